"""Packed experts in host memory, copied to the device ahead of their use.

    offload_experts     moves the experts of decoder layers to host memory, and back
      _Layer            one decoder layer's codes and statistics, in one piece of host memory
        _Hosted         one packed weight, as `packing/decoders.py` asks for it
      DeviceSlot        memory on the device, with a copy of one layer

The modules' own tensors are views of the host memory, so that saving, copying and exporting read
it. A forward, a recomputation and a backward each fetch the weight that they read: autograd keeps a
function that fetches (`PackedWeight.refetch`), and nothing of a slot.

A fetch returns a `Lease`. While it is referenced, the slot keeps its layer, and a later copy to it
waits for all that the device was given until its end. Where a traceback keeps a lease, another
layer of the same slot gets memory of its own. A layer always has the same slot, which neighbours do
not share: a CUDA graph that was recorded within a lease is replayed within another.

    compute stream   | wait for ready | kernels that read the slot | mark |
    copy stream                                                           | wait for mark | copy |
"""

import mmap
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.limits import cdiv
from ..kernels.weights import PackedWeight
from ..kernels.workspace import in_backward
from ..layout import human_bytes, unwrapped_name
from ..packing.decoders import PackedList, fetched, is_share, read
from ..packing.parametrize import iter_packed, parametrization_list
from ..planning.choice import ALIGNMENT, SLOTS
from .layers import decoder_layers


class HostMemory(mmap.mmap):
    """Zeroed host memory, freed with the last of its tensors."""

    locked_at = 0  # The address that CUDA has page-locked

    def __new__(cls, nbytes: int) -> "HostMemory":
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
        return super().__new__(cls, -1, nbytes, **flags)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def tensor(self, first: int, nbytes: int) -> Tensor:
        """Return a part as uint8 `(nbytes,)`, with a storage of its own: none copies the whole."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self, dtype=torch.uint8, count=nbytes, offset=first)

    def lock(self, device: torch.device) -> None:
        """Page-lock the memory, if the device is CUDA, so that copies run beside kernels."""
        if device.type != "cuda" or self.locked_at:
            return
        address = self.tensor(0, 1).data_ptr()
        with torch.cuda.device(device):
            portable = 1  # cudaHostRegisterPortable: for all devices
            error = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, portable))
            if error == 0:
                self.locked_at = address
                return
            with suppress(RuntimeError):  # The next launch would raise what CUDA remembers
                torch.zeros(1, device=device)
        raise ConfigError(
            f"offload_experts: {human_bytes(self.nbytes)} of host memory for a layer's experts "
            f"could not be page-locked (CUDA error {error}): free host memory, raise the limit "
            "(ulimit -l), or give fewer layers."
        )

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():
            torch.cuda.synchronize()  # A copy may be under way
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)


def offload_experts(model: nn.Module, *, layers: int | None = None) -> "Offload":
    """Move packed experts to host memory, from where they are copied to the device ahead of use.

    On the device are two slots, each as large as one layer's packed experts. While a layer runs,
    the next one's are copied, in the order of the layers: forwards, then backwards. Losses and
    gradients are the same, bit by bit. On CUDA the host memory is page-locked.

    State dicts, `save_pretrained` and exports read the host memory. `copy.deepcopy` returns a model
    with all experts on the device. Merging into the weights is refused until `remove()`. CUDA
    graphs but those of `prepare_training` are refused: `generate` on a static cache, which
    transformers compiles with them, needs `disable_compile=True`.

    Args:
        model: A transformers model with packed experts, or a PEFT model around one, on CUDA or a
            CPU. Under DDP each rank moves its own.
        layers: How many decoder layers, from the last one; None for all that have packed experts.

    Returns:
        What was moved: `remove()`, or the end of a `with` block, moves it back. After
        `enabled(offload=True)`, without `layers`, what the load has moved; `fit_memory` may have
        brought some of it to the device.

    Raises:
        ConfigError: No experts are packed, or fewer decoder layers than `layers` have such; they
            are in host memory already, sharded, or on meta; the layers lie on several devices; or
            host memory cannot be page-locked.
    """
    groups = expert_groups(model)
    if not groups:
        raise ConfigError(
            f"offload_experts: {type(model).__name__} has no packed experts; load it under "
            "moe_qlora.enabled(), or call quantize_experts first."
        )
    owners = {each.offload for lists in groups.values() for each in lists}
    if layers is None and len(owners) == 1 and isinstance(off := owners.pop(), Offload):
        return off
    for name, lists in groups.items():
        if any(each.offload is not None for each in lists):
            raise ConfigError(
                f"offload_experts: experts of {unwrapped_name(name)} are in host memory already, "
                "or fit_memory has brought them to the device; call remove() on what the first "
                "call returned, after enabled(offload=True) on what offload_experts(model) returns."
            )
    count = len(groups) if layers is None else layers
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(groups):
        raise ConfigError(
            f"layers is {layers!r}; give a whole number from 1 to {len(groups)}, of the decoder "
            "layers with packed experts, or None for all of them."
        )
    chosen = dict(list(groups.items())[-count:])
    off = Offload(chosen, _device_of(model, chosen))
    known: Any = vars(model).get(_IgnoredByDDP.attribute, ())
    if not isinstance(known, _IgnoredByDDP):
        vars(model)[_IgnoredByDDP.attribute] = _IgnoredByDDP(model, known)
    return off


class Offload(AbstractContextManager["Offload"]):
    """Packed experts that lie in host memory.

    Attributes:
        device: The device that computes.
        copies: How often a layer's experts have been copied to the device so far.
    """

    def __init__(self, groups: Mapping[str, Sequence[PackedList]], device: torch.device) -> None:
        self._groups, self.device, self.copies = dict(groups), device, 0
        self._slots: list[DeviceSlot] = []
        self._copier: Any = None
        self._lock = threading.Lock()
        self._blocks: list[_Layer] = []
        self._own(self)
        try:
            for place, lists in enumerate(groups.values()):
                self._blocks.append(_Layer(lists, self, place))
                self._blocks[-1].refresh()
        except BaseException:
            self.remove()
            raise

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the decoder layers."""
        return tuple(self._groups)[len(self._groups) - len(self._blocks) :]

    @property
    def host_nbytes(self) -> int:
        """Bytes of the experts in host memory."""
        return sum(block.memory.nbytes for block in self._blocks)

    @property
    def slots(self) -> int:
        """Number of slots on the device, each as large as the largest layer's packed experts."""
        return min(SLOTS, len(self._blocks))

    def remove(self) -> None:
        """Move the experts back to the device, and free the host memory and the slots."""
        self.hold(0)
        self._own(None)
        self._groups = {}

    def _own(self, offload: "Offload | None") -> None:
        for lists in self._groups.values():
            for each in lists:
                each.offload = offload

    def hold(self, count: int) -> None:
        """Let experts of the last `count` layers be in host memory; not after `remove`."""
        names, blocks = list(self._groups), self._blocks
        if names and count != len(blocks):
            self._drop_slots()
            while len(blocks) > count:
                blocks[0].leave()
                del blocks[0]
            while len(blocks) < count:
                place = len(names) - len(blocks) - 1
                blocks.insert(0, _Layer(self._groups[names[place]], self, place))
                blocks[0].refresh()

    def slot_memory(self) -> list[Tensor]:
        """Fill the slots on the device, and return their memory, uint8 each."""
        for block in self._blocks:  # Else some would be written while a step is measured
            block.refresh()
        return [self.fetch(block, True)[0].memory for block in self._blocks[: self.slots]]

    def __str__(self) -> str:
        nbytes = human_bytes(self.host_nbytes)
        return (
            f"experts of {len(self._blocks)} layers in {nbytes} of host memory, {self.slots} slots"
        )

    def __exit__(self, *_: object) -> None:
        self.remove()

    def fetch(self, block: "_Layer", training: bool) -> "tuple[DeviceSlot, Lease | None]":
        """Return the slot with a layer's experts, and what reserves it; then copy the next layer's.

        What the caller's stream is given from now on waits for the copy. In the recording of a
        CUDA graph, which runs later, nothing is copied, waited for or reserved: a `RuntimeError`
        where the layer is not in its slot, or not reserved there.
        """
        with self._lock:
            block.refresh()
            if not self._slots:
                self._copier = Copier(self.device)
                most = max(each.memory.nbytes for each in self._blocks)
                self._slots = [self._new(most) for _ in range(self.slots)]
            slot = home = self._slots[block.place % len(self._slots)]
            if self._copier.records():
                if slot.block is block and slot.leases:
                    return slot, None
                raise RuntimeError(
                    "experts in host memory were read in a CUDA graph that prepare_training does "
                    "not record, which would read them again after remove() has freed them: in "
                    "generate, give disable_compile=True; elsewhere, call remove() on what "
                    "offload_experts returned before recording it"
                )
            if slot.block is not block:
                if slot.leases:
                    slot = self._new(block.memory.nbytes)
                self._copy(block, slot)
            stream = self._copier.here()
            stream.wait_event(slot.ready)
            lease = Lease(slot, stream)
            at, last = self._blocks.index(block), len(self._blocks) - 1
            if in_backward():
                following = at - 1 if at else 1
            else:  # Forwards; in training then backwards
                following = at + 1 if at < last else last - 1 if training else 0
            if last:
                ahead = self._blocks[following]
                to = self._slots[ahead.place % len(self._slots)]
                # A backward may read this layer once more.
                if to is not home and to.block is not ahead and not to.leases:
                    self._copy(ahead, to)
        return slot, lease

    def move(self, device: torch.device) -> None:
        """Compute on another device from now on."""
        if device == self.device:
            return
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the model was moved to {device}, and experts in host memory are computed on CUDA "
                "or the CPU: call remove() on what offload_experts returned first."
            )
        self._drop_slots()
        self.device = device
        for block in self._blocks:
            block.store.lock(device)

    def _new(self, nbytes: int) -> "DeviceSlot":
        with torch.inference_mode(False):  # Else nothing outside could be copied to it
            return DeviceSlot(self._copier.empty(nbytes), self._copier.here())

    def _copy(self, block: "_Layer", slot: "DeviceSlot") -> None:
        slot.block = None  # While it is not known whether the copy is under way
        to = slot.memory[: block.memory.nbytes]
        slot.ready = self._copier.copy(to, block.memory, slot.marks.values())
        slot.marks, slot.block = {}, block
        self.copies += 1

    def forget(self, *blocks: "_Layer") -> None:
        """Forget copies of layers, and wait until host memory is not read any more."""
        for slot in self._slots:
            if slot.block in blocks:
                with suppress(Exception):  # Of a copy that was not made: nobody needs it now
                    slot.ready.synchronize()
                slot.block = None

    def _drop_slots(self) -> None:
        with self._lock:
            self.forget(*self._blocks)
            self._slots = []


class _Layer:
    """One decoder layer's packed experts, with their place in host memory."""

    def __init__(self, lists: Sequence[PackedList], offload: Offload, place: int) -> None:
        self.offload, self.place, self._records, end = offload, place, list[_Hosted](), 0
        for same in tied_lists(lists):
            self._records.append(_Hosted(self, same, end))
            end = self._records[-1].end
        self.store = HostMemory(end)
        self.store.lock(offload.device)
        self.memory = self.store.tensor(0, end)

    def refresh(self) -> None:
        """Write to host memory what is not there, as what load_state_dict has changed."""
        for record in self._records:
            if record.state() != record.seen:
                self.offload.forget(self)
                record.write()

    def leave(self) -> None:
        while self._records:
            self._records[-1].leave()  # One that does not fit on the device stays where it is
            del self._records[-1]
        del self.store, self.memory


class _Hosted:
    """One packed weight in host memory: the `host` of the lists that have it."""

    def __init__(self, layer: _Layer, lists: Sequence[PackedList], first: int) -> None:
        self.layer, self.lists, self.end = layer, lists, first
        self._parts: list[tuple[int, int]] = []  # Of each tensor: its first byte, and bytes
        for tensor in held_tensors(lists[0]):
            self._parts.append((self.end, tensor.nbytes))
            self.end += cdiv(tensor.nbytes, ALIGNMENT) * ALIGNMENT
        # In each slot; a slot that is gone is not kept by its memory
        self._views: WeakKeyDictionary[DeviceSlot, PackedWeight] = WeakKeyDictionary()
        self.seen: Any = None  # `state` of what lies in host memory

    @property
    def device(self) -> torch.device:
        return self.layer.offload.device

    def state(self) -> Any:
        return [(tensor.data_ptr(), tensor._version) for tensor in held_tensors(self.lists[0])]

    def fetch(self, packed_list: PackedList) -> PackedWeight:
        """Return the weight on the device, valid while the returned object is referenced."""
        if packed_list.host is not self:  # a backward after `remove`, or after another move
            return fetched(packed_list)
        slot, lease = self.layer.offload.fetch(self.layer, packed_list.training)
        if (packed := self._views.get(slot)) is None:
            held, decoder = held_tensors(self.lists[0]), cast(Any, self.lists[0][0])
            codes, *statistics = (
                slot.memory[first : first + nbytes].view(like.dtype).view(like.shape)
                for (first, nbytes), like in zip(self._parts, held, strict=True)
            )
            names = *decoder._parameters, *decoder._buffers
            whole = decoder.replaced(dict(zip(names, statistics, strict=True)))
            packed = self._views[slot] = read(codes, whole)
        return replace(packed, refetch=partial(self.fetch, packed_list), lease=lease)

    def reserve(self, packed_list: PackedList) -> tuple[object | None, object]:
        """Return the weight's place on the device, or None once its lease has ended."""
        offload = self.layer.offload
        slot, lease = offload.fetch(self.layer, packed_list.training)
        return (ref(slot) if slot in offload._slots else None), lease

    def move(self, device: torch.device) -> None:
        self.layer.offload.move(device)

    @torch.no_grad()
    def write(self) -> None:
        """Put tensors that are not in host memory there."""
        copies = []
        with torch.inference_mode(False):
            for (first, nbytes), held in zip(self._parts, held_tensors(self.lists[0]), strict=True):
                if nbytes != held.nbytes:
                    decoder: Any = self.lists[0][0]
                    raise ConfigError(
                        f"a packed weight of shape {tuple(decoder.weight_shape)} in host memory "
                        "was replaced by one in another format: call remove() on what "
                        "offload_experts returned before loading it."
                    )
                to = self.layer.store.tensor(first, nbytes).view(held.dtype).view(held.shape)
                copies.append(to if to.data_ptr() == held.data_ptr() else to.copy_(held.detach()))
        self._hold(copies, self)

    @torch.no_grad()
    def leave(self) -> None:
        """Put the tensors on the device, unless `write` has failed before."""
        if self.seen is not None:
            device = self.layer.offload.device
            with torch.inference_mode(False):
                held = held_tensors(self.lists[0])
                self._hold([each.detach().to(device, copy=True) for each in held], None)

    def _hold(self, tensors: Sequence[Tensor], host: "_Hosted | None") -> None:
        with torch.inference_mode(False):
            for old, new in zip(held_tensors(self.lists[0]), tensors, strict=True):
                old.data = new
        self.seen = self.state()
        self._views.clear()
        for each in self.lists:
            if each.host is not host:
                each.settle(host)


class DeviceSlot:
    """Memory on the device, uint8 `(bytes,)`, and the layer whose copy it holds."""

    def __init__(self, memory: Tensor, stream: Any) -> None:
        self.memory = memory
        self.block: _Layer | None = None
        self.ready: Any = None  # The event that the last copy to it is done
        # What a copy to it waits for, by stream: the ends of its leases; at first that of what the
        # allocator gave the memory to before
        self.marks: dict[Any, Any] = {stream: stream.record_event()}
        self.leases: set[int] = set()  # Their ids: a set is changed without a lock


class Lease:
    """Keeps a slot as it is, as long as this object is referenced."""

    def __init__(self, slot: DeviceSlot, stream: Any) -> None:
        self.slot, self.stream = slot, stream
        slot.leases.add(id(self))

    def __del__(self) -> None:
        # In any thread, also in the middle of a fetch, where the garbage collector runs. Nothing
        # is copied to the slot before its lease is discarded.
        if not sys.is_finalizing():
            self.slot.marks[self.stream] = self.stream.record_event()
            self.slot.leases.discard(id(self))


class _AtOnce:
    """A CPU as a stream and as its events: work is complete when it is submitted."""

    def record_event(self) -> "_AtOnce":
        return self

    def wait_event(self, *_: Any) -> None: ...

    synchronize = wait_event


class Copier:
    """Copies from host memory to one device, on a stream of its own; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if self.on_cuda else _AtOnce()

    def here(self) -> Any:
        """Return the stream that the caller computes on."""
        return torch.cuda.current_stream(self.device) if self.on_cuda else self.stream

    def records(self) -> bool:
        return self.on_cuda and torch.cuda.is_current_stream_capturing()

    def empty(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self.on_cuda:
            # When it is freed, torch gives it to nobody before the copies to it are done.
            memory.record_stream(self.stream)
        return memory

    def copy(self, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        """Copy once all events of `after` have come; return the event that it is done."""
        with torch.cuda.stream(self.stream) if self.on_cuda else nullcontext():
            for event in after:
                self.stream.wait_event(event)
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()


def offload_of(groups: Mapping[str, Sequence[PackedList]]) -> Offload | None:
    """Return what has moved some of these weights to host memory, wherever they are now."""
    owners = (each.offload for lists in groups.values() for each in lists)
    return next((owner for owner in owners if isinstance(owner, Offload)), None)


def held_tensors(chain: PackedList) -> list[Tensor]:
    """Return the tensors of a packed weight as its modules have them: codes, then statistics."""
    return [chain.original, *chain[0].parameters(), *chain[0].buffers()]


def expert_groups(model: nn.Module) -> dict[str, list[PackedList]]:
    """Return packed weights by the name of their decoder layer, in the layers' order.

    Experts outside of any decoder layer are a layer of their own; tied ones are the first layer's.
    """
    names = decoder_layers(model)
    groups: dict[str, list[PackedList]] = {}
    homes: dict[int, str] = {}
    for owner, module, name in iter_packed(model):
        packed_list: Any = parametrization_list(module, name)
        full = unwrapped_name(f"{owner}.{name}")
        if is_share(packed_list.original):
            raise ConfigError(
                f"offload_experts: {full} is sharded over ranks, by an engine with offloading of "
                "its own (FSDP2's CPUOffloadPolicy, ZeRO's zero_optimization.offload_param)."
            )
        if packed_list.original.is_meta:
            raise ConfigError(f"offload_experts: {full} is on meta, without values: load it first.")
        around = [each for each in names if owner == each or owner.startswith(f"{each}.")]
        home = homes.setdefault(id(packed_list.original), max(around, key=len, default=owner))
        groups.setdefault(home, []).append(packed_list)
    return groups


def _device_of(model: nn.Module, chosen: Mapping[str, Sequence[PackedList]]) -> torch.device:
    """Return the one device that computes these layers."""
    devices = set()
    for name, lists in chosen.items():
        packed = {id(each.original) for each in lists}
        own = model.get_submodule(name).parameters()
        plain = {p.device for p in own if id(p) not in packed and not p.is_meta}
        devices |= plain or {lists[0].original.device}
    device: torch.device = next(iter(devices))
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"offload_experts: the layers lie on {' and '.join(sorted(map(str, devices)))}; "
            "experts in host memory are for one device, CUDA or a CPU."
        )
    return device


def tied_lists(lists: Iterable[PackedList]) -> list[list[PackedList]]:
    """Return the lists of each weight."""
    tied: dict[int, list[PackedList]] = {}
    for each in lists:
        tied.setdefault(id(each.original), []).append(each)
    return list(tied.values())


class _IgnoredByDDP:
    """Names in host memory, which DDP ignores in a model, and in one that wraps it later.

    Else it would broadcast these codes, and refuse parameters on two kinds of devices. They are
    looked up at each iteration, since adapters rename what they wrap.
    """

    # As DDP's own `_set_params_and_buffers_to_ignore_for_model` sets it
    attribute = "_ddp_params_and_buffers_to_ignore"
    # PEFT and torch.compile put these before names of the model, whose attribute they forward.
    around = ("", "base_model.model.", "_orig_mod.", "_orig_mod.base_model.model.")

    def __init__(self, model: nn.Module, others: Iterable[str]) -> None:
        self.model, self.others = model, others

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for prefix, module in self.model.named_modules():
            if isinstance(module, PackedList) and module.host is not None:
                for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
                    yield from (f"{around}{prefix}.{name}" for around in self.around)
