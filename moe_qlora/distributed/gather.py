"""Exchange between ranks: a model's state dict as in a single process, and their arguments.

A share is a DTensor of FSDP2, or a parameter that ZeRO-3 has partitioned. No rank has more than one
whole tensor at a time. Ranks exchange tensors by shape alone: without `check_agreement`, gathered
codes are decoded with another folder's statistics, and sums mix two scalings.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import CheckpointError, ConfigError, MoeQloraError, first_line
from ..packing.bnb4bit import RECORD
from ..packing.codecs import CODES, codec_of
from ..packing.decoders import read
from ..packing.parametrize import Place, packed_places
from ..packing.settings import CodecSettings, packed_tensors
from ..world import NOT_GIVEN, WholeTensor, world

_Result = TypeVar("_Result")


def is_divided(state_dict: Mapping[str, Any]) -> bool:
    """Whether ranks have different parts of this state dict."""
    return any(_is_sharded(tensor) for tensor in state_dict.values())


def state_dict_to_save(model: nn.Module, given: Any) -> Mapping[str, Any] | None:
    """Return the state dict that a save writes: the one given, or the model's own."""
    # None means that this rank does not take part. Under ZeRO-3, accelerate, Trainer and DeepSpeed
    # gather a state dict for the first rank, and all others save with `state_dict=None`.
    if given is None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        if distributed.get_rank() != 0:
            return None
        raise CheckpointError(
            "state_dict=None was given to save_pretrained on rank 0 for a model that DeepSpeed "
            "ZeRO-3 has partitioned, where the other ranks then take no part: leave the argument "
            "out, and call save_pretrained on all ranks."
        )
    return local_state_dict(model) if given is None or given is NOT_GIVEN else given


def local_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict, with ZeRO-3's parameters, empty in `state_dict`, as shares."""
    parameters = model.named_parameters(remove_duplicate=False)
    partitioned = {name: value for name, value in parameters if hasattr(value, "ds_id")}
    return {key: partitioned.get(key, value) for key, value in model.state_dict().items()}


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def whole(tensor: Tensor) -> Tensor:
    """Gather a share's whole tensor on its group's device, with all ranks; return others as is."""
    if not _is_sharded(tensor):
        return tensor
    if hasattr(tensor, "ds_id"):
        import deepspeed  # type: ignore[import-not-found]

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().as_subclass(Tensor).clone()
    sharded: Any = tensor.detach()
    sharded = sharded.to(sharded.device_mesh.device_type)  # it may be offloaded
    return cast(Tensor, sharded.full_tensor())


def plain_tensor(value: Any) -> WholeTensor:
    """Return a function that gathers a tensor that is no part of a packed weight."""
    shape = tuple(getattr(value, "ds_shape", getattr(value, "shape", ())))
    dtype: Any = getattr(value, "dtype", None)
    return WholeTensor(dtype, shape, value, partial(whole, value), _is_sharded(value))


def whole_tensors(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, WholeTensor]:
    """Return the entries of a single process's state dict, of one in either form, in its order."""
    replaced: dict[str, dict[str, WholeTensor]] = {}
    for place in packed_places(model):
        keys = {part: f"{place.statistics}{part}" for part in place.decoder._parameters}
        # without these it is whole already, under bitsandbytes' keys
        if not all(key in state_dict for key in (place.codes, *keys.values())):
            continue
        entries = _entries(place, keys, state_dict)
        replaced |= {key: {} for key in keys.values()} | {place.codes: entries}
        if place.leaf == "weight":  # a Linear layer's statistics stand where its parameters do
            replaced[place.codes] = {place.codes: entries.pop(place.codes)}
            if not place.decoder.is_4bit:
                at = place.name.removesuffix("weight")
                rows = torch.tensor(0, dtype=torch.uint8)  # bitsandbytes' number of the layout
                (scales,) = entries.values()
                entries = {f"{at}SCB": scales, f"{at}weight_format": plain_tensor(rows)}
            replaced[next(iter(keys.values()))] = entries
    tensors: dict[str, WholeTensor] = {}
    for key, value in state_dict.items():
        tensors |= replaced[key] if key in replaced else {key: plain_tensor(value)}
    return tensors


def _entries(
    place: Place, keys: Mapping[str, str], state_dict: Mapping[str, Any]
) -> dict[str, WholeTensor]:
    """Return a packed weight's tensors under bitsandbytes' keys; `keys` are its parameters'."""
    decoder, codes = place.decoder, state_dict[place.codes]
    packed = read(cast(Tensor, place.owner._parameters[place.leaf]), decoder)
    parameters = {part: state_dict[own] for part, own in keys.items()}

    def gather(end: str) -> Tensor:
        if end == CODES:
            return whole(codes).view(-1).view(decoder.storage_dtype).view(specs[end].shape or ())
        gathered = decoder.replaced({part: whole(tensor) for part, tensor in parameters.items()})
        blank = torch.empty(plain_tensor(codes).shape or (), dtype=codes.dtype, device="meta")
        return codec_of(packed.kind).entries(gathered.packed(blank))[end]

    divided = any(map(_is_sharded, (codes, *parameters.values())))
    specs = packed_tensors(packed.shape, CodecSettings.of(packed))
    return {
        place.name + end: WholeTensor(*specs[end], codes, partial(gather, end), divided)
        for end in sorted(specs, key=lambda end: end.startswith(RECORD))  # as bitsandbytes has them
    }


def gather_to_first(
    tensors: Mapping[str, WholeTensor], use: Callable[[Callable[[str], Tensor]], _Result], what: str
) -> _Result | None:
    """Return `use(read)` of the first rank, where `read(key)` returns a tensor whole; else None.

    All ranks must call it, and return or raise together: an error of `use` is raised on all; where
    a rank is lost, a `CheckpointError` that `what` begins. Where no tensor is divided, it runs on
    every rank that calls.
    """
    if not any(tensor.divided for tensor in tensors.values()):
        return use(lambda key: tensors[key].gather())
    lost = False

    def guarded(collective: Callable[[], Any]) -> Any:
        nonlocal lost
        try:
            return collective()
        except RuntimeError as error:
            lost = True
            raise CheckpointError(
                f"{what} failed on rank {distributed.get_rank()} while it gathered tensors "
                f"from all ranks ({first_line(error)}): every rank must take part to the end."
            ) from error

    def exchanged(call: str | Exception | None = None) -> Any:
        """Send from the first rank a key to gather, a final error, or None; receive on others."""
        calls = [call]
        guarded(lambda: distributed.broadcast_object_list(calls, src=0))
        return calls[0]

    if distributed.get_rank() != 0:
        while isinstance(call := exchanged(), str):
            guarded(tensors[call].gather)
        if call is None:
            return None
        raise call

    def read(key: str) -> Tensor:
        exchanged(key)
        return cast(Tensor, guarded(tensors[key].gather))

    try:
        result = use(read)
    except BaseException as error:
        if not lost:
            text = f"{what} failed on rank 0: {type(error).__name__}: {first_line(error)}"
            exchanged(error if isinstance(error, MoeQloraError) else CheckpointError(text))
        raise
    exchanged()
    return result


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's whole state dict on the first rank, on the CPU; all others get `{}`.

    It has bitsandbytes' keys, as in a single process, however the model is sharded; those of a
    `DistributedDataParallel` model are of the model in it. Tensors are gathered one at a time. All
    ranks must call it. A `CheckpointError` where another rank was lost meanwhile.
    """
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = whole_tensors(inner, local_state_dict(inner))

    def collect(read: Callable[[str], Any]) -> dict[str, Any]:
        values = ((key, read(key)) for key in tensors)  # extra state of a module may be anything
        return {key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in values}

    gathered = gather_to_first(tensors, collect, "full_state_dict")
    return gathered or {} if world().is_first() else {}


Facts = Callable[[], Mapping[str, Any]]


def check_agreement(what: str, facts: Facts, mesh: Any = None, group: Any = None) -> None:
    """Raise on every rank where one was given something other than the first.

    All ranks of the mesh or group (None: all) must call it; without a process group it does
    nothing. `facts` returns what must be equal by name, a configuration compared field by field;
    its error on one rank is raised on all. `what` begins the sentence of the `ConfigError`.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    error: MoeQloraError | None = None
    known: dict[int, dict[str, str] | str] = {}
    try:
        known[distributed.get_rank()] = dict(_settings(facts()))
    except MoeQloraError as raised:
        error, known[distributed.get_rank()] = raised, str(raised)
    groups = [group] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for group in groups:  # after the last, each rank has the facts of all
        everyone: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(everyone, known, group=group)
        known = {rank: given for one in everyone for rank, given in one.items()}
    if error is not None:
        raise error
    told: dict[int, dict[str, str]] = {}
    for rank, given in sorted(known.items()):
        if isinstance(given, str):
            raise ConfigError(f"{what}: rank {rank} failed: {given}")
        told[rank] = given
    first, expected = min(told.items())
    for rank, given in told.items():
        for name in {**expected, **given}:
            here, there = given.get(name, "nothing"), expected.get(name, "nothing")
            if here != there:
                raise ConfigError(
                    f"{what}: rank {rank} has {name} {here}, and rank {first} has {there}: give "
                    "all ranks the same."
                )


def _settings(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield values by name as text; of a configuration, each field under its full name."""
    for name, value in facts.items():
        fields = value.to_dict() if hasattr(value, "to_dict") else value
        items = {name: value}
        if isinstance(fields, Mapping):
            # Each rank may read a copy of the base of its own.
            items = {f"{name}.{k}": v for k, v in fields.items() if k != "base_model_name_or_path"}
        for full, one in items.items():
            ordered = sorted(one, key=str) if isinstance(one, (set, frozenset)) else one
            yield full, f"{ordered!r:.200}"


def from_first(mesh: Any, broadcast: Callable[..., Any], value: Any) -> None:
    """Broadcast a value of a mesh's first rank to all others."""
    for group in reversed([mesh.get_group(dimension) for dimension in range(mesh.ndim)]):
        broadcast(value, src=distributed.get_global_rank(group, 0), group=group)
