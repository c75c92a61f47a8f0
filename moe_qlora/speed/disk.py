"""Experts that stay in the files of a packed folder, and are read from there to slots.

    OnDisk      one layer's codes and statistics: ranges of files, and tensors that no file has
    Disk        two buffers in host memory, page-locked for CUDA, and a thread for each slot that is
                filled: it reads the next part into one buffer while the other is copied

The system keeps in memory what it has room for: layers are read forwards and then backwards, so
that what was read last is wanted first.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..checkpoint.reader import TensorInfo
from ..errors import CheckpointError
from ..models.files import reading
from .host_memory import HostMemory
from .slots import Copier

BUFFER = 16 << 20  # Bytes of each of the two buffers

Places = Mapping[int, tuple[Tensor, TensorInfo]]
"""By address: a tensor of a file, and where in the file it lies."""


class _Part(NamedTuple):
    """Bytes of a slot: of a file from `offset` on, or of a tensor in host memory."""

    first: int
    nbytes: int
    source: Path | Tensor
    offset: int = 0


class OnDisk:
    """What is copied to a slot for one layer."""

    def __init__(self, nbytes: int, disk: Disk) -> None:
        self.nbytes, self._disk = nbytes, disk
        self._parts: dict[int, _Part] = {}

    def put(self, tensor: Tensor, first: int) -> Tensor:
        """Note a tensor's place in the slot; return what the module has of it, in host memory.

        What replaces another tensor there is read from host memory from now on.
        """
        here = tensor.cpu()
        if tensor.nbytes == 0:
            return here
        info = self._disk.place(tensor)
        if info is None:
            raw = here.detach().contiguous().view(-1).view(torch.uint8)
            self._parts[first] = _Part(first, tensor.nbytes, raw)
        else:
            self._parts[first] = _Part(first, tensor.nbytes, info.file, info.offset)
        return here

    def fill(self, to: Tensor, copier: Copier, after: Iterable[Any]) -> Future[Any]:
        """Read to a slot, in a thread; the result is the event that the last copy is done."""
        return self._disk.fill(to, list(self._parts.values()), copier, list(after))

    def lock(self, device: torch.device) -> None:
        """Do nothing: what is copied to a device lies in the buffers."""

    def check(self) -> None:
        """Raise a `CheckpointError` where a file was changed or removed."""
        self._disk.check(self._parts.values())

    def files(self) -> set[Path]:
        """Return the files that it is read from."""
        return self._disk.files(self._parts.values())

    @property
    def host_nbytes(self) -> int:
        """Bytes of what no file has."""
        return sum(p.nbytes for p in self._parts.values() if isinstance(p.source, Tensor))

    @property
    def disk_nbytes(self) -> int:
        """Bytes that are read from files."""
        return sum(p.nbytes for p in self._parts.values() if isinstance(p.source, Path))


class Disk:
    """The files, and buffers through which they reach slots, one slot after another."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._files: dict[Path, _File] = {}
        self._buffers: list[HostMemory] = []
        self._events: list[Any] = []  # Of each buffer: that the copy of its last part is done
        self._last: threading.Thread | None = None

    def place(self, tensor: Tensor) -> TensorInfo | None:
        """Return where a tensor lies, and open the file; None if that is not known."""
        _, info = self._places.get(tensor.data_ptr(), (None, None))
        if info is None or info.nbytes != tensor.nbytes:
            return None
        if info.file not in self._files:
            self._files[info.file] = _File(info.file)
        return info

    def check(self, parts: Iterable[_Part]) -> None:
        """Raise where a file of these parts was changed or removed."""
        for path in {part.source for part in parts if isinstance(part.source, Path)}:
            self._files[path].check()

    def files(self, parts: Iterable[_Part]) -> set[Path]:
        """Return the files of these parts, with their whole paths."""
        named = {part.source for part in parts if isinstance(part.source, Path)}
        return {self._files[path].path for path in named}

    def forget_places(self) -> None:
        """Forget where other tensors lie: their addresses may become another's."""
        self._places = {}

    def free(self) -> None:
        """Wait for what is under way, and free the buffers until a slot is filled again."""
        if self._last is not None:
            self._last.join()
        self._buffers, self._events, self._last = [], [], None

    def fill(self, to: Tensor, parts: list[_Part], copier: Copier, after: list[Any]) -> Future[Any]:
        """Start a thread that fills a slot; it ends with that, or with an exception."""
        done: Future[Any] = Future()
        before = self._last

        def work() -> None:
            if before is not None:
                before.join()
            try:
                event = self._fill(to, parts, copier, after)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the slot raises it
                done.set_exception(error)
            else:
                done.set_result(event)

        self._last = threading.Thread(target=work, name="moe_qlora reads experts")
        self._last.start()
        return done

    def _fill(self, to: Tensor, parts: list[_Part], copier: Copier, after: list[Any]) -> Any:
        files = self._files
        for part in parts:
            if isinstance(part.source, Path):
                files[part.source].expect(part.offset, part.nbytes)
        for start in range(0, len(to), BUFFER):
            stop = min(start + BUFFER, len(to))
            if len(self._buffers) < 2:
                memory = HostMemory(BUFFER, copier.device)
            else:
                memory = self._buffers.pop(0)
                copier.finish(self._events.pop(0))
            for part in parts:
                first, last = max(part.first, start), min(part.first + part.nbytes, stop)
                if first >= last:
                    continue
                skipped, here = first - part.first, memory.tensor(first - start, last - first)
                if isinstance(part.source, Tensor):
                    here.copy_(part.source[skipped : skipped + last - first])
                else:
                    files[part.source].read(here, part.offset + skipped)
            event = copier.copy(to[start:stop], memory.tensor(0, stop - start), after)
            self._buffers.append(memory)
            self._events.append(event)
        self.check(parts)  # What was read may be of another model else
        return event


class _File:
    """A file that is read for as long as the model is used."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # however the working directory changes
        with reading(path):
            self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        self._facts = _facts(os.fstat(self._handle))

    def check(self) -> None:
        """Raise a `CheckpointError` where another file, or none, has the name by now."""
        try:
            same = _facts(self.path.stat()) == self._facts
        except OSError:
            same = False
        if not same:
            raise CheckpointError(
                f"{self.path} was changed or removed since the model was loaded with "
                "enabled(offload='disk'), which reads experts from there in each step: load the "
                "model again, and leave the folder alone while it is used."
            )

    def expect(self, offset: int, nbytes: int) -> None:
        """Ask the system to read ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, to: Tensor, offset: int) -> None:
        """Fill a tensor with the file's bytes from `offset` on."""
        view = memoryview(cast(Any, to.numpy()))
        while view:
            with reading(self.path):
                count = os.preadv(self._handle, [view], offset)
            if not count:
                self.check()
                raise CheckpointError(f"{self.path} ends at byte {offset}: copy the file again.")
            view, offset = view[count:], offset + count


def _facts(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
