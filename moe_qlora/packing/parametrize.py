"""Attaches packed weights to modules.

A packed parameter becomes a torch parametrization, as in `bitsandbytes.nn.parametrize`, so that any
code that reads `module.<name>` gets the dequantized weight (the list: decoders.py). The codes are a
`Params4bit`, which PEFT's k-bit preparation and transformers' counts know.

In a call of the module, or of one around it whose code reads its weights, these are read in the
dtype of the call's hidden states, as Linear4bit computes, at any other time in their own.

Keys of a state dict; a packed folder has the first, a model that engines can shard (sharding.py)
the second, since engines look each key up as a parameter:

    of a weight <module>.<name>                                             of a Linear layer's
    <module>.<name>, and the ends of its codec's tensors                    the same
    <module>.parametrizations.<name>.original                               <module>.weight
    <module>.parametrizations.<name>.0.absmax, .nested                      <module>.statistics.*
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.utils.parametrize as P
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from ..layout import ExpertParam, unwrapped
from . import decoders
from .codec import restore, unpack
from .codecs import codec_of
from .decoders import Decoder, PackedList, bnb, read
from .settings import CodecSettings, packed_tensors

_HOOKS = "_moe_qlora_hooks"
_MEMBERS = "_moe_qlora_class_members"
_INPUT_DTYPE = "_moe_qlora_input_dtype"
_READS = "_moe_qlora_reads"
_shared_classes: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def attach(module: nn.Module, name: str, packed: PackedWeight) -> None:
    """Replace a plain parameter, or nothing, by a packed weight."""
    # One that is attached to another module is shared with it: one parameter, one decoder.
    assert not is_packed(module, name), name
    owner, decoder = decoders.hold(packed)
    chain = PackedList([decoder], owner, unsafe=True)
    host: Any = module
    if _HOOKS not in module.__dict__:
        module.__dict__[_HOOKS] = (
            host.register_state_dict_post_hook(_save),
            host.register_load_state_dict_pre_hook(_load),
        )
    module._parameters.pop(name, None)
    if not P.is_parametrized(module):
        cast(Any, P)._inject_new_class(module)
        host.parametrizations = nn.ModuleDict()
    # nn.ModuleDict refuses names of its own methods (`keys`, `values`), but looks them up by key.
    host.parametrizations._modules[name] = chain
    _set_class(module)


def detach(module: nn.Module, name: str, weight: Tensor | None = None) -> nn.Parameter:
    """Make a packed parameter plain again: `weight`, or by default the dequantized one."""
    _refuse_hosted(module, name, type(module).__name__)
    if weight is None:
        weight = unpack(read_packed(module, name))
    parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, False)
    lists: Any = _chains(module)
    del lists[name]
    module._parameters[name] = parameter
    if not packed_names(module):
        for hook in module.__dict__.pop(_HOOKS, ()):
            hook.remove()
    if not lists:
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
    _set_class(module)
    return parameter


def extend_class(module: nn.Module, members: Callable[[type], Mapping[str, Any]] | None) -> None:
    """Add members to the class of a packed module: of the plain class; None takes them back."""
    module.__dict__.pop(_MEMBERS, None)
    if members is not None:
        module.__dict__[_MEMBERS] = members
    _set_class(module)


def is_packed(module: nn.Module, name: str) -> bool:
    """Whether this parameter is packed by this package."""
    return decoder_of(module, name) is not None


def packed_names(module: nn.Module) -> tuple[str, ...]:
    """Return the packed parameters of this module itself."""
    return tuple(name for name in _chains(module) if is_packed(module, name))


def _chains(module: nn.Module) -> Mapping[str, Any]:
    """Return the `ParametrizationList`s of a module; nn.ModuleDict refuses some of their names."""
    lists = module._modules.get("parametrizations")
    return {} if lists is None else lists._modules


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
        yield from ((module_name, module, name) for name in packed_names(module))


def read_packed(module: nn.Module, name: str) -> PackedWeight:
    """Return the packed weight where it is now (`decoders.read`)."""
    return read(original_of(module, name), decoder_of(module, name))


def device_of(module: nn.Module, name: str) -> torch.device:
    """Return the device that computes with a packed weight: where the codes are, or are fetched."""
    chain = parametrization_list(module, name)
    return cast(torch.device, (chain.original if chain.host is None else chain.host).device)


def check_resident(model: nn.Module) -> None:
    """Raise where packed weights lie in host memory, by `offload_experts`."""
    for owner, module, name in iter_packed(model):
        _refuse_hosted(module, name, owner)


def _refuse_hosted(module: nn.Module, name: str, owner: str) -> None:
    if parametrization_list(module, name).host is not None:
        raise ConfigError(
            f"{owner}.{name} lies in host memory, by offload_experts, and cannot be replaced, "
            "merged or sharded there: call remove() on what offload_experts returned first."
        )


def original_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter of the codes."""
    return cast(nn.Parameter, parametrization_list(module, name).original)


def parametrization_list(module: nn.Module, name: str) -> PackedList:
    """Return torch's `ParametrizationList` of a packed parameter: its codes and its decoder."""
    return cast(PackedList, _chains(module)[name])


def decoder_of(module: nn.Module, name: str) -> Any:
    """Return the module that decodes this parameter (decoders.py), if it is packed."""
    chain = _chains(module).get(name)
    first = None if chain is None else chain._modules.get("0")
    return first if isinstance(first, Decoder) else None


class Place(NamedTuple):
    """Where a packed weight sits whose statistics are parameters; or a plain one."""

    name: str  # of the weight
    owner: nn.Module  # with the codes as its parameter `leaf`
    leaf: str
    decoder: Any = None  # with the statistics
    codes: str = ""  # key of the codes in a state dict
    statistics: str = ""  # begin of the keys of the statistics

    def tensors(self) -> list[Any]:
        """Return the codes or plain tensor as it is now, and the statistics."""
        statistics = () if self.decoder is None else self.decoder.parameters()
        return [getattr(self.owner, self.leaf), *statistics]


def packed_places(model: nn.Module) -> Iterator[Place]:
    """Yield each packed weight, an expert's or a Linear layer's, under all of its names."""
    for name, module in model.named_modules(remove_duplicate=False):
        at = f"{name}." if name else ""
        for leaf in packed_names(module):
            chain: Any = parametrization_list(module, leaf)
            own = f"{at}parametrizations.{leaf}."
            yield Place(at + leaf, chain, "original", chain[0], f"{own}original", f"{own}0.")
        decoder = module._modules.get("statistics")
        if isinstance(decoder, Decoder):
            codes = f"{at}weight"
            yield Place(codes, module, "weight", decoder, codes, f"{at}statistics.")


def in_input_dtype(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a decoded weight in the dtype of the hidden states of the call that reads it."""
    dtype: torch.dtype | None = getattr(module, _INPUT_DTYPE, None)
    return weight if dtype is None else weight.to(dtype)


def follow_calls_of(owner: nn.Module, path: str) -> None:
    """Read the packed weights of the module at `path` in the dtype of `owner`'s input too."""
    # For owners whose code reads them, as dbrx's. By the path copies follow their own calls.
    if path not in owner.__dict__.setdefault(_READS, {}):
        owner.__dict__[_READS][path] = (
            owner.register_forward_pre_hook(partial(_note_input, path, True), with_kwargs=True),
            owner.register_forward_hook(partial(_note_input, path, False), always_call=True),
        )


def follow_no_calls(owner: nn.Module) -> None:
    """Undo `follow_calls_of`."""
    for hooks in owner.__dict__.pop(_READS, {}).values():
        for hook in hooks:
            hook.remove()


def _note_input(path: str, begins: bool, owner: nn.Module, args: Any, last: Any) -> None:
    module = unwrapped(owner.get_submodule(path))
    setattr(module, _INPUT_DTYPE, _input_dtype(args, last) if begins else None)


def _input_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype of a call's hidden states; None under autocast, which casts weights."""
    # Hidden states are the widest of its floating-point tensors: routing weights are narrower.
    widest: Any = None
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
            widest = x if widest is None or x.shape[-1] > widest.shape[-1] else widest
    return None if widest is None or is_autocast_on(widest) else widest.dtype


def is_autocast_on(x: Tensor) -> bool:
    """Whether autocast is on for a tensor's device; torch cannot be asked for meta."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _set_class(module: nn.Module) -> None:
    """Give a module the class of other such modules with the same packed parameters."""
    # torch creates a class for each parametrized module, for which torch.compile would recompile.
    own, names = type(module), packed_names(module)
    module.__dict__.pop(_INPUT_DTYPE, None)
    if not P.is_parametrized(module) or "__getstate__" not in vars(own):
        return  # plain, or an engine derived the class
    lists, members = _chains(module), module.__dict__.get(_MEMBERS)
    key = own.__bases__, frozenset(lists), members
    shared = _shared_classes.get(key) if len(lists) == len(names) else None
    if shared is None:
        of_torch = {"__module__", "__deepcopy__", "__getstate__", *lists}
        body = {k: v for k, v in vars(own).items() if k in of_torch}
        if names:
            body |= {name: _decoding_property(name) for name in names}
            body["__call__"] = _reading_call(own.__bases__[0], tuple(names))
            body |= {} if members is None else members(own.__bases__[0])
        shared = type(own.__name__, own.__bases__, body)
        if len(lists) == len(names):  # with other code's parametrizations it stays its own
            _shared_classes[key] = shared
    module.__class__ = shared
    if names:
        module.__dict__[_INPUT_DTYPE] = None


def _reading_call(base: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a `__call__` in which each weight is dequantized once, in its input's dtype."""
    # bitsandbytes uses a pair of hooks, whose ids would make compilers tell modules apart.

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        around, dtype = getattr(self, _INPUT_DTYPE, None), _input_dtype(args, kwargs)
        if torch.compiler.is_compiling() and around is None:
            # torch 2.11 compiles no checkpointed layer in which an attribute is set.
            first = [self.parametrizations[name][0] for name in names]
            if dtype is None or all(decoder.weight_dtype == dtype for decoder in first):
                return base.__call__(self, *args, **kwargs)
        setattr(self, _INPUT_DTYPE, dtype)
        try:
            if torch.compiler.is_compiling():
                return base.__call__(self, *args, **kwargs)
            with P.cached():
                return base.__call__(self, *args, **kwargs)
        finally:
            setattr(self, _INPUT_DTYPE, around)

    return __call__


def _decoding_property(name: str) -> property:
    torch_parametrize: Any = P

    def read(self: Any) -> Tensor:
        chain = self.parametrizations[name]
        if not torch_parametrize._cache_enabled:
            return in_input_dtype(self, chain())
        key = id(self), name, getattr(self, _INPUT_DTYPE, None)
        if key not in torch_parametrize._cache:
            torch_parametrize._cache[key] = in_input_dtype(self, chain())
        return cast(Tensor, torch_parametrize._cache[key])

    def write(self: Any, value: Tensor) -> None:
        self.parametrizations[name].right_inverse(value)

    return property(read, write)


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Write bitsandbytes' keys unless statistics are parameters (state-dict hook)."""
    for name in packed_names(module):
        key = f"{prefix}parametrizations.{name}.original"
        if key not in state_dict or decoder_of(module, name)._parameters:
            continue
        state_dict[f"{prefix}{name}"] = state_dict.pop(key)
        packed = read_packed(module, name)
        for suffix, value in codec_of(packed.kind).entries(packed).items():
            state_dict[f"{prefix}{name}{suffix}"] = value


def _load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    for name in packed_names(module):
        decoder, key = decoder_of(module, name), f"{prefix}{name}"
        if key in state_dict and not decoder._parameters:
            original: Tensor = original_of(module, name)
            loaded = _taken(state_dict, key, read_packed(module, name), errors)
            if loaded is not None:
                decoder.put(loaded)
                assign = bool(metadata.get("assign_to_params_buffers"))
                original = decoders.parameter_of(loaded.codes, decoder) if assign else loaded.codes
            state_dict[f"{prefix}parametrizations.{name}.original"] = original


def _taken(
    state_dict: dict[str, Any], key: str, like: PackedWeight, errors: list[str]
) -> PackedWeight | None:
    """Take a copy of a weight's entries under bitsandbytes' keys; None after an error."""
    keys = [other for other in state_dict if other == key or other.startswith(f"{key}.")]
    device, settings = like.device, CodecSettings.of(like)
    tensors = {k.removeprefix(key): state_dict.pop(k).to(device, copy=True) for k in keys}
    try:
        dtype = None if settings.codec.has_record else like.dtype
        return restore(tensors, like.shape, dtype, settings)
    except ValueError as error:
        errors.append(
            f"{key} {error}: load codes that were packed with the same settings, or 16-bit "
            "weights into an unpacked model."
        )
        return None


def load_linears(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load bitsandbytes' 4-bit Linear layers by the keys that it saves, but does not load."""
    for name, module in model.named_modules():
        key = f"{prefix}{name}.weight"
        if type(module) is bnb.Linear4bit and decoders.has_codes(module) and key in state_dict:
            loaded = _taken(state_dict, key, decoders.read_linear(module), rest[-1])
            if loaded is not None:
                decoders.write_linear(module, loaded)
            state_dict[key] = module.weight


def blank_weight(
    shape: tuple[int, ...], dtype: torch.dtype, settings: CodecSettings
) -> PackedWeight:
    """Return the packed weight of this shape and dtype, on meta: shapes without values."""
    blank = {
        end: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for end, spec in packed_tensors(shape, settings).items()
        if spec.shape is not None
    }
    return settings.codec.assemble(blank, shape, dtype, settings)


def pack_blank(model: nn.Module, param: ExpertParam, settings: CodecSettings) -> None:
    """Attach a blank packed weight for one expert weight of a model, under each of its names."""
    weight = model.get_parameter(param.name)
    blank = blank_weight(tuple(weight.shape), weight.dtype, settings)
    for name in param.names:
        module, leaf = owner_of(model, name)
        if not is_packed(module, leaf):
            attach(module, leaf, blank)


def pack_blank_linear(module: Any, dtype: torch.dtype, settings: CodecSettings) -> None:
    """Give one of bitsandbytes' Linear layers on meta a blank packed weight, decoded to `dtype`."""
    shape = module.out_features, module.in_features
    decoders.write_linear(module, blank_weight(shape, dtype, settings))
