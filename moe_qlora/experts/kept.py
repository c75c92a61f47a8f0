"""Tensors of the experts that a checkpoint saves, so that its recomputation need not make them.

torch's selective checkpointing saves outputs of operators; tensors that an `autograd.Function`
saves, or that Triton kernels write, are computed again. Here an experts forward hands its tensors
over in the first forward, and gets them back in the recomputation. Compiled code saves by operator.
"""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

# Aliases of tensors, and their versions
_Kept = tuple[tuple[Tensor, ...], list[int]]


class _Active(threading.local):
    keeps: deque[_Kept] | None = None  # To hand tensors over to
    returns: deque[_Kept] | None = None  # To take tensors from


_active = _Active()


def kept_tensors() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return a checkpoint's `context_fn`: the first recomputation pops what was saved."""
    held: deque[_Kept] = deque()
    return _As(held, None), _As(None, held)


class _As:
    def __init__(self, keeps: deque[_Kept] | None, returns: deque[_Kept] | None) -> None:
        self.state = keeps, returns
        self.before: list[Any] = []

    def __enter__(self) -> None:
        # Autograd recomputes in a thread of its own, so each thread has its state.
        self.before.append((_active.keeps, _active.returns))
        _active.keeps, _active.returns = self.state

    def __exit__(self, *_: object) -> None:
        _active.keeps, _active.returns = self.before.pop()
        if (left := self.state[1]) is not None:
            left.clear()  # of a recomputation that ended early; the next one starts at the first


def save(tensors: Sequence[Tensor]) -> None:
    """Hand tensors over in a checkpoint's forward that keeps them; else do nothing."""
    if _active.keeps is not None:
        aliases = tuple(tensor.detach() for tensor in tensors)
        _active.keeps.append((aliases, _versions(aliases)))


def pop_saved() -> tuple[Tensor, ...] | None:
    """Return the tensors that the same call handed over, once; None where one was changed since."""
    if not _active.returns:
        return None
    tensors, versions = _active.returns.popleft()
    return tensors if _versions(tensors) == versions else None


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
