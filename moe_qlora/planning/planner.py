"""One model with one set of training settings: from its meta model to peaks on devices."""

import copy
import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from typing import Any, Self

import torch

from ..errors import ConfigError, MoeQloraError, first_line
from ..experts.forward_override import is_ligers
from ..kernels.cards import PORTABLE, Card
from ..kernels.limits import WORKSPACE_PART, cdiv
from ..kernels.weights import PackedWeight
from ..lora import targets
from ..models import named
from ..packing.settings import CodecSettings, packed_tensors
from . import attention
from .budget import Activity, Block, Settings, StepBudget
from .choice import KEEP, RECOMPUTE, Choices, ExpertLayer, PlannedFit, slots_nbytes
from .devices import CONTEXT_BYTES, Pace, reserve_nbytes, tensors_limit
from .model import MetaModel, ModelSource
from .report import MemoryPlan
from .step import NO_CAP, run_meta_step

LIGER_LOSS = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma4", "gemma4_text", "glm4v_moe"),
        *("gpt_oss", "hunyuan_v1_moe", "llama4", "llama4_text", "mixtral", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    )
)
"""Model types with fused experts whose loss Liger 0.8.5 computes in chunks."""

_SEQ_STEP, _LONGEST, _LARGEST_BATCH = 64, 1 << 20, 1 << 12  # Tokens, tokens, sequences

Step = tuple[tuple[Activity, ...], int]
"""What each block does in a step, in running order, and the bytes of the workspace."""


class Planner:
    """Peaks of one model, for any batch, sequence and devices."""

    def __init__(
        self,
        source: ModelSource,
        settings: Settings,
        lora_config: Any = None,
        card: Card = PORTABLE,
        pace: Pace = Pace(),  # noqa: B008 - frozen
    ) -> None:
        self.source, self.settings, self.lora_config = source, settings, lora_config
        self.card = card  # For which experts are computed
        self.pace = pace  # For experts in host memory
        self.notes: list[str] = []  # What to know about the figures, a sentence each
        self.eager: str | None = None  # That attention is eager, and may be flex
        self.model_type = str(getattr(source.config, "model_type", ""))
        self._run = cache(self._run_step)

    @cached_property
    def meta(self) -> MetaModel:
        """The model packed, adapted, and ready to run."""
        skips = getattr(self.source.quantization, "llm_int8_skip_modules", None)
        # Settings that may name a layer by number may make it differ from others.
        apart = self.lora_config is not None or re.search(r"\d", f"{skips}{self.settings.targets}")
        return self._ready(self.source.repeats and not apart)

    @cached_property
    def rank_blocks(self) -> list[Block]:
        """Each block as one process has it on its device."""
        blocks = list(self.meta.blocks)
        if (engine := self.settings.engine) is not None:
            blocks = list(map(engine.on_rank, blocks))
        return [block.without_experts() for block in blocks] if self.settings.offload else blocks

    @property
    def expert_layers(self) -> tuple[ExpertLayer, ...]:
        """The blocks with packed experts, in the model's order."""
        blocks, parts = self.meta.blocks, ("experts", "expert statistics")
        return tuple(ExpertLayer(b.name, b.nbytes(*parts), b.slot) for b in blocks if b.slot)

    def with_settings(self, settings: Settings) -> Self:
        """Return the planner with settings under which the model and its steps are the same."""
        meta, other = self.meta, copy.copy(self)
        other.settings, other.__dict__["meta"] = settings, meta
        other.__dict__.pop("rank_blocks", None)  # of other shares
        return other

    def report(self, capacities: Sequence[int]) -> MemoryPlan:
        """Return the plan for these devices, without a search."""
        step = self.step(capacities)
        budget, engine = self.budget(step), self.settings.engine
        peak, uses = budget.peak(), budget.spread(capacities)
        return MemoryPlan(
            label=self.source.label,
            model_type=self.model_type,
            kind=self.meta.kind,
            double_quant=any(part.weight.nested is not None for part in self.meta.parts),
            settings=self.settings,
            trained_weights=sum(sum(block.trained) for block in self.meta.blocks),
            unpacked=self.meta.unpacked,
            resident=self.resident,
            load_peak=self.load_peak,
            peak=peak,
            reserve=reserve_nbytes(peak.nbytes),
            devices=uses,
            device_map={name: use.index for use in uses for name in use.blocks} or None,
            whole=sum(block.weights for block in self.meta.blocks) if engine else None,
            on_disk=self.source.on_disk,
            hosting=self.choices(step[0]) if self.settings.offload else None,
        )

    def step(self, capacities: Sequence[int] = (), *, level: str | None = None) -> Step:
        """Return what each block does in a step, in running order, and the workspace's bytes.

        `level` is that of all decoder layers, None for what the settings say. The workspace keeps
        to the cap that it has on devices of these bytes.
        """
        batch, seq = self.settings.batch, self.settings.seq
        if level is None:
            again = self.settings.checkpointing and _checkpoints(self.meta.base)
            level = RECOMPUTE if again else KEEP
        cap = min(capacities) // WORKSPACE_PART if capacities else NO_CAP
        activities, workspace = self._run(batch, seq, cap, level)
        if activities and self.settings.prepared and self.model_type in LIGER_LOSS:
            # Liger's fused linear cross-entropy takes as many tokens at a time as make logits of
            # about the size of all hidden states, and has these states' gradient from forward on.
            head, tokens = self.meta.base.get_output_embeddings(), batch * seq
            chunk = 1 << (cdiv(tokens, cdiv(head.out_features, head.in_features)) - 1).bit_length()
            itemsize = next(self.meta.base.parameters()).dtype.itemsize
            part, more = min(chunk / tokens, 1.0), tokens * head.in_features * itemsize
            last = activities[-1]
            sizes = [int(s * part) + more for s in (last.saved, last.forward, last.backward)]
            activities = (*activities[:-1], Activity(last.name, *sizes))
        return activities, workspace

    def budget(self, step: Step) -> StepBudget:
        """Return the budget of what `step` has returned."""
        activities, workspace = step
        run = {activity.name: place for place, activity in enumerate(activities)}
        # What does not run (a vision tower) and what holds buffers alone comes first.
        ordered = sorted(self.rank_blocks, key=lambda block: run.get(block.name, -1))
        leader = {block.name: block.name for block in ordered}
        for first, second in self.meta.tied:
            leader[second] = leader[first]
        groups: dict[str, list[Block]] = {}
        for block in ordered:
            groups.setdefault(leader[block.name], []).append(block)
        itemsize, extra = self.meta.itemsize, {}
        if self.settings.offload:
            extra["packed experts"] = slots_nbytes(self.expert_layers)
        if (engine := self.settings.engine) is not None:
            whole = {block.name: block for block in self.meta.blocks}
            activities = engine.with_gathered(activities, whole)
            if engine.name == "ddp":
                extra["gradient buckets"] = itemsize * sum(sum(b.trained) for b in whole.values())
        args = [*groups.values()], activities, self.settings, itemsize
        return StepBudget(*args, workspace=workspace, extra=extra)

    def choices(self, activities: Sequence[Activity]) -> Choices:
        """Return what decoder layers can keep, in a step with these activities."""
        settings, layers = self.settings, self.expert_layers
        blocks = {block.name: block for block in self.meta.blocks}
        tokens = settings.batch * settings.seq
        active = {
            a.name: blocks[a.name].active * tokens for a in activities if blocks[a.name].layer
        }
        most = len(layers) if settings.offload else 0
        return Choices(active, settings.seq, layers, most, self.pace)

    def fit(self, capacities: Sequence[int]) -> PlannedFit | None:
        """Return what layers can keep on devices of these bytes, in place of checkpointing.

        None where the model has no decoder layers, or, with a note, these cannot be computed again.
        """
        steps: dict[str, Step] = {}

        def activities(level: str) -> tuple[Activity, ...]:
            if level not in steps:
                steps[level] = self.step(capacities, level=level)
            return steps[level][0]

        try:
            choices = self.choices(activities(RECOMPUTE))
        except ConfigError as error:
            self.notes.append(f"What layers can keep of their activations is not known: {error}")
            return None
        if not choices.active:
            return None
        spans = self.budget(self.step(capacities)).spans(capacities)  # Blocks stay where they are

        def fullest(activities: tuple[Activity, ...], freed: int) -> tuple[int, int]:
            """Return the peak and the bytes of the device that lacks most."""
            budget = self.budget((activities, max(workspace for _, workspace in steps.values())))
            brought = choices.freed(choices.most) - freed  # The budget has experts on the host
            peaks = (budget.nbytes(*span) + brought if span[0] < span[1] else 0 for span in spans)
            pairs = zip(peaks, capacities, strict=True)
            return max(pairs, key=lambda pair: pair[0] - tensors_limit(pair[1] - CONTEXT_BYTES))

        def lacks(activities: tuple[Activity, ...]) -> int:
            peak, capacity = fullest(activities, 0)
            return peak - tensors_limit(capacity - CONTEXT_BYTES)

        choice = choices.best(activities, lacks) or choices.at(0, activities, choices.most)
        peak, capacity = fullest(choice.activities, choices.freed(choice.host))
        return choices.fit(choice, peak, peak + reserve_nbytes(peak), capacity)

    def largest(self, capacities: Sequence[int], name: str) -> int:
        """Return the longest sequence ("seq") or the largest batch that fits, within 1/128; or 0.

        A step is nearly affine in its tokens: each size that is tried is where the line through the
        two that are nearest to the last one ends, at first through no tokens, or half way where
        that is ruled out already.
        """
        grain, limit = (_SEQ_STEP, _LONGEST) if name == "seq" else (1, _LARGEST_BATCH)

        def step(size: int) -> Step:
            sizes: dict[str, Any] = {name: size * grain}
            settings = replace(self.settings, **sizes)
            return self.with_settings(settings).step(capacities)

        def fullness(step: Step) -> float:
            uses = self.budget(step).spread(capacities)
            return max(use.needed / use.capacity for use in uses)

        low, high = 0, limit // grain + 1
        guess = min(max(getattr(self.settings, name) // grain, 1), high - 1)
        tried = {0: fullness((tuple(Activity(a.name, 0, 0, 0) for a in step(guess)[0]), 0))}
        while high - low > max(1, low // 128):
            tried[guess] = fullness(step(guess))
            low, high = (guess, high) if tried[guess] <= 1 else (low, guess)
            first, second = sorted(tried, key=lambda size: abs(size - guess))[:2]
            slope = (tried[second] - tried[first]) / (second - first)
            end = first + (1 - tried[first]) / slope if slope > 0 else high
            if low and low <= end < low + 1 and tried[low] > 1 - 1 / 128:
                break
            if not low <= end < high:
                end = (low + high) / 2 if high in tried else high - 1
            guess = max(int(end), low + 1)
        return low * grain

    def _run_step(self, batch: int, seq: int, cap: int, level: str) -> Step:
        meta, sizes = self.meta, {"batch": batch, "seq": seq}
        try:
            return run_meta_step(meta, **sizes, level=level, card=self.card, workspace_cap=cap)
        except MoeQloraError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)[:120]}"
            said = (
                f"{self.source.label}: a training step of this model cannot run on the meta device "
                f"({why}), so that its memory cannot be planned."
            )
            if any(is_ligers(getattr(type(m), "forward", None)) for m in meta.base.modules()):
                said += (
                    " Liger has replaced classes of this model in this process, and its kernels "
                    "cannot run there: plan before Liger is applied, or in another process."
                )
            raise ConfigError(said) from error

    def _ready(self, repeats: bool) -> MetaModel:
        with named.quiet():
            model: Any = self.source.build()
            if self.settings.attention is not None:
                attention.set_attention(model, self.settings.attention)
            self.eager = attention.eager_attention(model)
            if self.eager is not None and self.settings.attention is None:
                self.notes.append(self.eager)
            if (counted := attention.make_countable(model)) is not None:
                self.notes.append(counted)
            meta = MetaModel(self.source, model, repeats=repeats)
            with warnings.catch_warnings(record=True) as said:
                warnings.filterwarnings("always", targets.WARNING, UserWarning)
                meta.adapt(self.settings, self.lora_config)
        if said and meta.emptied:  # It counts the weights that got no adapters
            return self._ready(False)
        self.notes += [f"{warning.message}" for warning in said]
        meta.model.train()
        if self.settings.checkpointing and not _checkpoints(model):
            self.notes.append(
                f"{type(model).__name__} supports no gradient checkpointing; the plan is without."
            )
        for module in model.modules():  # levels are in its place
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        if (config := getattr(model, "config", None)) is not None:
            config.use_cache = config.get_text_config().use_cache = False
        return meta

    @property
    def resident(self) -> int:
        """Bytes of the packed weights that one process holds on its device, slots apart."""
        return sum(block.weights for block in self.rank_blocks)

    @property
    def load_peak(self) -> int:
        """The most that a process holds while it loads and packs."""
        held, modules = self.resident, defaultdict[str, list[PackedWeight]](list)
        if self.settings.offload:  # One weight is packed on the device, and goes to the host
            held += max((p.weight.nbytes for p in self.meta.parts if not p.linear), default=0)
        for part in self.meta.parts:
            modules[part.module].append(part.weight)
        return held + max(map(self._packing_nbytes, modules.values()), default=0)

    def _packing_nbytes(self, weights: Sequence[PackedWeight]) -> int:
        """Return the temporary bytes of packing one module's weights while loading."""
        # The largest expert's matrix in the checkpoint's dtype, and with double quantization the
        # float32 absmax of all weights, which are packed themselves only once a weight is complete.
        # A matrix that is dequantized first has its codes and fp32 values beside it, which the
        # loads of tools/bench/results/loading.csv show to be at most as much as two more of it.
        shapes, settings = [weight.shape for weight in weights], CodecSettings.of(weights[0])
        extra = max(prod(shape[1:] if len(shape) > 2 else shape) for shape in shapes)
        extra *= max(weight.dtype.itemsize for weight in weights)
        extra *= 3 if self.source.dequantizes else 1
        if settings.double_quant:
            name = settings.codec.scales
            blocks = sum(packed_tensors(shape, settings)[name].numel for shape in shapes)
            extra += torch.float32.itemsize * blocks
        return extra


def _checkpoints(model: Any) -> bool:
    """True if transformers would enable gradient checkpointing on a model."""
    layers = any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    return layers and bool(getattr(model, "supports_gradient_checkpointing", False))
