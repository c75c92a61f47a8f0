"""`save_pretrained` of packed models, and their reload: bit-equal, whole, clear where refused."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import bits, check_folder, contents
from safetensors.torch import load_file
from torch import nn
from training import NF4, SETTINGS
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import quantize_experts
from moe_qlora.checkpoint.manifest import (
    SHARD_NAME,
    has_manifest,
    is_save_file,
    open_checkpoint,
    read_manifest,
)
from moe_qlora.checkpoint.staging import left_behind, staging
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import AdapterError, CheckpointError, ConfigError
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_inputs, tiny_model

# bitsandbytes and transformers warn of their own affairs while they load
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = SETTINGS | {
    "fp32 storage": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.float32},
    "compute": NF4 | {"bnb_4bit_compute_dtype": torch.bfloat16},
}


def packed(family: str = "qwen3_moe", kind: str = "nf4", seed: int = 0, **overrides: Any) -> Any:
    """A model of which the experts alone are packed; its Linear layers are plain."""
    model = tiny_model(family, dtype=torch.bfloat16, seed=seed, **overrides)
    quantize_experts(model, BitsAndBytesConfig(**KINDS[kind]))
    return model


def loaded(folder: Path, tmp_path: Path, kind: str, family: str = "qwen3_moe") -> Any:
    """A model whose experts and Linear layers were packed while it was loaded."""
    plain = tiny_model(family, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(**KINDS[kind])
    with moe_qlora.enabled():
        return type(plain).from_pretrained(
            tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16
        )


def reload(folder: Path, cls: Any = AutoModelForCausalLM, **kwargs: Any) -> Any:
    with moe_qlora.enabled():
        return cls.from_pretrained(folder, **kwargs)


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("qwen3_moe", kind) for kind in KINDS), *(("gpt_oss", kind) for kind in ("nf4", "int8"))],
)
def test_a_reload_is_bit_equal(tmp_path, family, kind):
    model = packed(family, kind)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    check_folder(tmp_path / "saved")
    for cls in (AutoModelForCausalLM, type(model)):
        again = reload(tmp_path / "saved", cls)
        assert type(again) is type(model)
        assert list(bits(again)) == list(bits(model))
        assert bits(again) == bits(model)
        linear = next(m for n, m in again.named_modules() if n.endswith("q_proj"))
        assert type(linear) is nn.Linear  # they were not packed, and are not now
        assert again.is_loaded_in_8bit == (kind == "int8")
        assert again.get_memory_footprint() == model.get_memory_footprint()
    inputs = tiny_inputs(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, again(**inputs).logits)
    for (_, one, leaf), (_, other, _) in zip(
        parametrize.iter_packed(model), parametrize.iter_packed(again), strict=True
    ):
        left, right = parametrize.read_packed(one, leaf), parametrize.read_packed(other, leaf)
        assert (left.kind, left.shape, left.dtype, left.compute_dtype) == (
            *(right.kind, right.shape, right.dtype, right.compute_dtype),
        )


@pytest.mark.parametrize("kind", ["nf4", "bf16 storage", "int8"])
def test_a_model_packed_while_it_was_loaded_reloads_with_its_linear_layers(tmp_path, kind):
    model = loaded(tmp_path, tmp_path, kind)
    model.save_pretrained(tmp_path / "saved")
    again = reload(tmp_path / "saved")
    assert bits(again) == bits(model)
    layers = {name: type(module).__name__ for name, module in model.named_modules()}
    assert {name: type(module).__name__ for name, module in again.named_modules()} == layers
    assert any(name.startswith("Linear") and name != "Linear" for name in layers.values())
    assert not hasattr(again.config, "transformers_weights")
    again.save_pretrained(tmp_path / "twice")
    assert contents(tmp_path / "twice") == contents(tmp_path / "saved")


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_moe", "nf4"), ("gpt_oss", "int8"), ("jetmoe", "bf16 storage")]
)
def test_a_folder_loaded_in_another_dtype_is_as_one_packed_in_it(tmp_path, family, kind):
    loaded(tmp_path, tmp_path, kind, family).save_pretrained(tmp_path / "saved")
    again = reload(tmp_path / "saved", dtype=torch.float32)
    config = BitsAndBytesConfig(**KINDS[kind])
    wanted = reload(tmp_path / "plain", quantization_config=config, dtype=torch.float32)
    assert bits(again) == bits(wanted)
    for (_, one, leaf), (_, other, _) in zip(
        parametrize.iter_packed(again), parametrize.iter_packed(wanted), strict=True
    ):
        assert getattr(one, leaf).dtype == torch.float32
        assert torch.equal(getattr(one, leaf), getattr(other, leaf))
    inputs = tiny_inputs(wanted)
    assert torch.equal(again(**inputs).logits, wanted(**inputs).logits)
    again.save_pretrained(tmp_path / "twice")
    twice = reload(tmp_path / "twice")
    assert torch.equal(twice(**inputs).logits, wanted(**inputs).logits)


@pytest.mark.parametrize("family", ["diffusion_gemma", "qwen4_exp_text"])
def test_tied_stacks_and_layers_named_weight_come_back(tmp_path, family):
    model = loaded(tmp_path, tmp_path, "nf4", family)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    again = reload(tmp_path / "saved", type(model))
    assert bits(again) == bits(model)
    owners = [
        [
            id(parametrize.original_of(module, leaf))
            for _, module, leaf in parametrize.iter_packed(one)
        ]
        for one in (model, again)
    ]
    ranks = [[ids.index(one) for one in ids] for ids in owners]
    assert ranks[0] == ranks[1]
    assert again.get_memory_footprint() == model.get_memory_footprint()
    if family == "diffusion_gemma":
        saved = check_folder(tmp_path / "saved")
        assert any(entry.aliases for entry in saved.experts.values())
        assert not {a for entry in saved.experts.values() for a in entry.aliases} & set(
            saved.tensors
        )


def test_stock_transformers_quotes_what_to_do(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path)
    for cls in (AutoModelForCausalLM, type(model)):
        with pytest.raises(ValueError, match=r"inside `with moe_qlora\.enabled\(\):`"):
            cls.from_pretrained(tmp_path)


def test_only_names_of_the_model_are_on_disk_and_they_are_all_of_it(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    stored = {}
    shards = [file for file in tmp_path.iterdir() if SHARD_NAME.fullmatch(file.name)]
    assert len(shards) > 2
    for file in shards:
        tensors = load_file(file)
        big = max(t.nbytes for t in tensors.values())
        assert sum(t.nbytes for t in tensors.values()) <= 40_000 or big > 40_000
        stored |= tensors
    assert stored.keys() == model.state_dict().keys()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.config["model_type"] == manifest.model_type == "qwen3_moe"
    assert manifest.codec["kind"] == "nf4"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["moe_qlora"] == {
        "format_version": 2,
        "id": manifest.id,
        "manifest": manifest.file_name,
        "entry": manifest.entry,
    }


def test_two_saves_of_one_model_are_the_same_bytes(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(str(tmp_path / "b") + "/")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    model.save_pretrained(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_another_save_takes_the_place_of_the_first_and_leaves_what_is_not_ours(tmp_path):
    first, second = packed(seed=0), packed(seed=1)
    second.save_pretrained(tmp_path / "fresh", max_shard_size="60KB")
    folder = tmp_path / "saved"
    first.save_pretrained(folder, max_shard_size="30KB")
    foreign = {
        "tokenizer.json": b"{}",
        "model.safetensors": b"not ours",
        "model-00001-of-00002.safetensors": b"nor this",
        "runs/log": b"x",
    }
    (folder / "runs").mkdir()
    for name, content in foreign.items():
        (folder / name).write_bytes(content)
    second.save_pretrained(folder, max_shard_size="60KB")
    assert contents(folder) == contents(tmp_path / "fresh") | foreign
    assert bits(reload(folder)) == bits(second)


def test_the_same_weights_cut_otherwise_take_new_names(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path / "a", max_shard_size="60KB")
    model.save_pretrained(tmp_path / "b", max_shard_size="65KB")
    one, other = (read_manifest(tmp_path / name) for name in "ab")
    assert one is not None
    assert other is not None
    assert one.id == other.id
    assert not set(one.shards) & set(other.shards)
    model.save_pretrained(tmp_path / "a", max_shard_size="65KB")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_plain_checkpoint_in_the_folder_gives_way(tmp_path):
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path)
    model = packed(seed=1)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert bits(reload(tmp_path)) == bits(model)
    with pytest.raises(ValueError, match="moe_qlora"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    # and back: a plain save into a packed folder is a plain checkpoint again
    plain.save_pretrained(tmp_path)
    assert bits(AutoModelForCausalLM.from_pretrained(tmp_path)) == bits(plain)
    assert bits(reload(tmp_path)) == bits(plain)


def test_what_the_index_of_a_plain_checkpoint_names_is_removed_and_nothing_else(tmp_path):
    folder, outside = tmp_path / "model", tmp_path / "elsewhere.safetensors"
    tiny_model("qwen3_moe").save_pretrained(folder, max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    shards = sorted(set(value["weight_map"].values()))
    assert len(shards) > 2
    (folder / shards[0]).rename(outside)
    (folder / shards[0]).symlink_to(outside)
    (folder / shards[1]).rename(folder / "target.safetensors")
    (folder / shards[1]).symlink_to("target.safetensors")
    value["weight_map"] |= {"a": "../elsewhere.safetensors", "b": "notes.txt", "c": str(outside)}
    value["weight_map"] |= {"d": "folder.safetensors", "e": "absent.safetensors"}
    index.write_text(json.dumps(value))
    kept = ("notes.txt", "adapter_model.safetensors", "model-00001-of-00009.safetensors")
    for name in kept:
        (folder / name).write_bytes(b"x")
    (folder / "folder.safetensors").mkdir()
    model = packed(seed=1)
    model.save_pretrained(folder)
    model.save_pretrained(tmp_path / "fresh")
    fresh = {file.name for file in (tmp_path / "fresh").iterdir()}
    found = {file.name for file in folder.iterdir()}
    assert found == fresh | {*kept, "folder.safetensors", "target.safetensors"}
    assert outside.exists()
    assert bits(reload(folder)) == bits(model)


@pytest.mark.parametrize("damage", ["{", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_names_nothing_to_remove(tmp_path, damage):
    tiny_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(damage)
    before = {file.name for file in tmp_path.glob("model*")}
    model = packed(seed=1)
    model.save_pretrained(tmp_path)
    assert before <= {file.name for file in tmp_path.iterdir()}
    assert bits(reload(tmp_path)) == bits(model)


@pytest.mark.parametrize("config", [None, "{", '{"moe_qlora": 3}'])
def test_weights_without_a_config_are_no_checkpoint_to_replace(tmp_path, config):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    packed().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"x"


def test_a_failed_save_leaves_a_plain_checkpoint_whole(tmp_path, monkeypatch):
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path, max_shard_size="100KB")
    before = contents(tmp_path)
    rename = Path.replace

    def full(path: Path, target: Path) -> Any:
        if target == tmp_path / "config.json":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CheckpointError, match="No space left"):
        packed(seed=1).save_pretrained(tmp_path)
    assert before.items() <= contents(tmp_path).items()


def test_a_stock_bitsandbytes_config_in_a_packed_folder_is_refused(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    config = json.loads((tmp_path / "config.json").read_text())
    del config["moe_qlora"], config["transformers_weights"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / manifest.entry).rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"its config\.json does not say so"):
        reload(tmp_path)


def test_another_process_than_the_main_one_writes_nothing(tmp_path):
    packed().save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("gathered", [False, True])
def test_all_ranks_of_a_distributed_run_may_call_it_and_the_first_one_writes(
    copied, tmp_path, gathered
):
    model = packed()

    def rank(number: int) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
        # what gathers a sharded state dict gives the others an empty one
        state = (model.state_dict() if number == 0 else {}) if gathered else None
        if number == 1:  # what it would write is there before
            torch.distributed.barrier()
        model.save_pretrained(tmp_path / "model", state_dict=state)
        if number == 0:
            time = (tmp_path / "model" / "config.json").stat().st_mtime_ns
            torch.distributed.barrier()
            torch.distributed.barrier()
            assert (tmp_path / "model" / "config.json").stat().st_mtime_ns == time
        else:
            torch.distributed.barrier()

    copies = [copied(partial(rank, number)) for number in range(2)]
    assert [copy.ended() for copy in copies] == [0, 0]
    check_folder(tmp_path / "model")


def test_a_state_dict_is_saved_in_the_place_of_the_models_own(tmp_path):
    model, other = packed(seed=0), packed(seed=1)
    state = other.state_dict()
    model.save_pretrained(tmp_path, state_dict=state)
    assert bits(reload(tmp_path)) == bits(other)


@pytest.mark.parametrize("end", [".absmax", ".quant_state.bitsandbytes__nf4", ""])
def test_a_state_dict_that_lacks_part_of_a_stack_is_refused(tmp_path, end):
    model = packed()
    state = model.state_dict()
    key = next(key for key in state if key.endswith(f"gate_up_proj{end}"))
    del state[key]
    name = re.escape(key.removesuffix(end))
    with pytest.raises(CheckpointError, match=f"{name} has nothing as its {end};" if end else name):
        model.save_pretrained(tmp_path / "saved", state_dict=state)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_named(tmp_path):
    model = packed()
    for kwargs in ({"variant": "fp16"}, {"distributed_checkpoint": True}):
        with pytest.raises(ConfigError, match="is not supported"):
            model.save_pretrained(tmp_path / "saved", **kwargs)
    with pytest.raises(CheckpointError, match="max_shard_size"):
        model.save_pretrained(tmp_path / "saved", max_shard_size="much")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a link or no folder"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        model.save_pretrained(tmp_path / "file" / "under")
    model.lm_head.weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is on the meta device"):
        model.save_pretrained(tmp_path / "saved")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_what_is_no_tensor_is_named_and_a_sharded_weight_gathered(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    model = packed()
    key = "model.norm.weight"
    with pytest.raises(CheckpointError, match=f"{key} is int and no tensor"):
        model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict() | {key: 3})
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.rand_like(model.state_dict()[key])
        weight = DTensor.from_local(whole, mesh, [Shard(0)])
        with pytest.raises(CheckpointError, match=f"{key} is int and no tensor"):
            model.save_pretrained(tmp_path / "saved", state_dict={key: weight} | {key: 3})
        assert list(tmp_path.iterdir()) == []
        model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict() | {key: weight})
    finally:
        distributed.destroy_process_group()
    saved = load_file(next((tmp_path / "saved").glob("*.safetensors")))
    assert torch.equal(saved[key], whole)


class Hub:
    """Stands for the hub's client, with the matching of file names that the real one does."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, token: Any = None) -> Hub:
        self.calls.append(("token", {"token": token}))
        return self

    def create_repo(self, name: str, **kwargs: Any) -> Any:
        self.calls.append(("create", {"name": name, **kwargs}))
        return type("Repo", (), {"repo_id": f"me/{name}"})()

    def upload_folder(
        self,
        folder_path: Path,
        allow_patterns: list[str],
        delete_patterns: list[str],
        **kwargs: Any,
    ) -> None:
        from huggingface_hub.utils import filter_repo_objects

        self.calls.append(("upload", kwargs))
        check_folder(folder_path)  # all of it is there by now
        local = contents(folder_path)
        added = set(filter_repo_objects(local, allow_patterns=allow_patterns))
        for name in filter_repo_objects(list(self.files), allow_patterns=delete_patterns):
            del self.files[name]
        self.files |= {name: local[name] for name in added}


def test_the_hub_gets_what_was_written_and_loses_the_shards_of_before(tmp_path, monkeypatch):
    import huggingface_hub

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "secrets.txt").write_text("not for the hub")
    hub.files = {"README.md": b"card", "model-00001-of-00002.safetensors": b"plain"}
    kept = dict(hub.files)
    packed().save_pretrained(folder, max_shard_size="40KB", push_to_hub=True, token="t")
    packed(seed=1).save_pretrained(
        folder,
        push_to_hub=True,
        repo_id="other",
        private=True,
        commit_message="second",
        create_pr=True,
    )
    local = contents(folder)
    del local["secrets.txt"]
    assert hub.files == local | kept
    assert hub.calls == [
        ("token", {"token": "t"}),
        ("create", {"name": "mine", "exist_ok": True}),
        ("upload", {"repo_id": "me/mine", "commit_message": "Upload model", "create_pr": False}),
        ("token", {"token": None}),
        ("create", {"name": "other", "exist_ok": True, "private": True}),
        ("upload", {"repo_id": "me/other", "commit_message": "second", "create_pr": True}),
    ]


def test_a_save_changes_nothing_of_the_model(tmp_path):
    model = packed()
    settings = model.config.quantization_config.to_dict()
    quantizer, methods = dict(model.hf_quantizer.__dict__), set(model.__dict__)
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.to_dict() == settings
    assert model.hf_quantizer.__dict__ == quantizer
    assert set(model.__dict__) == methods
    assert not hasattr(model.config, "moe_qlora")
    assert not hasattr(model.config, "transformers_weights")
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    linears = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    assert saved["llm_int8_skip_modules"] == [rf"{re.escape(name)}$" for name in linears]


def test_the_signature_is_that_of_the_stock_method():
    import inspect

    model = packed()
    ours = inspect.signature(model.save_pretrained).parameters
    stock = inspect.signature(type(model).save_pretrained).parameters
    positional = [name for name in ours if name != "kwargs"]
    assert positional == list(stock)[1 : len(positional) + 1]
    assert ours["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_saved_once_and_tied_again(tmp_path, tied):
    model = packed(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    stored = check_folder(tmp_path).tensors
    assert ("lm_head.weight" in stored) is not tied
    again = reload(tmp_path)
    assert bits(again) == bits(model)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


def test_what_the_class_does_not_save_is_not_saved(tmp_path):
    model = packed()
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    model.save_pretrained(tmp_path)
    left_out = model.state_dict().keys() - check_folder(tmp_path).tensors.keys()
    assert left_out == {"model.norm.weight"}


def test_the_dtype_of_the_config_is_that_of_most_weights(tmp_path):
    model = packed(vocab_size=8)
    model.model.embed_tokens.float()  # the first parameter, whose dtype is `model.dtype`
    assert model.dtype == torch.float32
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert reload(tmp_path).lm_head.weight.dtype == torch.bfloat16


def test_a_second_saver_is_refused_and_the_first_one_finishes(tmp_path):
    folder = tmp_path / "model"
    packed(seed=0).save_pretrained(folder)
    before = contents(folder)
    with (
        staging(folder, inside=True),
        pytest.raises(CheckpointError, match=r"Another process is writing to .*is_main_process"),
    ):
        packed(seed=1).save_pretrained(folder)
    assert contents(folder) == before
    packed(seed=1).save_pretrained(folder)
    assert contents(folder) != before and not left_behind(folder)


def test_a_save_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path):
    packed(seed=0).save_pretrained(tmp_path)
    left = ("model-0123abcd-00001-of-00001.safetensors", "moe_qlora-0123456789abcdef.json")
    kept = ("moe_qlora.json", "moe_qlora-0123.json", "model-00001-of-00001.safetensors")
    for name in (*left, *kept):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".moe_qlora.partial").mkdir()
    (tmp_path / ".moe_qlora.lock").write_text("")
    packed(seed=1).save_pretrained(tmp_path)
    packed(seed=1).save_pretrained(tmp_path.with_name("fresh"))
    assert contents(tmp_path) == contents(tmp_path.with_name("fresh")) | dict.fromkeys(kept, b"x")
    assert not left_behind(tmp_path)


def test_what_a_killed_save_has_left_in_a_plain_folder_is_without_effect(tmp_path):
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    packed(seed=1).save_pretrained(tmp_path / "packed")
    for file in (tmp_path / "packed").iterdir():  # killed just before config.json is renamed
        if is_save_file(file.name):
            file.rename(tmp_path / "plain" / file.name)
    assert has_manifest(tmp_path / "plain")
    assert bits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")) == bits(plain)
    assert bits(reload(tmp_path / "plain")) == bits(plain)
    for config in (True, False):
        if not config:
            (tmp_path / "plain" / "config.json").unlink()
        with open_checkpoint(tmp_path / "plain") as checkpoint:
            assert set(checkpoint) == set(load_file(tmp_path / "plain" / "model.safetensors"))
        report = verify(tmp_path / "plain")
        assert (report.good, report.kind) == (True, "plain")


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path):
    model = packed()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    model.save_pretrained(tmp_path / "empty")
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "other") == contents(tmp_path / "empty")


def test_adapters_of_peft_are_not_saved_as_weights(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = packed()
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(AdapterError, match="adapters of PEFT"):
        model.save_pretrained(tmp_path / "base")
    assert not (tmp_path / "base").exists()
    peft.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    peft.unload()
    model.save_pretrained(tmp_path / "base")
    assert bits(reload(tmp_path / "base")) == bits(packed())


@pytest.mark.parametrize("what", ["shard", "missing", "manifest"])
def test_ignoring_mismatches_does_not_ignore_damage(tmp_path, what):
    packed().save_pretrained(tmp_path, max_shard_size="50KB")
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    file = tmp_path / list(manifest.shards)[1]
    if what == "missing":
        file.unlink()
    elif what == "manifest":
        (tmp_path / manifest.file_name).unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    with pytest.raises(CheckpointError):
        reload(tmp_path, ignore_mismatched_sizes=True)


def test_ignoring_mismatches_does_not_make_room_for_another_models_config(tmp_path):
    packed().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    config = json.loads(text)
    config["moe_intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json is not the one"):
        reload(tmp_path, ignore_mismatched_sizes=True)


def test_a_base_model_is_read_from_the_folder_of_the_whole(tmp_path):
    model = packed()
    model.save_pretrained(tmp_path)
    base = reload(tmp_path, type(model.model))
    assert type(base) is type(model.model)
    want = {k.removeprefix("model."): v for k, v in bits(model).items() if k.startswith("model.")}
    assert bits(base) == want
