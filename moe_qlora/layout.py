"""Records of a model's experts, without an import of torch.

`detect` makes a `ModelLayout` of a live model; all packing, planning and printing uses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


GATE_UP, GATE, UP, DOWN = "gate_up", "gate", "up", "down"  # roles

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(b|(?<=[kmgt])ib|)", re.IGNORECASE)


def name_pattern(name: str) -> str:
    """Return a name with `*` for each number in it: `layers.*.mlp` for `layers.3.mlp`."""
    return _NUMBER.sub("*", name)


def unwrapped_name(name: str) -> str:
    """Return a module's or parameter's name before adapters or torch.compile wrapped it."""
    return name.replace(".base_layer", "").replace("_orig_mod.", "")


def unwrapped(module: Any) -> Any:
    """Return the module inside all adapter layers around it."""
    while (inner := module._modules.get("base_layer")) is not None:
        module = inner
    return module


def base_model(model: Any) -> Any:
    """Return the model inside a `PeftModel`, and any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) and hasattr(model, "base_model") else model


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype as a config has it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def parse_bytes(text: str) -> int:
    """Return the bytes of "24GiB", "80GB", "500 MiB", "24G" (binary), or "1024B"."""
    match = _BYTES.fullmatch(text.strip())
    if (digits := text.strip()).isdecimal():
        meant = f"{digits}GiB" if int(digits) < 1024 else "the memory, as in 24GiB"
        raise ValueError(f"{digits} is a number of bytes; write {meant}")
    if match is None:
        raise ValueError(f"{text!r} is no size; write it as in 24GiB, 80GB or 500MiB")
    number, prefix, ending = match.groups()
    base = 1000 if ending.lower() == "b" else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def human_bytes(count: int) -> str:
    """Return a count of bytes in binary units: `16.8 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def listed(items: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Return the first items and the number of the others: `a, b, c and 4 more`."""
    text = separator.join(items[:most])
    rest = len(items) - most
    return f"{text} and {rest} more" if rest > 0 else text


@dataclass(frozen=True, slots=True)
class ExpertParam:
    """One fused expert weight: a parameter that stacks the matrices of a layer's experts.

    Attributes:
        name: Full dotted name, `module_name` + "." + `parameter_name`, packed or not.
        module_name: Dotted name of the module that owns the parameter ("" for the model itself).
        parameter_name: Name on that module.
        shape: Shape of the decoded tensor: `(E, out, in)`, `(E, in, out)` or `(E * rows, columns)`.
        num_experts: E, the number of experts whose matrices it holds.
        in_features, out_features: Of one expert's matrix as it is applied; None where the
            orientation is unknown.
        transposed: True for `(E, in, out)`, False for `(E, out, in)`, None where neither shapes
            nor the module tell.
        role: "gate_up" (both halves of a gated input projection), "gate", "up", "down" (without a
            gate "up" is the first projection and "down" the second, of attention experts too).
        dtype: torch.dtype of the decoded tensor, or its name ("bfloat16") where the layout comes
            from the registry.
        nbytes: Bytes of the tensor now (16-bit weights, or packed codes without statistics).
        evidence: The reason why this is an expert tensor, for a person to check.
        aliases: Other full names of the same tensor (tied experts).
        packed: None for plain weights, else the packed type, such as nf4.
        orientation_evidence: How `transposed` was found, or why it could not be.
    """

    name: str
    module_name: str
    parameter_name: str
    shape: tuple[int, ...]
    num_experts: int
    in_features: int | None
    out_features: int | None
    transposed: bool | None
    role: str
    dtype: torch.dtype | str
    nbytes: int
    evidence: str
    aliases: tuple[str, ...] = ()
    packed: str | None = None
    orientation_evidence: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """`name`, then `aliases`."""
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        """Number of weights in the decoded tensor."""
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        """The dtype without its `torch.` prefix, as in "bfloat16"."""
        return dtype_name(self.dtype)

    @property
    def pattern(self) -> str:
        """`name` with layer numbers replaced by `*`."""
        return name_pattern(self.name)


@dataclass(frozen=True, slots=True)
class RejectedParam:
    """A parameter with three or more dimensions that is not an expert weight, and why."""

    name: str  # Full dotted name
    shape: tuple[int, ...]
    reason: str  # Why it is not packed, for a person to check
    aliases: tuple[str, ...] = ()  # Other full names of the same tensor


@dataclass(frozen=True, slots=True)
class Router:
    """The module or parameter that chooses among a layer's experts."""

    name: str  # Dotted name of the module, or of the parameter where it is a bare one
    num_choices: int  # E, or more if some choices are not experts
    # True for exactly an `nn.Linear`, which bitsandbytes packs unless it is named in
    # `llm_int8_skip_modules`
    plain_linear: bool = False
    packed: bool = False  # bitsandbytes has packed it


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """One module that owns fused expert weights."""

    name: str  # Dotted name ("" for the model itself)
    class_name: str  # Its Python class, for messages only
    num_experts: int  # E of its largest expert weight
    parameters: tuple[ExpertParam, ...]  # Its expert weights, in registration order
    router: Router | None = None  # None for shared experts
    # True if its forward uses transformers' experts interface, with a replaceable experts forward
    dispatches: bool = False


@dataclass(frozen=True, slots=True)
class LinearExperts:
    """Experts kept as a list of separate Linear modules: bitsandbytes packs these itself."""

    name: str  # Dotted name of the list (`nn.ModuleList`, `nn.ModuleDict` or a plain container)
    num_experts: int
    linear_names: tuple[str, ...]  # Linear layers of the first expert, relative to it


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Every expert weight of a model, everything that looked like one, and the routers.

    Attributes:
        experts: One entry for each distinct expert tensor, in the model's own parameter order.
        rejected: Every other parameter with three or more dimensions, with the reason.
        modules: The modules that own `experts`, with their routers.
        linear_experts: Experts that are lists of Linear layers, which bitsandbytes packs itself.
        routers: Every router, in the model's order.
        model_type: `config.model_type` where the model has one, for messages only.
    """

    experts: tuple[ExpertParam, ...] = ()
    rejected: tuple[RejectedParam, ...] = ()
    modules: tuple[ExpertsModule, ...] = ()
    linear_experts: tuple[LinearExperts, ...] = ()
    routers: tuple[Router, ...] = ()
    model_type: str | None = None

    def __len__(self) -> int:
        return len(self.experts)

    def __iter__(self) -> Iterator[ExpertParam]:
        return iter(self.experts)

    def __bool__(self) -> bool:
        return bool(self.experts)

    @property
    def nbytes(self) -> int:
        """Bytes of all expert weights now; tied weights count once."""
        return sum(param.nbytes for param in self.experts)

    @property
    def packed(self) -> tuple[ExpertParam, ...]:
        """The expert weights that are packed already."""
        return tuple(param for param in self.experts if param.packed is not None)

    def find(self, name: str) -> ExpertParam | None:
        """Return the expert weight with this full name or alias, or None."""
        return next((param for param in self.experts if name in param.names), None)
