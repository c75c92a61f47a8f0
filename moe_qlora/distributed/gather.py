"""A model's state dict as one process has it, gathered from the ranks that hold shares of it.

    whole_tensors       bitsandbytes' keys, each with what gathers its tensor; gathers nothing yet
    gather_to_first     runs a function on the first rank, which reads such tensors one at a time
                        while all other ranks take part
    full_state_dict     all of them, on the first rank's CPU

A share is a DTensor, as FSDP2 has it, a parameter that ZeRO-3 has partitioned, or a rank's own
experts under expert parallelism (shares.py).
What is gathered is free before the next tensor is: no rank holds more than one whole tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import CheckpointError, MoeQloraError, first_line
from ..kernels.weights import PackedWeight
from ..packing import parametrize
from ..packing.bnb4bit import RECORD
from ..packing.codecs import CODES, codec_of
from ..packing.decoders import PackedScales, read
from ..packing.settings import CodecSettings, packed_tensors
from ..world import NOT_GIVEN, WholeTensor, first_share, whole_shape
from .shares import ExpertShare, expert_share

_Result = TypeVar("_Result")


def is_divided(model: nn.Module, state_dict: Mapping[str, Any]) -> bool:
    """Whether ranks hold different parts of this state dict of the model."""
    sharded = any(_is_sharded(tensor) for tensor in state_dict.values())
    return sharded or first_share(model) is not None


def state_dict_to_save(model: nn.Module, given: Any) -> Mapping[str, Any] | None:
    """Return what a save writes: the state dict that it was given, or the model's own.

    None means that this rank takes no part. Under ZeRO-3, accelerate, Trainer and DeepSpeed gather
    a state dict for the first rank, and all others save with `state_dict=None`.

    Raises:
        CheckpointError: The first rank of a model under ZeRO-3 was given None as well.
    """
    if given is None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        if distributed.get_rank() != 0:
            return None
        raise CheckpointError(
            "state_dict=None was given to save_pretrained on rank 0 for a model that DeepSpeed "
            "ZeRO-3 has partitioned, where the other ranks then take no part: leave the argument "
            "out, and call save_pretrained on all ranks."
        )
    return own_state_dict(model) if given is None or given is NOT_GIVEN else given


def own_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict, with parameters that ZeRO-3 has partitioned as they are.

    Under ZeRO-3 the tensors of `state_dict` are empty.
    """
    state_dict: dict[str, Any] = model.state_dict()
    parameters = model.named_parameters(remove_duplicate=False)
    partitioned = {name: value for name, value in parameters if hasattr(value, "ds_id")}
    return {key: partitioned.get(key, value) for key, value in state_dict.items()}


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", getattr(tensor, "shape", ())))


def whole(tensor: Tensor) -> Tensor:
    """Return a share's whole tensor, on its process group's device, and any other as it is.

    All ranks must call it.
    """
    if not _is_sharded(tensor):
        return tensor
    if hasattr(tensor, "ds_id"):
        import deepspeed  # type: ignore[import-not-found]

        with deepspeed.zero.GatheredParameters([tensor]):
            copied: Tensor = tensor.detach().as_subclass(Tensor).clone()
            return copied
    sharded: Any = tensor.detach()
    if sharded.device.type != sharded.device_mesh.device_type:  # offloaded
        sharded = sharded.to(sharded.device_mesh.device_type)
    gathered: Tensor = sharded.full_tensor()
    return gathered


def whole_tensors(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, WholeTensor]:
    """Return what the state dict of a single process's model has, in its order.

    `state_dict` is the model's own, or has whole tensors under its keys; these may be the keys of
    either layout (state_dict.py).
    """
    replaced: dict[str, dict[str, WholeTensor]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for leaf in parametrize.packed_names(module):
            _replace_expert_weight(replaced, module, prefix, leaf, state_dict)
        _replace_plain_share(replaced, module, prefix, state_dict)
        if isinstance(module._modules.get("statistics"), nn.Module):
            _replace_linear(replaced, module, prefix, state_dict)
    tensors: dict[str, WholeTensor] = {}
    for key, value in state_dict.items():
        if key in replaced:
            tensors |= replaced[key]
        else:
            tensors[key] = plain_tensor(value)
    return tensors


def plain_tensor(value: Any) -> WholeTensor:
    """Return how a tensor that is no part of a packed weight is gathered."""
    dtype: Any = getattr(value, "dtype", None)
    return WholeTensor(dtype, _shape(value), value, partial(whole, value), _is_sharded(value))


def _replace_expert_weight(
    replaced: dict[str, dict[str, WholeTensor]],
    module: nn.Module,
    prefix: str,
    leaf: str,
    state_dict: Mapping[str, Any],
) -> None:
    """Enter a packed parameter under the first of its keys, and nothing under the others."""
    own, name = f"{prefix}parametrizations.{leaf}.", f"{prefix}{leaf}"
    share, decoder = expert_share(module), parametrize.decoder_of(module, leaf)
    first = f"{own}original" if f"{own}original" in state_dict else name
    if first not in state_dict or parametrize.is_foreign(module, leaf):
        return
    if share is None and first == name:
        return  # whole already, under bitsandbytes' keys
    packed = parametrize.read_packed(module, leaf)
    codes = state_dict[first]
    if share is not None:
        like = replace(packed, shape=whole_shape(module, packed.shape))
        weight = _Weight(name, like, codes, *_of_all(packed, share), True)
        others = own if first != name else f"{name}."
        statistics = [key for key in state_dict if key.startswith(others) and key != first]
    else:
        keys = {part: f"{own}0.{part}" for part in decoder._parameters}
        parameters = {part: state_dict[key] for part, key in keys.items()}
        weight = _sharded_weight(name, packed, decoder, codes, parameters)
        statistics = list(keys.values())
    replaced[first] = weight.tensors()
    replaced |= {key: {} for key in statistics}


def _replace_plain_share(
    replaced: dict[str, dict[str, WholeTensor]],
    module: nn.Module,
    prefix: str,
    state_dict: Mapping[str, Any],
) -> None:
    """Enter biases and unpacked weights of a rank's experts as those of all ranks."""
    share = expert_share(module)
    if share is None:
        return
    for leaf in module._parameters:
        key = f"{prefix}{leaf}"
        own = state_dict.get(key)
        if own is not None and _shape(own)[:1] == (share.count,):
            shape = (share.experts, *_shape(own)[1:])
            gather = partial(_gathered_experts, own, share)
            replaced[key] = {key: WholeTensor(own.dtype, shape, own, gather, True)}


def _gathered_experts(own: Tensor, share: ExpertShare) -> Tensor:
    return torch.cat(_of_each_rank(own, share))


def _replace_linear(
    replaced: dict[str, dict[str, WholeTensor]],
    module: Any,
    prefix: str,
    state_dict: Mapping[str, Any],
) -> None:
    """Enter what bitsandbytes' Linear layer of the shardable layout saves as in the compact one."""
    decoder, name = module.statistics, f"{prefix}weight"
    keys = {part: f"{prefix}statistics.{part}" for part in decoder._parameters}
    if not all(key in state_dict for key in (name, *keys.values())):
        return
    parameters = {part: state_dict[key] for part, key in keys.items()}
    first, *others = keys.values()
    if isinstance(decoder, PackedScales):
        bits = parameters["scale_bits"]
        scales = WholeTensor(
            torch.float32, _shape(bits), bits, lambda: whole(bits).view(torch.float32),
            _is_sharded(bits),
        )  # fmt: skip
        layout = torch.tensor(0, dtype=torch.uint8)  # row by row
        row_major = WholeTensor(layout.dtype, (), layout, lambda: layout, False)
        replaced[first] = {f"{prefix}SCB": scales, f"{prefix}weight_format": row_major}
        return
    codes = state_dict[name]
    weight = _sharded_weight(name, read(module.weight, decoder), decoder, codes, parameters)
    tensors = weight.tensors()
    replaced[name] = {name: tensors.pop(name)}
    replaced[first] = tensors
    replaced |= {key: {} for key in others}


@dataclass(frozen=True)
class _Weight:
    """A packed weight of which `codes` and `statistics` (its codes are empty) are gathered."""

    name: str
    packed: PackedWeight  # its shape and settings
    source: Any
    codes: Callable[[], Tensor]
    statistics: Callable[[], PackedWeight]
    divided: bool

    def tensors(self) -> dict[str, WholeTensor]:
        """Return codes and statistics under bitsandbytes' keys."""
        specs = packed_tensors(self.packed.shape, CodecSettings.of(self.packed))
        ends = sorted(specs, key=lambda end: end.startswith(RECORD))  # as bitsandbytes has them
        return {
            self.name + end: WholeTensor(
                specs[end].dtype,
                specs[end].shape,
                self.source,
                self.codes if end == CODES else partial(self._statistic, end),
                self.divided,
            )
            for end in ends
        }

    def _statistic(self, end: str) -> Tensor:
        return codec_of(self.packed.kind).entries(self.statistics())[end]


def _sharded_weight(
    name: str, packed: PackedWeight, decoder: Any, codes: Any, parameters: Mapping[str, Any]
) -> _Weight:
    """Return a weight whose codes, and the decoder's parameters, are DTensors or whole."""
    codec = codec_of(packed.kind)

    def whole_codes() -> Tensor:
        flat = whole(codes).view(-1)
        if isinstance(decoder, PackedScales):
            return flat.view(codec.codes_shape(packed.shape))
        return flat.view(torch.uint8).view(decoder.storage_dtype).unsqueeze(1)

    def statistics() -> PackedWeight:
        gathered = {part: whole(tensor) for part, tensor in parameters.items()}
        if isinstance(decoder, PackedScales):
            return replace(packed, absmax=gathered["scale_bits"].view(codec.scale_dtype))
        other = copy.copy(decoder)
        other._parameters = {
            part: nn.Parameter(tensor, requires_grad=False) for part, tensor in gathered.items()
        }
        empty: PackedWeight = other.packed(torch.empty((0, 1), dtype=torch.uint8))
        return empty

    divided = any(map(_is_sharded, (codes, *parameters.values())))
    return _Weight(name, packed, codes, whole_codes, statistics, divided)


def _of_all(
    packed: PackedWeight, share: ExpertShare
) -> tuple[Callable[[], Tensor], Callable[[], PackedWeight]]:
    """Return what gathers codes and statistics of a weight of which each rank has some experts."""

    def codes() -> Tensor:
        alone = replace(packed, absmax=packed.absmax[:0], nested=None)
        return _joined(alone, share).codes

    def statistics() -> PackedWeight:
        return _joined(replace(packed, codes=packed.codes[:0]), share)

    return codes, statistics


def _joined(packed: PackedWeight, share: ExpertShare) -> PackedWeight:
    """Return the whole weight of which this rank holds a share; all ranks of the group call it."""
    codes, absmax = _of_each_rank(packed.codes, share), _of_each_rank(packed.absmax, share)
    outer = None if packed.nested is None else _of_each_rank(packed.nested.absmax, share)
    parts = []
    for rank in range(len(codes)):
        nested = packed.nested
        if nested is not None and outer is not None:
            nested = nested._replace(absmax=outer[rank])
        part = replace(packed, codes=codes[rank], absmax=absmax[rank], nested=nested, owner=None)
        parts.append(part)
    return codec_of(packed.kind).join(parts)


def _of_each_rank(tensor: Tensor, share: ExpertShare) -> list[Tensor]:
    """Return each rank's own tensor, in the order of their experts; all ranks must call it."""
    plain = tensor.detach().contiguous()
    parts = [torch.empty_like(plain) for _ in range(distributed.get_world_size(share.group))]
    distributed.all_gather(parts, plain, group=share.group)
    return parts


def gather_to_first(
    tensors: Mapping[str, WholeTensor], use: Callable[[Callable[[str], Tensor]], _Result], what: str
) -> _Result | None:
    """Return `use(read)` of the first rank, where `read(key)` returns a tensor whole; else None.

    All ranks must call it, and return or raise together: what `use` raises, each of them does.
    Where no tensor is divided, `use` runs on every rank that calls.

    Args:
        tensors: What `whole_tensors` returns.
        use: Called on the first rank; may read the tensors in any order, and not all of them.
        what: Begins the sentence that says that a rank was lost.

    Raises:
        CheckpointError: A rank ended or does not take part.
    """
    if not any(tensor.divided for tensor in tensors.values()):
        return use(lambda key: tensors[key].gather())
    calls = _Calls(what)
    if distributed.get_rank() != 0:
        while isinstance(call := calls.receive(), str):
            calls.guarded(tensors[call].gather)
        if call is not None:
            raise call
        return None

    def read(key: str) -> Tensor:
        calls.send(key)
        return calls.guarded(tensors[key].gather)

    try:
        result = use(read)
    except BaseException as error:
        if not calls.lost:
            calls.send(error if isinstance(error, MoeQloraError) else _as_error(what, error))
        raise
    calls.send(None)
    return result


class _Calls:
    """What the first rank tells all others: a key to gather, an error that ends it, or None."""

    def __init__(self, what: str) -> None:
        self.what, self.lost = what, False

    def send(self, call: str | Exception | None) -> None:
        self.guarded(lambda: distributed.broadcast_object_list([call], src=0))

    def receive(self) -> str | Exception | None:
        calls: list[Any] = [None]
        self.guarded(lambda: distributed.broadcast_object_list(calls, src=0))
        return calls[0]

    def guarded(self, collective: Callable[[], _Result]) -> _Result:
        """Return what a collective returns, and say in a sentence where it fails."""
        try:
            return collective()
        except RuntimeError as error:
            self.lost = True
            raise CheckpointError(
                f"{self.what} failed on rank {distributed.get_rank()} while it gathered tensors "
                f"from all ranks ({first_line(error)}): every rank must take part to the end."
            ) from error


def _as_error(what: str, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{what} failed on rank 0: {type(error).__name__}: {first_line(error)}")


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's whole state dict on the first rank, on the CPU; all others get `{}`.

    It has bitsandbytes' keys, as that of a model in a single process, whatever shares of the model
    this process holds. Tensors are gathered one at a time: no device holds two of them whole.

    All ranks must call it. Where nothing is sharded, and without a process group, it is the state
    dict itself. A `DistributedDataParallel` model's keys are those of the model in it.

    Raises:
        CheckpointError: Another rank was lost meanwhile.
    """
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = whole_tensors(inner, own_state_dict(inner))

    def collect(read: Callable[[str], Tensor]) -> dict[str, Any]:
        return {key: _on_cpu(read(key)) for key in tensors}

    gathered = gather_to_first(tensors, collect, "full_state_dict")
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    return gathered if first and gathered is not None else {}


def _on_cpu(value: Any) -> Any:
    """Return a tensor on the CPU; a module's extra state may be anything else."""
    return value.detach().cpu() if isinstance(value, Tensor) else value
