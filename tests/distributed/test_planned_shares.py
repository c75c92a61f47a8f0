"""What a rank holds under FSDP2 is what `plan` says, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.ranks import sharded
from tests.helpers.training import NF4, adapted

RANKS = 2
PACKINGS = {
    "nf4 double": NF4,
    "nf4": NF4 | {"bnb_4bit_use_double_quant": False},
    "int8": {"load_in_8bit": True},
}
ODD = {"hidden_size": 72, "moe_intermediate_size": 40, "num_experts": 6, "num_hidden_layers": 2}


def packed(packing: str) -> nn.Module:
    model: nn.Module = tiny_model("qwen3_moe", dtype=torch.bfloat16, **ODD)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**PACKINGS[packing]))
    return model


def held(model: nn.Module) -> dict[str, int]:
    """Bytes that this rank holds: of weights, and of trained parameters."""
    sizes = {"weights": sum(buffer.nbytes for buffer in model.buffers()), "trained": 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sizes["trained" if parameter.requires_grad else "weights"] += local.nbytes
    return sizes


def one_rank(rank: int, world: int) -> dict[str, dict[str, int]]:
    attention = "q_proj", "k_proj", "v_proj", "o_proj"
    return {packing: held(sharded(adapted(packed(packing), attention))) for packing in PACKINGS}


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(one_rank, RANKS)


@pytest.mark.parametrize("packing", PACKINGS)
def test_fsdp_shares(ranks, packing):
    """The first rank's; FSDP2 pads the last one's to the same size."""
    made = moe_qlora.plan(packed(packing), fsdp=RANKS, seq=8, rank=3,
                          targets="attention,experts")  # fmt: skip
    adapters = made.peak.parts["adapters"]
    assert ranks[0][packing] == {"weights": made.resident, "trained": adapters}
    assert ranks[1][packing]["weights"] <= made.resident
