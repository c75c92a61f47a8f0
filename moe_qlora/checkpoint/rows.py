"""Rows of a 16-bit checkpoint's parameters by name, converted as transformers loads them."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from ..errors import CheckpointError
from .base import PlainBase


class CheckpointRows:
    """Reads rows of the first dimension of parameters and buffers, and no others.

    What transformers converts as a whole only is read as a whole; the last such parameter is kept
    for its next rows.
    """

    def __init__(
        self,
        base: PlainBase,
        aliases: Mapping[str, tuple[str, ...]],
        transposed: Container[str] = (),
    ) -> None:
        """`aliases` are all names of tied parameters by each of them.

        `transposed` are weights that a packed layer holds the other way round than the checkpoint.
        """
        self._base, self._transposed = base, transposed
        self._last: tuple[str, Tensor] | None = None
        on_disk = base.layout.by_name.keys()
        names = {*on_disk, *aliases}
        stored = {n: next((a for a in (n, *aliases.get(n, ())) if a in on_disk), "") for n in names}
        self._stored = {name: other for name, other in stored.items() if other}

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows `[start, stop)`, on the CPU, in the dtype on disk."""
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self._base.folder} has no tensor for {name}.")
        group = self._base.layout.by_name[stored]
        shape = group.shapes[stored]
        if group.unit and shape and name not in self._transposed:
            return self._base.parameters(group, start, stop)[stored]
        if self._last is None or self._last[0] != stored:
            whole = self._base.parameters(group, 0, None)[stored]
            if name in self._transposed:
                whole = whole.T
            self._last = stored, whole.reshape(1) if not shape else whole
        return self._last[1][start:stop]
