"""Loading while packing, in every family; saving, reloading, and packing from disk: all equal."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import bits
from representatives import cases
from training import NF4, loaded
from transformers import BitsAndBytesConfig
from upstream import skip_renamed

import moe_qlora
from moe_qlora import registry
from moe_qlora.checkpoint.manifest import open_checkpoint, read_manifest
from moe_qlora.layout import name_pattern
from moe_qlora.packing import parametrize
from moe_qlora.testing import registry_families, tiny_model

# Per expert and fused on disk, interleaved, transposed, biased, two banks, 2-D, tied, stacks in
# parts, plain forwards: one of each kind runs the longer test.
KINDS = ("qwen3_moe", "gpt_oss", "llama4_text", "dbrx", "jetmoe", "diffusion_gemma")
KINDS += ("ernie4_5_vl_moe", "step3p5")
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
    with open_checkpoint(folder) as checkpoint:
        written = Counter(map(name_pattern, checkpoint))
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


def assert_equal(left: Any, right: Any) -> None:
    """Both hold the same tensors under the same names, packed alike."""
    assert [*bits(left).items()] == [*bits(right).items()]
    assert_equal_experts(left, right)
    assert left.get_memory_footprint() == right.get_memory_footprint()


def assert_equal_experts(left: Any, right: Any) -> None:
    """Both hold the same packed experts, bit for bit."""
    found = [
        {
            f"{path}.{leaf}": (
                (one := parametrize.read_packed(module, leaf)).kind, one.shape, one.dtype,
                one.compute_dtype, one.flat_codes.tolist(), [p.tolist() for p in one.statistics],
            )
            for path, module, leaf in parametrize.iter_packed(model)
        }
        for model in (left, right)
    ]  # fmt: skip
    assert found[0] == found[1] != {}


@pytest.mark.parametrize("family", sorted(FAMILIES & {*KINDS}))
def test_streaming_equals_packing_after_the_load_and_reloads(family: str, tmp_path: Path) -> None:
    plain, config = tmp_path / "plain", BitsAndBytesConfig(**NF4)
    cls = type(on_disk(family, plain))
    check_keys(family, plain)
    reference = cls.from_pretrained(plain, quantization_config=config)
    moe_qlora.quantize_experts(reference)
    model = loaded(plain, NF4, cls, dtype="auto")
    assert_equal(model, reference)
    assert type(model.hf_quantizer) is type(reference.hf_quantizer)
    kinds = [
        [type(c) for c in m.__dict__.get("_weight_conversions") or []] for m in (model, reference)
    ]
    assert kinds[0] == kinds[1]  # what a save of the decoded model will undo
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    moe_qlora.quantize_checkpoint(plain, tmp_path / "packed", NF4, max_shard_size="50KB")
    saved, packed = (read_manifest(tmp_path / name) for name in ("saved", "packed"))
    assert (saved.id, saved.experts) == (packed.id, packed.experts)
    for name in ("saved", "packed"):
        assert_equal(loaded(tmp_path / name, None, cls, dtype="auto"), model)


@pytest.mark.parametrize("family", cases(sorted(FAMILIES - {*KINDS})))
def test_streaming_equals_packing_in_memory(family: str, tmp_path: Path) -> None:
    model = on_disk(family, tmp_path)
    streamed = loaded(tmp_path, NF4, type(model), dtype="auto")
    moe_qlora.quantize_experts(model, NF4)
    assert_equal_experts(streamed, model)
    skip_renamed(family)
    check_keys(family, tmp_path)
