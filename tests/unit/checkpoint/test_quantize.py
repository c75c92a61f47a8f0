"""Packing a checkpoint from disk to disk; stored weights that are refused on every way in."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import check_folder, contents, edit, set_json, tensors
from torch import Tensor
from training import NF4, loaded, lora
from upstream import TRANSFORMERS

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import (
    CheckpointError,
    MoeQloraError,
    NonFiniteWeightError,
    UnsupportedWeightError,
)
from moe_qlora.testing import tiny_model

SHARD = "24KB"


def plain(root: Path, **changes: Any) -> Path:
    sizes = {"num_hidden_layers": 1, **changes}
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes)
    model.save_pretrained(root / "qwen3_moe", max_shard_size="40KB")
    return root / "qwen3_moe"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = plain(tmp_path_factory.mktemp("source"))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.bin").write_text("a pickle, so to speak")
    return path


def pack(source: Path, out: Path) -> Any:
    return moe_qlora.quantize_checkpoint(source, out, NF4, max_shard_size=SHARD)


def test_the_folder_is_complete_in_any_dtype(source: Path, tmp_path: Path) -> None:
    manifest = pack(source, tmp_path / "packed")
    whole = contents(tmp_path / "packed")
    assert verify(tmp_path / "packed").good
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(whole)
    assert "model.bin" not in whole and len(manifest.shards) > 1
    assert set(manifest.shards) == {name for name in whole if name.endswith(".safetensors")}
    moe_qlora.quantize_checkpoint(source, tmp_path / "half", NF4, dtype=torch.float16)
    packed = loaded(tmp_path / "half", None, dtype="auto")
    ids, reference = torch.arange(5)[None], loaded(source, dtype=torch.float16)
    assert packed.dtype == torch.float16
    assert torch.equal(packed(ids).logits, reference(ids).logits)


def asked(config: Any = NF4, **options: Any) -> Callable[[Path, Path], Any]:
    return lambda source, out: moe_qlora.quantize_checkpoint(source, out, config, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, o: pack(s, s), "exists and is no empty folder"),
        (lambda s, o: pack(s / "no", o), "is no folder: name one"),
        (lambda s, o: pack(plain(o.parent, mlp_only_layers=[0]), o), "ForCausalLM has no exp"),
        (asked(config={}), "neither 4 nor 8 bit"),
        (asked(config=4), "config is of the method 'int'"),
        (
            asked(config=NF4 | {"llm_int8_skip_modules": ["experts"]}),
            "qwen3_moe: .* or llm_int8_skip_modules leaves all of them unpacked",
        ),
        (asked(device="x"), "device is 'x'"),
        (asked(max_shard_size="much"), "max_shard_size"),
    ],
)
def test_refusals(source: Path, tmp_path: Path, call: Any, message: str) -> None:
    with pytest.raises(MoeQloraError, match=message):
        call(source, tmp_path / "o")
    assert not (tmp_path / "o").exists()


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_written_once(tmp_path: Path, tied: bool) -> None:
    """Unless the checkpoint holds two that differ: transformers does not tie these."""
    model: Any = tiny_model("granitemoe", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "plain")
    if tied:  # and yet stored twice
        edit(tmp_path / "plain", lambda held: held.update({HEAD: held[EMBEDDING].clone()}))
    set_json(tmp_path / "plain/config.json", tie_word_embeddings=True)
    stored_now = tensors(tmp_path / "plain")
    moe_qlora.quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", NF4)
    written = {EMBEDDING, HEAD} & check_folder(tmp_path / "packed").tensors.keys()
    assert written == ({EMBEDDING} if tied else {EMBEDDING, HEAD})
    packed = loaded(tmp_path / "packed", None, dtype="auto")
    assert torch.equal(packed.model.embed_tokens.weight, stored_now[EMBEDDING])
    assert torch.equal(packed.lm_head.weight, stored_now[EMBEDDING if tied else HEAD])
    assert verify(tmp_path / "packed", tmp_path / "plain").good


BF16 = NF4 | {"bnb_4bit_compute_dtype": "bfloat16"}
KEY = "model.layers.0.self_attn.k_proj.weight"
Change = Callable[[dict[str, Tensor], str], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By family: a folder, the packed one of it, and an adapter."""
    root = tmp_path_factory.mktemp("stored")
    for family, sizes in (("qwen3_moe", {}), ("gpt_oss", {"intermediate_size": 96})):
        place, sizes = root / family, {"num_hidden_layers": 1, **sizes}
        tiny_model(family, dtype=torch.bfloat16, **sizes).save_pretrained(place / "plain")
        moe_qlora.quantize_checkpoint(place / "plain", place / "packed", BF16)
        model = loaded(place / "packed", None, dtype="auto")
        lora(model, "v_proj").save_pretrained(place / "adapter")
    return root


def changed(folder: Path, to: Path, part: str, change: Change) -> Path:
    """A copy in which `change(tensors, key)` is done for keys with a part."""

    def each(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if part in f"{key} "]:
            change(tensors, key)

    return edit(Path(shutil.copytree(folder, to)), each)


def made(how: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, key: tensors.update({key: how(tensors[key]).contiguous()})


TURNED, CUT = made(lambda weight: weight.transpose(-1, -2)), made(lambda weight: weight[1:])


@pytest.mark.parametrize(
    ("family", "key", "change"),
    [
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", TURNED),
        ("qwen3_moe", KEY, TURNED),
        ("qwen3_moe", "model.norm.weight", CUT),
    ],
)
def test_another_shape_is_refused_on_every_way_in(folders, tmp_path, family, key, change):
    plain, packed, adapter = (folders / family / name for name in ("plain", "packed", "adapter"))
    source = changed(plain, tmp_path / "plain", f"{key} ", change)
    shapes = tensors(source)[key].shape, tensors(plain)[key].shape
    wrong, right = (re.escape(str(tuple(shape))) for shape in shapes)
    for way in (
        lambda: moe_qlora.quantize_checkpoint(source, tmp_path / "out", BF16),
        lambda: verify(packed, against=source),
        lambda: moe_qlora.merge_adapter(source, adapter, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match=f"{re.escape(key)} .*{wrong}.*{right}"):
            way()
        assert not (tmp_path / "out").exists()
    # Packed weights are named by one sentence; transformers refuses others itself, from 5.23 on.
    fault, said = (CheckpointError, key) if "proj" in key else (RuntimeError, "above report")
    if "proj" in key or TRANSFORMERS >= (5, 23):
        with pytest.raises(fault, match=re.escape(said)):
            loaded(source, BF16, dtype="auto")


def cast(dtype: torch.dtype, nan: bool = False) -> Change:
    """Codes of another tool, or one that is NaN among them."""

    def change(tensors: dict[str, Tensor], key: str) -> None:
        codes = tensors[key].to(dtype)
        if nan:
            codes.view(torch.uint8)[1, 2] = 0x7F
        tensors |= {key: codes, f"{key}_scale_inv": torch.ones(1, 1)}

    return change


def blocks(tensors: dict[str, Tensor], key: str) -> None:
    experts, inner, out = tensors.pop(key).shape
    codes = torch.zeros(experts, out, max(inner // 32, 1), 16, dtype=torch.uint8)
    tensors |= {f"{key}_blocks": codes, f"{key}_scales": codes[..., 0].clone()}


def poison(tensors: dict[str, Tensor], key: str) -> None:
    """Which bitsandbytes would spread over the whole weight, through the mean of its absmax."""
    tensors[key][3, 5:6] = float("nan")


EXPERT, DOWN, FP8 = ".0.mlp.experts.1.", r"experts\.down_proj", torch.float8_e4m3fn
UNSAID = r"\S* is (float8_e4m3fn|uint8)\b.*config\.json has no quantization_config"
NAMED, ODD, ENDLESS = CheckpointError, UnsupportedWeightError, NonFiniteWeightError
BAD: dict[str, tuple[str, Change, type[Exception], str]] = {
    "nan": (f"{EXPERT}up", poison, ENDLESS, "gate_up_proj holds NaN or inf in row 1"),
    "layer": (KEY, poison, ENDLESS, re.escape(KEY)),
    "fp8: code": (KEY, cast(FP8, nan=True), ENDLESS, re.escape(KEY)),
    "shape": (f"{EXPERT}down", made(lambda weight: weight[:, :-8]), NAMED, DOWN),
    "none": ("down_proj", lambda tensors, key: tensors.pop(key), NAMED, DOWN),
    # of which the floating-point other half would make a weight
    "int8 half": (f"{EXPERT}up", made(Tensor.char), ODD, "gate_up_proj is int8 in the checkpoint"),
    "int8": ("q_proj", cast(torch.int8), ODD, r"q_proj\S* is int8.*another tool"),
    "fp8 router": ("mlp.gate.", cast(FP8), NAMED, r"mlp\.gate" + UNSAID),
    "fused: mxfp4": ("experts.down_proj ", blocks, NAMED, "down_proj_blocks" + UNSAID),
}


@pytest.mark.parametrize("case", BAD)
def test_a_source_that_cannot_be_packed_is_named_on_both_ways(folders, tmp_path, case):
    part, change, error, said = BAD[case]
    family = "gpt_oss" if case.startswith("fused") else "qwen3_moe"
    source = changed(folders / family / "plain", tmp_path / "plain", part, change)
    if case.startswith("fp8: "):
        maker = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        set_json(source / "config.json", quantization_config=maker)
    for way in (
        lambda: moe_qlora.quantize_checkpoint(source, tmp_path / "out", BF16),
        lambda: loaded(source, BF16, dtype="auto", ignore_mismatched_sizes=True),
    ):
        with pytest.raises(error, match=said):
            way()
    assert not (tmp_path / "out").exists()
