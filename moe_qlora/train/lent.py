"""Memory that graphs write, lent to their callers instead of copied.

Copies took 74 of 4,100 us a layer (48 layers of Qwen3-30B-A3B, 4,096 tokens, H100). So results are
lent: as tensors at the same address, each with a storage of its own, which tells whether anybody
still references it. Nothing that is referenced is overwritten:

    outputs      stay until the layer's next forward; another layer keeps its input where it lies.
                 Who still has one by then lets the layer run without graphs
    gradients    of hidden states stay until the layer before has used them; likewise
                 of weights stay until the next forward, before which `settle` gives those that are
                 still used, as where gradients accumulate, memory of their own

Only layers that keep something lend: of these, one forward at a time waits for its backward
(`passes.py`), so that no graph runs again while a backward still adds up what it has returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]


class Lent:
    """A contiguous tensor at an address that graphs write, and the one that it was last lent as."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._bytes = tensor.view(torch.uint8).flatten()
        self.last: StorageWeakRef | None = None

    def lend(self) -> Tensor:
        """Return a new tensor at this address, with a storage of its own."""
        source = self.tensor
        # A capsule: given a tensor, torch looks for a stream to wait for, three times as long.
        storage = from_dlpack(to_dlpack(self._bytes)).untyped_storage()
        lent = torch.empty(0, dtype=source.dtype, device=source.device)
        lent.set_(storage, 0, source.shape, source.stride())
        self.last = StorageWeakRef(storage)
        return lent

    @property
    def is_free(self) -> bool:
        """Whether no alias of it is alive."""
        return self.last is None or self.last.expired()

    def is_lent_as(self, tensor: Tensor) -> bool:
        """Whether a tensor is what it is lent as now, and all of it."""
        return not self.is_free and is_at(tensor, self.tensor)


def is_at(tensor: Tensor, place: Tensor) -> bool:
    """Whether a tensor lies where another does, element by element."""
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.dtype == place.dtype
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
    )


class Lender:
    """What the graphs of a model lend."""

    def __init__(self) -> None:
        self.out: Lent | None = None  # The output of the layer that ran last
        self.grad: Lent | None = None  # The gradient of hidden states that was computed last
        # Holds the memory of the one recorded last until the layer that reads it is recorded
        self.recorded: Tensor | None = None
        self._grads: list[Lent] = []
        # Of trained weights, by layer: the weights and their gradients
        self._of_weights: list[tuple[Sequence[nn.Parameter], Sequence[Lent]]] = []
        self._storages: list[StorageWeakRef] = []  # Of these gradients

    def lend_grad(self, lent: Lent) -> Tensor:
        """Lend a gradient of hidden states."""
        self.grad = lent
        self._grads.append(lent)
        return lent.lend()

    def lend_grads_of(
        self, weights: Sequence[nn.Parameter], several: Sequence[Lent]
    ) -> list[Tensor]:
        """Lend the gradients of a layer's trained weights."""
        self._of_weights.append((weights, several))
        grads = [lent.lend() for lent in several]
        self._storages += [lent.last for lent in several if lent.last is not None]
        return grads

    def has_lent_other_than(self, grad: Tensor) -> bool:
        """Whether a gradient of hidden states is used, besides the one that a layer was given."""
        self._grads = [lent for lent in self._grads if not lent.is_free]
        return any(lent.tensor.data_ptr() != grad.data_ptr() for lent in self._grads)

    def settle(self) -> bool:
        """Give weights' gradients that are in use memory of their own; return whether none is left.

        Graphs may run then.
        """
        if not self._are_free():
            for weights, several in self._of_weights:
                for weight, lent in zip(weights, several, strict=True):
                    grad = weight.grad
                    if grad is not None and lent.is_lent_as(grad):
                        grad.data = grad.clone()
                    del grad
            if not self._are_free():
                return False
        self._of_weights, self._storages = [], []
        return all(lent.is_free for lent in self._grads)

    def _are_free(self) -> bool:
        # In C, since a step's first layer asks for 600 of them while the GPU waits
        known = [storage.cdata for storage in self._storages]
        return all(map(torch.UntypedStorage._expired, known))
