"""`moe_qlora.fit_memory`: keep as many activations as the memory holds, and compute the rest again.

memory/measure.py   what each block allocates in a step, for each level, on this very model
memory/choice.py    what each decoder layer keeps: arithmetic, which `plan` prints too
memory/hosting.py   what experts in host memory free, and what their copies cost
fit_arguments.py    checks what it is given
first_steps.py      compares the plan with the first steps
fitted.py           a layer that keeps what was chosen
hosted.py           experts that lie in host memory, and come to the device
here                measures, chooses, sets it, checks it against the first steps, and undoes it
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError, check_numbers
from ..layout import human_bytes
from ..lora.targets import base_model
from ..memory import levels
from ..memory.attention import attended
from ..memory.budget import COMPONENTS, Activity, Peak, Settings, StepBudget
from ..memory.choice import (
    ALL_KEPT,
    MORE_MEMORY,
    Choices,
    Ladder,
    LayerChoice,
    counted,
    sentence,
)
from ..memory.devices import FRAGMENTATION
from ..memory.hosting import Pace
from ..memory.measure import Loss, MeasuredModel
from .first_steps import FirstSteps, expandable
from .fit_arguments import (
    check_loss,
    check_time,
    device_of,
    layers_of,
    limit_of,
    meant,
)
from .fitted import (
    FittedLayer,
    Overrides,
    RunsLevels,
    fitted,
    refuse_emptied,
    release_copy,
    runs_recorded,
)
from .flat_rows import RowMemory, has_flat_rows, limit_lengths
from .hosted import HostedExperts, pace

_log = logging.getLogger(__name__)

_OF_GRAPHS = 256 << 20
"""Bytes of libraries' workspaces on the stream of recordings, and of buffers that graphs share."""
_GAPS_OF_EXPANDABLE = 0.02
"""`FRAGMENTATION` where torch's allocator has expandable segments."""


def fit_memory(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    memory: int | str | None = None,
    padded: bool | None = None,
    loss: Loss | None = None,
) -> Fit:
    """Keep as many activations as the memory holds, and compute the rest again in backward.

    A step then is as fast as this memory allows. For each decoder layer it decides whether to keep
    all that backward needs, what the experts save, also what attention or Linear layers save, or
    nothing but the layer's input. It measures a step of this model for that (two layers of each
    kind run, a few times), so call it when the model is complete: after `get_peft_model`, Liger,
    and `graph_layers(compiled=True)` or `layer.compile()`, before the training loop. Gradients are
    those of the same kernels.

    Of experts in host memory (`offload_experts`, `enabled(offload=True)`) it brings those of the
    first layers to the device, where that saves more time than activations in their place: copies
    that computing hides cost nothing. On CUDA it measures a copy for that. Experts that are on the
    device stay there; if nothing fits, the error says what `offload_experts` would free.

    What is fitted wins over gradient checkpointing, whose enabling does nothing until `remove`.
    Batches of more or longer sequences compute their layers again, and so do layers that a step of
    text does not reach, as those of a vision tower, whose memory is not planned. A training step
    writes no key-value cache; where it is given one that holds tokens, layers keep all. The
    optimizer is taken to be AdamW with two states in the trained weights' dtype.

    A step of whole sequences is measured. Without `prepare_training`, whose rows have no padding,
    attention to padded batches often takes more memory (up to a third more in a step, torch's sdpa,
    tiny models on a CPU).

    With torch.distributed running, every rank has to call it, and all ranks decide alike.

    Args:
        model: A transformers model, or a PEFT model around one, on one device.
        batch_size: Sequences in a micro-batch, of one rank.
        seq_len: Tokens in the longest sequence.
        memory: Bytes that tensors may take on the device, or a text such as "24GiB"; None for what
            the CUDA device has free, and what torch has reserved there.
        padded: Ignored, and deprecated.
        loss: What computes the loss, where that is not the model's own, and so takes other memory
            (the logits of all tokens in DPO, say): a function of the model and a batch, which is a
            dict with `input_ids` and `labels`, `(batch_size, seq_len)` int64. It has one forward
            with gradients, and beside it any without.

    Returns:
        What was chosen: `str()` is one sentence, and `remove()`, or the end of a `with` block,
        undoes it, and moves experts back to host memory.

    Raises:
        ConfigError: The memory is too small even where every layer is computed again, here or on
            another rank; or it is not given for a model on a CPU; or the model has no decoder
            layers, trains nothing, is sharded, or lies on meta or several devices; or `loss` is no
            function that returns a number with a gradient, of one forward with gradients.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    layers, device = layers_of(model), device_of(model)
    check_numbers(batch_size=batch_size, seq_len=seq_len)
    check_loss(loss)
    if padded is not None:
        text = "fit_memory: padded is ignored and will go; leave it out."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    if found := [each for layer in layers.values() if (each := fitted(layer)) is not None]:
        if not all(each.is_copy for each in found):
            raise ConfigError(
                "fit_memory has been called on this model before: call remove() on what it "
                "returned."
            )
        for each in found:  # of a model that this one was copied from
            each.remove()
        release_copy(model)
    fit = Fit(model, layers, device, (batch_size, seq_len), loss)
    try:
        fit._choose(batch_size, seq_len, memory)
    except BaseException:
        fit.remove()
        raise
    _log.info("fit_memory: %s.", fit)
    return fit


class Fit:
    """What the decoder layers of a model keep between forward and backward.

    Attributes:
        layers: For each decoder layer `.name`, `.activations` ("keep", "part" or "recompute") and
            `.experts` ("device" or "host").
        peak: Bytes of tensors in a step, as planned.
        memory: Bytes that they may take.
        gain: How many times as fast a step is as one that computes all layers again, about; of a
            model with experts in host memory, as one that copies all of these, too.
    """

    def __init__(
        self,
        model: Any,
        layers: dict[str, nn.Module],
        device: torch.device,
        promised: tuple[int, int],
        loss: Loss | None,
    ) -> None:
        self.memory, self.peak, self.gain = 0, 0, 1.0
        self._limit = 0  # `memory` without what the first steps took beside the plan
        self.layers: tuple[LayerChoice, ...] = ()
        self._model, self._modules, self._device = model, layers, device
        warned: set[str] = set()
        # Layers then see one row of all tokens.
        promised = (1, math.prod(promised)) if has_flat_rows(model) else promised
        self._fitted = {
            name: FittedLayer(layer, levels.RECOMPUTE, promised, warned)
            for name, layer in layers.items()
        }
        emptied: weakref.WeakSet[Any] = weakref.WeakSet()
        for layer in self._fitted.values():
            layer.emptied = emptied
        trunk = getattr(base_model(model), "base_model", base_model(model))
        self._refusal = trunk.register_forward_pre_hook(
            partial(refuse_emptied, emptied), with_kwargs=True
        )
        self._overrides = Overrides(model, layers.values())
        self._hook: Any = None
        self._loss = loss  # Of a measured step
        self._given_back: Any = None  # The hook of `_give_back_once`
        self._activities: dict[str, tuple[Activity, ...]] = {}
        self._sizes = 0, 0  # Sequences, and tokens in each
        self._experts = HostedExperts(base_model(model))

    def _choose(self, batch: int, seq: int, memory: int | str | None) -> None:
        paced = pace(self._device) if self._experts.offload is not None else Pace()
        paced = replace(paced, link=float(self._least(lambda: int(paced.link))))

        def keeps_all() -> int:
            self.memory = self._limit = limit_of(memory, self._device)
            check_time(batch, seq, self._device)
            measured = self._measured = MeasuredModel(self._model, self._experts.slot_memory)
            settings = Settings(batch=batch, seq=seq, foreach=self._device.type == "cuda")
            self._budget_of = partial(_budget, measured, settings)
            self._sizes = batch, seq
            self._measure_once(levels.RECOMPUTE)
            ran = {activity.name for activity in self._activities[levels.RECOMPUTE]}
            names = tuple(name for name in self._fitted if name in ran)
            if not names:
                raise ConfigError(
                    f"fit_memory: no decoder layer of {type(measured.base).__name__} runs in a "
                    "step of text, which is what is measured."
                )
            blocks = [block for block in measured.blocks if block.name in ran]
            could = self._could = self._experts.hosting(blocks, batch * seq, paced)
            ladder = Ladder.of(attended(measured.base.config, seq))
            self._choices = Choices(names, ladder, could if could.most else None)
            self._measure_once(ALL_KEPT)
            self._resident = _resident(measured, self._device, could.freed(could.most))
            return int(self._fits(ALL_KEPT, self.memory, last=True))

        def place() -> int:
            return self._chosen(self.memory)

        # Where all can be kept, which torch.compile takes half a minute for, that is all to know.
        every = self._least(keeps_all)
        self._set(len(self._choices.path) - 1 if every else self._least(place))
        if self._device.type == "cuda":
            self._hook = self._model.register_forward_pre_hook(FirstSteps(self))

    def _chosen(self, memory: int) -> int:
        """Return the place on the path that so many bytes can hold.

        torch.compile takes long for each level: where all layers can be on one, those below it
        need no measurement, and where they cannot, those above it.
        """
        rising = self._choices.ladder.levels
        lowest, highest = 0, len(rising) - 1
        fits = self._fits(levels.RECOMPUTE, memory)
        if fits and self._fits(levels.RECOMPUTE, memory, last=True):
            self._measure_once(levels.KEEP)
        else:
            highest = 0
        while highest - lowest > 1:
            middle = (lowest + highest) // 2
            self._measure_once(rising[middle])
            if self._fits(rising[middle], memory):
                lowest = middle
            else:
                highest = middle
        choice = self._choices.choose(
            self._known,
            lambda choice: self._needed(choice.activities, self._could.freed(choice.host)),
            memory,
            rising[highest],
            meant(memory) + (MORE_MEMORY if fits else self._advice(memory)),
            [self._needed_by_all(ALL_KEPT, last=True)],
        )
        return self._choices.path.index((choice.host, choice.steps))

    def _advice(self, memory: int) -> str:
        could, least = self._could, tuple(self._activities[levels.RECOMPUTE])
        every = could.freed(len(could.layers))
        more = every - could.freed(could.most)
        if more <= 0 or self._needed(least, every) > memory:
            return MORE_MEMORY
        return (
            f"moe_qlora.offload_experts(model) would free {more} bytes ({human_bytes(more)}), and "
            f"the step would fit. {MORE_MEMORY}"
        )

    def _fits(self, level: str, memory: int, last: bool = False) -> bool:
        """Whether all layers can be on a level, at the first place on the path or the last."""
        return self._needed_by_all(level, last=last) <= memory

    def _needed_by_all(self, level: str, *, last: bool = False) -> int:
        """Return the bytes that a step needs with all layers on a level, at such a place."""
        level_of_all = levels.KEEP if level == ALL_KEPT else level
        steps = self._choices.ladder.levels.index(level_of_all) * len(self._choices.layers)
        hosts = [host for host, done in self._choices.path if done == steps]
        freed = self._could.freed(hosts[-1 if last else 0])
        return self._needed(tuple(self._activities[level]), freed)

    @property
    def _known(self) -> dict[str, tuple[Activity, ...]]:
        """What blocks do on each level: on one that was not measured, as on the one above."""
        known, above = dict(self._activities), self._activities[ALL_KEPT]
        for level in reversed(self._choices.ladder.levels):
            above = known.setdefault(level, above)
        return known

    def _least(self, find: Callable[[], int]) -> int:
        """Return the least number that any rank finds; where one fails, all do."""
        found, failed = -1, None
        try:
            found = find()
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one's number
            failed = error
        least = _least(found, self._device)
        if failed is not None:
            raise failed
        if least < 0:
            raise ConfigError("fit_memory failed on another rank, whose error says why.")
        return least

    def _measure_once(self, name: str) -> None:
        if name in self._activities:
            return
        (batch, seq), level = self._sizes, levels.KEEP if name == ALL_KEPT else name
        for layer in self._fitted.values():
            layer.level, layer.measures = level, True
        try:
            holds = name == levels.KEEP
            with _trainers_autocast(self._measured):
                done = self._measured.step(batch, seq, holds=holds, loss=self._loss)
        except torch.cuda.OutOfMemoryError:
            if level == levels.RECOMPUTE:
                raise ConfigError(
                    f"batch_size={batch} of seq_len={seq} tokens ran out of memory on "
                    f"{self._device} while two layers of each kind ran. Take a smaller batch_size "
                    "or seq_len; Liger's loss (use_liger_kernel=True) needs no logits of all."
                ) from None
            # As much as no memory holds, so that no layer is on this level
            below = self._activities[levels.RECOMPUTE]
            done = tuple(Activity(a.name, 1 << 60, 1 << 60, 1 << 60) for a in below)
        finally:
            for layer in self._fitted.values():
                layer.measures = False
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        self._activities[name] = done
        sizes = {a.name: (a.saved, a.forward, a.backward) for a in done}
        _log.debug("fit_memory: %s: saved, forward, backward: %s", name, sizes)

    def _needed(self, activities: tuple[Activity, ...], freed: int = 0) -> int:
        """Return the bytes that a step needs, of which experts in host memory free some."""
        planned = self._budget_of(activities)
        peak = self._resident + planned.nbytes
        if self._is_recorded and self._device.type == "cuda":
            peak = max(peak, self._with_graphs(activities, planned))
        return self._with_gaps(peak - freed)

    def _with_gaps(self, nbytes: int) -> int:
        return int(nbytes * (1 + self._gaps)) if self._device.type == "cuda" else nbytes

    @cached_property
    def _gaps(self) -> float:
        """The part of the peak that gaps between tensors take, by the allocator's segments."""
        return _GAPS_OF_EXPANDABLE if expandable() else FRAGMENTATION

    @property
    def _is_recorded(self) -> bool:
        return any(map(runs_recorded, self._modules.values()))

    def _with_graphs(self, activities: tuple[Activity, ...], planned: Peak) -> int:
        """Return the bytes of a step whose layers have a memory pool of their own.

        What layers keep and work with is not shared with what the loss works with, nor with
        gradients, which come as activations go, and with one layer that runs to be recorded.
        """
        always = sum(planned.parts[name] for name in COMPONENTS[: COMPONENTS.index("gradients")])
        others = self._work(activities, of_layers=False)
        gradients = sum(parameter.nbytes for parameter in self._measured.trained)
        pool = self._pool(activities) + _OF_GRAPHS
        once = self._work(activities, of_layers=True)
        return self._resident + always + pool + max(others, gradients + once)

    def _pool(self, activities: tuple[Activity, ...]) -> int:
        return sum(a.saved for a in activities) + self._work(activities, of_layers=True)

    def _work(self, activities: tuple[Activity, ...], *, of_layers: bool) -> int:
        """Return the most bytes that one block works with, of decoder layers or of the others."""
        work = [
            max(a.forward, a.backward) - a.saved
            for a in activities
            if (a.name in self._fitted) is of_layers
        ]
        return max(work, default=0)

    def _set(self, place: int) -> None:
        self._place = place
        choice = self._choices.at(self._choices.path[place], self._known)
        freed = self._could.freed(choice.host)
        self.layers = choice.layers(self._choices.hosting)
        self.peak = self._resident + self._budget_of(choice.activities).nbytes - freed
        self._needs = self._needed(choice.activities, freed)
        self.gain = self._choices.gain(self._known, choice)
        self._saved = self._choices.saved_by(choice)
        # A batch of another shape may run while memory of graphs stays reserved.
        pool = self._pool(choice.activities)
        both = self._needs + self._with_gaps(pool)
        for name, layer in self._fitted.items():
            layer.level = choice.levels.get(name, levels.RECOMPUTE)
            layer.beside = both <= self._limit
        self._experts.hold(choice.host)
        kept = sum(a.saved for a in self._activities[levels.RECOMPUTE] if a.name in self._fitted)
        room = 1 + (self._limit - self._needs) / pool
        limit_lengths(self._model, RowMemory(room, kept / pool))

    def _keep_less(self, excess: int) -> None:
        """Choose anew where steps take so many bytes more than was planned."""
        self._forget_recordings()
        self._limit = self.memory - excess
        try:
            place = self._chosen(self._limit)
        except ConfigError:
            place = 0
        self._set(min(place, self._place))

    def _forget_recordings(self) -> None:
        for layer in self._modules.values():
            if isinstance(runs := getattr(layer.forward, "__self__", None), RunsLevels):
                runs.forget()
        gc.collect()  # Graphs, whose memory would stay reserved beside that of the next ones
        torch.cuda.empty_cache()

    def remove(self) -> None:
        """Let the layers run as before."""
        for hook in (self._hook, self._given_back, self._refusal):
            if hook is not None:
                hook.remove()
        self._hook = self._given_back = None
        for layer in self._fitted.values():
            layer.remove()
        self._overrides.remove()
        self._experts.restore()

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        counts = counted(self.layers)
        hosting = self._choices.hosting
        return sentence(counts, self.peak, self.memory, self.gain, hosting, self._saved)


def _resident(measured: MeasuredModel, device: torch.device, freed: int) -> int:
    """Return the bytes on a device that `_budget` does not count: other tensors, workspaces.

    `freed` are those that it does not hold of experts in host memory.
    """
    if device.type != "cuda":  # AdamW counts its steps in a float32 tensor for each weight
        return torch.float32.itemsize * len(measured.trained)
    torch.cuda.synchronize(device)
    budget = StepBudget([measured.blocks], (), Settings(), measured.itemsize, library=0)
    own = (*COMPONENTS[:4], "adapters")
    counted_bytes = sum(size for name, size in budget.peak().parts.items() if name in own)
    return torch.cuda.memory_allocated(device) - (counted_bytes - freed)


def _trainers_autocast(measured: MeasuredModel) -> Any:
    """Return the autocast that steps will run in, as far as it is known.

    Layers are compiled for it: else they would be compiled again in the first step.
    """
    device, dtype = measured.device, getattr(measured.base, "dtype", None)
    if device.type != "cuda" or torch.is_autocast_enabled(device.type):
        return nullcontext()
    accelerate = sys.modules.get("accelerate.state")  # Imported, if there is a trainer
    states = {} if accelerate is None else accelerate.AcceleratorState._shared_state
    known = str(states.get("_mixed_precision"))
    if known == "None" and any(p.dtype == torch.float32 for p in measured.trained):
        known = str(dtype)  # Adapters in float32, as PEFT makes them, are for autocast
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "torch.bfloat16": torch.bfloat16}
    return torch.autocast(device.type, named[known]) if known in named else nullcontext()


def _budget(measured: MeasuredModel, settings: Settings, activities: tuple[Activity, ...]) -> Peak:
    budget = StepBudget(
        [[block] for block in measured.blocks], activities, settings, measured.itemsize, library=0
    )
    return budget.peak()


def _least(steps: int, device: torch.device) -> int:
    """Return the fewest steps that any rank has chosen."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return steps
    on = device if dist.get_backend() == "nccl" else torch.device("cpu")
    least = torch.tensor(steps, device=on)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)
