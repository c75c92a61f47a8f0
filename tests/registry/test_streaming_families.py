"""Loading while packing, in every family; saving, reloading, and packing from disk: all equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import bits
from safetensors import safe_open
from transformers import BitsAndBytesConfig
from upstream import skip_renamed

import moe_qlora
from moe_qlora import registry
from moe_qlora.layout import name_pattern
from moe_qlora.packing import parametrize
from moe_qlora.testing import registry_families, tiny_model

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}

# Per expert and fused on disk, interleaved, transposed, biased, shared experts, two banks, 2-D,
# tied, stacks in parts, plain forwards: one of each kind runs the longer tests, too.
KINDS = (
    *("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "llama4_text", "dbrx", "jetmoe"),
    *("diffusion_gemma", "ernie4_5_vl_moe", "granitemoe", "step3p5", "qwen3_vl_moe_text"),
)
FAMILIES = {*registry_families()}

# Llama 4 keeps its rotary frequencies in complex numbers, which a cast of the model warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")


def on_disk(family: str, folder: Path) -> Any:
    """A tiny bf16 model of a family, which transformers has saved there."""
    model = tiny_model(family).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def check_keys(family: str, folder: Path) -> None:
    """The registry's keys on disk are those that transformers writes."""
    written: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                written[name_pattern(key)] = written.get(name_pattern(key), 0) + 1
    expected: dict[str, dict[str, int]] = {}
    for item in registry.load(family).experts:
        blocks = item["tiny"]["count"]
        experts = max(group["experts"] for group in item["tiny"]["groups"])
        owner = item["pattern"].rpartition(".")[0]
        for key in item["checkpoint"]["keys"]:
            per_block = experts if item["checkpoint"]["layout"] == "per expert" else 1
            expected.setdefault(key, {})[owner] = blocks * per_block
    # Experts of two modules may share one list on disk (text, then vision experts).
    assert {key: written.get(key) for key in expected} == {
        key: sum(owners.values()) for key, owners in expected.items()
    }


def assert_equal(left: torch.nn.Module, right: torch.nn.Module) -> None:
    """Both hold the same tensors under the same names, packed alike."""
    assert [*bits(left).items()] == [*bits(right).items()]
    assert_equal_experts(left, right)
    assert left.get_memory_footprint() == right.get_memory_footprint()  # type: ignore[operator]


def assert_equal_experts(left: torch.nn.Module, right: torch.nn.Module) -> None:
    """Both hold the same packed experts, bit for bit."""
    stacks = [f"{m}.{n}" for m, _, n in parametrize.iter_packed(left)]
    assert stacks
    assert stacks == [f"{m}.{n}" for m, _, n in parametrize.iter_packed(right)]
    for (_, one, name), (_, other, _) in zip(
        parametrize.iter_packed(left), parametrize.iter_packed(right), strict=True
    ):
        first, second = parametrize.read_packed(one, name), parametrize.read_packed(other, name)
        assert (first.kind, first.shape, first.dtype) == (second.kind, second.shape, second.dtype)
        assert first.compute_dtype == second.compute_dtype
        for ours, theirs in zip(first.statistics, second.statistics, strict=True):
            assert torch.equal(ours, theirs)
        codes = (weight.flat_codes.view(torch.uint8) for weight in (first, second))
        assert torch.equal(*codes)


def then_packed(cls: Any, folder: Path, settings: dict[str, Any]) -> Any:
    """Loaded first, packed afterwards: the reference."""
    model = cls.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**settings))
    moe_qlora.quantize_experts(model)
    return model


def streamed(cls: Any, folder: Path, settings: dict[str, Any] | None = None) -> Any:
    """Loaded under the switch; without settings, a packed folder."""
    extra = {} if settings is None else {"quantization_config": BitsAndBytesConfig(**settings)}
    with moe_qlora.enabled():
        return cls.from_pretrained(folder, **extra)


@pytest.mark.parametrize("family", sorted(FAMILIES & {*KINDS}))
def test_streaming_equals_packing_after_the_load_and_reloads(family: str, tmp_path: Path) -> None:
    cls = type(on_disk(family, tmp_path / "plain"))
    check_keys(family, tmp_path / "plain")
    reference = then_packed(cls, tmp_path / "plain", NF4)
    model = streamed(cls, tmp_path / "plain", NF4)
    assert_equal(model, reference)
    assert type(model.hf_quantizer) is type(reference.hf_quantizer)
    kinds = [
        [type(c) for c in m.__dict__.get("_weight_conversions") or []] for m in (model, reference)
    ]
    assert kinds[0] == kinds[1]  # what a save of the decoded model will undo
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    assert_equal(streamed(cls, tmp_path / "saved"), model)
    check_packed_from_disk(cls, tmp_path, NF4, model)


@pytest.mark.parametrize("family", sorted(FAMILIES - {*KINDS}))
def test_streaming_equals_packing_in_memory(family: str, tmp_path: Path) -> None:
    model = on_disk(family, tmp_path / "plain")
    loaded = streamed(type(model), tmp_path / "plain", NF4)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**NF4))
    assert_equal_experts(loaded, model)
    skip_renamed(family)
    check_keys(family, tmp_path / "plain")


def check_packed_from_disk(cls: Any, tmp_path: Path, settings: dict[str, Any], model: Any) -> None:
    moe_qlora.quantize_checkpoint(
        tmp_path / "plain", tmp_path / "packed", settings, max_shard_size="50KB"
    )
    saved, packed = (
        json.loads(next((tmp_path / n).glob("moe_qlora-*.json")).read_text())
        for n in ("saved", "packed")
    )
    assert saved["id"] == packed["id"]  # equal tensors, packed alike, so that one load is enough
    assert saved["experts"] == packed["experts"]
    assert_equal(streamed(cls, tmp_path / "packed"), model)
