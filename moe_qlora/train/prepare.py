"""`prepare_training`: everything that makes a step quicker, set in one call and taken off in one.

    1. Liger         its loss in chunks, or TRL's
    2. LayerGraphs   decoder layers compiled and recorded as CUDA graphs (train/graphs.py)
    3. fit_memory    what each decoder layer keeps for its backward (train/fit.py)

The order is that of what each one finds: `fit_memory` measures a step of the model as it will run,
with Liger's loss and compiled layers.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.integrations.fsdp import is_fsdp_enabled

from ..errors import ConfigError, check_numbers
from ..experts.backend import has_triton
from ..layout import base_model
from ..planning.step import Loss
from ..progress import reporting
from ..world import runs_distributed, world
from .flat_rows import flatten_rows, has_flat_rows
from .layers import decoder_layers, runner_of
from .liger import apply_liger, has_trls_loss
from .trainer_loop import copy_losses_early, quicken_walks

if TYPE_CHECKING:
    from .fit import Fit
    from .graphs import LayerGraphs

_log = logging.getLogger(__name__)

_PREPARED = "_moe_qlora_prepared"  # Entry of a model's `__dict__`: its `PreparedTraining`
_YOURS = (
    'Trainer\'s arguments are yours: optim="adamw_torch_fused", dataloader_num_workers=2, '
    "dataloader_prefetch_factor=2 and dataloader_pin_memory=True are the quick ones."
)
_MEASURES = "prepare_training compiles decoder layers and measures a step, up to a minute"
_COMPILED = "_compiled_call_impl"  # Attribute of a module that `compile()` sets


def prepare_training(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    memory: int | str | None = None,
    loss: Loss | None = None,
) -> PreparedTraining:
    """Make training steps of a model as fast as its device and memory allow.

    On CUDA this sets Liger's loss, compiles the decoder layers, records them as CUDA graphs if
    these fit, and keeps as many activations as fit; a part that is left out is a sentence in the
    result. On a CPU it calls `fit_memory` if `memory` is given. Losses and gradients stay the same
    up to rounding.

    Call it after `get_peft_model`, before the training loop, before or after a trainer is made. A
    second call replaces the first.

    Args:
        model: A transformers model, or a PEFT model around one.
        batch_size: Sequences in a micro-batch of one device. Longer or larger batches than promised
            compute layers again.
        seq_len: Tokens of the longest sequence; padding is not computed.
        memory: Bytes that the step may take on this device, or a string such as "24GiB"; None for
            what the device has free.
        loss: Computes the loss that `fit_memory` measures, where that is not the model's own.

    Returns:
        The settings: `str()` says them in at most seven lines, also logged at INFO. `remove()`, or
        the end of a `with` block, undoes them.

    Raises:
        ConfigError: The step does not fit into this memory, or an argument makes no sense; the
            model is as it was.
    """
    base = base_model(model)
    if (earlier := vars(base).get(_PREPARED)) is not None:
        earlier.remove()
    with ExitStack() as undo:
        check_numbers(batch_size=batch_size, seq_len=seq_len)
        on_cuda = _is_on_cuda(model)
        flat = flatten_rows(model, batch_size, seq_len, fixed=on_cuda)
        for rows in flat:
            undo.callback(rows.remove)
        prepared = PreparedTraining()
        if on_cuda:
            prepared._lines += [f"Prepared for batches of {batch_size} x {seq_len} tokens."]
            _quicken(prepared, model, undo)
        else:
            also = "; batches run as flat rows" if has_flat_rows(model) else ""
            prepared._lines += [f"prepare_training: this model is not on a CUDA device{also}."]
        if on_cuda or memory is not None:
            from .fit import fit_memory

            bar = on_cuda and sys.stderr.isatty()
            if on_cuda and not bar and world().is_first():
                sys.stderr.write(f"{_MEASURES}.\n")
            sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "memory": memory}
            with reporting(bar, _MEASURES, "Prepared", stderr=True, transient=True):
                prepared.fit = fit_memory(model, loss=loss, **sizes)
            undo.callback(prepared.fit.remove)
            if not prepared.fit.graphs_fit:
                prepared.graphs = None
                prepared._lines[-1] = "CUDA graphs: not used; a step with them does not fit."
            prepared._lines += [f"Memory: {prepared.fit}.", *([_YOURS] if on_cuda else [])]
        kept = [f"{type(rows.stack).__name__}: {rows.obstacle}" for rows in flat if rows.obstacle]
        if kept or not flat:
            kept = kept or ["this model has no decoder stack that takes input_ids and position_ids"]
            prepared._lines.insert(1, f"Rows: each in its own shape; {'; '.join(kept)}.")
        vars(base)[_PREPARED] = prepared
        undo.callback(vars(base).pop, _PREPARED, None)
        # FSDP2, here or by accelerate's settings, puts other parameters in the place of these
        if not (world().uses_fsdp(model) or (runs_distributed() and is_fsdp_enabled())):
            undo.callback(quicken_walks(model))
        prepared.push(undo.pop_all())
    _log.info("%s", prepared)
    return prepared


class PreparedTraining(ExitStack):
    """The settings of `prepare_training` on a model."""

    fit: Fit | None = None
    graphs: LayerGraphs | None = None  # None: no layer can be recorded

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self._lines = [*lines]

    def remove(self) -> None:
        """Undo all of it, the last first."""
        self.close()

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedTraining:
        """Return a result that undoes nothing: a copied model has no graphs."""
        return PreparedTraining(*self._lines)


def _quicken(prepared: PreparedTraining, model: nn.Module, undo: ExitStack) -> None:
    """Set all but `fit_memory` on a model on CUDA."""
    layers: list[Any] = [x for x in decoder_layers(model).values() if _is_on_cuda(x)]
    undo.callback(copy_losses_early(model).remove)
    base, said = base_model(model), "Loss: TRL's, in chunks."
    if not has_trls_loss(base):
        try:
            undo.enter_context(apply_liger(base))
            said = "Liger: loss."
        except ConfigError as error:
            said = f"Liger: not used; {error}; the loss stays the model's."
    prepared._lines.append(said)
    if (obstacle := _obstacle(layers)) is not None:
        prepared._lines.append(f"torch.compile, CUDA graphs: not used; {obstacle}.")
        return
    if compiles := has_triton():  # Torch's compile workers start while other code runs
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
    obstacle = None if has_flat_rows(model) else "batches keep their own shapes"
    of_all = f"{len(layers)} layers"
    compiled = of_all if compiles else "not used; Triton is not installed"
    graphs = f"not used; {obstacle}" if obstacle else f"{of_all}, recorded in the second step"
    prepared._lines += [f"torch.compile: {compiled}.", f"CUDA graphs: {graphs}."]
    if obstacle is None:
        from .graphs import LayerGraphs

        prepared.graphs = LayerGraphs(model, compiled=compiles)
        undo.callback(prepared.graphs.remove)
    else:
        for layer in layers if compiles else ():
            undo.callback(setattr, layer, _COMPILED, getattr(layer, _COMPILED, None))
            layer.compile()


def _is_on_cuda(module: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def _obstacle(layers: list[Any]) -> str | None:
    """Return why layers can be neither compiled nor recorded; None if they can be."""
    if not layers:
        return "this model has no decoder layers of transformers' class for checkpointing"
    if any("forward" in vars(layer) and runner_of(layer) is None for layer in layers):
        return "other code has replaced the layers' forward, as a device map or offloading does"
    return None
