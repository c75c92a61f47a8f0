"""Linear layers whose weight the module around them reads."""

import functools
from typing import Any

import pytest
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from moe_qlora.detection.weight_reads import weights_read


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


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (Reads, {"0.outer": "Reads"}),
        (ReadsBelow, {"0.inner": "ReadsBelow"}),
        (Pair, {}),
        (ReadsFacts, {}),
    ],
)
def test_what_a_forward_reads_also_below_adapters(owner: Any, expected: dict[str, str]) -> None:
    model: Any = nn.Sequential(owner(), Pair())
    assert weights_read(model) == expected
    get_peft_model(model, LoraConfig(target_modules=["outer"]))
    assert weights_read(model) == expected
