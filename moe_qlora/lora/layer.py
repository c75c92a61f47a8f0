"""PEFT's layers over packed weights: their names and files, but not their W + s B A.

PEFT wraps a module once for each adapted parameter, in the order in which these were registered
(`gate_up_proj` inside `down_proj`); adapter files name them so. The experts forward of this package
asks the module's `ExpertAdapters` for the active factors and adds s B (A x) to the packed product.
For another forward the wrapper adds s B A to the decoded weight, for the length of the call.

PEFT merges into a packed Linear layer by packing W + s B A again, which rounds away much of s B A.
Here a merged layer is a plain `nn.Linear`, summed in fp32 and rounded once, and `unmerge` puts the
packed one back.

Shapes: E experts, r rank, `lora_A` `(E r, in)` with the expert slowest, `lora_B` `(out, r E)` with
the expert fastest, as PEFT stores them; in and out as PEFT's `ParamWrapper` sees them.
"""

import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import bnb as stock
from peft.tuners.lora.layer import Linear as StockLinear
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..detection.weight_reads import weights_read
from ..errors import AdapterError
from ..experts.forward import asks_for_lora
from ..experts.forward_override import bound_forward, forward_property
from ..experts.operands import LoraFactors, set_lora_source
from ..kernels.weights import PackedWeight
from ..layout import unwrapped
from ..packing import codec, parametrize
from ..packing.codec import first_nonfinite, require_whole
from ..packing.codecs import codec_of
from ..packing.decoders import read_linear
from ..packing.parametrize import device_of, is_packed, packed_names, read_packed
from .targets import changed, check_dropout


def wrap_parameter(
    target: nn.Module,
    adapter_name: str,
    config: LoraConfig,
    parameter_name: str | None = None,
    **kwargs: Any,
) -> nn.Module | None:
    """Wrap one parameter of `target`, which may be wrapped already; None leaves it to PEFT."""
    # PEFT wraps in alphabetical order; here the parameter that was registered first is innermost.
    base = unwrapped(target)
    if parameter_name is None or not packed_names(base):
        return None
    order = [*packed_names(base), *(name for name, _ in base.named_parameters(recurse=False))]
    outer: ParamWrapper | None = None
    inner, source = target, None
    while isinstance(inner, ParamWrapper):
        source = inner.lora_source
        if order.index(inner.parameter_name) < order.index(parameter_name):
            break
        outer, inner = inner, inner.base_layer
    wrapper = ParamWrapper(inner, adapter_name, parameter_name, config=config, **kwargs)
    wrapper.lora_source = source = source or ExpertAdapters()
    source.wrappers[parameter_name] = wrapper
    set_lora_source(base, source)
    if outer is None:
        return wrapper
    outer.base_layer = wrapper
    return target


class ExpertAdapters:
    """The wrappers of one experts module by parameter name: the LoRA source of its forward."""

    def __init__(self) -> None:
        self.wrappers: dict[str, ParamWrapper] = {}

    def active_lora(self, parameter_name: str) -> tuple[LoraFactors, ...]:
        """Return the active adapters' factors; none while adapters are disabled or merged."""
        wrapper = self.wrappers.get(parameter_name)
        return () if wrapper is None or wrapper.adds_itself else wrapper.active_factors()


class ParamWrapper(StockParamWrapper):
    """PEFT's wrapper for one parameter of packed experts; PEFT knows its wrappers by this name."""

    # PEFT accepts full parameter names on modules with this attribute, so that a second adapter
    # finds the wrapper; `__getattr__` gives it the parameters of the wrapped module.
    parametrizations: Mapping[str, Any] = types.MappingProxyType({})

    lora_source: ExpertAdapters | None = None  # None until it is connected
    merge_dtype: torch.dtype | None = None  # None for the dtype before packing
    adds_itself: bool = False  # whether a call runs with LoRA in the plain weight
    _unmerged: PackedWeight | None = None

    def __init__(
        self, target: nn.Module, adapter_name: str, *args: Any, config: LoraConfig, **kwargs: Any
    ) -> None:
        super().__init__(
            target, adapter_name, *args, config=changed(config, lora_dropout=0.0), **kwargs
        )
        self.set_dropout(adapter_name, config.lora_dropout)
        self.__dict__["_add_on_read"] = _AddOnRead(self)  # no submodule

    def update_layer(
        self, adapter_name: str, *args: Any, config: LoraConfig, **kwargs: Any
    ) -> None:
        super().update_layer(
            adapter_name, *args, config=changed(config, lora_dropout=0.0), **kwargs
        )
        self.set_dropout(adapter_name, config.lora_dropout)

    def set_dropout(self, adapter_name: str, probability: float) -> None:
        """Give an adapter this dropout, or refuse it where the forward cannot apply it."""
        if probability > 0.0:
            check_dropout(self.parameter_name, self.get_base_layer(), probability)
            self.lora_dropout[adapter_name] = nn.Dropout(p=probability)

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().set_adapter(*args, **kwargs)
        base, name = self.get_base_layer(), self.parameter_name
        if is_packed(base, name) and parametrize.parametrization_list(base, name).host is not None:
            device = device_of(base, name)  # Not where PEFT saw the first parameter
            for factor in (*self.lora_A.values(), *self.lora_B.values()):
                if not factor.weight.is_meta:
                    factor.to(device)

    # The forward.

    forward = forward_property("_forward")

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("LoRA on experts supports no adapter_names: one for the whole batch.")
        self._unmerge_if_disabled()
        base = self.get_base_layer()
        if asks_for_lora(base):
            return self.base_layer(x, *args, **kwargs)
        # A forward that other code has bound may still call the one that adds LoRA itself.
        if is_packed(base, self.parameter_name):
            chain = parametrize.parametrization_list(base, self.parameter_name)._modules
            chain[last := str(len(chain))] = self._add_on_read
            try:
                return self.base_layer(x, *args, **kwargs)
            finally:
                del chain[last]
        self.check_dropped(self.active_factors())
        self.adds_itself = True
        try:
            return super().forward(x, *args, **kwargs)
        finally:
            self.adds_itself = False

    def active_factors(self) -> tuple[LoraFactors, ...]:
        """Return the active adapters' factors, in the order in which they were set active."""
        if self.disable_adapters or self.merged:
            return ()
        # Bypasses `__getattr__`: a step calls this four times a layer, and up to a few thousand
        # tokens is bound by the host.
        a, b, dropouts = (self._modules[name] for name in ("lora_A", "lora_B", "lora_dropout"))
        return tuple(
            LoraFactors(
                a=a[name].weight,
                b=b[name].weight,
                scaling=self.scaling[name],
                dropout=None if isinstance(dropouts[name], nn.Identity) else dropouts[name],
            )
            for name in self.active_adapters
            if name in a
        )

    def check_dropped(self, factors: tuple[LoraFactors, ...]) -> None:
        """Raise where dropout would apply to the input of another forward."""
        if not self.training or all(adapter.dropout is None for adapter in factors):
            return
        bound = bound_forward(self.get_base_layer())
        seen = "this model runs another one; call model.set_experts_implementation('moe_qlora')"
        if bound is not None:
            name = getattr(bound, "__qualname__", type(bound).__name__)
            seen = f"{name} is bound as the forward of these experts; unbind it or set dropout to 0"
        raise AdapterError(
            f"lora_dropout on {self.parameter_name} needs the 'moe_qlora' experts "
            f"implementation, and {seen}."
        )

    def add_lora(self, weight: Tensor, factors: tuple[LoraFactors, ...]) -> Tensor:
        """Return `weight` + the sum of s B A, computed in fp32 and rounded to its dtype."""
        device = weight.device.type
        # Autocast does not support the meta device, on which `moe_qlora.plan` runs a step.
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            wide = torch.promote_types(weight.dtype, torch.float32)
            total = weight.to(wide)
            for adapter in factors:
                left, right = self._oriented(adapter.a.to(wide), adapter.b.to(wide))
                total = total + (left @ right * adapter.scaling).reshape(weight.shape)
            return total.to(weight.dtype)

    def read_adapted(self, base: nn.Module) -> Tensor:
        """Return the parameter of `base` with the active adapters added."""
        self._unmerge_if_disabled()
        factors = self.active_factors() if is_packed(base, self.parameter_name) else ()
        if factors:
            require_whole(read_packed(base, self.parameter_name))
        weight: Tensor = getattr(base, self.parameter_name)
        return self.add_lora(weight, factors) if factors else weight

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # PEFT reads the parameter before it adds an adapter, and some architectures (dbrx) read
            # an experts module's weights from outside.
            base = self.__dict__.get("_modules", {}).get("base_layer")
            if base is None:
                raise
            inner = unwrapped(base)
            wrapper = None if self.lora_source is None else self.lora_source.wrappers.get(name)
            if wrapper is not None:
                return wrapper.read_adapted(inner)
            if name not in packed_names(inner):
                raise
            return getattr(inner, name)

    # The factors.

    def get_param(self) -> Tensor:
        """Return the parameter; for a packed one an empty tensor of its shape and dtype."""
        base = self.get_base_layer()
        if not is_packed(base, self.parameter_name):
            return cast(Tensor, super().get_param())
        packed = read_packed(base, self.parameter_name)
        device = device_of(base, self.parameter_name)
        return torch.empty((), dtype=packed.dtype, device=device).expand(packed.shape)

    def _oriented(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(E, rows, r)` and `(E, r, columns)`, whose product has the weight's layout."""
        experts = self.num_experts
        a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(len(b), -1, experts).permute(2, 0, 1)
        if self._did_swap_in_out_features or len(self.get_param().shape) == 2:
            return b, a  # (E, out, in)
        return a.transpose(1, 2), b.transpose(1, 2)  # (E, in, out)

    # Merging.

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Replace the packed parameter by base + delta; the original is saved for `unmerge`."""
        base = self.get_base_layer()
        if self._unmerged is None and not is_packed(base, self.parameter_name):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        asked = check_adapters_to_merge(self, adapter_names)
        names = [name for name in asked if name in self.lora_A]
        if not names and (self.merge_dtype is None or self._unmerged is None):
            return
        original = self._unmerged or read_packed(base, self.parameter_name)
        every = [*self.merged_adapters, *names]
        merged = self._sum(original, every)
        if safe_merge:
            _check_merged(every[-1], merged)
        self._replace(merged)
        self._unmerged = original
        self.merged_adapters.extend(names)

    @torch.no_grad()
    def _sum(self, packed: PackedWeight, adapters: Sequence[str]) -> Tensor:
        """Return the decoded weight + s B A of each adapter, summed in fp32 and rounded once."""
        dtype, device = self.merge_dtype or packed.dtype, packed.device
        out = torch.empty(packed.shape, dtype=dtype, device=device)
        wide = torch.promote_types(packed.dtype, torch.float32)
        products = []
        for name in adapters:
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            factors = self._oriented(a.to(device, wide), b.to(device, wide))
            products.append((*factors, self.scaling[name]))
        # One expert at a time, or one matrix of any number of them
        rows = 1 if len(packed.shape) == 3 else packed.shape[0]
        for expert, first in enumerate(range(0, packed.shape[0], rows)):
            total = codec.unpack_range(packed, first, first + rows, dtype=wide)
            for left, right, scaling in products:
                total.view(packed.shape[-2:]).addmm_(left[expert], right[expert], alpha=scaling)
            out[first : first + rows] = total
        return out

    def _replace(self, weight: Tensor) -> None:
        base, name = self.get_base_layer(), self.parameter_name
        if is_packed(base, name):
            parametrize.detach(base, name, weight)
        else:
            base._parameters[name] = nn.Parameter(weight, requires_grad=False)

    def unmerge(self) -> None:
        """Restore the packed parameter from before `merge`, bit for bit."""
        if self._unmerged is None:
            super().unmerge()
            return
        base, name, packed = self.get_base_layer(), self.parameter_name, self._unmerged
        is_again = is_packed(base, name)
        now: Any = parametrize.original_of(base, name) if is_again else base._parameters[name]
        self._replace(torch.empty(0, device=now.device))
        packed = packed if packed.device == now.device else packed.to(now.device)
        parametrize.attach(base, name, packed)
        self._unmerged = None
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        base = super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        set_lora_source(base, None)
        return cast(nn.Module, base)

    def _unmerge_if_disabled(self) -> None:
        if self.disable_adapters and self.merged:
            self.unmerge()


def _check_merged(adapter: str, *weights: Tensor) -> None:
    if any(first_nonfinite(weight) is not None for weight in weights):
        said = f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken"
        raise ValueError(said)


class _AddOnRead(nn.Module):
    """Adds s B A to a decoded weight, in fp32; appended to the parametrization for one forward."""

    def __init__(self, wrapper: ParamWrapper) -> None:
        super().__init__()
        self.wrapper = (wrapper,)  # in a tuple, so that it does not become a submodule

    def forward(self, weight: Tensor) -> Tensor:
        wrapper = self.wrapper[0]
        factors = wrapper.active_factors()
        wrapper.check_dropped(factors)
        if not factors:
            return weight
        weight = parametrize.in_input_dtype(wrapper.get_base_layer(), weight)
        return wrapper.add_lora(weight, factors)


# Linear layers.


def use_own_layers(model: nn.Module) -> None:
    """Turn PEFT's layers into ours, in place."""
    for name in weights_read(model):
        layer = model.get_submodule(name)
        if type(layer) is StockLinear:
            layer.__class__ = ReadLinear
    for module in model.modules():
        for own in (Linear4bit, Linear8bitLt):
            if type(module) is own.__bases__[1]:
                module.__class__ = own


class ReadLinear(StockLinear):
    """LoRA on a Linear layer whose weight the model reads, W + s B A in W's dtype.

    Longcat's routers and Mamba layers do. Dropout is for calls alone.
    """

    @property
    def weight(self: Any) -> Tensor:
        weight: Tensor = self.get_base_layer().weight
        if not (self.disable_adapters or self.merged):
            for name in self.active_adapters:
                if name in self.lora_A and name not in self.lora_variant:
                    weight = weight + self.get_delta_weight(name).to(weight.dtype)
        return weight


class _ExactMerge:
    merge_dtype: torch.dtype | None = None  # of the merged weight; None for that before packing
    _unmerged: tuple[Any, ...] = ()  # The packed layer; in a tuple, so that it is no submodule

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Replace the packed layer by a plain one with the adapters merged."""
        asked = check_adapters_to_merge(self, adapter_names)
        names = [name for name in asked if name in self.lora_A]
        if not names and not (self._unmerged and self.merge_dtype):
            return
        (layer,) = self._unmerged or (self.base_layer,)
        packed, every = read_linear(layer), [*self.merged_adapters, *names]
        dtype = self.merge_dtype or packed.dtype
        if codec_of(packed.kind).loads_in_8bit:  # which bitsandbytes dequantizes in fp32
            packed = replace(packed, dtype=torch.float32)
        bias = None if layer.bias is None else layer.bias.data
        with torch.no_grad():
            weight = codec.unpack(packed).to(torch.promote_types(packed.dtype, torch.float32))
            for name in every:
                if name in self.lora_variant:
                    weight = self.lora_variant[name].merge_safe(self, name, weight)
                    continue
                a, b = (part[name].weight.to(weight) for part in (self.lora_A, self.lora_B))
                weight.addmm_(b, a, alpha=self.scaling[name])
            for name in (name for name in every if self.lora_bias[name]):
                bias = bias + self.lora_B[name].bias
        if safe_merge:
            _check_merged(every[-1], weight, *([] if bias is None else [bias]))
        merged = nn.Linear(layer.in_features, layer.out_features, bias is not None, device="meta")
        merged.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        if bias is not None:
            merged.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self.base_layer, self._unmerged = merged.train(layer.training), (layer,)
        self.merged_adapters.extend(names)

    def unmerge(self: Any) -> None:
        """Put the packed layer back."""
        if self._unmerged:
            (layer,) = self._unmerged
            self.base_layer, self._unmerged = layer.to(self.base_layer.weight.device), ()
            self.merged_adapters.clear()


class Linear4bit(_ExactMerge, stock.Linear4bit):
    """LoRA on a 4-bit Linear layer."""


class Linear8bitLt(_ExactMerge, stock.Linear8bitLt):
    """LoRA on an 8-bit Linear layer."""
