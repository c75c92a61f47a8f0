"""LoRA over packed experts: PEFT's own layers and files, without its parametrization.

PEFT adapts a parameter by wrapping its module: one `ParamWrapper` for each adapted parameter,
nested in the order in which the parameters were registered (`gate_up_proj` inside `down_proj`),
which is also how adapter files name them. At each forward a stock wrapper registers a
parametrization that computes W + s B A. Over packed weights that leaks, hides the inner of two
wrappers, merges into a temporary, and would hold a decoded layer for backward.

Here the wrapper keeps its name, parameters and place, and leaves W alone:

- where the experts forward of this package runs, it asks the module's `ExpertAdapters` for the
  active `(A, B, scaling, dropout)` and adds s B (A x) beside the packed product: exact at any
  scale, no dense gradient;
- where another forward runs (an experts class outside transformers' interface, or another
  implementation chosen by hand), the wrapper adds s B A to what the parametrization decodes, in
  fp32 and rounded to the weight's dtype, for the length of the call. That is what stock PEFT
  computes on unpacked weights, at its price: a decoded stack, its sum and its dense gradient are
  alive at once, and in 16 bit, updates below the weight's rounding step are lost. Dropout cannot be
  expressed there and is refused.

Shapes: E experts, r rank, `lora_A` `(E * r, in)` with the expert slowest, `lora_B` `(out, r * E)`
with the expert fastest, as PEFT stores them; in and out as PEFT's `ParamWrapper` sees them.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ..detection.detect import dispatches
from ..errors import AdapterError, ConfigError
from ..experts.forward import IMPLEMENTATION, LoraFactors, clear_lora_source, set_lora_source
from ..packing import codec, parametrize
from ..packing.codec import PackedWeight, settings_of
from ..packing.parametrize import has_packed, is_packed, packed_names, read_packed


class ExpertAdapters:
    """A module's wrappers by parameter name, where the experts forward asks for LoRA terms."""

    def __init__(self) -> None:
        self.wrappers: dict[str, ParamWrapper] = {}

    def active_lora(self, parameter_name: str) -> tuple[LoraFactors, ...]:
        """The active adapters of one parameter; empty while adapters are disabled or merged."""
        wrapper = self.wrappers.get(parameter_name)
        return () if wrapper is None else wrapper.lora_terms()


class ParamWrapper(StockParamWrapper):
    """PEFT's wrapper for one parameter of a module that holds packed experts.

    The class has the stock name because PEFT tells its wrappers by it.

    Attributes:
        provider: What connects the module's wrappers with its forward; None until connected.
        merge_dtype: Dtype of a merged plain weight; None is the dtype that the packed weight had.
        merge_repack: Whether a merged weight is packed again.
    """

    # PEFT takes full parameter names on modules that have this attribute, which is how a second
    # adapter finds a wrapper: all that the wrapped module has to offer is behind it.
    parametrizations: Mapping[str, Any] = types.MappingProxyType({})

    provider: ExpertAdapters | None = None
    merge_dtype: torch.dtype | None = None
    merge_repack: bool = False
    _unmerged: PackedWeight | None = None

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        parameter_name: str,
        config: LoraConfig,
        **kwargs: Any,
    ) -> None:
        without = copy.copy(config)
        without.lora_dropout = 0.0
        super().__init__(
            base_layer, adapter_name, parameter_name=parameter_name, config=without, **kwargs
        )
        self._set_dropout(adapter_name, config.lora_dropout)

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        without = copy.copy(config)
        without.lora_dropout = 0.0
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=without, **kwargs)
        self._set_dropout(adapter_name, config.lora_dropout)

    def _set_dropout(self, adapter_name: str, probability: float) -> None:
        if probability > 0.0:
            if not dispatches(self.get_base_layer()):
                raise ConfigError(
                    f"lora_dropout={probability} does not work for {self.parameter_name} of "
                    f"{type(self.get_base_layer()).__name__}, whose forward multiplies by the "
                    f"weight itself; set "
                    "lora_dropout=0, or leave these experts out of target_parameters."
                )
            self.lora_dropout[adapter_name] = nn.Dropout(p=probability)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # PEFT asks a module for the parameter before it adds an adapter to it, and some
            # architectures (dbrx) read an experts module's weights from outside of it.
            base = self.__dict__.get("_modules", {}).get("base_layer")
            inner = None if base is None else _innermost(base)
            wrappers = {} if self.provider is None else self.provider.wrappers
            if inner is None or (name not in packed_names(inner) and name not in wrappers):
                raise
            wrapper = wrappers.get(name)
            return getattr(inner, name) if wrapper is None else wrapper.read_adapted(inner)

    def get_param(self) -> Tensor:
        """The parameter; for a packed one a stand-in of its shape, dtype and device."""
        base = self.get_base_layer()
        if not is_packed(base, self.parameter_name):
            return cast(Tensor, super().get_param())
        stack = read_packed(base, self.parameter_name)
        return torch.empty((), dtype=stack.dtype, device=stack.device).expand(stack.shape)

    def read_adapted(self, base: nn.Module) -> Tensor:
        """The parameter of `base` as its readers must see it: decoded, active adapters added."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        weight = cast(Tensor, getattr(base, self.parameter_name))
        terms = self.lora_terms() if is_packed(base, self.parameter_name) else ()
        return self.added(weight, terms) if terms else weight

    def added(self, weight: Tensor, terms: tuple[LoraFactors, ...]) -> Tensor:
        """The decoded `weight` + the sum of s B A, computed in fp32 and rounded to its dtype."""
        with torch.autocast(device_type=weight.device.type, enabled=False):
            wide = torch.promote_types(weight.dtype, torch.float32)
            total = weight.to(wide)
            for term in terms:
                left, right = self.factors(term.a.to(wide), term.b.to(wide))
                total = total + (left @ right * term.scaling).reshape(weight.shape)
            return total.to(weight.dtype)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError(
                "LoRA on expert parameters does not support a different adapter for each row of a "
                "batch."
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        base = self.get_base_layer()
        if keeps_lora_apart(base):
            return self.base_layer(x, *args, **kwargs)
        terms = self.lora_terms()
        if not terms:
            return self.base_layer(x, *args, **kwargs)
        if not is_packed(base, self.parameter_name):
            return super().forward(x, *args, **kwargs)
        with self._added_on_read(base, terms):
            return self.base_layer(x, *args, **kwargs)

    @contextmanager
    def _added_on_read(self, base: nn.Module, terms: tuple[LoraFactors, ...]) -> Iterator[None]:
        for term in terms:
            if term.dropout is not None and self.training:
                raise AdapterError(
                    f"lora_dropout on {self.parameter_name} needs the 'moe_qlora' experts "
                    f"implementation, and this "
                    "model runs another one; call model.set_experts_implementation('moe_qlora')."
                )
        chain: Any = cast(Any, base.parametrizations)[self.parameter_name]
        chain.append(_AddOnRead(self, terms))
        try:
            yield
        finally:
            del chain[len(chain) - 1]

    def lora_terms(self) -> tuple[LoraFactors, ...]:
        """The active adapters' terms, in the order in which they were set active."""
        if self.disable_adapters or self.merged:
            return ()
        # Past `__getattr__`: a step asks for this four times a layer, and up to a few thousand
        # tokens waits for it.
        a, b, dropouts = (self._modules[name] for name in ("lora_A", "lora_B", "lora_dropout"))
        terms = []
        for name in self.active_adapters:
            if name in a:
                dropout = dropouts[name]
                terms.append(
                    LoraFactors(
                        a=a[name].weight,
                        b=b[name].weight,
                        scaling=self.scaling[name],
                        dropout=None if isinstance(dropout, nn.Identity) else dropout,
                    )
                )
        return tuple(terms)

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """`lora_A`, `lora_B` -> `(E, rows, r)`, `(E, r, columns)`, in the weight's layout."""
        experts = self.num_experts
        a = a.reshape(experts, -1, a.shape[-1])  # (E, r, in)
        b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # (E, out, r)
        if self._did_swap_in_out_features or len(self.get_param().shape) == 2:
            return b, a  # (E, out, in)
        return a.transpose(1, 2), b.transpose(1, 2)  # (E, in, out)

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """s B A in the parameter's shape, in fp32 or finer."""
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        wide = torch.promote_types(a.dtype, torch.float32)
        left, right = self.factors(a.to(wide), b.to(wide))
        delta = left @ right * self.scaling[adapter_name]
        return delta.reshape(self.get_param().shape)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put base + delta in place of the packed parameter: plain or packed again.

        The packed original is kept for `unmerge`, which restores it exactly.

        Raises:
            ValueError: `safe_merge`, and the result is not finite.
        """
        base = self.get_base_layer()
        if self._unmerged is None and not is_packed(base, self.parameter_name):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = [
            name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A
        ]
        if not names:
            return
        original = (
            self._unmerged if self._unmerged is not None else read_packed(base, self.parameter_name)
        )
        merged = merged_weight(self, original, [*self.merged_adapters, *names], self.merge_dtype)
        if safe_merge and not all_finite(merged):
            raise ValueError(
                f"NaNs detected in the merged weights. The adapter {names[-1]} seems to be broken"
            )
        put(base, self.parameter_name, merged, original if self.merge_repack else None)
        self._unmerged = original
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Put the packed parameter back that was there before `merge`, bit for bit."""
        if self._unmerged is None:
            super().unmerge()
            return
        restore(self.get_base_layer(), self.parameter_name, self._unmerged)
        self._unmerged = None
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        base = super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        clear_lora_source(base)
        return cast(nn.Module, base)

    def connect(self, provider: ExpertAdapters) -> None:
        """Let the module's forward find this wrapper."""
        provider.wrappers[self.parameter_name] = self
        self.provider = provider
        set_lora_source(self.get_base_layer(), provider)


class _AddOnRead(nn.Module):
    """Adds s B A to a decoded weight, in fp32; stands behind the decoding during one forward."""

    def __init__(self, wrapper: ParamWrapper, terms: tuple[LoraFactors, ...]) -> None:
        super().__init__()
        self.owner = (wrapper, terms)  # in a tuple, so that neither becomes a submodule

    def forward(self, weight: Tensor) -> Tensor:
        wrapper, terms = self.owner
        return wrapper.added(weight, terms)


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return module


def keeps_lora_apart(module: nn.Module) -> bool:
    """Whether the module's forward is this package's now, which asks for the LoRA terms."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen == IMPLEMENTATION and dispatches(module) and has_packed(module)


def merged_weight(
    wrapper: ParamWrapper,
    stack: PackedWeight,
    adapters: list[str],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """decoded + sum of s B A, summed in fp32 and rounded once.

    Beside the result, one expert's decoded weight and delta are alive.

    Args:
        wrapper: Holds the adapters.
        stack: The packed weight without any of them.
        adapters: Which adapters to add.
        dtype: Of the result; None is the dtype that the packed weight had.

    Returns:
        `stack.shape`, on the stack's device.
    """
    out = torch.empty(stack.shape, dtype=dtype or stack.dtype, device=stack.device)
    wide = torch.promote_types(stack.dtype, torch.float32)
    with torch.no_grad():
        parts = []
        for name in adapters:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            left, right = wrapper.factors(a.to(stack.device, wide), b.to(stack.device, wide))
            parts.append((left, right, wrapper.scaling[name]))
        if len(stack.shape) == 2:  # one matrix, whatever number of experts it stacks
            total = codec.unpack(stack).to(wide)
            for left, right, scaling in parts:
                total.addmm_(left[0], right[0], alpha=scaling)
            return out.copy_(total)
        for expert in range(stack.shape[0]):
            total = codec.unpack_range(stack, expert, expert + 1, dtype=wide)[0]
            for left, right, scaling in parts:
                total.addmm_(left[expert], right[expert], alpha=scaling)
            out[expert].copy_(total)
    return out


def all_finite(weight: Tensor) -> bool:
    """Whether no entry is NaN or inf; looks at one slice of the first dimension at a time."""
    return all(bool(torch.isfinite(part).all()) for part in weight)


def put(module: nn.Module, name: str, weight: Tensor, like: PackedWeight | None) -> None:
    """Replace a parameter, packed or plain, by `weight`: plain, or packed the way `like` was."""
    if parametrize.is_packed(module, name):
        parametrize.detach(module, name, weight)
    else:
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    if like is not None:
        parametrize.attach(module, name, codec.pack(weight, settings_of(like)))


def restore(module: nn.Module, name: str, stack: PackedWeight) -> None:
    """Put a packed weight back, on the device where the module's parameter is now."""
    if parametrize.is_packed(module, name):
        device = parametrize.read_packed(module, name).device
        parametrize.detach(module, name, torch.empty(0, device=device))
    else:
        device = module._parameters[name].device  # type: ignore[union-attr]
    if stack.device != device:
        stack.codes = stack.codes.to(device)
        stack.state.to(device)
        stack.owner = None
    parametrize.attach(module, name, stack)
