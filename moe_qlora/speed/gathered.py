"""Router logits that transformers gathers from layers: outputs of a recorded call like others.

During a model's forward with `output_router_logits=True`, hooks on the routers append their logits
to a list, for the loss that balances experts. A replay calls no hooks. So a layer is recorded under
a list of its own (`gathering`), and each replay adds its own to the model's (`delivered`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers.utils import output_capturing

from .recording import ObstacleError

_LOGITS = "router_logits"


def asked() -> bool:
    """Return whether router logits are gathered now.

    Raises:
        ObstacleError: Other outputs of modules are gathered.
    """
    others = set(output_capturing._active_collector.get() or ()) - {_LOGITS}
    if others:
        raise ObstacleError(
            f"outputs of layers are gathered ({', '.join(sorted(others))}), of which router logits "
            "alone can be recorded"
        )
    return bool(output_capturing._active_collector.get())


@contextmanager
def gathering(wanted: bool) -> Iterator[list[Tensor]]:
    """Gather router logits of the block in the list, if they are wanted, and nowhere else."""
    found: list[Tensor] = []
    token = output_capturing._active_collector.set({_LOGITS: found} if wanted else None)
    try:
        yield found
    finally:
        output_capturing._active_collector.reset(token)


def delivered(outs: Sequence[Tensor]) -> Tensor:
    """Return a layer's hidden states; add its router logits to those of the model's forward."""
    gathered = output_capturing._active_collector.get()
    if gathered:  # Not in a recomputation
        gathered[_LOGITS].extend(outs[1:])
    return outs[0]
