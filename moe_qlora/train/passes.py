"""The order of forwards and backwards in training, in which graphs of layers may run."""

from __future__ import annotations

import weakref
from typing import Any


class Passes:
    """The model's forward passes in training: whose kept tensors graphs may not overwrite now.

    A recorded call waits for its backward as long as what `pending` returned for it lives. The
    backward of one that keeps nothing writes to the graphs' memory too: where later calls keep
    their tensors.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = -1  # Place of the layer that ran last
        # Before this pass: whether a call waited for its backward, and whether one kept tensors
        self._waited, self._kept = False, False
        self._alive: weakref.WeakSet[_Pending] = weakref.WeakSet()
        self._recorded: weakref.WeakSet[Any] = weakref.WeakSet()  # Calls, in this pass

    @property
    def is_waiting(self) -> bool:
        """Whether a backward of a recorded call is to come."""
        return bool(self._alive)

    @property
    def is_kept(self) -> bool:
        """Whether a backward still needs what a recorded call keeps."""
        return any(token.call.keeps for token in self._alive)

    @property
    def is_replaying(self) -> bool:
        """Whether a call that was recorded in an earlier pass keeps tensors."""
        return any(token.call.keeps and token.call not in self._recorded for token in self._alive)

    def is_outdated(self, call: Any) -> bool:
        """Whether a call writes to memory in which calls that this pass recorded keep tensors.

        When these were recorded, an earlier call's memory was free to them.
        """
        return call not in self._recorded and any(
            other.keeps and other.pool == call.pool for other in self._recorded
        )

    def enters(self, place: int, *, keeps: bool) -> bool:
        """Note that the layer of this place runs; return whether its graphs may run now."""
        if place <= self._last:  # another pass
            self.count += 1
            self._waited, self._kept = self.is_waiting, self.is_kept
            self._recorded = weakref.WeakSet()
        self._last = place
        return not (self._waited if keeps else self._kept)

    def records(self, call: Any) -> None:
        """Note that a call was recorded in this pass."""
        self._recorded.add(call)

    def pending(self, call: Any) -> object:
        """Return an object that lives as long as a call waits for its backward."""
        token = _Pending(call)
        self._alive.add(token)
        return token


class _Pending:
    """Lives as long as a call waits for its backward."""

    def __init__(self, call: Any) -> None:
        self.call = call
