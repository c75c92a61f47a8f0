"""`moe_qlora.fit_memory`: keep as many activations as the memory holds, and compute the rest again.

It measures what each block allocates on each of three levels, on this very model
(planning/step.py), chooses by arithmetic that `plan` prints too (planning/choice.py), sets it on
the layers (layers.py), and says if the first steps take more.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import accumulate, starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError, check_numbers
from ..layout import base_model, human_bytes, parse_bytes
from ..packing.decoders import PackedList
from ..planning.budget import FIXED, Activity, Peak, Settings, StepBudget
from ..planning.choice import RECOMPUTE, Choice, Choices, ExpertLayer, LayerChoice
from ..planning.devices import FRAGMENTATION, Pace, pace_named, tensors_limit
from ..planning.model import StepModel, slot_nbytes
from ..planning.step import Loss, measure_step
from ..world import world
from .flat_rows import RowMemory, has_flat_rows, limit_lengths
from .layers import LayerRunner, decoder_layers, runner_of
from .offload import expert_groups, held_tensors, offload_of, tied_lists

_log = logging.getLogger(__name__)

_OF_GRAPHS = 256 << 20  # Libraries' workspaces on the stream of recordings, and shared buffers
_GAPS_OF_EXPANDABLE = 0.02  # `FRAGMENTATION` where torch's allocator has expandable segments
_TOLERANCE = 1.03  # of the peak of the first steps over the planned one
_STEPS_CHECKED = 3


def fit_memory(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    memory: int | str | None = None,
    loss: Loss | None = None,
) -> "Fit":
    """Keep as many activations as the memory holds, and compute the rest again in backward.

    Each decoder layer keeps all that backward needs, a part (what the experts and attention save;
    in long sequences attention alone), or nothing but its input. Steps of this model are measured
    for that, so call it when the model is complete: after `get_peft_model`, Liger and
    `layer.compile()`, before the training loop. Gradients are those of the same kernels.

    Under FSDP2, what memory is left holds gathered layers: these are not gathered again for their
    backward, and only what is trained for the next step.

    Of experts in host memory (`offload_experts`, `enabled(offload=True)`) it brings those of the
    first layers to the device, where that saves more time than activations in their place. If
    nothing fits, the error says what `offload_experts` would free.

    Gradient checkpointing does nothing until `remove`. Batches of more or longer sequences compute
    their layers again, and so do layers that a step of text does not reach, as a vision tower's,
    whose memory is not planned. A step that is given a key-value cache with tokens keeps all. The
    optimizer is taken to be AdamW with two states in the trained weights' dtype; a warning says so
    if the first steps take more. Without `prepare_training`, attention to padded batches may take
    more memory than is measured. Every rank of torch.distributed has to call it, under FSDP2 before
    or after `fully_shard`; all decide alike.

    Args:
        model: A transformers model, or a PEFT model around one, on one device.
        batch_size: Sequences in a micro-batch, of one rank.
        seq_len: Tokens in the longest sequence.
        memory: Bytes that tensors may take on the device, or a text such as "24GiB"; None for what
            the CUDA device has free, and what torch has reserved there.
        loss: What computes the loss, where that is not the model's own (DPO's, say): a function of
            the model and a batch, a dict with `input_ids` and `labels`, `(batch_size, seq_len)`
            int64. It has one forward with gradients, and beside it any without.

    Returns:
        What was chosen: `str()` is one sentence, and `remove()`, or the end of a `with` block,
        undoes it, and moves experts back to host memory.

    Raises:
        ConfigError: The memory is too small even where every layer is computed again, here or on
            another rank; or it is not given for a model on a CPU; or the model has no decoder
            layers, trains nothing, or lies on meta or several devices; or `loss` is no
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


class Fit(ExitStack):
    """The activations that decoder layers keep between forward and backward.

    Attributes:
        layers: For each decoder layer `.name`, `.activations` ("keep", "part" or "recompute") and
            `.experts` ("device" or "host").
        peak: Bytes of tensors in a step, as planned.
        memory: Bytes that they may take.
        graphs_fit: False if a step fits only without CUDA graphs, which were removed for it.
        gain: How many times as fast a step is as one that computes all layers again, about; of a
            model with experts in host memory, as one that copies all of these, too.
    """

    def __init__(
        self, model: Any, layers: Any, device: torch.device, sizes: tuple[int, int], loss: Any
    ) -> None:
        super().__init__()
        self.memory, self.peak, self.gain, self.graphs_fit = 0, 0, 1.0, True
        self.layers: tuple[LayerChoice, ...] = ()
        self._model, self._device, self._loss = model, device, loss
        self._sizes = sizes  # Sequences, and tokens in each
        self._activities: dict[str, tuple[Activity, ...]] = {}
        self._steps = 0  # That were checked
        self._gathered: list[nn.Module] | None = None  # Layers that FSDP2 gathers once a pass
        base = base_model(model)
        try:
            groups = expert_groups(base)
        except ConfigError:  # Packed by others: they stay where they are
            groups = {}
        self._offload = offload_of(groups)
        hosted = 0 if self._offload is None else len(self._offload.layers)
        if self._offload is not None:
            self.callback(self._offload.hold, hosted)
        self._hosted, self._expert_layers = hosted, tuple(starmap(_expert_layer, groups.items()))
        self._runners = {name: runner_of(x) or LayerRunner(x) for name, x in layers.items()}
        warned: list[str] = []
        promised = (1, math.prod(sizes)) if has_flat_rows(model) else sizes  # One row of all tokens
        for runner in self._runners.values():
            self.callback(runner.end)
            self.callback(setattr, runner, "level", None)
            runner.level, runner.promised, runner.warned = RECOMPUTE, promised, warned
        self._switch_checkpointing_off()
        trunk = getattr(base, "base_model", base)
        self.callback(trunk.register_forward_pre_hook(self._before_forward).remove)

    def _switch_checkpointing_off(self) -> None:
        for runner in self._runners.values():
            if runner.layer.gradient_checkpointing:
                runner.layer.gradient_checkpointing = False
                self.callback(setattr, runner.layer, "gradient_checkpointing", True)

    def _before_forward(self, trunk: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or any(r.measured for r in self._runners.values()):
            return
        trains = trunk.training and torch.is_grad_enabled()
        if world().uses_fsdp(next(iter(self._runners.values())).layer):
            if trains and self._gathered is None:
                self._keep_gathered()
            # Not where no backward follows, after which they would be gathered still
            world().gather_once(self._gathered or (), trains)
        if trains:
            self._switch_checkpointing_off()  # Trainer may have enabled it
            if self._device.type == "cuda":
                self._check_first_steps()

    def _choose(self, memory: int | str | None) -> None:
        (batch, seq), device, cuda = self._sizes, self._device, self._device.type == "cuda"
        pace = _pace(device) if self._offload is not None else Pace()
        paces, gaps = (-int(pace.link), -int(pace.rate)), round(100 * _gaps()) if cuda else 0
        link, rate, least, gaps = self._agreed(lambda: [*paces, -_limit_of(memory, device), gaps])
        self.memory, self._gaps = -least, gaps / 100
        limit = tensors_limit(self.memory, self._gaps)
        self._step = step = StepModel(self._model)
        ran = {activity.name for activity in self._measure(RECOMPUTE)}
        active = {b.name: b.active * batch * seq for b in step.blocks if b.name in ran}
        active = {name: active[name] for name in self._runners if name in ran}
        if not active:
            raise ConfigError(
                f"fit_memory: no decoder layer of {type(step.base).__name__} runs in a step of "
                "text, which is what is measured."
            )
        pace = Pace(-float(link), -float(rate))
        choices = Choices(active, seq, self._expert_layers, self._hosted, pace)
        freed = choices.freed(choices.most)
        (self._resident,) = self._agreed(lambda: [_resident(step, device, freed)])
        self._choices = choices
        self._gathers = {world().gathered_nbytes(each.layer) for each in self._runners.values()}
        # Where all can be kept, no part need be measured, which torch.compile takes long for.
        lacks = lambda each: self._tensors(each) - limit  # noqa: E731
        choice = choices.best(self._measure, lacks)
        if choice is None and self._is_recorded:
            self.graphs_fit = False
            next(runner for runner in self._runners.values() if runner.graphs).graphs.remove()
            choice = choices.best(self._measure, lacks)
        if choice is None:
            raise self._too_small()
        self._set(choice)

    def _too_small(self) -> ConfigError:
        choices, memory = self._choices, self.memory
        activities, most, every = self._measure(RECOMPUTE), choices.most, len(choices.experts)
        least = min(self._needed(activities, host) for host in range(most + 1))
        where = f" and has experts of {most} in host memory" if most else ""
        meant = f'memory={memory} is a number of bytes; write "{memory}GiB". '
        advice, more = "", choices.freed(every) - choices.freed(most)
        if more > 0 and self._needed(activities, every) <= memory:
            advice = (
                f"moe_qlora.offload_experts(model) would free {more} bytes ({human_bytes(more)}), "
                "and the step would fit. "
            )
        return ConfigError(
            f"memory is {memory} bytes ({human_bytes(memory)}), and a step that computes layers "
            f"again{where} takes {human_bytes(least)}: {least - memory} bytes are missing. "
            f"{meant if memory < 1024 else ''}{advice}Take a smaller batch_size or seq_len, or "
            "give more memory."
        )

    def _agreed(self, find: Callable[[], list[int]]) -> list[int]:
        """Return the most that any rank finds of each number; where one fails, all do."""
        found, failed = list[int](), None
        try:
            found = find()
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one's numbers
            failed = error
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            on = self._device if dist.get_backend() == "nccl" else torch.device("cpu")
            failures = torch.tensor(int(failed is not None), device=on)
            dist.all_reduce(failures)
            if failures and failed is None:
                failed = ConfigError("fit_memory failed on another rank, whose error says why.")
            if failed is None:
                numbers = torch.tensor(found, device=on)
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
                found = numbers.tolist()
        if failed is not None:
            raise failed
        return found

    def _measure(self, level: str) -> tuple[Activity, ...]:
        """Return what each block does in a step of this model, with all layers on a level."""
        if level not in self._activities:
            done: list[tuple[Activity, ...]] = []

            def measure() -> list[int]:
                done.append(self._measured(level))
                return [n for a in done[0] for n in (a.saved, a.forward, a.backward, a.gathered)]

            most = iter(self._agreed(measure))
            sizes = zip(most, most, most, most, strict=True)
            named = zip(done[0], sizes, strict=True)
            self._activities[level] = tuple(Activity(a.name, *each) for a, each in named)
        return self._activities[level]

    def _measured(self, level: str) -> tuple[Activity, ...]:
        batch, seq = self._sizes
        slots = tuple if self._offload is None else self._offload.slot_memory
        for runner in self._runners.values():
            runner.level, runner.measured = level, True
        try:
            with _trainers_autocast(self._step, self._device):
                return measure_step(self._step, batch, seq, loss=self._loss, slots=slots)
        except torch.cuda.OutOfMemoryError:
            if level == RECOMPUTE:
                raise ConfigError(
                    f"batch_size={batch} of seq_len={seq} tokens ran out of memory on "
                    f"{self._device} while two layers of each kind ran. Take a smaller batch_size "
                    "or seq_len; Liger's loss (use_liger_kernel=True) needs no logits of all."
                ) from None
            # As much as no memory holds, so that no layer is on this level
            below = self._activities[RECOMPUTE]
            return tuple(Activity(a.name, 1 << 60, 1 << 60, 1 << 60) for a in below)
        finally:
            for runner in self._runners.values():
                runner.measured = False
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _needed(self, activities: tuple[Activity, ...], host: int = 0) -> int:
        """Return the bytes that a step needs with experts of so many layers in host memory."""
        return int((self._tensors(activities) - self._choices.freed(host)) * (1 + self._gaps))

    def _tensors(self, activities: tuple[Activity, ...]) -> int:
        """Return the bytes of tensors in a step, with all experts on the device."""
        planned = self._budget(activities)
        peak = self._resident + planned.nbytes
        if self._is_recorded and self._device.type == "cuda":
            # Layers have a memory pool of their own. What they keep and work with is not shared
            # with the loss, nor with gradients, which come as activations go, nor with one layer
            # that runs to be recorded. FSDP2 gathers into a buffer, and copies from there.
            work = self._work(activities, of_layers=True)
            once = planned.parts["adapters"] + work + max(self._gathers)
            once = max(once, self._work(activities, of_layers=False))
            always = self._resident + sum(planned.parts[name] for name in FIXED)
            kept = sum(self._gathers) + sum(a.saved for a in activities) + work
            peak = max(peak, always + kept + _OF_GRAPHS + once)
        return peak

    def _budget(self, activities: tuple[Activity, ...]) -> Peak:
        blocks, cuda = [[block] for block in self._step.blocks], self._device.type == "cuda"
        args = blocks, activities, Settings(), self._step.itemsize
        return StepBudget(*args, library=0, foreach=cuda).peak()

    @property
    def _is_recorded(self) -> bool:
        return any(runner.graphs is not None for runner in self._runners.values())

    def _pool(self, activities: tuple[Activity, ...]) -> int:
        """Return the bytes that layers keep and work with."""
        return self._saved(activities) + self._work(activities, of_layers=True)

    def _saved(self, activities: tuple[Activity, ...]) -> int:
        return sum(a.saved for a in activities if a.name in self._runners)

    def _work(self, activities: tuple[Activity, ...], *, of_layers: bool) -> int:
        """Return the most bytes that one block works with, of decoder layers or of the others."""
        some = (a for a in activities if (a.name in self._runners) is of_layers)
        return max((max(a.forward, a.backward) - a.saved for a in some), default=0)

    def _set(self, choice: Choice) -> None:
        planned = self._budget(choice.activities).nbytes
        peak = self._resident + planned - self._choices.freed(choice.host)
        self._chosen = chosen = self._choices.fit(choice, peak, peak, self.memory)
        self.layers, self.peak, self.gain = chosen.layers, chosen.peak, chosen.gain
        self._needs = self._needed(choice.activities, choice.host)
        # A row without graphs may run while their memory stays reserved.
        pool = self._pool(choice.activities)
        both = self._needs + int(pool * (1 + self._gaps))
        for name, runner in self._runners.items():
            runner.level = choice.levels.get(name, RECOMPUTE)
            runner.fits_beside = both <= self.memory
        self._room = int((self.memory - both) / (1 + self._gaps))
        if self._offload is not None:
            self._offload.hold(choice.host)
        room = 1 + (self.memory - self._needs) / pool
        limit_lengths(self._model, RowMemory(room, self._saved(self._activities[RECOMPUTE]) / pool))

    def _keep_gathered(self) -> None:
        """Choose layers that FSDP2 gathers once for forward and backward, from the last one."""
        layers = [r.layer for r in self._runners.values() if world().is_gathered_twice(r.layer)]
        sizes = [*map(world().gathered_nbytes, layers)]
        # Alike on all ranks. What a model that is sharded later frees holds what is on its way
        others = sum(total > self._room for total in accumulate(reversed(sizes)))
        self._gathered = layers[others:]
        self.peak += sum(sizes[others:])
        self._needs += int(sum(sizes[others:]) * (1 + self._gaps))
        self.callback(world().gather_once, self._gathered, False)
        world().keep_root(self._model)
        self.callback(world().keep_root, self._model, False)

    def _check_first_steps(self) -> None:
        """Compare the planned peak with that of the first steps, before each forward."""
        if self._steps > _STEPS_CHECKED:
            return
        if not self._steps:
            torch.cuda.reset_peak_memory_stats(self._device)
            waiting = [True]  # torch runs over its hooks: none may be removed meanwhile

            def give_back(*_: Any) -> None:
                # The memory of a step without graphs, before an optimizer makes its states: in
                # gaps between these would be memory that graphs cannot use.
                if waiting:
                    waiting.clear()
                    torch.cuda.empty_cache()

            if self._is_recorded:
                self.callback(register_optimizer_step_pre_hook(give_back).remove)
        self._steps += 1
        if self._steps <= _STEPS_CHECKED:
            return
        peak = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        # What graphs and libraries take of their own is planned, but is no tensor of a step.
        if peak <= max(_TOLERANCE * self.peak, self._needs) and reserved <= self.memory:
            return
        less = max(1, self.memory - max(peak - self.peak, reserved - self._needs))
        within = f"; to stay within {human_bytes(self.memory)}, give memory={less}"
        _log.warning(
            "fit_memory: the first steps took %s of memory (%s with what torch's allocator holds "
            "in reserve), and %s were planned (an optimizer with larger states, other tensors on "
            "the device, gaps between tensors: PYTORCH_ALLOC_CONF=expandable_segments:True leaves "
            "fewer)%s.",
            *map(human_bytes, (peak, reserved, self.peak)),
            within if max(peak, reserved) > self.memory else "",
        )

    def remove(self) -> None:
        """Let the layers run as before."""
        self.close()

    def __str__(self) -> str:
        return str(self._chosen)


def _device_of(model: nn.Module) -> torch.device:
    """Return the one device that a model lies on; experts in host memory belong to it."""
    hosted = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, PackedList) and module.host is not None
        for parameter in module.parameters()
    }
    own = [parameter for parameter in model.parameters() if id(parameter) not in hosted]
    if any(p.device_mesh.device_type != p.device.type for p in own if hasattr(p, "device_mesh")):
        raise ConfigError(
            "fit_memory: FSDP2 keeps the weights in host memory (CPUOffloadPolicy), where no step "
            "is measured: leave the policy out, or fit_memory."
        )
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
    return pace_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else Pace()


def _gaps() -> float:
    """Return the part of a peak that torch's allocator leaves in gaps between tensors."""
    expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    return _GAPS_OF_EXPANDABLE if expandable else FRAGMENTATION


def _resident(step: StepModel, device: torch.device, freed: int) -> int:
    """Return the bytes on a device that a budget does not count: other tensors, workspaces."""
    # `freed` are those that it does not hold of experts in host memory.
    if device.type != "cuda":  # AdamW counts its steps in a float32 tensor for each weight
        return torch.float32.itemsize * len(step.trained)
    torch.cuda.synchronize(device)
    own = sum(block.weights + step.itemsize * sum(block.trained) for block in step.blocks)
    return torch.cuda.memory_allocated(device) - (own - freed)


def _trainers_autocast(step: StepModel, device: torch.device) -> Any:
    """Return the autocast that steps will run in, as far as it is known."""
    # Layers are compiled for it: else they would be compiled again in the first step.
    if device.type != "cuda" or torch.is_autocast_enabled(device.type):
        return nullcontext()
    accelerate = sys.modules.get("accelerate.state")  # Imported, if there is a trainer
    states = {} if accelerate is None else accelerate.AcceleratorState._shared_state
    known = str(states.get("_mixed_precision"))
    if known == "None" and any(p.dtype == torch.float32 for p in step.trained):
        # Adapters in float32, as PEFT makes them, are for autocast
        known = str(getattr(step.base, "dtype", None))
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "torch.bfloat16": torch.bfloat16}
    return torch.autocast(device.type, named[known]) if known in named else nullcontext()
