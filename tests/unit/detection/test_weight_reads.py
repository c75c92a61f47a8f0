"""Linear layers whose weight the module around them reads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from moe_qlora.detection.weight_reads import weights_read
from moe_qlora.testing import tiny_model


class Pair(nn.Module):
    """Two layers, as those below have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.ones_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


class Reads(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.outer.weight, self.outer.bias)


def traced(method: Any) -> Any:
    @functools.wraps(method)
    def run(self: Any, *args: Any) -> Any:
        return method(self, *args)

    return run


class ReadsBelow(Pair):
    @traced
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return self.fused(x)

    def fused(module, x: Tensor) -> Tensor:
        weight = module.inner.weight.to(x.dtype)
        return module.outer(x @ weight.T)


class ReadsFacts(Pair):
    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner.weight, nn.Parameter) and x.dtype != self.inner.weight.dtype:
            x = x.to(self.inner.weight.dtype, copy=self.outer.weight.shape[0] > 1)
        return super().forward(x)

    def reset(self) -> None:  # which no forward calls
        self.inner.weight.data.zero_()


READS = {Reads: {"0.outer": "Reads"}, ReadsBelow: {"0.inner": "ReadsBelow"}}


@pytest.mark.parametrize("owner", [*READS, Pair, ReadsFacts])
def test_what_a_forward_reads(owner: type[Pair]) -> None:
    assert weights_read(nn.Sequential(owner(), Pair())) == READS.get(owner, {})


def test_names_are_the_same_below_adapters() -> None:
    model: Any = nn.Sequential(Reads())
    expected = weights_read(model)
    get_peft_model(model, LoraConfig(target_modules=["outer"]))
    assert weights_read(model) == expected == {"0.outer": "Reads"}


@pytest.mark.parametrize(
    ("model_type", "layer", "owner"),
    [
        ("granitemoehybrid", "model.layers.0.mamba.out_proj", "GraniteMoeHybridMambaLayer"),
        ("longcat_flash", "model.layers.0.mlp.router.classifier", "LongcatFlashTopkRouter"),
        ("nemotron_h", "model.layers.0.mixer.out_proj", "NemotronHMamba2Mixer"),
        ("jamba", "", ""),
        ("qwen3_next", "", ""),
    ],
)
def test_families(model_type: str, layer: str, owner: str) -> None:
    with torch.device("meta"):
        found = weights_read(tiny_model(model_type))
    assert dict(list(found.items())[:1]) == ({layer: owner} if layer else {})
    assert len({name.rpartition(".")[2] for name in found}) == bool(layer)
