"""Which backend computes a call of an experts module, and why: all conditions."""

import math
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import cards
from ..kernels.cards import HALVES, Card, planned_card
from ..kernels.limits import GROUP, MAX_EXPERTS, MAX_LORA_RANK, dequantizes_whole, supports_fused
from ..kernels.weights import PackedWeight
from ..layout import dtype_name
from ..packing.parametrize import is_autocast_on
from .operands import LoraFactors, PackedOperand, known_record, read_operand, record_of

_LEAST_CAPABILITY = (8, 0)
_kernels_run: dict[int, bool] = {}  # By CUDA device


class Backend(NamedTuple):
    """A way to compute a call, and the reason for it."""

    name: str  # "fused layer", "projection by projection", "reference loop" or "unpacked"
    reason: str


FUSED = Backend("fused layer", "both packed projections, the gate and LoRA suit its kernels")
UNPACKED = Backend("unpacked", "no expert weight is packed: transformers' own forward runs")


Operand: TypeAlias = PackedWeight | PackedOperand


class Call(NamedTuple):
    """The inputs of one call of an experts module that the choice of a backend depends on."""

    names: tuple[str, str]  # Parameters of the first projection and of the second
    x: Tensor  # `(T, H)`: the hidden states
    weights: tuple[Operand | None, Operand | None]  # None for a weight that is not packed
    lora: tuple[tuple[LoraFactors, ...], tuple[LoraFactors, ...]]  # Of the active adapters
    autocast: torch.dtype | None  # None outside autocast
    card: Card | None = None  # To choose for, for hidden states on meta; None: their own


def read_call(module: Any, x: Tensor) -> Call:
    """Return the weights, LoRA factors and dtypes of a call of `module` with x `(T, H)`."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    weights = read_operand(module, names[0]), read_operand(module, names[1])
    source = known_record(module).lora
    lora = [() if source is None else source.active_lora(name) for name in names]
    autocast = torch.get_autocast_dtype(x.device.type) if is_autocast_on(x) else None
    return Call(names, x, weights, (lora[0], lora[1]), autocast)


def stored_transposed(module: Any, weight: Operand | None) -> bool:
    """Whether a weight is stored `(E, in, out)`: as its parameter, or transposed."""
    swapped = weight is not None and weight.stored_transposed
    return bool(module.is_transposed) != swapped


def choose_backend(module: Any, call: Call) -> Backend:
    """Return the backend of a call of this module, and why."""
    if call.weights[0] is None and call.weights[1] is None:
        return UNPACKED
    obstacle = fused_obstacle(module, call)
    if obstacle is None:
        return FUSED
    if torch.compiler.is_compiling():  # there the custom operator chooses as it runs
        return Backend("projection by projection", obstacle)
    x, grouped = call.x, True
    for weight in call.weights:
        asked = None if weight is None else weight.compute_dtype
        dtype = call.autocast or asked or x.dtype
        grouped &= weight is not None and runs_grouped(weight.shape, x, dtype, call.card)
        on_gpu = x.device.type == "cuda" and call.autocast is None
        if on_gpu and dtype == torch.float32 and x.dtype in HALVES:
            _warn_of_float32(x.dtype)
    return Backend("projection by projection" if grouped else "reference loop", obstacle)


@cache  # once in a process: all layers of a model are packed by one config
def _warn_of_float32(dtype: torch.dtype) -> None:
    warnings.warn(
        "A packed weight is computed in float32, which no fast kernel serves, since "
        "bnb_4bit_compute_dtype is float32, its default, and the activations are "
        f"{dtype_name(dtype)}: give the BitsAndBytesConfig bnb_4bit_compute_dtype={dtype}.",
        UserWarning,
        stacklevel=2,
    )


def fused_obstacle(module: Any, call: Call) -> str | None:  # noqa: C901 - a list of reasons
    """Return the reason against the fused layer for a call, or None."""
    x, autocast = call.x, call.autocast
    dtype = autocast or x.dtype
    if not (kernels_run(x.device) if call.card is None else suits(call.card)):
        return _device_obstacle(x.device, call.card)
    if x.numel() == 0:
        return "there are no tokens"
    if module.has_post_expert_norm:
        return "a norm stands between the last projection and the routing weights"
    if find_gate(module) is None:
        name = type(module).__name__.removeprefix("Parametrized")  # torch's, of packed modules
        return f"the kernels know no such activation as {name}'s"
    if dtype not in HALVES:
        return f"the activations are {dtype}, not bfloat16 or float16"
    for name, weight, lora in zip(call.names, call.weights, call.lora, strict=True):
        if weight is None:
            return f"{name} is not packed"
        if module.has_bias and getattr(module, f"{name}_bias").requires_grad:
            return f"{name}_bias is trained"
        if len(lora) > 1:
            return f"{len(lora)} adapters of {name} are active at a time"
        # float32 factors are multiplied in 16 bit, as under autocast, and get float32 gradients.
        for factors in lora:
            if factors.drops:
                return f"dropout stands before the LoRA of {name}"
            if autocast is None and factors.a.dtype not in (dtype, torch.float32):
                return f"the LoRA of {name} is {factors.a.dtype}, the activations are {dtype}"
            if (rank := factors.a.shape[0] // weight.shape[0]) > MAX_LORA_RANK:
                return f"the LoRA of {name} is of rank {rank}, over {MAX_LORA_RANK}"
        if len(weight.shape) != 3:
            return f"{name} has {len(weight.shape)} dimensions, not 3"
        asked = weight.compute_dtype
        if asked is not None and asked != dtype and autocast is None:
            return f"{name} is to be computed in {asked}, the activations are {dtype}"
        if isinstance(weight, PackedOperand):
            there = (t.device == x.device and not hasattr(t, "device_mesh") for t in weight.tensors)
            plain = weight.hosted or all(there)  # What lies in host memory is fetched
        else:
            codes = weight.flat_codes
            plain = type(codes) is Tensor and codes.device == x.device
        if not plain:
            return f"{name} is sharded, or not on {x.device}"
        if not weight.spec.is_known:
            return f"{name} is packed as {weight.spec.kind}, which no kernel decodes"
        experts, *sizes = weight.spec.shape
        if not supports_fused(experts, tuple(sizes), weight.spec.blocksize):
            form = f"groups of {GROUP}, or has over {MAX_EXPERTS} experts"
            return f"{name} of shape {tuple(weight.shape)} is not all {form}"
    first, second = (stored_transposed(module, weight) for weight in call.weights)
    if first != second:
        return f"{call.names[0]} and {call.names[1]} are stored in different orientations"
    return None


def _device_obstacle(device: torch.device, card: Card | None) -> str:
    if card is not None and card.maker == "nvidia":
        if card.capability >= _LEAST_CAPABILITY:
            return "the fused kernels need Triton, which is not installed"
        major, minor = card.capability
        return f"the fused kernels need CUDA of compute capability 8.0, not {major}.{minor}"
    if card is not None:
        device = torch.device({"amd": "cuda", "intel": "xpu"}.get(card.maker, "cpu"))
    if device.type == "cuda" and (torch.version.hip is not None or suits(cards.actual(device))):
        return f"the fused kernels do not compile for {device}, or are not right there"
    return f"the fused kernels need CUDA of compute capability 8.0 and Triton, not {device}"


def runs_grouped(shape: Sequence[int], x: Tensor, dtype: torch.dtype, card: Any = None) -> bool:
    """Whether one grouped matmul, not a loop over experts, multiplies by packed codes."""
    return dtype in HALVES and has_grouped(x, dtype, card) and dequantizes_whole(*shape)


def has_grouped(x: Tensor, dtype: torch.dtype, card: Card | None = None) -> bool:
    """Whether there are grouped matmuls for such rows."""
    if card is None:
        card = planned_card(x.device) or (cards.actual(x.device) if x.is_cuda else None)
    some = x.shape[0] > 0 and dtype in (*HALVES, torch.float32)
    return some and card is not None and _multiplies(card)


def _multiplies(card: Card) -> bool:
    return card.maker == "amd" or card.capability >= _LEAST_CAPABILITY


def has_triton() -> bool:
    """Whether Triton is installed, by which the fused kernels are launched."""
    from ..kernels.lang import HAS_TRITON

    return HAS_TRITON


def suits(card: Card) -> bool:
    """Whether the fused kernels support a card, by its maker and capability; nothing is run."""
    return has_triton() and _multiplies(card)


# Called while torch.compile traces a call, and not traced
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def kernels_run(device: torch.device) -> bool:
    """Whether the fused kernels run on this device, on meta the card that is planned for."""
    # On a card or with a Triton that no test has seen, small layers are compared first.
    if (planned := planned_card(device)) is not None:
        return _multiplies(planned)
    if device.type != "cuda":
        return False
    index = device.index or 0
    if index not in _kernels_run:
        if runs := suits(cards.actual(device)):
            from .self_check import layer_is_right

            runs = layer_is_right(device)
        _kernels_run[index] = runs
        if torch.version.hip is not None and runs:
            said = f"moe_qlora's kernels are not tested on ROCm; a small layer is right on {device}"
            warnings.warn(f"{said}: compare the first losses with a CPU's.", stacklevel=2)
    return _kernels_run[index]


def find_gate(module: Any) -> tuple[Any, ...] | None:
    """Return the fields of `gate_kernels.Gate` that compute the module's gate; None if none do."""
    # No name says what a gate computes: it is compared once, on the CPU in fp64, with every
    # combination of the kernels' activations and the module's numbers. The module's record has it.
    record = known_record(module)
    if not record.gate_sought and not torch.compiler.is_compiling():
        record = record_of(module)
        record.gate, record.gate_sought = _find_gate(module), True
    return record.gate


@torch.no_grad()
def _find_gate(module: Any) -> tuple[Any, ...] | None:
    gated = bool(module.has_gate)
    gate = module._apply_gate if gated else module.act_fn
    floats = (value for value in vars(module).values() if isinstance(value, float))
    numbers = sorted({value for value in floats if 0 < value < math.inf})
    spread = max([3.0, *(3 * n for n in numbers if n < 100)])
    probe = torch.linspace(-spread, spread, 4 * 257, dtype=torch.float64)
    probe = probe[torch.randperm(len(probe), generator=torch.Generator().manual_seed(0))]
    probe = probe.view(4, -1)[:, :256].contiguous()
    try:
        expected = gate(probe.clone())
    except Exception:  # noqa: BLE001 - whatever it is, the module's own gate stays in use
        return None
    combinations = product(
        ("silu", "gelu_tanh", "gelu", "relu", "relu2"),
        (False, True) if gated else (False,),
        [None, *numbers] if gated else [None],
        [1.0, *(n for n in numbers if n != 1.0)],
        (0.0, 1.0) if gated else (0.0,),
    )
    for act, interleaved, limit, alpha, shift in combinations:
        if act != "silu" and alpha != 1.0:
            continue
        fields = (act, gated, interleaved, limit, alpha, shift)
        out = plain_gate(probe, *fields)
        if expected.shape == out.shape and torch.allclose(expected, out, rtol=1e-6, atol=1e-9):
            return fields
    return None


def plain_gate(pre: Tensor, *fields: Any) -> Tensor:
    """Compute a `Gate` of these fields as the kernels do: `(R, P)` -> `(R, I)`."""
    act, gated, interleaved, limit, alpha, shift = fields
    acts = {
        "silu": lambda z: z * torch.sigmoid(alpha * z),
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
        "relu2": lambda z: F.relu(z).square(),
    }
    if not gated:
        return acts[act](pre)
    gate, up = (pre[..., ::2], pre[..., 1::2]) if interleaved else pre.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + shift) * acts[act](gate)
