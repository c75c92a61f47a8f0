"""A small layer on the fused kernels beside plain torch, where no test has run them.

It runs each family of kernels: routing, rows, gate, factors, and both sizes of products.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import cards, table
from ..kernels.gate_kernels import Gate
from ..kernels.moe_layer import Layer, Lora, Operands, backward, down_forward, gate_up_forward
from ..kernels.weights import NF4, PackedWeight
from ..packing import codec
from ..versions import OPTIONAL, installed_version


def runs_untested(device: torch.device) -> bool:
    """Whether no test has run kernels on such a card, or with the installed Triton."""
    installed = installed_version("triton")
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != cards.HOPPER:
        return True
    return installed is not None and not OPTIONAL["triton"].includes(installed)


def layer_is_right(device: torch.device) -> bool:
    """Whether small layers of few tokens and many are right; warn once where they are not."""
    try:
        right = all(_is_right(device, tokens) for tokens in (8, 1024))
        wrong = "give wrong results"
    except Exception as error:  # noqa: BLE001 - whatever this Triton or card refuses
        right, wrong = False, f"do not run ({type(error).__name__})"
    if not right:
        warnings.warn(
            f"moe_qlora's fused kernels {wrong} on {device} with Triton "
            f"{installed_version('triton')}, which no test has seen; this process goes on without "
            "them, and slower.",
            stacklevel=4,
        )
    return right


def _is_right(device: torch.device, tokens: int) -> bool:
    E, H, width, r, scaling = 4, 256, 128, 16, 0.5
    generator = torch.Generator(device).manual_seed(0)
    stacks = [
        table.random_weight(shape, NF4, device, generator)
        for shape in ((E, 2 * width, H), (E, H, width))
    ]
    dtype = stacks[0].dtype

    def random(*shape: int, scale: float = 0.1) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator) * scale
        return values.to(dtype).requires_grad_()

    x, weights = random(tokens, H, scale=1), random(tokens, 2, scale=1)
    index = torch.rand(tokens, E, device=device, generator=generator).topk(2).indices
    factors = [random(E * r, H), random(2 * width, r * E), random(E * r, width), random(H, r * E)]
    gradient = random(tokens, H, scale=1).detach()
    loras = [Lora(a.detach(), b.detach(), scaling) for a, b in (factors[:2], factors[2:])]
    layer = Layer(stacks[0], stacks[1], False, Gate("silu"), dtype)
    operands = Operands(x.detach(), weights.detach(), (None, None), loras)
    state = gate_up_forward(layer, index, operands)
    found = [down_forward(layer, state)]
    gradients = backward(layer, state.routing, state.saved, gradient, operands)
    found += [each for each in gradients if each is not None]
    with torch.enable_grad():
        wanted = _by_torch(stacks, x, weights, index, factors, scaling)
        wanted += torch.autograd.grad(wanted[0], [x, weights, *factors], gradient.float())
    # bf16 rounds pre-activations and gradients to 0.4 %.
    return all(
        bool((one.float() - other.float()).norm() < 2e-2 * other.float().norm())
        for one, other in zip(found, wanted, strict=True)
    )


def _by_torch(
    stacks: list[PackedWeight], x: Tensor, weights: Tensor, index: Tensor, factors: list[Tensor],
    scaling: float,
) -> list[Tensor]:  # fmt: skip
    """Return the layer's output: all experts for all tokens, in fp32, with W + s B A."""
    dense = []
    for stack, a, b in zip(stacks, factors[::2], factors[1::2], strict=True):
        A, B = a.view(stack.experts, -1, a.shape[1]).float(), b.view(len(b), -1, stack.experts)
        delta = torch.einsum("ore,eri->eoi", B.float(), A)
        dense.append(codec.unpack(stack).float() + scaling * delta)
    gate, up = torch.einsum("th,eph->tep", x.float(), dense[0]).chunk(2, -1)
    y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, dense[1])
    chosen = y.gather(1, index[..., None].expand(-1, -1, y.shape[-1]))
    return [torch.einsum("tk,tkh->th", weights.float(), chosen)]
