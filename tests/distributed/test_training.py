"""Packed models train on several ranks as they do in one process, whatever engine shards them.

Every group of processes runs many cases: starting them takes longer than a case.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.nn.parallel import DistributedDataParallel
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_inputs, tiny_model
from tests.helpers import training
from tests.helpers.plans import plan
from tests.helpers.ranks import are_same, packed_bytes, said, sharded
from tests.helpers.training import NF4, adapted, loaded, mean_of_ranks, whole_gradients

STEPS = 3
SETTINGS = {
    **training.SETTINGS,
    "fp32 storage": {**NF4, "bnb_4bit_quant_storage": torch.float32},
}

EXACT: dict[str, dict[str, Any]] = {
    "ddp": {"how": "ddp", "reentrant": False},
    "ddp, int8, from rank 0": {"how": "ddp", "settings": "int8", "spoiled": True},
    "fsdp2, fp4": {"settings": "fp4"},
    "fsdp2, int8, reentrant": {"settings": "int8", "reentrant": True},
    "fsdp2, bf16 storage, non-reentrant": {"settings": "bf16 storage", "reentrant": False},
    "fsdp2, fp32 storage, offload": {
        "settings": "fp32 storage",
        "options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    },
}  # fmt: skip
BF16 = {"options": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}}
MIXED: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16, fp32 storage": {**BF16, "settings": "fp32 storage"},
}
# Experts stored (E, in, out), outside of the experts interface; experts that two stacks of
# layers share.
FAMILIES = ("llama4_text", "diffusion_gemma")


def packed_model(folder: str, settings: str = "nf4") -> Any:
    return loaded(folder, SETTINGS[settings])


def packed_family(model_type: str, **overrides: Any) -> Any:
    model = tiny_model(model_type, **overrides)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**NF4))
    return adapted(model, [])


def train(model: Any, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Losses of all steps, and the first step's whole gradients."""
    gradients: dict[str, Tensor] = {}

    def keep_first(step: int) -> None:
        if step == 0:
            gradients.update(whole_gradients(model))

    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(5, 88, (12, 5), generator=generator) for _ in range(STEPS)]
    losses = training.train(model, batches, rank, world, after_backward=keep_first)
    return {"losses": losses, "gradients": gradients}


def run_case(folder: str, rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    model = adapted(packed_model(folder, case.get("settings", "nf4")))
    if "reentrant" in case:
        model.gradient_checkpointing_enable({"use_reentrant": case["reentrant"]})
        model.enable_input_require_grads()
    before = packed_bytes(model)
    if case.get("how") == "ddp":
        if case.get("spoiled") and rank > 0:
            for name in before:
                model.get_parameter(name).data.zero_()
        model = DistributedDataParallel(model)
    else:
        model = sharded(model, **case.get("options", {}))
    result = train(model, rank, world)
    after = packed_bytes(model)
    result["intact"] = are_same(before, after)
    return result


def run_family(model: Any, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Losses and the last step's gradients of two steps that use nothing but the logits."""
    inputs = tiny_inputs(model, batch=4)
    draws_noise = "diffusion" in model.config.model_type
    if not draws_noise:
        inputs = {key: value.chunk(world)[rank] for key, value in inputs.items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses, gradients = [], {}
    for step in range(2):
        torch.manual_seed(step)
        loss = model.train()(**inputs).logits.float().square().mean()
        losses.append(mean_of_ranks(loss, world))
        optimizer.zero_grad()
        loss.backward()
        gradients = whole_gradients(model)
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "intact": True}


PACKINGS = {"nf4 double": NF4, "int8": {"load_in_8bit": True}}
ODD = {"hidden_size": 72, "moe_intermediate_size": 40, "num_experts": 6, "num_hidden_layers": 2}
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"


def packed(packing: str) -> Any:
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, **ODD)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**PACKINGS[packing]))
    return model


def held(model: Any) -> dict[str, int]:
    """Bytes that this rank holds: of weights, and of trained parameters."""
    sizes = {"weights": sum(buffer.nbytes for buffer in model.buffers()), "trained": 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sizes["trained" if parameter.requires_grad else "weights"] += local.nbytes
    return sizes


def run_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    cases = {**EXACT, **MIXED}
    results = {name: run_case(folder, rank, world, case) for name, case in cases.items()}
    for family in FAMILIES:
        results[family] = run_family(sharded(packed_family(family)), rank, world)
    for packing in PACKINGS:
        results[packing] = held(sharded(adapted(packed(packing), ATTENTION)))
    results["compiled"] = run_family(compiled(sharded(one_layer())), rank, world)
    results["refusals"] = run_refusals(folder)
    return results


def one_layer() -> Any:
    return packed_family("qwen3_moe", num_hidden_layers=1)


def compiled(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "self_attn"):
            module.compile(backend="eager")
    return model


def run_refusals(folder: str) -> dict[str, Any]:
    """What is said where packed weights cannot be computed with."""
    texts: dict[str, Any] = {}
    layer = sharded(adapted(packed_model(folder))).get_base_model().model.layers[0]
    x, index = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.long)
    texts["experts"] = said(lambda: layer.mlp.experts(x, index, torch.ones(3, 2)))
    texts["read"] = said(lambda: layer.mlp.experts.down_proj)
    texts["linear"] = said(lambda: layer.self_attn.k_proj(x))
    cpu = torch.device("cpu")
    texts["fsdp1"] = said(lambda: Fsdp1(packed_model(folder), device_id=cpu))
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("training") / "model"
    model: Any = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=40, num_experts=3)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def two(folder: str) -> Any:
    return run_distributed(run_two, 2, folder)


@cache
def reference(folder: str, settings: str = "nf4") -> dict[str, Any]:
    """What one process computes, where statistics are no parameters."""
    return train(adapted(packed_model(folder, settings)))


def assert_same(result: dict[str, Any], expected: dict[str, Any], close: float = 1e-5) -> None:
    assert result["intact"]
    assert result["losses"] == pytest.approx(expected["losses"], abs=close)
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = (result["gradients"][name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error < 10 * close, name


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_train_as_one(two: Any, folder: str, case: str) -> None:
    for result in two:
        assert_same(result[case], reference(folder, EXACT[case].get("settings", "nf4")))


@pytest.mark.parametrize("case", MIXED)
def test_mixed_precision_rounds_and_casts_no_codes(two: Any, folder: str, case: str) -> None:
    dtype = case.partition(",")[0]
    for result in two:
        assert result[case]["losses"] == result[dtype]["losses"]
        assert_same(result[case], reference(folder), 5e-3)


@pytest.mark.parametrize("family", [*FAMILIES, "compiled"])
def test_families_and_a_compiled_decoder_layer(two: Any, family: str) -> None:
    model = one_layer() if family == "compiled" else packed_family(family)
    expected = run_family(model)
    for result in two:
        assert_same(result[family], expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_rank_holds_what_is_planned_to_the_byte(two: Any, packing: str) -> None:
    """The first one; FSDP2 pads the last one's share to the same size."""
    made = plan(packed(packing), engine="fsdp:2", seq=8, rank=3, targets="attention,experts")
    adapters = made.peak.parts["adapters"]
    assert two[0][packing] == {"weights": made.resident, "trained": adapters}
    assert two[1][packing]["weights"] <= made.resident


def test_what_is_refused(two: Any) -> None:
    at, rest = "QuantizationError: model.layers.0.", " is sharded and not gathered now: call the "
    rest += "model that was given to fully_shard"
    for texts in (result["refusals"] for result in two):
        assert texts["experts"].startswith(f"{at}mlp.experts.gate_up_proj{rest}")
        assert texts["read"].startswith(f"{at}mlp.experts.down_proj{rest}")
        assert texts["linear"].startswith(f"{at}self_attn.k_proj.weight{rest}")
        # in torch's words, which troubleshooting.md explains
        assert "Must flatten tensors with uniform dtype" in texts["fsdp1"]
