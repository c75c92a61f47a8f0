"""Merging an adapter on disk: what is refused, what stays, what it costs; merged folders that load:
added tokens, heads trained in full, text models of images ones."""

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from folders import assert_close, edit, set_json, tensors
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from training import NF4, loaded, lora
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from upstream import skip_llama4

import moe_qlora
from moe_qlora import testing
from moe_qlora.checkpoint import conversion
from moe_qlora.checkpoint.folder import Checkpoint, ShardWriter
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import AdapterError, CheckpointError, ConfigError, UnsupportedWeightError
from moe_qlora.packing import codec
from moe_qlora.packing.parametrize import iter_packed
from moe_qlora.packing.settings import CodecSettings

# of lm_head, of a base that is in no folder, and PEFT's advice on tied weights
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS = ["gate_up_proj", "down_proj"]
SHARDED = "40KB"


def save(model: Any, folder: Path, **settings: Any) -> Path:
    """Save a model, or an adapter."""
    model.save_pretrained(folder, **settings)
    return folder


def adapt(model: Any, folder: Path, linears: Sequence[str] = (), **settings: Any) -> Any:
    """An adapter, all of it random, saved; returns the model with it."""
    config: Any = LoraConfig(r=2, target_modules=[*linears], **settings)
    packed = any(iter_packed(model))
    make = partial(moe_qlora.get_peft_model, experts=True) if packed else peft.get_peft_model
    adapted: Any = make(model, config)
    generator = torch.Generator().manual_seed(3)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    save(adapted, folder, **({"save_embedding_layers": True} if packed else {}))
    return adapted


def merge(root: Path, out: str = "out", **settings: Any) -> dict[str, Tensor]:
    moe_qlora.merge_adapter(root / "base", root / "adapter", root / out, **settings)
    return tensors(root / out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded bf16 base with side files, an adapter on it, and what a merge makes of them."""
    root = tmp_path_factory.mktemp("merge")
    model = testing.tiny_model("qwen3_moe", dtype=torch.bfloat16)
    save(model, root / "base", max_shard_size=SHARDED)
    (root / "base" / "tokenizer.json").write_text('{"version": "1.0"}')
    (root / "base" / "additional_chat_templates").mkdir()
    (root / "base" / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    for name in ("training_args.bin", "pytorch_model.bin", "adapter_model.safetensors"):
        (root / "base" / name).write_bytes(b"\x80\x04N.")
    adapt(model, root / "adapter", linears=["q_proj"], target_parameters=EXPERTS)
    merge(root)
    return root


def note(root: Path, kind: str, *linears: str, **fields: Any) -> None:
    """Note in the adapter's folder what was packed as it was trained."""
    codec = {"kind": kind, "double_quant": False, "blocksize": 64}
    experts = ["model.layers.0.mlp.experts.down_proj"]
    said = {"format_version": 1, "codec": codec, "experts": experts, "linears": linears}
    set_json(root / "adapter" / "moe_qlora_adapter.json", **{**said, **fields})


def test_files_keys_order_and_side_files_are_the_bases(folders: Path) -> None:
    base, out = folders / "base", folders / "out"
    shards = sorted(file.name for file in base.glob("model-*.safetensors"))
    assert len(shards) > 3
    refused = {"training_args.bin", "pytorch_model.bin", "adapter_model.safetensors"}
    assert {f.name for f in out.iterdir()} == {f.name for f in base.iterdir()} - refused
    for name in shards:  # keys, dtypes, shapes and places in order, and the metadata
        size = 8 + int.from_bytes((base / name).read_bytes()[:8], "little")
        assert (out / name).read_bytes()[:size] == (base / name).read_bytes()[:size]
    index, template = "model.safetensors.index.json", "additional_chat_templates/tool.jinja"
    for name in ("config.json", "tokenizer.json", template):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    maps = [json.loads((place / index).read_text())["weight_map"] for place in (out, base)]
    assert maps[0] == maps[1]
    before, after = tensors(base), tensors(out)
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if "q_proj" in key or ".experts." in key}


def test_dtype_casts_what_transformers_does_not_keep_in_fp32_and_says_so(tmp_path: Path) -> None:
    model: Any = testing.tiny_model("deepseek_v3")
    kept = model._keep_in_fp32_modules_strict
    save(model, tmp_path / "base")
    adapt(model, tmp_path / "adapter", ["o_proj"], target_parameters=EXPERTS)
    exact, half, seen = merge(tmp_path), tmp_path / "half", list[tuple[int, int, str]]()
    how: dict[str, Any] = {"dtype": torch.float16, "progress": lambda *one: seen.append(one)}
    report = moe_qlora.merge_adapter(tmp_path / "base", tmp_path / "adapter", half, **how)
    cast = tensors(half)
    assert seen == sorted(seen, key=lambda one: one[0]) and seen[-1] == (len(cast), len(cast), "")
    assert json.loads((half / "config.json").read_text())["dtype"] == "float16"
    assert report.nbytes == sum(tensor.nbytes for tensor in cast.values())
    exempt = {key for key in cast if any(name in key for name in kept)}
    assert exempt and cast.keys() == exact.keys()
    for key, value in exact.items():  # rounded once, from fp32
        wanted = value if key in exempt else value.half()
        assert cast[key].dtype == wanted.dtype and torch.equal(cast[key], wanted), key


# What PEFT can do to a Linear layer, an embedding, a module in full


PATTERNS: dict[str, Any] = {
    "rank_pattern": {r"layers\.0\..*gate_up_proj": 5},
    "alpha_pattern": {r".*down_proj": 3},
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"linears": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 3}}),
        ("qwen3_moe", {"target_parameters": EXPERTS, **PATTERNS, "use_rslora": True}),
        ("qwen3_moe", {"target_parameters": ["mlp.gate.weight", "gate_up_proj"]}),
        ("qwen3_moe", {"linears": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]}),
        ("gpt_oss", {"linears": ["q_proj"], "bias": "all"}),
        ("granitemoe", {"linears": ["embed_tokens"]}),  # tied
    ],
    ids=lambda settings: settings if isinstance(settings, str) else "-".join(settings),
)
def test_settings_of_the_adapter(family, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 1000)  # some rows at a time
    model: Any = testing.tiny_model(family, tie_word_embeddings=family == "granitemoe")
    save(model, tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", **settings)
    merged = merge(tmp_path)
    save(adapted.merge_and_unload(), tmp_path / "reference")
    assert_close(merged, tensors(tmp_path / "reference"))


def test_a_base_transposed_on_disk_stays_so(tmp_path: Path) -> None:
    """As published Qwen3-VL checkpoints are, which transformers itself writes the other way."""
    model: Any = testing.tiny_model("qwen3_vl_moe")
    save(model, tmp_path / "base")
    experts = [key for key in tensors(tmp_path / "base") if ".mlp.experts." in key]
    turned = {key: tensors(tmp_path / "base")[key].transpose(1, 2).contiguous() for key in experts}
    edit(tmp_path / "base", lambda held: held.update(turned))
    assert all(weight.shape[1] != weight.shape[2] for weight in turned.values())
    adapted = adapt(model, tmp_path / "adapter", target_parameters=EXPERTS)
    merged = merge(tmp_path)
    back = {key: merged[key].transpose(1, 2) for key in experts}
    save(adapted.merge_and_unload(), tmp_path / "reference")
    assert_close(merged | back, tensors(tmp_path / "reference"))


# What is refused


@pytest.fixture
def root(folders: Path, tmp_path: Path) -> Path:
    """A copy of base and adapter that a test may spoil."""
    for name in ("base", "adapter"):
        shutil.copytree(folders / name, tmp_path / name)
    return tmp_path


def refuses(error: type[Exception], match: str, root: Path, **settings: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        merge(root, **settings)
    assert "\n" not in str(caught.value)
    assert not (root / "out").exists() and not list(root.glob(".*.partial"))


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
Spoil = Callable[[Path], Any]
Change = Callable[[dict[str, Tensor]], Any]


def fields(**settings: Any) -> Spoil:
    return lambda root: set_json(root / "adapter" / "adapter_config.json", **settings)


def weights(change: Change) -> Spoil:
    return lambda root: edit(root / "adapter", change)


def stored(change: Change) -> Spoil:
    """A base with other tensors, in one file."""

    def spoil(root: Path) -> None:
        held = tensors(root / "base")
        for file in (root / "base").glob("model*"):
            file.unlink()
        change(held)
        save_file(held, root / "base" / "model.safetensors", {"format": "pt"})

    return spoil


def each(part: str, change: Callable[[dict[str, Tensor], str], Any]) -> Change:
    return lambda held: [change(held, key) for key in list(held) if re.search(part, key)]


PACKED = {"quant_method": "bitsandbytes", "load_in_4bit": True}
WIDEN = each("", lambda held, key: held.update({key: torch.cat([held[key]] * 2, dim=1)}))
MOVE = each(Q_PROJ, lambda held, k: held.update({k.replace("s.0", "s.9"): held.pop(k)}))
WRONG: Change = lambda held: held.update({"base_model.model.lm_head.weight": torch.zeros(2, 8)})  # noqa: E731
SPOIL = each("experts.*lora_A", lambda held, key: held[key].fill_(math.inf))
LOSE = each(r"layers\.1.*\.experts\.3\.", lambda held, key: held.pop(key))
CAST = each("0.self_attn.q_proj", lambda held, key: held.update({key: held[key].char()}))
FOLDERS: list[tuple[str, Spoil]] = [
    ("holds an adapter and no model", lambda root: shutil.move(root / "base", root / "x")
     and shutil.copytree(root / "adapter", root / "base")),
    ("is no adapter: it has no", lambda root: (root / "adapter/adapter_config.json").unlink()),
    ("is no folder", lambda root: shutil.rmtree(root / "base")),
    (r"1.mlp.experts.\w+ has the shape \(3, .*on disk .* and \(4, ", stored(LOSE)),
    ("q_proj.weight is torch.int8, which an adapter", stored(CAST)),
    (r"is quantized \(bitsandbytes\); name the 16-bit checkpoint",
     lambda root: set_json(root / "base" / "config.json", quantization_config=PACKED)),
]  # fmt: skip
ADAPTERS: list[tuple[str, Spoil]] = [
    ("holds a LOHA adapter", fields(peft_type="LOHA")),
    ("use_dora=True.*norm", fields(use_dora=True)),
    ("init_lora_weights=pissa", fields(init_lora_weights="pissa")),
    ("trainable_token_indices", fields(trainable_token_indices=[1, 2])),
    (r"lora_A.weight \(.*\) and its lora_B .* needs .* at rank 4", fields(r=4)),
    ("one of 2 LoRA layers on .*, of which", fields(target_parameters=["gate_up_proj"])),
    ("gate.weight, for which the file", fields(target_parameters=[*EXPERTS, "mlp.gate.weight"])),
    (r"was trained on .*: \S+lora_A.weight \(\d+, \d+\) .* of shape \(", weights(WIDEN)),
    ("lora_A.weight lacks its other half", weights(lambda w: w.pop(f"{Q_PROJ}.lora_B.weight"))),
    (r"layers.9.self_attn.q_proj.lora_A.weight \(2, 64\) belongs to a module", weights(MOVE)),
    (r"head.weight \(2, 8\) replaces .* of shape \(\d+, 64\)", weights(WRONG)),
    (r"Merged, model.layers.*down_proj.weight holds NaN or inf", weights(SPOIL)),
]


@pytest.mark.parametrize(("match", "spoil"), FOLDERS + ADAPTERS)
def test_what_cannot_be_merged(match: str, spoil: Spoil, root: Path) -> None:
    spoil(root)
    refuses(AdapterError if (match, spoil) in ADAPTERS else CheckpointError, match, root)


def test_a_conversion_that_cannot_be_undone_is_not_trusted(root, monkeypatch):
    def swap_halves(model: Any, values: Any, name: str) -> dict[str, Tensor]:
        made = honest(model, values, name)
        keys = [key for key in made if "gate_proj" in key]
        return made | {key: made[key.replace("gate_proj", "up_proj")] for key in keys}

    honest = conversion.revert
    monkeypatch.setattr(conversion, "revert", swap_halves)
    match = "gate_up_proj cannot be written back as the base has it"
    refuses(CheckpointError, match, root)


# Rounding as in training


def test_like_training_never_guesses(root: Path) -> None:
    given = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    refuses(ConfigError, "needs the codec that", root, like_training=True)
    refuses(ConfigError, "is for like_training", root, **given)
    note(root, "int8")
    said = "asks for nf4, and .* was trained on int8"
    refuses(ConfigError, said, root, like_training=True, **given)
    for fields, match in (
        ({"format_version": 2}, "is damaged: format_version is 2"),
        ({"codec": {}}, "is damaged"),
        ({"experts": ["model.layers.7.mlp.experts.down_proj"]}, "is for a model .*layers.7"),
        ({"dtype": "int4"}, "is damaged: dtype is 'int4'"),
    ):
        note(root, "int8", **fields)
        refuses(CheckpointError, match, root, like_training=True)


def test_a_note_rounds_what_it_names_and_nothing_else(folders: Path, root: Path) -> None:
    v_proj = "model.layers.1.self_attn.v_proj.weight"
    note(root, "int8", v_proj)
    rounded, exact = merge(root, like_training=True), tensors(folders / "out")
    other = {key for key, value in exact.items() if not torch.equal(value, rounded[key])}
    assert other == {v_proj} | {
        key for key in exact if "layers.0.mlp.experts" in key and "down_proj" in key
    }
    weight = tensors(root / "base")[v_proj].half()  # as bitsandbytes holds them
    packed = codec.pack(weight, CodecSettings("int8"))
    assert torch.equal(rounded[v_proj], codec.unpack(replace(packed, dtype=torch.bfloat16)))


def test_like_training_rounds_to_the_dtype_that_was_trained_in(tmp_path):
    """Of a base in fp32 on disk, whose weights a load has rounded before it packed them."""
    save(testing.tiny_model("qwen3_moe", dtype=torch.float32), tmp_path / "base")
    packed = loaded(tmp_path / "base", NF4, dtype=torch.float16)
    adapted = adapt(packed, tmp_path / "adapter", ["q_proj"])
    merged = merge(tmp_path, like_training=True)
    save(adapted.merge_and_unload(dtype=torch.float32), tmp_path / "reference")
    reference = tensors(tmp_path / "reference")
    for key in (key for key in reference if "experts" in key or "q_proj" in key):
        assert torch.allclose(merged[key], reference[key], rtol=1e-5, atol=1e-6), key


# What it costs


def test_no_more_than_two_experts_at_a_time(tmp_path, monkeypatch):
    model: Any = testing.tiny_model("gpt_oss", num_local_experts=8)
    save(model, tmp_path / "base")
    adapt(model, tmp_path / "adapter", target_parameters=EXPERTS)
    stacks = [weight for name, weight in model.named_parameters() if name.endswith("gate_up_proj")]
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 2 * stacks[0][0].numel())
    sizes: list[int] = []

    def spied(stock: Any) -> Any:
        def call(self: Any, key: str, *given: Any) -> Any:
            made = stock(self, key, *given)
            moved = given[0] if made is None else made
            sizes.extend([moved.numel()] if ".experts." in key else [])
            return made

        return call

    monkeypatch.setattr(Checkpoint, "read", spied(Checkpoint.read))
    monkeypatch.setattr(ShardWriter, "write", spied(ShardWriter.write))
    settings: Any = {"like_training": True, "quantization_config": {"load_in_4bit": True}}
    places = (tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    moe_qlora.merge_adapter(*places, **settings)
    assert max(sizes) == 2 * stacks[0][0].numel()
    assert len(sizes) > 4 * len(stacks)


# Merged folders that load

ROWS, ADDED = 128, 7
SAME = {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [3, 7]}}
# whether the base is tied, tokens more, what is trained: tied after it are the SAME rows alone
TRAINED: list[tuple[bool, int, dict[str, Any]]] = [
    (False, ADDED, {"modules_to_save": ["embed_tokens"]}),
    (True, 0, {"modules_to_save": ["lm_head"]}),
    (True, ADDED, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    (False, 0, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    (False, ADDED, {"trainable_token_indices": [3, 7]}),
    (True, ADDED, {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [3, 9]}}),
    (True, ADDED, SAME),
]


def base(folder: Path, model_type: str = "qwen3_moe", **settings: Any) -> Path:
    model = testing.tiny_model(model_type, dtype=torch.float32, num_hidden_layers=1, **settings)
    return save(model, folder)


def load(folder: Path, kind: Any = AutoModelForCausalLM, added: int = 0, **settings: Any) -> Any:
    model = loaded(folder, NF4, kind, **settings)
    torch.manual_seed(5)
    if added:
        model.resize_token_embeddings(ROWS + added, mean_resizing=False)
    model.config.pad_token_id = 0
    return model


@torch.no_grad()
def out(model: Any, added: int = 0) -> Tensor:
    tokens = torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(1))
    tokens[:, 2:6] = torch.tensor([3, 7, 9, ROWS + added - 1])
    return model.eval()(input_ids=tokens).logits


def merged(root: Path, kind: Any = AutoModelForCausalLM) -> Any:
    merge(root, like_training=True)
    model, info = kind.from_pretrained(root / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    model.config.pad_token_id = 0
    return model


@pytest.mark.parametrize(("tied", "added", "trained"), TRAINED, ids=str)
def test_added_tokens(tied: bool, added: int, trained: dict[str, Any], tmp_path: Path) -> None:
    source = base(tmp_path / "base", tie_word_embeddings=tied)
    adapter = tmp_path / "adapter"
    expected = out(adapt(load(source, added=added), adapter, ["q_proj"], **trained), added)
    again = PeftModel.from_pretrained(load(source, added=added), adapter)
    assert torch.equal(out(again, added), expected)
    again = moe_qlora.load_adapter(load(source, added=added), adapter, is_trainable=True)
    again.load_adapter(adapter, "default", is_trainable=True)  # as Trainer goes on
    assert torch.equal(out(again, added), expected)
    model = merged(tmp_path)
    torch.testing.assert_close(out(model, added), expected, atol=1e-5, rtol=0)
    assert model.config.vocab_size == ROWS + added
    assert model.config.tie_word_embeddings is (trained is SAME)


def test_a_vocabulary_that_is_not_all_in_the_adapter(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    model = lora(load(source, added=ADDED), "q_proj", "embed_tokens")
    save(model, tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"embed_tokens.weight: 135 rows, lm_head.weight: 128"):
        merge(tmp_path)


def test_a_reward_models_head(tmp_path: Path) -> None:
    source = base(tmp_path / "base", "mixtral", tie_word_embeddings=True)
    kind = AutoModelForSequenceClassification
    reward = load(source, kind, num_labels=1)
    adapted = adapt(reward, tmp_path / "adapter", ["q_proj"], task_type="SEQ_CLS")
    model = merged(tmp_path, kind)
    assert model.config.num_labels == 1 and "lm_head.weight" not in tensors(tmp_path / "out")
    torch.testing.assert_close(out(model), out(adapted), atol=1e-5, rtol=0)


def test_experts_that_bitsandbytes_packed_one_by_one(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    stored: dict[str, Tensor] = {}
    for key, weight in tensors(folder).items():
        stored[key] = weight
        if key.endswith("proj.weight"):
            stored[key], state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
            stored |= {f"{key}.{end}": part for end, part in state.as_dict(packed=True).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    set_json(folder / "config.json", quantization_config={**NF4, "quant_method": "bitsandbytes"})
    sentence = r"has experts that bitsandbytes packed one by one \(model\.layers\.\d\.mlp\.experts"
    with moe_qlora.enabled(), pytest.raises(UnsupportedWeightError, match=sentence):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UnsupportedWeightError, match=sentence):
        moe_qlora.plan(folder)
    (problem,) = verify(folder).problems
    assert re.search(sentence, problem)


def test_the_adapters_tokenizer_wins(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    adapter = save(lora(load(source), "q_proj"), tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "notes.txt"):
        (source / name).write_text(json.dumps({"of": "base"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (adapter / name).write_text(json.dumps({"of": "adapter"}))
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    report = moe_qlora.merge_adapter(source, adapter, tmp_path / "out")
    copied = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert {*report.from_adapter} == copied | {"generation_config.json"}
    assert all(name in str(report) for name in copied)
    for name in report.from_adapter:
        assert (tmp_path / "out" / name).read_bytes() == (adapter / name).read_bytes()
    assert (tmp_path / "out" / "notes.txt").is_file()
    assert not (tmp_path / "out" / "added_tokens.json").exists()


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "llama4"])
def test_an_adapter_of_the_text_model_is_merged_into_all_of_it(model_type, tmp_path):
    images = save(testing.tiny_model(model_type, seed=1), tmp_path / "base")
    text = AutoModelForCausalLM.from_pretrained(images, dtype=torch.float32)
    assert type(text).__name__.endswith("ForCausalLM")
    before = out(text)
    model = adapt(text, tmp_path / "adapter", linears=["q_proj"], target_parameters=EXPERTS)
    wanted = out(model)
    assert (wanted - before).abs().max() > 1e-2
    merge(tmp_path, dtype=torch.float32)
    served, call = tmp_path / "served", {"base": images, "target": "peft"}
    with pytest.raises(AdapterError, match="does not fit the base"):
        moe_qlora.export_adapter(tmp_path / "adapter", served, **call)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        again = auto.from_pretrained(tmp_path / "out", dtype=torch.float32)
        if auto is AutoModelForImageTextToText:
            skip_llama4(model_type)
        torch.testing.assert_close(out(again), wanted, rtol=1e-4, atol=1e-5)


def test_a_packed_folder_of_a_model_of_images_says_how_it_is_loaded(tmp_path: Path):
    save(testing.tiny_model("qwen3_5_moe", seed=1), tmp_path / "plain")
    moe_qlora.quantize_checkpoint(tmp_path / "plain", tmp_path / "base", NF4)
    with pytest.raises(ValueError, match=r"holds a packed .*ForConditionalGeneration: load it"):
        loaded(tmp_path / "base", None)
    model = loaded(tmp_path / "base", None, AutoModelForImageTextToText)
    assert "transformers_weights" not in vars(model.config.text_config)
    assert verify(tmp_path / "base").good
    model = adapt(model, tmp_path / "adapter", ["q_proj"])
    merge(tmp_path)
    assert "transformers_weights" not in (tmp_path / "out" / "config.json").read_text()
    save(model.unload(), tmp_path / "again")
    assert verify(tmp_path / "again").good
