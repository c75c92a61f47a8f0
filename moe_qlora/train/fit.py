"""`moe_qlora.fit_memory`: keep as many activations as the memory holds, and compute the rest again.

It measures what each block allocates on each of three levels, on this very model
(planning/measure.py), chooses by arithmetic that `plan` prints too (planning/choice.py,
planning/hosting.py), and sets it on the layers (layers.py).
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError, check_numbers
from ..layout import human_bytes, parse_bytes
from ..lora.targets import base_model
from ..packing.decoders import PackedList
from ..planning import levels
from ..planning.blocks import slot_nbytes
from ..planning.budget import COMPONENTS, Activity, Peak, Settings, StepBudget
from ..planning.choice import MORE_MEMORY, Choices, Ladder, LayerChoice, counted, sentence
from ..planning.devices import FRAGMENTATION, gpu_of_device, pace_of
from ..planning.hosting import ExpertLayer, Hosting, Pace
from ..planning.measure import Loss, MeasuredModel
from .flat_rows import RowMemory, has_flat_rows, limit_lengths
from .layers import LayerRunner, decoder_layers, runner_of
from .offload import expert_groups, held_tensors, offload_of, tied_lists

_log = logging.getLogger(__name__)

_OF_GRAPHS = 256 << 20  # Libraries' workspaces on the stream of recordings, and shared buffers
_GAPS_OF_EXPANDABLE = 0.02  # `FRAGMENTATION` where torch's allocator has expandable segments


def fit_memory(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    memory: int | str | None = None,
    loss: Loss | None = None,
) -> Fit:
    """Keep as many activations as the memory holds, and compute the rest again in backward.

    A step then is as fast as this memory allows. Each decoder layer keeps all that backward needs,
    a part (what the experts and attention save; in long sequences attention alone), or nothing but
    its input. Steps of this model are measured for that, so call it when the model is complete:
    after `get_peft_model`, Liger and `layer.compile()`, before the training loop. Gradients are
    those of the same kernels.

    Of experts in host memory (`offload_experts`, `enabled(offload=True)`) it brings those of the
    first layers to the device, where that saves more time than activations in their place. If
    nothing fits, the error says what `offload_experts` would free.

    Gradient checkpointing does nothing until `remove`. Batches of more or longer sequences compute
    their layers again, and so do layers that a step of text does not reach, as those of a vision
    tower, whose memory is not planned. A training step writes no key-value cache; where it is given
    one that holds tokens, layers keep all. The optimizer is taken to be AdamW with two states in
    the trained weights' dtype: give less `memory` for others. Without `prepare_training`, attention
    to padded batches may take more memory than is measured.

    With torch.distributed running, every rank has to call it, and all ranks decide alike.

    Args:
        model: A transformers model, or a PEFT model around one, on one device.
        batch_size: Sequences in a micro-batch, of one rank.
        seq_len: Tokens in the longest sequence.
        memory: Bytes that tensors may take on the device, or a text such as "24GiB"; None for what
            the CUDA device has free, and what torch has reserved there.
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
    base = base_model(model)
    if not (layers := decoder_layers(base)):
        raise ConfigError(
            f"fit_memory: {type(base).__name__} has no decoder layers that transformers can "
            "compute again (GradientCheckpointingLayer), so that there is nothing to decide."
        )
    device = _device_of(model)
    check_numbers(batch_size=batch_size, seq_len=seq_len)
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r}; give a function of the model and a batch, or None.")
    if any((runner := runner_of(layer)) and runner.level for layer in layers.values()):
        raise ConfigError(
            "fit_memory has been called on this model before: call remove() on what it returned."
        )
    fit = Fit(model, layers, device, (batch_size, seq_len), loss)
    try:
        fit._choose(memory)
    except BaseException:
        fit.remove()
        raise
    _log.info("fit_memory: %s.", fit)
    return fit


class Fit:
    """The activations that decoder layers keep between forward and backward.

    Attributes:
        layers: For each decoder layer `.name`, `.activations` ("keep", "part" or "recompute") and
            `.experts` ("device" or "host").
        peak: Bytes of tensors in a step, as planned.
        memory: Bytes that they may take.
        gain: How many times as fast a step is as one that computes all layers again, about; of a
            model with experts in host memory, as one that copies all of these, too.
    """

    def __init__(
        self, model: Any, layers: Any, device: torch.device, sizes: tuple[int, int], loss: Any
    ) -> None:
        self.memory, self.peak, self.gain = 0, 0, 1.0
        self.layers: tuple[LayerChoice, ...] = ()
        self._model, self._device, self._loss = model, device, loss
        self._sizes = sizes  # Sequences, and tokens in each
        self._activities: dict[str, tuple[Activity, ...]] = {}
        self._ran = False  # Whether a step has begun
        self._undo = ExitStack()
        base = base_model(model)
        try:
            groups = expert_groups(base)
        except ConfigError:  # Packed by others: they stay where they are
            groups = {}
        self._offload = offload_of(groups)
        hosted = 0 if self._offload is None else len(self._offload.layers)
        if self._offload is not None:
            self._undo.callback(self._offload.hold, hosted)
        self._hosted, self._expert_layers = hosted, tuple(starmap(_expert_layer, groups.items()))
        self._runners = {name: runner_of(x) or LayerRunner(x) for name, x in layers.items()}
        warned: list[str] = []
        promised = (1, math.prod(sizes)) if has_flat_rows(model) else sizes  # One row of all tokens
        for runner in self._runners.values():
            self._undo.callback(runner.end)
            self._undo.callback(setattr, runner, "level", None)
            runner.level, runner.promised, runner.warned = levels.RECOMPUTE, promised, warned
        self._switch_checkpointing_off()
        trunk = getattr(base, "base_model", base)
        self._undo.callback(trunk.register_forward_pre_hook(self._before_forward).remove)

    def _switch_checkpointing_off(self) -> None:
        for runner in self._runners.values():
            if runner.layer.gradient_checkpointing:
                runner.layer.gradient_checkpointing = False
                self._undo.callback(setattr, runner.layer, "gradient_checkpointing", True)

    def _before_forward(self, trunk: nn.Module, _: Any) -> None:
        if trunk.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._switch_checkpointing_off()  # Trainer may have enabled it
            measured = any(runner.measured for runner in self._runners.values())
            if self._device.type == "cuda" and not (measured or self._ran):
                self._ran = True
                self._give_back_once()

    def _choose(self, memory: int | str | None) -> None:
        batch, seq = self._sizes
        pace = _pace(self._device) if self._offload is not None else Pace()
        # Ranks with other cards would choose by other paths.
        pace = Pace(*(float(self._least(partial(int, x))) for x in (pace.link, pace.rate)))

        def keeps_all() -> int:
            self.memory = _limit_of(memory, self._device)
            slots = tuple if self._offload is None else self._offload.slot_memory
            measured = self._measured = MeasuredModel(self._model, slots)
            self._measure_once(levels.RECOMPUTE)
            ran = {activity.name for activity in self._activities[levels.RECOMPUTE]}
            names = tuple(name for name in self._runners if name in ran)
            if not names:
                raise ConfigError(
                    f"fit_memory: no decoder layer of {type(measured.base).__name__} runs in a "
                    "step of text, which is what is measured."
                )
            active = {b.name: b.active * batch * seq for b in measured.blocks if b.name in ran}
            could = self._could = Hosting.of(self._expert_layers, self._hosted, pace, active)
            self._choices = Choices(names, Ladder.of(seq), could if could.most else None)
            self._measure_once(levels.KEEP)
            self._resident = _resident(measured, self._device, could.freed(could.most))
            return int(self._needed_at(-1) <= self.memory)

        # Where all can be kept, no part need be measured, which torch.compile takes long for.
        self._set(-1 if self._least(keeps_all) else self._least(self._chosen))

    def _chosen(self) -> int:
        """Return the last place on the path that fits."""
        path, memory = self._choices.path, self.memory
        least = min(self._needed_at(at) for at, (_, steps) in enumerate(path) if not steps)
        if least > memory:
            most, every = self._could.most, len(self._could.layers)
            where = f" and has experts of {most} in host memory" if most else ""
            meant = f'memory={memory} is a number of bytes; write "{memory}GiB". '
            advice, more = "", self._could.freed(every) - self._could.freed(most)
            if more > 0 and self._needed(self._activities[levels.RECOMPUTE], every) <= memory:
                freed = f"would free {more} bytes ({human_bytes(more)}), and the step would fit"
                advice = f"moe_qlora.offload_experts(model) {freed}. "
            raise ConfigError(
                f"memory is {memory} bytes ({human_bytes(memory)}), and a step that computes "
                f"layers again{where} takes {human_bytes(least)}: {least - memory} bytes are "
                f"missing. {meant if memory < 1024 else ''}{advice}{MORE_MEMORY}"
            )
        self._measure_once(self._choices.ladder.levels[1])
        return next(at for at in reversed(range(len(path))) if self._needed_at(at) <= memory)

    def _least(self, find: Callable[[], int]) -> int:
        """Return the least number that any rank finds; where one fails, all do."""
        found, failed = -1, None
        try:
            found = find()
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one's number
            failed = error
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            on = self._device if dist.get_backend() == "nccl" else torch.device("cpu")
            least = torch.tensor(found, device=on)
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
            found = int(least)
        if failed is not None:
            raise failed
        if found < 0:
            raise ConfigError("fit_memory failed on another rank, whose error says why.")
        return found

    def _measure_once(self, level: str) -> None:
        if level in self._activities:
            return
        batch, seq = self._sizes
        for runner in self._runners.values():
            runner.level, runner.measured = level, True
        try:
            with _trainers_autocast(self._measured):
                done = self._measured.step(batch, seq, loss=self._loss)
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
            for runner in self._runners.values():
                runner.measured = False
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        self._activities[level] = done

    def _needed_at(self, place: int) -> int:
        choice = self._choices.at(self._choices.path[place], self._activities)
        return self._needed(choice.activities, choice.host)

    def _needed(self, activities: tuple[Activity, ...], host: int = 0) -> int:
        """Return the bytes that a step needs with experts of so many layers in host memory."""
        planned = self._budget(activities)
        peak = self._resident + planned.nbytes
        if self._is_recorded and self._device.type == "cuda":
            # Layers have a memory pool of their own. What they keep and work with is not shared
            # with what the loss works with, nor with gradients, which come as activations go, and
            # with one layer that runs to be recorded.
            parts = COMPONENTS[: COMPONENTS.index("gradients")]
            always = sum(planned.parts[name] for name in parts)
            once = sum(parameter.nbytes for parameter in self._measured.trained)
            once += self._work(activities, of_layers=True)
            once = max(once, self._work(activities, of_layers=False))
            graphed = self._resident + always + self._pool(activities) + _OF_GRAPHS + once
            peak = max(peak, graphed)
        return self._with_gaps(peak - self._could.freed(host))

    def _budget(self, activities: tuple[Activity, ...]) -> Peak:
        measured, (batch, seq) = self._measured, self._sizes
        settings = Settings(batch=batch, seq=seq, foreach=self._device.type == "cuda")
        blocks = [[block] for block in measured.blocks]
        return StepBudget(blocks, activities, settings, measured.itemsize, library=0).peak()

    def _with_gaps(self, nbytes: int) -> int:
        return int(nbytes * (1 + self._gaps)) if self._device.type == "cuda" else nbytes

    @cached_property
    def _gaps(self) -> float:
        # torch's allocator leaves fewer gaps with expandable segments.
        known = torch.cuda.memory_snapshot()
        expandable = any(segment.get("is_expandable") for segment in known)
        return _GAPS_OF_EXPANDABLE if expandable else FRAGMENTATION

    @property
    def _is_recorded(self) -> bool:
        return any(runner.graphs is not None for runner in self._runners.values())

    def _pool(self, activities: tuple[Activity, ...]) -> int:
        """Return the bytes that layers keep and work with."""
        return sum(a.saved for a in activities) + self._work(activities, of_layers=True)

    def _work(self, activities: tuple[Activity, ...], *, of_layers: bool) -> int:
        """Return the most bytes that one block works with, of decoder layers or of the others."""
        some = (a for a in activities if (a.name in self._runners) is of_layers)
        return max((max(a.forward, a.backward) - a.saved for a in some), default=0)

    def _set(self, place: int) -> None:
        choice = self._choices.at(self._choices.path[place], self._activities)
        self.layers = choice.layers(self._choices.hosting)
        self.peak = self._resident + self._budget(choice.activities).nbytes
        self.peak -= self._could.freed(choice.host)
        needs = self._needed(choice.activities, choice.host)
        self.gain, self._saved = self._choices.gain(choice), self._choices.saved_by(choice)
        # A row without graphs may run while their memory stays reserved.
        pool = self._pool(choice.activities)
        both = needs + self._with_gaps(pool)
        for name, runner in self._runners.items():
            runner.level = choice.levels.get(name, levels.RECOMPUTE)
            runner.fits_beside = both <= self.memory
        if self._offload is not None:
            self._offload.hold(choice.host)
        kept = sum(a.saved for a in self._activities[levels.RECOMPUTE] if a.name in self._runners)
        room = 1 + (self.memory - needs) / pool
        limit_lengths(self._model, RowMemory(room, kept / pool))

    def _give_back_once(self) -> None:
        """Give back the memory of a step without graphs, before an optimizer makes its states.

        In gaps between these would be memory that graphs cannot use.
        """
        waiting = [True]  # torch runs over its hooks: none may be removed meanwhile

        def give_back(*_: Any) -> None:
            if waiting:
                waiting.clear()
                torch.cuda.empty_cache()

        if self._is_recorded:
            self._undo.callback(register_optimizer_step_pre_hook(give_back).remove)

    def remove(self) -> None:
        """Let the layers run as before."""
        self._undo.close()

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        sizes = counted(self.layers), self.peak, self.memory, self.gain
        return sentence(*sizes, self._choices.hosting, self._saved)


def _device_of(model: nn.Module) -> torch.device:
    """Return the one device that a model lies on; experts in host memory belong to it."""
    if sharded := [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]:
        raise ConfigError(
            f"fit_memory: {sharded[0]} is sharded over ranks, so that no step of one rank alone "
            "can be measured; call fit_memory before fully_shard or trainer.train()."
        )
    hosted = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, PackedList) and module.host is not None
        for parameter in module.parameters()
    }
    own = [parameter for parameter in model.parameters() if id(parameter) not in hosted]
    devices = {str(parameter.device): parameter.device for parameter in own}
    if len(devices) > 1:
        raise ConfigError(
            f"fit_memory: the model lies on {' and '.join(sorted(devices))}; load it on one device "
            '(device_map={"": 0}), which is where memory is fitted.'
        )
    device = next(iter(devices.values()))
    if device.type == "meta":
        raise ConfigError(
            "fit_memory: the model is on meta, where nothing can be measured; load its weights "
            "first, or ask moe_qlora.plan what its layers can keep."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "fit_memory: no weight of the model is trained; call it after get_peft_model."
        )
    return device


def _limit_of(memory: int | str | None, device: torch.device) -> int:
    """Return the bytes that tensors may take on a device."""
    if memory is None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        size = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise ConfigError(f"memory is {memory!r}: {error}.") from error
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ConfigError(
            f"memory is {memory!r}, and the model is on {device}: give bytes, or a text such as "
            '"24GiB".'
        )
    return size


def _expert_layer(name: str, lists: Sequence[PackedList]) -> ExpertLayer:
    held = [held_tensors(same[0]) for same in tied_lists(lists)]
    nbytes = sum(tensor.nbytes for tensors in held for tensor in tensors)
    return ExpertLayer(name, nbytes, sum(map(slot_nbytes, held)))


def _pace(device: torch.device) -> Pace:
    """Return an estimate of how quick a device copies and computes."""
    if device.type != "cuda":
        return Pace()
    return pace_of(gpu_of_device(torch.cuda.get_device_name(device)))


def _resident(measured: MeasuredModel, device: torch.device, freed: int) -> int:
    """Return the bytes on a device that `_budget` does not count: other tensors, workspaces.

    `freed` are those that it does not hold of experts in host memory.
    """
    if device.type != "cuda":  # AdamW counts its steps in a float32 tensor for each weight
        return torch.float32.itemsize * len(measured.trained)
    torch.cuda.synchronize(device)
    budget = StepBudget([measured.blocks], (), Settings(), measured.itemsize, library=0)
    parts = budget.peak().parts
    own = sum(size for name, size in parts.items() if name in (*COMPONENTS[:4], "adapters"))
    return torch.cuda.memory_allocated(device) - (own - freed)


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
