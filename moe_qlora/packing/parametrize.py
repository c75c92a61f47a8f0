"""How a packed weight sits on its module.

A packed parameter becomes a torch parametrization, as `bitsandbytes.nn.parametrize` does it, so
that code which reads `module.<name>` gets the dequantized weight and need not know:

    module.parametrizations.<name>            torch's ParametrizationList
        .original    4-bit: bnb.nn.Params4bit, the codes; the QuantState travels with it
                     int8:  nn.Parameter of int8 codes, in the weight's own shape
        [0]          Packed4bit (a Bnb4bitParametrization) with the same QuantState object,
                     or PackedInt8 with the row scales

The codes are a `Params4bit`, where bitsandbytes' own helper has a plain Parameter: its `to` moves
the statistics with the codes, PEFT's k-bit preparation spares it by its class name, and
transformers counts its weights right. What that helper packed is read here as well.

Statistics are never parameters, and the int8 scales are a buffer of their fp32 bits as int32: hosts
cast every fp32 parameter or buffer that they find, and statistics must move with the model but keep
their precision. Codes and statistics are both flat and in the order of the weights, so that a shard
of the one belongs to a range of the other.

A state dict has bitsandbytes' keys (format.py), and `load_state_dict` reads them back.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import bitsandbytes.nn
import torch
import torch.nn.utils.parametrize as P
from bitsandbytes.nn import parametrize as bnb_parametrize
from torch import Tensor, nn

from ..errors import QuantizationError
from ..kernels.weights import PackedWeight
from .codec import restore, unpack
from .format import CODES, NESTED_ABSMAX, RECORD
from .quant_state import from_quant_state, state_dict_entries, to_quant_state
from .settings import KINDS, STORAGE_DTYPES, CodecSettings

bnb: Any = bitsandbytes.nn  # no type annotations to check against
Params4bit = bnb.Params4bit

# All parameters of a module as they were registered, and its hooks; its copies have it too.
_RECORD = "_moe_qlora_storage"
_SHARED = "_moe_qlora_int8"
_MOVED = "_moe_qlora_moved"


class Packed4bit(bnb_parametrize.Bnb4bitParametrization):
    """Dequantizes a 4-bit weight on access.

    Unlike the class it extends it takes tensors of more than 2**31 - 1 weights and of any row
    length, and reads its statistics from the codes' own `Params4bit`, so that both stay one object
    through deepcopy and device moves.
    """

    quant_state: Any

    def __init__(self, codes: nn.Parameter, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__(cast(Any, codes).quant_state)
        self.compute_dtype = compute_dtype
        self._codes = weakref.ref(codes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed4bit:
        # Params4bit copies its QuantState by itself, past the memo: take the one that it made.
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        codes = self._codes()
        known = {"quant_state": self.quant_state, "_codes": self._codes}
        if codes is not None:
            copied: Any = copy.deepcopy(codes, memo)
            known = {"quant_state": copied.quant_state, "_codes": weakref.ref(copied)}
        for key, value in self.__dict__.items():
            new.__dict__[key] = known[key] if key in known else copy.deepcopy(value, memo)
        if codes is None:
            new.quant_state = copy.deepcopy(self.quant_state, memo)
        return new

    def follow(self, codes: Tensor) -> Any:
        """Return the statistics that belong to these codes."""
        own = codes.__dict__.get("quant_state") if isinstance(codes, Params4bit) else None
        if own is not None and own is not self.quant_state:
            self.quant_state = own
            self._codes = weakref.ref(cast(nn.Parameter, codes))
        return self.quant_state

    @torch.no_grad()
    def forward(self, quantized_param: Tensor) -> Tensor:
        """Dequantize `(bytes / itemsize, 1)` codes to the weight's shape and dtype."""
        return unpack(_read_4bit(quantized_param, self))


class PackedInt8(nn.Module):
    """Dequantizes an int8 weight on access; its row scales live in a buffer of their fp32 bits."""

    scale_bits: Tensor

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.register_buffer("scale_bits", packed.absmax.view(torch.int32), persistent=False)
        self.weight_shape, self.weight_dtype = packed.shape, packed.dtype

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Dequantize int8 codes to the weight's dtype."""
        return unpack(_read_int8(codes, self))


class _PackedList(P.ParametrizationList):
    """A ParametrizationList whose codes can go to the meta device and come back empty."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        cross_meta(self, "original", fn)
        decoder = self._modules["0"]
        if isinstance(decoder, Packed4bit):
            decoder._codes = weakref.ref(cast(nn.Parameter, self._parameters["original"]))
        return super()._apply(fn, recurse)


def cross_meta(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace a `Params4bit` that `fn` would move to or from meta, which torch cannot do.

    There are no values on meta, so that codes and statistics are empty afterwards.
    """
    old: Any = module._parameters.get(name)
    if not isinstance(old, Params4bit) or old.quant_state is None:
        return
    device = fn(torch.empty(0, dtype=old.dtype, device=old.device)).device
    if old.is_meta == (device.type == "meta"):
        return
    moved = old.__dict__.get(_MOVED)  # by another module that holds it
    if moved is None or moved.device != device:
        packed = from_quant_state(old.data, old.quant_state)
        state = to_quant_state(packed.map(partial(torch.empty_like, device=device)))
        old.quant_state.__dict__.update(state.__dict__)
        moved = _params4bit(torch.empty_like(old.data, device=device), old.quant_state)
        old.__dict__[_MOVED] = moved
    module._parameters[name] = moved


def attach(module: nn.Module, name: str, packed: PackedWeight) -> None:
    """Replace a plain parameter, or nothing, by a packed weight.

    The parameter's memory is free as soon as nobody else holds it. A weight that already sits on
    another module is shared with it: one parameter, one set of statistics (tied experts).
    """
    if is_packed(module, name):
        raise QuantizationError(
            f"{type(module).__name__}.{name} is packed already: detach it before packing it again."
        )
    _unshare_class(module)
    if _RECORD not in module.__dict__:
        host: Any = module
        cache = bnb_parametrize._enable_parametrization_cache  # of dequantized weights
        clear = bnb_parametrize._disable_parametrization_cache
        hooks = [
            host.register_forward_pre_hook(cache),
            host.register_forward_hook(clear, always_call=True),
            host.register_state_dict_post_hook(_save),
            host.register_load_state_dict_pre_hook(_load),
        ]
        module.__dict__[_RECORD] = tuple(module._parameters), hooks
    owner = hold(packed)
    parametrization: nn.Module
    if packed.kind == "int8":
        # Tied weights share the module that holds their scales, so that one move moves all.
        parametrization = getattr(owner, _SHARED, None) or PackedInt8(packed)
        setattr(owner, _SHARED, parametrization)
    else:
        parametrization = Packed4bit(owner, packed.compute_dtype)
    plain = module._parameters.get(name)
    try:
        module._parameters.pop(name, None)
        module.register_parameter(name, owner)
        _register(module, name, parametrization)
        cast(Any, module.parametrizations)._modules[name].__class__ = _PackedList
    except BaseException:
        if not is_packed(module, name):
            module._parameters[name] = plain
            _forget(module)
        raise


def _register(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """`register_parametrization`, for parameters called `keys`, `values` or `items` as well.

    torch keeps its lists in an `nn.ModuleDict`, which takes no entry named as one of its own
    methods; it looks entries up by key all the same.
    """
    if not hasattr(nn.ModuleDict, name):
        P.register_parametrization(module, name, parametrization, unsafe=True)
        return
    torch_parametrize: Any = P
    chain = P.ParametrizationList([parametrization], module._parameters[name], unsafe=True)  # type: ignore[arg-type]
    delattr(module, name)
    if not P.is_parametrized(module):
        torch_parametrize._inject_new_class(module)
        module.parametrizations = nn.ModuleDict()
    torch_parametrize._inject_property(module, name)
    cast(nn.Module, module.parametrizations)._modules[name] = chain


def detach(module: nn.Module, name: str, weight: Tensor | None = None) -> nn.Parameter:
    """Make a packed parameter plain again: `weight`, or by default the dequantized one.

    The parameter takes its old place in registration order, does not require gradients, and with
    the last packed parameter of the module the hooks go as well.
    """
    if not is_packed(module, name):
        raise QuantizationError(f"{type(module).__name__}.{name} is not packed.")
    if weight is None:
        weight = unpack(read_packed(module, name))
    _unshare_class(module)
    P.remove_parametrizations(module, name, leave_parametrized=False)
    parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, False)
    module._parameters[name] = parameter
    _forget(module)
    return parameter


def is_packed(module: nn.Module, name: str) -> bool:
    """Return whether this parameter is packed, by this package or by bitsandbytes' own helper."""
    return _parametrization(module, name) is not None


def is_foreign(module: nn.Module, name: str) -> bool:
    """Return whether this parameter was packed by bitsandbytes' own helper."""
    decoder = _parametrization(module, name)
    return decoder is not None and not isinstance(decoder, (Packed4bit, PackedInt8))


def packed_names(module: nn.Module) -> tuple[str, ...]:
    """Return the packed parameters of this very module, in registration order."""
    lists = module._modules.get("parametrizations")
    if lists is None:
        return ()
    names = [name for name in cast(nn.ModuleDict, lists) if is_packed(module, name)]
    order, _ = module.__dict__.get(_RECORD, ((), ()))
    place = {name: index for index, name in enumerate(order)}
    names.sort(key=lambda name: place.get(name, len(place)))
    return tuple(names)


def is_packed_linear(module: nn.Module | None) -> bool:
    """Return whether this is one of the Linear layers that bitsandbytes packs itself."""
    return isinstance(module, (bnb.Linear4bit, bnb.Linear8bitLt))


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a parameter of this full name, and its name on that module."""
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def iter_packed(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield every packed parameter as `(module's dotted name, module, parameter's name)`."""
    for module_name, module in model.named_modules():
        for name in packed_names(module):
            yield module_name, module, name


def read_packed(module: nn.Module, name: str) -> PackedWeight:
    """Return the packed weight where it is now; nothing is dequantized or copied.

    Codes that were cast to another dtype, which destroys them, are an error.
    """
    decoder = _parametrization(module, name)
    if decoder is None:
        raise QuantizationError(f"{type(module).__name__}.{name} is not packed.")
    codes = original_of(module, name)
    read = _read_int8 if isinstance(decoder, PackedInt8) else _read_4bit
    return read(codes, decoder)


def original_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter that holds the codes."""
    lists = cast(Any, module._modules["parametrizations"])
    return cast(nn.Parameter, lists[name].original)


def _parametrization(module: nn.Module, name: str) -> Any:
    lists = module._modules.get("parametrizations")
    if lists is None or name not in lists._modules:
        return None
    first = lists._modules[name]._modules.get("0")  # type: ignore[union-attr]
    known = (bnb_parametrize.Bnb4bitParametrization, PackedInt8)
    return first if isinstance(first, known) else None


def _read_4bit(codes: Tensor, parametrization: Any) -> PackedWeight:
    own = isinstance(parametrization, Packed4bit)
    state = parametrization.follow(codes) if own else parametrization.quant_state
    if state.absmax.device != codes.device and not codes.is_meta:
        state.to(codes.device)
    storage = codes.__dict__.get("quant_storage") if isinstance(codes, Params4bit) else None
    if storage is not None and codes.dtype != storage:
        raise QuantizationError(
            f"The packed codes of a weight of shape {tuple(state.shape)} were cast from {storage} "
            f"to {codes.dtype}, which destroys them: do not cast a packed model, or set "
            "bnb_4bit_quant_storage=torch.uint8, which casts leave alone."
        )
    compute = getattr(parametrization, "compute_dtype", None)
    owner = codes if isinstance(codes, nn.Parameter) else None
    return from_quant_state(codes.data, state, compute, owner)


def _read_int8(codes: Tensor, parametrization: PackedInt8) -> PackedWeight:
    scales = parametrization.scale_bits.view(torch.float32)
    owner = codes if isinstance(codes, nn.Parameter) else None
    return PackedWeight(
        codes.data, scales, None, 0, None, codes.shape, "int8", parametrization.weight_dtype, None,
        owner,
    )  # fmt: skip


def hold(packed: PackedWeight) -> nn.Parameter:
    """Return the one parameter that holds this weight's codes, made on first use."""
    if packed.owner is None:
        if packed.kind == "int8":
            packed.owner = nn.Parameter(packed.codes, requires_grad=False)
        else:
            packed.owner = _params4bit(packed.codes, to_quant_state(packed))
        packed.codes = packed.owner.data
    return packed.owner


def _params4bit(codes: Tensor, state: Any) -> nn.Parameter:
    parameter = Params4bit(
        codes,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=codes.dtype,
        bnb_quantized=True,
    )
    return cast(nn.Parameter, parameter)


def _forget(module: nn.Module) -> None:
    """Restore registration order; the hooks go with the module's last packed parameter."""
    if _RECORD not in module.__dict__:
        return
    order, hooks = module.__dict__[_RECORD]
    known = [name for name in order if name in module._parameters]
    ordered = {name: module._parameters[name] for name in (*known, *module._parameters)}
    module._parameters.clear()
    module._parameters.update(ordered)
    if all(is_foreign(module, name) for name in packed_names(module)):
        for hook in hooks:
            hook.remove()
        del module.__dict__[_RECORD]


def _unshare_class(module: nn.Module) -> None:
    """Give a parametrized module a class that no copy shares.

    torch gives it a class with a property for each parametrized name, but deepcopy shares that
    class: a property added to the copy or removed would change the model it was copied from.
    """
    if not P.is_parametrized(module):
        return
    shared = type(module)
    body = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, body)


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Write bitsandbytes' keys instead of torch's parametrization keys (state-dict hook)."""
    for name in packed_names(module):
        key = f"{prefix}parametrizations.{name}.original"
        if key not in state_dict or is_foreign(module, name):
            continue
        state_dict[f"{prefix}{name}"] = state_dict.pop(key)
        for suffix, value in state_dict_entries(read_packed(module, name)).items():
            state_dict[f"{prefix}{name}{suffix}"] = value


def _load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Take the statistics from bitsandbytes' keys, and leave torch the codes (load hook)."""
    assign = bool(metadata.get("assign_to_params_buffers"))
    for name in packed_names(module):
        key, own = f"{prefix}{name}", f"{prefix}parametrizations.{name}.original"
        if is_foreign(module, name) or state_dict.get(key) is None:
            continue
        decoder, original = _parametrization(module, name), original_of(module, name)
        packed = read_packed(module, name)
        dtype = packed.dtype if packed.kind == "int8" else None
        loaded = _take(state_dict, key, packed.shape, dtype, CodecSettings.of(packed), errors)
        state_dict[own] = original if loaded is None else loaded.codes
        if loaded is None or (original.is_meta and not assign):
            continue  # torch says of meta what to do
        loaded = loaded if assign else loaded.to(original.device)
        codes = state_dict[own] = loaded.codes
        if packed.kind == "int8" and assign:
            decoder.scale_bits = loaded.absmax.view(torch.int32)
            state_dict[own] = nn.Parameter(codes, requires_grad=False)
        elif packed.kind == "int8":
            packed.absmax.copy_(loaded.absmax)
        else:  # in place: tied modules see the same statistics
            decoder.quant_state.__dict__.update(to_quant_state(loaded).__dict__)
            if assign:
                state_dict[own] = _params4bit(codes, decoder.quant_state)


def load_linears(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, assign: bool, errors: list[str]
) -> None:
    """Do what `_load` does for bitsandbytes' 4-bit Linear layers, whose keys torch does not know.

    torch would convert the numbers of codes that are stored in another dtype, which destroys them.
    """
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        key = f"{prefix}{name}.weight"
        own = isinstance(module, bnb.Linear4bit) and isinstance(weight, Params4bit)
        if not own or not any(f"{key}{RECORD}{kind}" in state_dict for kind in KINDS):
            continue
        shape = int(module.out_features), int(module.in_features)
        settings = CodecSettings(
            weight.quant_type, False, weight.quant_storage, None, weight.blocksize
        )
        loaded = _take(state_dict, key, shape, None, settings, errors)
        state_dict[key] = weight if loaded is None else loaded.codes
        if loaded is None or (weight.is_meta and not assign):
            continue  # torch says of meta what to do
        if not assign:
            loaded = loaded.map(partial(torch.Tensor.to, device=weight.device, copy=True))
        state_dict[key] = weight = hold(loaded)
        weight.module, module.weight, module.quant_state = module, weight, weight.quant_state


def _take(
    state_dict: dict[str, Any],
    key: str,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    settings: CodecSettings,
    errors: list[str],
) -> PackedWeight | None:
    """Take a packed weight out of a state dict, statistics copied; None, and why, if it is none.

    Codes in another storage dtype of the same size are the same bytes.
    """
    codes, storage = state_dict.pop(key), settings.storage_dtype
    codes = codes.contiguous()
    if codes.dtype != storage and codes.dtype.itemsize == storage.itemsize:
        codes = codes.view(storage) if codes.dtype in STORAGE_DTYPES else codes
    keys = [other for other in state_dict if other.startswith(f"{key}.")]
    tensors = {other.removeprefix(key): state_dict.pop(other).clone() for other in keys}
    settings = replace(settings, double_quant=NESTED_ABSMAX in tensors)
    try:
        return restore({CODES: codes, **tensors}, shape, dtype, settings)
    except ValueError as error:
        errors.append(
            f"{key} {error}: load codes that were packed with the same settings, or 16-bit weights "
            "into an unpacked model."
        )
        return None
