"""One training step of a real model, with what each of its blocks allocates.

As `meta_step.py` on meta, but nothing is faked: on CUDA, torch's allocator says what was allocated,
compiled code and foreign kernels included; on a CPU, tensors are counted, and everything runs
eagerly. Of decoder layers that differ in nothing but their place only the first and the last run.
Gradients, random numbers, and the mode of modules stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, first_line
from ..lora.targets import base_model
from .blocks import block_modules, blocks_of, packed_parts
from .budget import Activity
from .meta_model import alike
from .meta_step import loss_of, record_step
from .tracker import MemoryTracker, tensors_of

_HIDDEN = "hidden_states"

Loss = Callable[[Any, dict[str, Any]], Tensor]
"""(model, batch) -> the loss of the batch, a dict with `input_ids` and `labels` (batch, seq)."""


class MeasuredModel:
    """A model with its blocks, ready for measured steps.

    `slots` allocates the memory on the device of experts that lie in host memory, and returns it.
    """

    def __init__(self, model: Any, slots: Callable[[], Sequence[Tensor]] = tuple) -> None:
        self.model, self._slots = model, slots
        base: Any = base_model(model)
        self.base = base
        self.modules = block_modules(base)
        self.groups = alike(self.modules)
        parts = tuple(packed_parts(base))
        self.blocks = blocks_of(base, parts)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.itemsize = max((p.itemsize for p in self.trained), default=4)
        self.device = next(iter(self.trained), next(model.parameters())).device

    def step(self, batch: int, seq: int, *, loss: Loss | None = None) -> tuple[Activity, ...]:
        """Run one step; return what each block does, in running order.

        What layers are given is alive in their backward whether they need it or not, as where
        layers before them are computed again. `loss` computes the loss in place of the model.
        """
        vocabulary = self.base.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (batch, seq), generator=generator)
        if self.device.type == "cuda":
            self._run(ids, loss)  # For what kernels and libraries allocate once
            return self._run(ids, loss)
        # What a loop over experts allocates goes by the busiest: equal tokens have all in one.
        most = zip(self._run(ids, loss), self._run(torch.zeros_like(ids), loss), strict=True)
        return tuple(
            Activity(
                a.name,
                *map(max, (a.saved, a.forward, a.backward), (b.saved, b.forward, b.backward)),
            )
            for a, b in most
        )

    def _run(self, ids: Tensor, loss_of_batch: Loss | None) -> tuple[Activity, ...]:
        own = {block.name: self.itemsize * sum(block.trained) for block in self.blocks}
        ids, cuda = ids.to(self.device), self.device.type == "cuda"
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        statistics = (t for part in packed_parts(self.base) for t in part.weight.statistics)
        known = [*self.model.parameters(), *self.model.buffers(), *statistics, ids, anchor]
        known += self._slots()  # which may go afterwards
        tracker: Any = _Allocator(self.device) if cuda else MemoryTracker(known, grain=1)
        with ExitStack() as stack:
            stack.enter_context(_as_before(self.model, self.device))
            if not cuda:
                # What Dynamo sees first under such a mode, it would never compile.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(tracker)
            stack.enter_context(self._holding())
            loss = partial(_loss_of, self.model, ids, loss_of_batch)
            once = loss_of_batch is not None
            args = tracker, self.modules, self.groups, own, anchor, self.trained, loss
            return record_step(*args, once=once)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold what layers are given, as layers do that are computed again.

        That is masks and other arguments; and hidden states, but for those that a layer makes.
        """
        layers = [self.modules[block.name] for block in self.blocks if block.layer]
        held: list[Tensor] = []

        def hold(layer: nn.Module, args: Any, kwargs: Any) -> None:
            first = not held  # of those that run: a tower's may not
            named = {key: value for key, value in kwargs.items() if first or key != _HIDDEN}
            held.extend(tensors_of((args if first else args[1:], named)))

        with ExitStack() as hooks:
            for layer in layers:
                hook = layer.register_forward_pre_hook(hold, with_kwargs=True)
                hooks.callback(hook.remove)
            yield


def _loss_of(model: Any, ids: Tensor, loss_of_batch: Loss | None) -> Tensor:
    if loss_of_batch is None:
        try:
            return loss_of(model, ids, **_fused_head(base_model(model)))
        except AttributeError as error:  # A model without embeddings of tokens, say
            name = type(base_model(model)).__name__
            raise ConfigError(
                f"fit_memory measures a step of token ids, on which {name} does not run "
                f"({first_line(error)}): give loss=, a function that runs it on other inputs."
            ) from error
    found: Any = loss_of_batch(model, {"input_ids": ids, "labels": ids.clone()})
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"a tensor of shape {tuple(found.shape)}, requires_grad={found.requires_grad}"
        raise ConfigError(
            f"loss returned {what}; give a function of the model and a batch that returns one "
            "number with a gradient."
        )
    return found


def _fused_head(base: nn.Module) -> dict[str, bool]:
    """Return the argument by which TRL's trainers ask for their loss in chunks, if it is there."""
    for name in ("forward", "_old_forward"):  # The second inside of accelerate's hook
        forward = vars(base).get(name)
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames:
            return {"fused_lm_head": True}
    return {}


class _Allocator:
    """The same readings, of torch's allocator on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark()

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def mark(self) -> int:
        """Start a new section, and return the most that was allocated in the one before."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


@contextmanager
def _as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In this block, a model trains without gradients of before; then all is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
