"""Merging an adapter on disk: what is refused, what stays, what a crash leaves, what it costs."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from folders import assert_close, edit, set_json, tensors
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from small_models import fill
from torch import Tensor, nn
from training import loaded, lora

import moe_qlora
from moe_qlora import testing
from moe_qlora.checkpoint import conversion
from moe_qlora.checkpoint.folder import Checkpoint, ShardWriter
from moe_qlora.errors import AdapterError, CheckpointError, ConfigError
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings

EXPERTS = ["gate_up_proj", "down_proj"]
SHARDED = "40KB"
DAMAGED = "adapter_config.json is damaged"


def save(model: Any, folder: Path, **settings: Any) -> None:
    """Save a model, or an adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lm_head, and of a base that is in no folder
        model.save_pretrained(folder, **settings)


def adapt(model: Any, folder: Path, *, linears: list[str] | None = None, **settings: Any) -> Any:
    """A random adapter, saved; returns the model with it."""
    config: Any = LoraConfig(r=2, target_modules=linears or [], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    save(adapted, folder)
    return adapted


def merge(root: Path, out: str = "out", **settings: Any) -> dict[str, Tensor]:
    moe_qlora.merge_adapter(root / "base", root / "adapter", root / out, **settings)
    return tensors(root / out)


def merged_by_peft(root: Path, adapted: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(adapted.merge_and_unload(), root / "reference")
    return tensors(root / "reference")


def change_base(root: Path, change: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    """Change the tensors of a base in one file; returns them."""
    return load_file(edit(root / "base", change) / "model.safetensors")


def assert_merges_as_peft(tmp_path: Path, model: Any, **settings: Any) -> dict[str, Tensor]:
    """Merge on disk and in memory, compare what they save; returns it."""
    save(model, tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", **settings)
    merged = merge(tmp_path)
    assert_close(merged, merged_by_peft(tmp_path, adapted))
    return merged


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


def other_base(folders: Path, tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    """A base of the same configuration whose tensors are in one file."""
    base = tmp_path / "base"
    base.mkdir()
    shutil.copyfile(folders / "base" / "config.json", base / "config.json")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    return base


def changed_config(folders: Path, target: Path, **fields: Any) -> Path:
    """A copy of the adapter with other settings."""
    shutil.copytree(folders / "adapter", target)
    set_json(target / "adapter_config.json", **fields)
    return target


def noted(folders: Path, target: Path, kind: str, *linears: str, **fields: Any) -> Path:
    """A copy of the adapter with a note of what was packed as it was trained."""
    changed_config(folders, target)
    note = {
        "format_version": 1,
        "codec": {"kind": kind, "double_quant": kind == "fp4", "blocksize": 64},
        "experts": ["model.layers.0.mlp.experts.down_proj"],
        "linears": linears,
    }
    (target / "moe_qlora_adapter.json").write_text(json.dumps(note | fields))
    return target


# What stays


def header(file: Path) -> bytes:
    """Keys, dtypes, shapes and places in order, and the metadata."""
    raw = file.read_bytes()
    return raw[: 8 + int.from_bytes(raw[:8], "little")]


def test_files_keys_order_and_side_files_are_the_bases(folders: Path) -> None:
    base, out = folders / "base", folders / "out"
    shards = sorted(file.name for file in base.glob("model-*.safetensors"))
    assert len(shards) > 3
    refused = {"training_args.bin", "pytorch_model.bin", "adapter_model.safetensors"}
    assert {f.name for f in out.iterdir()} == {f.name for f in base.iterdir()} - refused
    for name in shards:
        assert header(out / name) == header(base / name)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    ours, theirs = (
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for folder in (out, base)
    )
    assert ours == theirs
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "{{ x }}"
    before, after = tensors(base), tensors(out)
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if "q_proj" in key or ".experts." in key}


def test_dtype_casts_floating_tensors_and_says_so(folders: Path, tmp_path: Path) -> None:
    out, dtype = tmp_path / "out", torch.float16
    seen: list[tuple[int, int, str]] = []
    how: dict[str, Any] = {"dtype": dtype, "progress": lambda *one: seen.append(one)}
    report = moe_qlora.merge_adapter(folders / "base", folders / "adapter", out, **how)
    own, cast = tensors(folders / "out"), tensors(out)
    assert {tensor.dtype for tensor in cast.values()} == {dtype}
    assert seen == sorted(seen, key=lambda one: one[0]) and seen[-1] == (len(own), len(own), "")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes == sum(t.nbytes for t in cast.values())
    for key, value in own.items():
        if "q_proj" in key or ".experts." in key:  # rounded once, from fp32, to either
            step = 2**-8 + 2**-11
            torch.testing.assert_close(cast[key].float(), value.float(), rtol=step, atol=1e-7)
            assert not torch.equal(cast[key].bfloat16().to(dtype), cast[key])
        else:
            assert torch.equal(cast[key], value.to(dtype))


def test_dtype_leaves_what_transformers_keeps_in_fp32(tmp_path: Path) -> None:
    model: Any = testing.tiny_model("deepseek_v3")
    kept = model._keep_in_fp32_modules_strict
    save(model, tmp_path / "base")
    adapt(model, tmp_path / "adapter", linears=["o_proj"])
    found = merge(tmp_path, dtype=torch.bfloat16)
    exempt = {key for key in found if any(name in key for name in kept)}
    assert exempt
    for key, value in found.items():
        assert value.dtype == (torch.float32 if key in exempt else torch.bfloat16), key


# What PEFT can do to a Linear layer, an embedding, a module in full


@pytest.mark.parametrize(
    "settings",
    [
        {"linears": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v": 5}},
        {
            "target_parameters": EXPERTS,
            "rank_pattern": {r"layers\.0\..*gate_up_proj": 5},
            "alpha_pattern": {r".*down_proj": 3},
            "use_rslora": True,
        },
        {"target_parameters": ["down_proj"]},
        {"target_parameters": ["mlp.gate.weight", "gate_up_proj"]},
        {"linears": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        {"linears": ["embed_tokens", "o_proj"]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_of_the_adapter(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 1000)  # some rows at a time
    assert_merges_as_peft(tmp_path, testing.tiny_model("qwen3_moe"), **settings)


BIAS = "model.layers.0.self_attn.q_proj.bias"


def test_trained_biases_replace_the_bases(tmp_path: Path) -> None:
    model: Any = testing.tiny_model("gpt_oss")
    save(model, tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", linears=["q_proj"], bias="all")
    for name, parameter in adapted.named_parameters():
        if name.endswith("q_proj.base_layer.bias"):
            parameter.data.fill_(0.25)
    save(adapted, tmp_path / "adapter")
    merged = merge(tmp_path)
    assert_close(merged, merged_by_peft(tmp_path, adapted))
    assert bool((merged[BIAS] == 0.25).all())


def test_lora_on_a_convolution_is_refused(tmp_path: Path) -> None:
    model: Any = testing.tiny_model("qwen3_vl_moe")
    save(model, tmp_path / "base")
    layers = [n for n, one in model.named_modules() if isinstance(one, nn.Conv2d | nn.Conv3d)]
    adapt(model, tmp_path / "adapter", linears=layers)
    with pytest.raises(AdapterError, match=r"conv|proj.* of shape .*, which cannot be merged"):
        merge(tmp_path)


def test_lora_on_a_tied_embedding_changes_both(tmp_path: Path) -> None:
    model: Any = testing.tiny_model("granitemoe", tie_word_embeddings=True)
    assert_merges_as_peft(tmp_path, model, linears=["embed_tokens"])


def test_tied_names_that_differ_on_disk_are_no_longer_tied(tmp_path: Path) -> None:
    """transformers unties them as it loads; so a change of one is a change of one."""
    model: Any = testing.tiny_model("granitemoe", tie_word_embeddings=True)
    save(model, tmp_path / "base")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    weights = change_base(tmp_path, lambda held: held.update({head: held[embedding] + 1}))
    adapt(model, tmp_path / "adapter", linears=["embed_tokens"])
    merged = merge(tmp_path)
    assert torch.equal(merged[head], weights[head])
    assert not torch.equal(merged[embedding], weights[embedding])


def test_a_base_transposed_on_disk_stays_so(tmp_path: Path) -> None:
    """As published Qwen3-VL checkpoints are, which transformers itself writes the other way."""
    model: Any = testing.tiny_model("qwen3_vl_moe")
    save(model, tmp_path / "base")
    experts = []

    def swap(held: dict[str, Tensor]) -> None:
        experts.extend(key for key in held if ".mlp.experts." in key)
        held |= {key: held[key].transpose(1, 2).contiguous() for key in experts}

    swapped = change_base(tmp_path, swap)
    assert all(swapped[key].shape[1] != swapped[key].shape[2] for key in experts)
    adapted = adapt(model, tmp_path / "adapter", target_parameters=EXPERTS)
    reference = merged_by_peft(tmp_path, adapted)
    assert_close(
        merge(tmp_path), reference | {key: reference[key].transpose(1, 2) for key in experts}
    )


# What is refused


def refuses(
    error: type[Exception], match: str, base: Path, adapter: Path, out: Path, **settings: Any
) -> None:
    with pytest.raises(error, match=match) as caught:
        moe_qlora.merge_adapter(base, adapter, out, **settings)
    assert "\n" not in str(caught.value)
    assert not out.exists() and not list(out.parent.glob(".*.partial"))


Places = Callable[[Path, Path], tuple[Path, Path]]
"""Gives base and adapter of a refused merge, given `folders` and `tmp_path`."""
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Tensor]], Any]


def fields(**settings: Any) -> Places:
    """The adapter with other settings."""
    return lambda f, tmp: (f / "base", changed_config(f, tmp / "adapter", **settings))


def weights(change: Change) -> Places:
    """The adapter with other tensors."""

    def places(folders: Path, tmp_path: Path) -> tuple[Path, Path]:
        return folders / "base", edit(changed_config(folders, tmp_path / "adapter"), change)

    return places


def stored(change: Change) -> Places:
    """A base with other tensors."""
    return lambda f, tmp: (edit(other_base(f, tmp, tensors(f / "base")), change), f / "adapter")


def of_bitsandbytes(folders: Path, tmp_path: Path) -> tuple[Path, Path]:
    base = other_base(folders, tmp_path, {})
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    set_json(base / "config.json", quantization_config=said)
    return base, folders / "adapter"


def each(part: str, change: Callable[[dict[str, Tensor], str], Any]) -> Change:
    return lambda held: [change(held, key) for key in list(held) if re.search(part, key)]


def also(name: str, *shape: int) -> Places:
    """The adapter with one more tensor."""
    return weights(lambda held: held.update({f"base_model.model.{name}": torch.zeros(shape)}))


WIDEN = each("", lambda held, key: held.update({key: torch.cat([held[key]] * 2, dim=1)}))
MOVE = each(Q_PROJ, lambda held, k: held.update({k.replace("s.0", "s.9"): held.pop(k)}))
SPOIL = each("experts.*lora_A", lambda held, key: held[key].fill_(math.inf))
LOSE = each(r"layers\.1.*\.experts\.3\.", lambda held, key: held.pop(key))
CAST = each("0.self_attn.q_proj", lambda held, key: held.update({key: held[key].char()}))
REFUSED: list[tuple[str, Places]] = [
    ("holds an adapter and no model", lambda f, tmp: (f / "adapter", f / "adapter")),
    ("is no adapter: it has no", lambda f, tmp: (f / "base", tmp)),
    ("is no folder", lambda f, tmp: (tmp / "nothing", f / "adapter")),
    ("holds a LOHA adapter", fields(peft_type="LOHA")),
    ("use_dora=True.*norm", fields(use_dora=True)),
    ("lora_bias=True", fields(lora_bias=True)),
    ("init_lora_weights=pissa", fields(init_lora_weights="pissa")),
    ("trainable_token_indices", fields(trainable_token_indices=[1, 2])),
    (r"lora_A.weight \(.*\) and its lora_B .* needs .* at rank 4", fields(r=4)),
    ("one of 2 LoRA layers on .*, of which", fields(target_parameters=["gate_up_proj"])),
    ("gate.weight, for which the file", fields(target_parameters=[*EXPERTS, "mlp.gate.weight"])),
    (DAMAGED, fields(rank_pattern={"(": 3})),
    (r"was trained on .*: \S+lora_A.weight \(\d+, \d+\) .* of shape \(", weights(WIDEN)),
    ("lora_A.weight lacks its other half", weights(lambda w: w.pop(f"{Q_PROJ}.lora_B.weight"))),
    (r"layers.9.self_attn.q_proj.lora_A.weight \(2, 64\) belongs to a module", weights(MOVE)),
    (r"score.weight \(2, 8\) has no place", also("score.weight", 2, 8)),
    (r"head.weight \(2, 8\) replaces .* of shape \(\d+, 64\)", also("lm_head.weight", 2, 8)),
    (r"Merged, model.layers.*down_proj.weight holds NaN or inf", weights(SPOIL)),
    (r"1.mlp.experts.\w+ has the shape \(3, .*on disk .* and \(4, ", stored(LOSE)),
    ("q_proj.weight is torch.int8, which an adapter", stored(CAST)),
    (r"is quantized \(bitsandbytes\); name the 16-bit checkpoint", of_bitsandbytes),
]


@pytest.mark.parametrize(("match", "places"), REFUSED)
def test_what_cannot_be_merged(match: str, places: Places, folders: Path, tmp_path: Path) -> None:
    base, adapter = places(folders, tmp_path)
    of_adapter = adapter == tmp_path / "adapter" and match != DAMAGED
    refuses(AdapterError if of_adapter else CheckpointError, match, base, adapter, tmp_path / "out")


def test_a_conversion_that_cannot_be_undone_is_not_trusted(folders, tmp_path, monkeypatch):
    def swap_halves(model: Any, values: Any, name: str) -> dict[str, Tensor]:
        made = honest(model, values, name)
        keys = sorted(key for key in made if "gate_proj" in key)
        made |= {key: made[key.replace("gate_proj", "up_proj")] for key in keys}
        return made

    honest = conversion.revert
    monkeypatch.setattr(conversion, "revert", swap_halves)
    match = "gate_up_proj cannot be written back as the base has it"
    refuses(CheckpointError, match, folders / "base", folders / "adapter", tmp_path / "out")


# Rounding as in training


def test_like_training_never_guesses(folders: Path, tmp_path: Path) -> None:
    places = folders / "base", folders / "adapter", tmp_path / "out"
    refuses(ConfigError, "needs the codec that", *places, like_training=True)
    given = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    refuses(ConfigError, "is for like_training", *places, **given)
    for number, (fields, match) in enumerate((
        ({}, "asks for nf4, and .* was trained on int8"),
        ({"format_version": 2}, "is damaged: format_version is 2"),
        ({"codec": {}}, "is damaged"),
        ({"experts": ["model.layers.7.mlp.experts.down_proj"]}, "is for a model .*layers.7"),
    )):  # fmt: skip
        note = noted(folders, tmp_path / str(number), "int8", **fields)
        error, more = (CheckpointError, {}) if fields else (ConfigError, given)
        refuses(error, match, places[0], note, places[2], like_training=True, **more)


@pytest.mark.parametrize("kind", ["fp4", "int8"])
def test_a_note_rounds_what_it_names_and_nothing_else(kind, folders, tmp_path):
    v_proj = "model.layers.1.self_attn.v_proj.weight"
    note = noted(folders, tmp_path / "noted", kind, v_proj)
    out = tmp_path / "out"
    report = moe_qlora.merge_adapter(folders / "base", note, out, like_training=True)
    assert report.rounded == 2
    exact, rounded = tensors(folders / "out"), tensors(out)
    other = {key for key, value in exact.items() if not torch.equal(value, rounded[key])}
    assert other == {v_proj} | {
        key for key in exact if "layers.0.mlp.experts" in key and "down_proj" in key
    }
    weight = tensors(folders / "base")[v_proj]
    if kind == "int8":  # as bitsandbytes holds them
        weight = weight.half()
    packed = codec.pack(weight, CodecSettings(kind, double_quant=kind == "fp4"))
    assert torch.equal(rounded[v_proj], codec.unpack(replace(packed, dtype=torch.bfloat16)))


@pytest.mark.parametrize(("trained", "bits"), [(torch.float16, 4), (torch.bfloat16, 8)])
def test_like_training_rounds_to_the_dtype_that_was_trained_in(trained, bits, tmp_path):
    """Of a base in fp32 on disk, whose weights a load has rounded before it packed them."""
    save(testing.tiny_model("qwen3_moe", dtype=torch.float32), tmp_path / "base")
    packed = loaded(tmp_path / "base", {f"load_in_{bits}bit": True}, dtype=trained)
    adapted = fill(lora(packed, "q_proj"), 3, 0.1)
    save(adapted, tmp_path / "adapter")
    file = tmp_path / "adapter" / "moe_qlora_adapter.json"
    note = json.loads(file.read_text())
    merged = merge(tmp_path, like_training=True)
    file.write_text(json.dumps({key: value for key, value in note.items() if key != "dtype"}))
    unrounded = merge(tmp_path, "old", like_training=True)
    save(adapted.merge_and_unload(dtype=torch.float32), tmp_path / "reference")
    reference = tensors(tmp_path / "reference")
    for key in (key for key in reference if "experts" in key or "q_proj" in key):
        assert torch.allclose(merged[key], reference[key], rtol=1e-5, atol=1e-6), key
        assert not torch.allclose(unrounded[key], reference[key], rtol=1e-5, atol=1e-6), key
    set_json(file, **note | {"dtype": "int4"})
    places = (tmp_path / "base", tmp_path / "adapter", tmp_path / "none")
    refuses(CheckpointError, "dtype", *places, like_training=True)


# Links in a base that comes from somebody else


@pytest.mark.parametrize(
    ("work", "name"),
    [
        *(("merge", name) for name in ("config.json", "additional_chat_templates/tool.jinja")),
        ("quantize", "additional_chat_templates"),
        ("quantize", "model.safetensors.index.json"),
    ],
)
def test_no_link_leads_out_of_a_base(folders: Path, tmp_path: Path, work: str, name: str) -> None:
    base, secret = tmp_path / "base", tmp_path / "secret"
    shutil.copytree(folders / "base", base)
    link = base / name
    if link.is_dir():
        link.rename(secret)
    else:
        secret.write_bytes(link.read_bytes())
        link.unlink()
    link.symlink_to(secret)
    adapter, out = folders / "adapter", tmp_path / "out"
    calls: dict[str, Callable[[], Any]] = {
        "merge": lambda: moe_qlora.merge_adapter(base, adapter, out),
        "quantize": lambda: moe_qlora.quantize_checkpoint(base, out, {"load_in_4bit": True}),
    }
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leads out of its folder"):
        calls[work]()
    assert not (tmp_path / "out").exists()


# What it costs


def test_no_more_than_two_experts_at_a_time(tmp_path, monkeypatch):
    model: Any = testing.tiny_model("gpt_oss", num_local_experts=8)
    save(model, tmp_path / "base")
    adapt(model, tmp_path / "adapter", target_parameters=EXPERTS)
    stacks = [weight for name, weight in model.named_parameters() if name.endswith("gate_up_proj")]
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 2 * stacks[0][0].numel())
    sizes: list[int] = []
    read, write = Checkpoint.read, ShardWriter.write

    def spied_read(self: Any, key: str, *rows: Any) -> Tensor:
        tensor = read(self, key, *rows)
        sizes.extend([tensor.numel()] if ".experts." in key else [])
        return tensor

    def spied_write(self: Any, key: str, tensor: Tensor) -> None:
        sizes.extend([tensor.numel()] if ".experts." in key else [])
        write(self, key, tensor)

    monkeypatch.setattr(Checkpoint, "read", spied_read)
    monkeypatch.setattr(ShardWriter, "write", spied_write)
    settings: Any = {"like_training": True, "quantization_config": {"load_in_4bit": True}}
    places = (tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    moe_qlora.merge_adapter(*places, **settings)
    assert max(sizes) == 2 * stacks[0][0].numel()
    assert len(sizes) > 4 * len(stacks)
