"""`moe_qlora.fit_memory`: keep as many activations as the memory holds, and compute the rest again.

memory/measure.py   what each block allocates in a step, for each level, on this very model
memory/choice.py    what each decoder layer keeps: arithmetic, which `plan` prints too
fitted.py           a layer that keeps what was chosen
here                measures, chooses, sets it, checks it against the first steps, and undoes it
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from ..layout import human_bytes, parse_bytes
from ..lora.names import base_model
from ..memory import levels
from ..memory.budget import COMPONENTS, Activity, Peak, Settings, StepBudget
from ..memory.choice import (
    ALL_KEPT,
    Choice,
    LayerChoice,
    choose,
    counted,
    gain,
    levels_at,
    mixed,
    sentence,
)
from ..memory.devices import FRAGMENTATION
from ..memory.measure import MeasuredModel
from ..packing.parametrize import is_hosted
from .fitted import FittedLayer, RunsLevels, decoder_layers, fitted, runs_recorded
from .overrides import Overrides

_log = logging.getLogger(__name__)

_TOLERANCE = 1.03  # of the peak of the first steps over the planned one
_OF_GRAPHS = 256 << 20
"""Bytes of libraries' workspaces on the stream of recordings, and of buffers that graphs share."""
_GAPS_OF_EXPANDABLE = 0.02
"""`FRAGMENTATION` where torch's allocator has expandable segments."""
_STEPS_CHECKED = 3


def fit_memory(
    model: nn.Module, *, batch_size: int, seq_len: int, memory: int | str | None = None
) -> Fit:
    """Keep as many activations as the memory holds, and compute the rest again in backward.

    A step then is as fast as this memory allows. For each decoder layer it decides whether to keep
    all that backward needs, what the experts save, also what attention or Linear layers save, or
    nothing but the layer's input. It measures a step of this model for that (two layers of each
    kind run, a few times), so call it when the model is complete: after `get_peft_model`, Liger,
    and `graph_layers(compiled=True)` or `layer.compile()`, before the training loop. Gradients are
    those of the same kernels.

    What is fitted wins over `gradient_checkpointing_enable`, which does nothing until `remove`.
    Batches of more tokens compute their layers again, and so do layers that a step of text does not
    reach, as those of a vision tower, whose memory is not planned. The optimizer is taken to be
    AdamW with two states in the trained weights' dtype.

    With torch.distributed running, every rank has to call it, and all ranks decide alike.

    Args:
        model: A transformers model, or a PEFT model around one, on one device.
        batch_size: Sequences in a micro-batch, of one rank.
        seq_len: Tokens in the longest sequence.
        memory: Bytes that tensors may take on the device, or a text such as "24GiB"; None for what
            the CUDA device has free, and what torch has reserved there.

    Returns:
        What was chosen: `str()` is one sentence, and `remove()`, or the end of a `with` block,
        undoes it.

    Raises:
        ConfigError: The memory is too small even where every layer is computed again, here or on
            another rank; or it is not given for a model on a CPU; or the model has no decoder
            layers, trains nothing, is sharded, or lies on meta or several devices.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    layers = _decoder_layers(model)
    if any(map(is_hosted, model.modules())):
        raise ConfigError(
            "fit_memory: experts of this model lie in host memory, which it cannot plan with yet: "
            "call it before offload_experts, or without."
        )
    device = _device_of(model)
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number of 1 or more.")
    if any(fitted(layer) is not None for layer in layers.values()):
        raise ConfigError(
            "fit_memory has been called on this model before: call remove() on what it returned."
        )
    fit = Fit(model, layers, device, batch_size * seq_len)
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
            `.experts` ("device").
        peak: Bytes of tensors in a step, as planned.
        memory: Bytes that they may take.
        gain: How many times as fast a step is as one that computes all layers again, about.
    """

    def __init__(
        self,
        model: Any,
        layers: dict[str, nn.Module],
        device: torch.device,
        tokens: int,
    ) -> None:
        self.memory, self.peak, self.gain = 0, 0, 1.0
        self.layers: tuple[LayerChoice, ...] = ()
        self._model, self._modules, self._device = model, layers, device
        warned: set[str] = set()
        self._fitted = {
            name: FittedLayer(layer, levels.RECOMPUTE, tokens, warned)
            for name, layer in layers.items()
        }
        self._overrides = Overrides(model, layers.values())
        self._hook: Any = None
        self._given_back: Any = None  # The hook of `_give_back_once`
        self._activities: dict[str, tuple[Activity, ...]] = {}
        self._names: tuple[str, ...] = ()  # Of the layers that run in a measured step
        self._sizes = 0, 0  # Sequences, and tokens in each

    def _choose(self, batch: int, seq: int, memory: int | str | None) -> None:
        def keeps_all() -> int:
            self.memory = _limit(memory, self._device)
            measured = self._measured = MeasuredModel(self._model)
            self._budget_of = partial(_budget, measured, Settings(batch=batch, seq=seq))
            self._sizes = batch, seq
            self._measure_once(levels.RECOMPUTE)
            ran = {activity.name for activity in self._activities[levels.RECOMPUTE]}
            self._names = tuple(name for name in self._fitted if name in ran)
            if not self._names:
                raise ConfigError(
                    f"fit_memory: no decoder layer of {type(measured.base).__name__} runs in a "
                    "step of text, which is what is measured."
                )
            self._measure_once(ALL_KEPT)
            self._resident = _resident(measured, self._device)
            return int(self._fits(ALL_KEPT, self.memory))

        def steps() -> int:
            return self._chosen(self.memory).steps

        # Where all can be kept, which torch.compile takes half a minute for, that is all to know.
        if self._least(keeps_all):
            self._set(self._after(len(self._names) * (len(levels.LEVELS) - 1)))
        else:
            self._set(self._after(self._least(steps)))
        if self._device.type == "cuda":
            self._hook = self._model.register_forward_pre_hook(_Check(self))

    def _chosen(self, memory: int) -> Choice:
        """Choose what so many bytes can hold, of the levels that layers may be on.

        torch.compile takes long for each level: where all layers can be on one, those below it
        need no measurement, and where they cannot, those above it.
        """
        lowest, highest = 0, len(levels.LEVELS) - 1
        if self._fits(levels.RECOMPUTE, memory):
            self._measure_once(levels.KEEP)
        else:
            highest = 0
        while highest - lowest > 1:
            middle = (lowest + highest) // 2
            self._measure_once(levels.LEVELS[middle])
            if self._fits(levels.LEVELS[middle], memory):
                lowest = middle
            else:
                highest = middle
        return choose(self._names, self._known, self._needed, memory, levels.LEVELS[highest])

    def _fits(self, level: str, memory: int) -> bool:
        return self._needed(tuple(self._activities[level])) <= memory

    @property
    def _known(self) -> dict[str, tuple[Activity, ...]]:
        """What blocks do on each level: on one that was not measured, as on the one above."""
        known, above = dict(self._activities), self._activities[ALL_KEPT]
        for level in reversed(levels.LEVELS):
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
        """Measure a step in which all layers are on a level, or keep all, unless it is known."""
        if name in self._activities:
            return
        (batch, seq), level = self._sizes, levels.KEEP if name == ALL_KEPT else name
        for layer in self._fitted.values():
            layer.level, layer.measures = level, True
        try:
            done = self._measured.step(batch, seq, holds=name == levels.KEEP)
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

    def _after(self, steps: int) -> Choice:
        chosen = levels_at(self._names, steps)
        return Choice(steps, chosen, mixed(self._known, chosen))

    def _needed(self, activities: tuple[Activity, ...]) -> int:
        """Return the bytes that a step needs of the memory."""
        planned = self._budget_of(activities)
        peak = self._resident + planned.nbytes
        if self._device.type != "cuda":
            return peak
        if self._is_recorded:
            peak = max(peak, self._with_graphs(activities, planned))
        return int(peak * (1 + self._gaps))

    @cached_property
    def _gaps(self) -> float:
        """The part of the peak that gaps between tensors take, by the allocator's segments."""
        expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        return _GAPS_OF_EXPANDABLE if expandable else FRAGMENTATION

    @property
    def _is_recorded(self) -> bool:
        return any(map(runs_recorded, self._modules.values()))

    def _with_graphs(self, activities: tuple[Activity, ...], planned: Peak) -> int:
        """Return the bytes of a step whose layers have a memory pool of their own.

        What layers keep and work with is not shared with what the loss works with, nor with
        gradients, which come as activations go.
        """
        always = sum(planned.parts[name] for name in COMPONENTS[: COMPONENTS.index("gradients")])
        work = {a.name: max(a.forward, a.backward) - a.saved for a in activities}
        layers, others = (
            max((size for name, size in work.items() if (name in self._fitted) is own), default=0)
            for own in (True, False)
        )
        gradients = sum(parameter.nbytes for parameter in self._measured.trained)
        pool = sum(a.saved for a in activities) + layers
        return self._resident + always + pool + max(others, gradients) + _OF_GRAPHS

    def _peak_of(self, activities: tuple[Activity, ...]) -> int:
        return self._resident + self._budget_of(activities).nbytes

    def _set(self, choice: Choice) -> None:
        self._steps, self.layers = choice.steps, choice.layers
        self.peak = self._peak_of(choice.activities)
        self._needs = self._needed(choice.activities)
        self.gain = gain(self._known, choice.levels)
        for name, layer in self._fitted.items():
            layer.level = choice.levels.get(name, levels.RECOMPUTE)

    def _keep_less(self, excess: int) -> None:
        """Choose anew where steps take so many bytes more than was planned."""
        for layer in self._modules.values():
            if isinstance(runs := getattr(layer.forward, "__self__", None), RunsLevels):
                runs.forget()
        planned = self.memory - excess
        try:
            steps = self._chosen(planned).steps
        except ConfigError:
            steps = 0
        self._set(self._after(min(steps, self._steps)))

    def remove(self) -> None:
        """Let the layers run as before."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._given_back is not None:
            self._given_back.remove()
            self._given_back = None
        for layer in self._fitted.values():
            layer.remove()
        self._overrides.remove()

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return sentence(counted(self.layers), self.peak, self.memory, self.gain)


class _Check:
    """Compares the planned peak with that of the first steps, before each forward."""

    def __init__(self, fit: Fit) -> None:
        self.fit, self.calls = fit, 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        fit = self.fit
        if not (model.training and torch.is_grad_enabled()):
            return
        if not self.calls:
            torch.cuda.reset_peak_memory_stats(fit._device)
            if fit._is_recorded:
                fit._given_back = _give_back_once(fit._modules[fit._names[0]])
        self.calls += 1
        if self.calls <= _STEPS_CHECKED:
            return
        if fit._hook is not None:
            fit._hook.remove()
            fit._hook = None
        peak = torch.cuda.max_memory_allocated(fit._device)
        reserved = torch.cuda.max_memory_reserved(fit._device)
        if peak <= _TOLERANCE * fit.peak and reserved <= fit.memory:
            return
        alone = not (dist.is_available() and dist.is_initialized())
        less = alone and max(peak, reserved) > fit.memory
        _log.warning(
            "fit_memory: the first steps took %s of memory (%s with what torch's allocator holds "
            "in reserve), and %s were planned (an optimizer with larger states, other tensors on "
            "the device, gaps between tensors)%s.",
            human_bytes(peak),
            human_bytes(reserved),
            human_bytes(fit.peak),
            "; fewer activations are kept from now on" if less else "",
        )
        if less:
            fit._keep_less(max(peak - fit.peak, reserved - fit._needs))


def _give_back_once(layer: nn.Module) -> Any:
    """Give back the memory of the first backward, once a layer's gradients are there.

    That step ran without graphs. An optimizer makes its states next, and in gaps between them
    would be memory that graphs cannot use. Returns the hook, None where nothing is trained.
    """
    trained = next((p for p in layer.parameters() if p.requires_grad), None)
    if trained is None:
        return None

    def give_back(_: Any) -> None:
        handle.remove()
        torch.cuda.empty_cache()

    handle = trained.register_post_accumulate_grad_hook(give_back)
    return handle


def _decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's decoder layers by name."""
    base = base_model(model)
    found = decoder_layers(base)
    if not found:
        raise ConfigError(
            f"fit_memory: {type(base).__name__} has no decoder layers that transformers can "
            "compute again (GradientCheckpointingLayer), so that there is nothing to decide."
        )
    return found


def _device_of(model: nn.Module) -> torch.device:
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        raise ConfigError(
            f"fit_memory: {sharded[0]} is sharded over ranks, so that no step of one rank alone "
            "can be measured; call fit_memory before fully_shard or trainer.train()."
        )
    devices = {str(parameter.device): parameter.device for parameter in model.parameters()}
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


def _limit(memory: int | str | None, device: torch.device) -> int:
    """Return the bytes that tensors may take on a device."""
    if memory is None:
        if device.type != "cuda":
            raise ConfigError(
                f'memory is None, and the model is on {device}: give it, as in memory="24GiB".'
            )
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    try:
        size = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise ConfigError(f"memory is {memory!r}: {error}.") from error
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ConfigError(f'memory is {memory!r}; give bytes, or a text such as "24GiB".')
    return size


def _resident(measured: MeasuredModel, device: torch.device) -> int:
    """Return the bytes on a device that `_budget` does not count: other tensors, workspaces."""
    if device.type != "cuda":  # AdamW counts its steps in a float32 tensor for each weight
        return torch.float32.itemsize * len(measured.trained)
    torch.cuda.synchronize(device)
    budget = StepBudget([measured.blocks], (), Settings(), measured.itemsize, library=0)
    own = (*COMPONENTS[:4], "adapters")
    counted_bytes = sum(size for name, size in budget.peak().parts.items() if name in own)
    return torch.cuda.memory_allocated(device) - counted_bytes


def _budget(measured: MeasuredModel, settings: Settings, activities: tuple[Activity, ...]) -> Peak:
    """Return the planned peak of a step, of what `_resident` does not count."""
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
