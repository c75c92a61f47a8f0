"""An experts layer with LoRA on both projections: the factors as leaves, and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_qlora.experts.operands import LoraFactors


class Provider:
    """LoRA of ranks 3 and 5 on two projections of an experts module.

    `sizes` are the features that come out and go in, by the projection's name.
    """

    def __init__(self, sizes: dict[str, tuple[int, int]], experts: int, dtype: torch.dtype) -> None:
        self.all = {}
        for rank, (name, (out, into)) in zip((3, 5), sizes.items(), strict=True):
            a, b = torch.randn(experts * rank, into), torch.randn(out, rank * experts)
            leaves = [(t * 0.1).to(dtype).requires_grad_() for t in (a, b)]
            self.all[name] = (LoraFactors(*leaves, 0.5),)

    def active_lora(self, name: str) -> tuple[LoraFactors, ...]:
        return self.all[name]

    def leaves(self) -> list[Tensor]:
        return [leaf for terms in self.all.values() for term in terms for leaf in (term.a, term.b)]


def layer_gradients(
    run: Callable[..., Tensor], provider: Provider, parts: Sequence[Tensor]
) -> list[Tensor]:
    """The output, and the gradients of x, the routing weights and the factors."""
    out = run(*parts)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [parts[0], parts[2], *provider.leaves()], seed)]
