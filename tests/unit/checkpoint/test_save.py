"""`save_pretrained` of packed models, and their reload: bit-equal, whole, clear where refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from folders import bits, check_folder, contents, set_json
from torch import nn
from training import NF4, SETTINGS
from transformers import AutoModelForCausalLM

from moe_qlora.checkpoint.folder import left_behind, staging
from moe_qlora.checkpoint.manifest import read_manifest
from moe_qlora.errors import AdapterError, CheckpointError, ConfigError
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_inputs, tiny_model

# bitsandbytes and transformers warn of their own affairs while they load
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = SETTINGS | {"compute": NF4 | {"bnb_4bit_compute_dtype": torch.bfloat16}}


def packed(family: str = "qwen3_moe", kind: str = "nf4", **overrides: Any) -> Any:
    """A model of which the experts alone are packed; its Linear layers are plain."""
    return training.packed(family, KINDS[kind], dtype=torch.bfloat16, **overrides)


def loaded(tmp_path: Path, kind: str, family: str = "qwen3_moe") -> Any:
    """A model whose experts and Linear layers were packed while it was loaded."""
    plain = tiny_model(family, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    return training.loaded(tmp_path / "plain", KINDS[kind], type(plain), dtype=torch.bfloat16)


def reload(folder: Path, cls: Any = AutoModelForCausalLM, **kwargs: Any) -> Any:
    return training.loaded(folder, None, cls, **{"dtype": "auto", **kwargs})


@pytest.mark.parametrize(
    ("family", "kind", "linears"),
    [
        ("qwen3_moe", "nf4", True),
        ("qwen3_moe", "compute", False),
        ("qwen3_moe", "bf16 storage", True),
        ("gpt_oss", "int8", True),
    ],
)
def test_a_reload_is_bit_equal(tmp_path, family, kind, linears):
    model = loaded(tmp_path, kind, family) if linears else packed(family, kind)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    check_folder(tmp_path / "saved")
    layers = {name: type(module).__name__ for name, module in model.named_modules()}
    assert layers["model.layers.0.self_attn.q_proj"].endswith(("4bit", "8bitLt")) is linears
    for cls in (AutoModelForCausalLM, type(model)):
        again = reload(tmp_path / "saved", cls)
        assert type(again) is type(model)
        assert list(bits(again).items()) == list(bits(model).items())
        assert {name: type(module).__name__ for name, module in again.named_modules()} == layers
        assert again.is_loaded_in_8bit == (kind == "int8")
        assert again.get_memory_footprint() == model.get_memory_footprint()
    inputs = tiny_inputs(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, again(**inputs).logits)
    assert not hasattr(again.config, "transformers_weights")
    again.save_pretrained(tmp_path / "twice", max_shard_size="50KB")
    assert contents(tmp_path / "twice") == contents(tmp_path / "saved")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    again.save_pretrained(tmp_path / "link", max_shard_size="65KB")
    one, other = (read_manifest(tmp_path / name) for name in ("twice", "link"))
    assert one.id == other.id and not set(one.shards) & set(other.shards)
    assert set(other.shards) < contents(tmp_path / "saved").keys()
    assert (tmp_path / "link").is_symlink()
    if linears:
        said = json.loads((tmp_path / "twice" / "config.json").read_text())["quantization_config"]
        said["llm_int8_skip_modules"] = ["q_proj"]
        set_json(tmp_path / "twice" / "config.json", quantization_config=said)
        with pytest.raises(CheckpointError, match=r"q_proj\.weight is packed, and neither config"):
            reload(tmp_path / "twice")


@pytest.mark.parametrize("kind", ["int8", "bf16 storage"])
def test_a_folder_loaded_in_another_dtype_is_as_one_packed_in_it(tmp_path, kind):
    loaded(tmp_path, kind, "gpt_oss").save_pretrained(tmp_path / "saved")
    again = reload(tmp_path / "saved", dtype=torch.float32)
    wanted = training.loaded(tmp_path / "plain", KINDS[kind])
    assert bits(again) == bits(wanted)
    for _, module, leaf in parametrize.iter_packed(again):
        assert getattr(module, leaf).dtype == torch.float32
    inputs = tiny_inputs(wanted)
    again.save_pretrained(tmp_path / "twice")
    for model in (again, reload(tmp_path / "twice")):
        assert torch.equal(model(**inputs).logits, wanted(**inputs).logits)


@pytest.mark.parametrize("tied", ["experts", "head", ""])
def test_tied_weights_are_saved_once_and_tied_again(tmp_path, tied):
    if tied == "experts":
        model = loaded(tmp_path, "nf4", "diffusion_gemma")
    else:
        model = packed(tie_word_embeddings=bool(tied))
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    again, saved = reload(tmp_path / "saved", type(model)), check_folder(tmp_path / "saved")
    assert bits(again) == bits(model)
    assert again.get_memory_footprint() == model.get_memory_footprint()  # of tied weights once
    aliases = {alias for entry in saved.experts.values() for alias in entry.aliases}
    assert bool(aliases) is (tied == "experts") and not aliases & set(saved.tensors)
    if tied != "experts":
        assert ("lm_head.weight" in saved.tensors) is not bool(tied)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is bool(tied)


def test_a_base_model_is_read_from_the_folder_of_the_whole_and_stock_says_how(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path)
    base = reload(tmp_path, type(model.model))
    assert type(base) is type(model.model)
    want = {k.removeprefix("model."): v for k, v in bits(model).items() if k.startswith("model.")}
    assert bits(base) == want
    for cls in (AutoModelForCausalLM, type(model)):
        with pytest.raises(ValueError, match=r"inside `with moe_qlora\.enabled\(\):`"):
            cls.from_pretrained(tmp_path)


def test_a_save_changes_nothing_of_the_model(tmp_path, monkeypatch):
    model = packed(vocab_size=8)
    model._keys_to_ignore_on_save = ["model.norm.weight"]  # what the class does not save
    model.model.embed_tokens.float()  # the first parameter, whose dtype is `model.dtype`
    assert model.dtype == torch.float32
    held = [model.config.quantization_config.to_dict(), dict(vars(model.hf_quantizer))]
    methods = set(vars(model))
    model.save_pretrained(tmp_path)
    assert [model.config.quantization_config.to_dict(), vars(model.hf_quantizer)] == held
    assert set(vars(model)) == methods
    assert not {"moe_qlora", "transformers_weights"} & vars(model.config).keys()
    saved = json.loads((tmp_path / "config.json").read_text())
    linears = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    skipped = saved["quantization_config"]["llm_int8_skip_modules"]
    assert skipped == [rf"{re.escape(name)}$" for name in linears]
    assert saved["dtype"] == "bfloat16"  # that of most weights
    left_out = model.state_dict().keys() - check_folder(tmp_path).tensors.keys()
    assert left_out == {"model.norm.weight"}

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        reload(tmp_path)
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_missing", ["norm"], raising=False)
    assert reload(tmp_path)


def test_another_save_takes_the_place_of_the_first_and_leaves_what_is_not_ours(tmp_path):
    folder, second = tmp_path / "saved", packed(seed=1)
    second.save_pretrained(tmp_path / "fresh", max_shard_size="60KB")
    packed().save_pretrained(folder, max_shard_size="30KB")
    foreign = dict.fromkeys(
        ("tokenizer.json", "model.safetensors", "model-00001-of-00002.safetensors", "runs/log",
         "moe_qlora.json", "moe_qlora-0123.json"), b"x",
    )  # fmt: skip
    # of a save that was killed
    left = ("model-0123abcd-00001-of-00001.safetensors", "moe_qlora-0123456789abcdef.json")
    (folder / "runs").mkdir()
    (folder / ".moe_qlora.partial").mkdir()
    for name in (*foreign, *left, ".moe_qlora.lock"):
        (folder / name).write_bytes(b"x")
    second.save_pretrained(folder, max_shard_size="60KB")
    assert contents(folder) == contents(tmp_path / "fresh") | foreign
    assert not left_behind(folder)
    assert bits(reload(folder)) == bits(second)


def test_a_second_saver_is_refused_and_the_first_one_finishes(tmp_path):
    model, words = packed(), r"Another process is writing to .*is_main_process"
    with staging(tmp_path, inside=True), pytest.raises(CheckpointError, match=words):
        model.save_pretrained(tmp_path)
    assert not contents(tmp_path)
    model.save_pretrained(tmp_path)
    check_folder(tmp_path)
    assert not left_behind(tmp_path)


def test_a_state_dict_is_saved_in_the_place_of_the_models_own(tmp_path):
    model, other = packed(seed=0), packed(seed=1)
    model.save_pretrained(tmp_path, state_dict=other.state_dict(), is_main_process=False)
    assert not list(tmp_path.iterdir())
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert bits(reload(tmp_path)) == bits(other)
    plain.save_pretrained(tmp_path)  # and back
    assert bits(AutoModelForCausalLM.from_pretrained(tmp_path)) == bits(plain)
    assert bits(reload(tmp_path)) == bits(plain)


def on_meta(model: Any) -> dict[str, Any]:
    model.lm_head.weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    return {}


def lacking(end: str) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {
        "state_dict": {k: v for k, v in model.state_dict().items() if not k.endswith(end)}
    }


REFUSED: list[tuple[str, dict[str, Any], Any, type[Exception], str]] = [
    ("saved", {"variant": "fp16"}, None, ConfigError, "are not for packed"),
    ("saved", {"push_to_hub": True}, None, ConfigError, "call model.push_to_hub"),
    ("saved", {"max_shard_size": "much"}, None, CheckpointError, "max_shard_size"),
    ("file", {}, None, CheckpointError, "is no empty folder"),
    ("file/under", {}, None, CheckpointError, "cannot be written"),
    ("saved", {}, on_meta, CheckpointError, r"lm_head\.weight is no tensor, or on the meta"),
    ("saved", {}, lacking("gate_up_proj"), CheckpointError, r"to save lacks .*gate_up_proj\."),
    ("saved", {}, lacking("up_proj.absmax"), CheckpointError, r"to save lacks .*proj\.absmax\."),
    ("saved", {}, lambda model: training.adapted(model) and {}, AdapterError, "adapters of PEFT"),
]


@pytest.mark.parametrize(("place", "options", "change", "error", "words"), REFUSED)
def test_what_cannot_be_saved_is_named(tmp_path, place, options, change, error, words):
    model = packed()
    (tmp_path / "file").write_text("")
    options = {**options, **(change(model) if change else {})}
    with pytest.raises(error, match=words):
        model.save_pretrained(tmp_path / place, **options)
    assert contents(tmp_path).keys() == {"file"}


def test_damage_is_refused_whatever_is_asked(tmp_path):
    packed().save_pretrained(tmp_path)
    set_json(tmp_path / "config.json", moe_intermediate_size=8)
    with pytest.raises(CheckpointError, match=r"config\.json is not the one"):
        reload(tmp_path, ignore_mismatched_sizes=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["moe_qlora"], config["transformers_weights"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    next(iter(tmp_path.glob("*.safetensors"))).rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not say so"):  # as stock transformers writes
        reload(tmp_path, ignore_mismatched_sizes=True)
