"""A small layer by all families of the fused kernels, compared with plain torch."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import cards, table
from ..kernels.factors import Lora
from ..kernels.gate_kernels import Gate
from ..kernels.moe_layer import Layer, Operands, backward, down_forward, gate_up_forward
from ..kernels.weights import NF4, TABLES, PackedWeight
from ..packing import codec
from ..versions import OPTIONAL, installed_version


def layer_is_right(device: torch.device) -> bool:
    """Whether kernels are right, of few tokens and many; tried where no test has run them."""
    # Those in Gluon, whose language changes with Triton's versions, are left out if only they fail.
    triton = installed_version("triton")
    seen = device.type == "cuda" and torch.version.hip is None
    hopper = seen and torch.cuda.get_device_capability(device) == cards.HOPPER
    if hopper and (triton is None or OPTIONAL["triton"].includes(triton)):
        return True
    wrong = ""
    for _ in range(1 + hopper):
        try:
            if all(_is_right(device, tokens) for tokens in (8, 1024)):
                return True
            wrong = "give wrong results"
        except Exception as error:  # noqa: BLE001 - whatever this Triton or card refuses
            wrong = f"do not run ({type(error).__name__})"
        if hopper:
            table.KERNELS[:] = [kernel for kernel in table.kernels() if not kernel.hopper]
    said = f"moe_qlora's fused kernels {wrong} on {device} with Triton {triton}, which no test "
    warnings.warn(f"{said}has seen; this process goes on without them, slower.", stacklevel=4)
    return False


def _is_right(device: torch.device, tokens: int) -> bool:
    E, H, width, r, scaling = 4, 512, 128, 16, 0.5
    generator = torch.Generator(device).manual_seed(0)
    shapes = (E, 2 * width, H), (E, H, width)
    first, second = (_random_weight(shape, generator) for shape in shapes)

    def random(*shape: int, scale: float = 0.1) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator) * scale
        return values.to(first.dtype).requires_grad_()

    x, weights, gradient = (random(tokens, n, scale=1) for n in (H, 2, H))
    index = torch.rand(tokens, E, device=device, generator=generator).topk(2).indices
    a1, b1 = random(E * r, H), random(2 * width, r * E)
    a2, b2 = random(E * r, width), random(H, r * E)
    with torch.no_grad():
        layer = Layer(first, second, False, Gate("silu"), first.dtype)
        loras = Lora(a1, b1, scaling), Lora(a2, b2, scaling)
        operands = Operands(x, weights, (None, None), loras)
        state = gate_up_forward(layer, index, operands)
        out = down_forward(layer, state)
        found = out, *backward(layer, state.routing, state.saved, gradient, operands)
    with torch.enable_grad():  # All experts for all tokens in fp32, with W + s B A
        terms = (first, a1, b1), (second, a2, b2)
        w1, w2 = (
            codec.unpack(stack).float()
            + scaling * (b.view(len(b), r, E).permute(2, 0, 1) @ a.view(E, r, -1)).float()
            for stack, a, b in terms
        )
        gate, up = torch.einsum("th,eph->tep", x.float(), w1).chunk(2, -1)
        y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, w2)
        chosen = y.gather(1, index[..., None].expand(-1, -1, H))
        sums = torch.einsum("tk,tkh->th", weights.float(), chosen)
        inputs = x, weights, a1, b1, a2, b2
        wanted = sums, *torch.autograd.grad(sums, inputs, gradient.float())
    # bf16 rounds pre-activations and gradients to 0.4 %.
    pairs = [(a.float(), b.float()) for a, b in zip(found, wanted, strict=True) if a is not None]
    return all(bool((a - b).norm() < 2e-2 * b.norm()) for a, b in pairs)


def _random_weight(shape: tuple[int, int, int], generator: torch.Generator) -> PackedWeight:
    """Return nf4 codes of blocks of 64, in bf16 on CUDA, else in fp32."""
    device, numel = generator.device, math.prod(shape)
    codes = torch.randint(256, (numel // 2,), device=device, generator=generator).to(torch.uint8)
    absmax = torch.rand(numel // 64, device=device, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table_ = torch.tensor(TABLES[NF4], device=device)
    return PackedWeight(codes, absmax, table_, 64, None, shape, NF4, dtype)
