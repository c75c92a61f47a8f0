"""One model with one set of training settings: from its meta model to peaks on devices."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from typing import Any

import torch

from ..errors import ConfigError, MoeQloraError, first_line
from ..experts.forward_override import is_ligers
from ..kernels.cards import PORTABLE, Card
from ..kernels.limits import WORKSPACE_PART, cdiv
from ..kernels.weights import PackedWeight
from ..lora import targets
from ..models import named
from ..packing.settings import CodecSettings, packed_tensors
from . import attention, levels, meta_model, meta_step
from .budget import Activity, Block, DeviceUse, Engine, Peak, Settings, StepBudget
from .devices import reserve_nbytes
from .hosting import ExpertLayer, Hosting, Pace, slots_nbytes
from .meta_model import MetaModel, ModelSource, tells_layers_apart
from .report import MemoryPlan

LIGER_LOSS = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma4", "gemma4_text", "glm4v_moe"),
        *("gpt_oss", "hunyuan_v1_moe", "llama4", "llama4_text", "mixtral", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    )
)
"""Model types with fused experts whose loss Liger 0.8.5 computes in chunks."""


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
        pace: Pace | None = None,
    ) -> None:
        self.source = source
        self.settings = settings
        self.lora_config = lora_config
        self.card = card  # For which experts are computed
        self.pace = Pace() if pace is None else pace  # For experts in host memory
        self.notes: list[str] = []  # What to know about the figures, a sentence each
        self.eager: str | None = None  # That attention is eager, and may be flex
        self.itemsize = meta_model.DTYPES[settings.adapter_dtype].itemsize
        self.model_type = str(getattr(source.config, "model_type", ""))
        self._step = cache(self._run_step)

    @cached_property
    def meta(self) -> MetaModel:
        """The model packed, adapted, and ready to run."""
        source, asked = self.source, self.settings.targets
        apart = tells_layers_apart(asked, self.lora_config, source.quantization)
        return self._ready(source.repeats and not apart)

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
        return tuple(
            ExpertLayer(block.name, block.parts["experts"] + block.expert_statistics, block.slot)
            for block in self.meta.blocks
            if block.slot
        )

    def hosting(self, activities: Sequence[Activity]) -> Hosting:
        """Return what packed experts cost in host memory, in a step with these activities."""
        blocks = {block.name: block for block in self.meta.blocks}
        layers, tokens = self.expert_layers, self.settings.batch * self.settings.seq
        active = {a.name: blocks[a.name].active * tokens for a in activities}
        return Hosting.of(layers, len(layers), self.pace, active)

    def with_settings(self, settings: Settings) -> Planner:
        """Return the planner with settings under which the model and its steps are the same."""
        meta, other = self.meta, copy.copy(self)
        other.settings, other.__dict__["meta"] = settings, meta
        other.__dict__.pop("rank_blocks", None)  # of other shares
        return other

    def with_engine(self, engine: Engine | None) -> Planner:
        """Return the same with another engine, or with none."""
        return self.with_settings(replace(self.settings, engine=engine))

    def report(self, capacities: Sequence[int]) -> MemoryPlan:
        """Return the plan for these devices, without a search."""
        batch, seq = self.settings.batch, self.settings.seq
        step = self.activities(batch, seq, capacities)
        budget = self.budget(step)
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
            whole=self.with_engine(None).resident if self.settings.engine else None,
            on_disk=self.source.on_disk,
            hosting=self.hosting(step[0]) if self.settings.offload else None,
        )

    def peak(self, batch: int, seq: int, capacities: Sequence[int] = ()) -> Peak:
        """Return the peak on one device that holds all.

        The workspace keeps to the cap that it has on devices of these bytes.
        """
        return self.budget(self.activities(batch, seq, capacities)).peak()

    def uses(self, batch: int, seq: int, capacities: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Return the blocks over devices of these bytes; the rest is as in `peak`."""
        return self.budget(self.activities(batch, seq, capacities)).spread(capacities)

    def activities(
        self, batch: int, seq: int, capacities: Sequence[int] = (), *, level: str | None = None
    ) -> Step:
        """Return what each block does in a step, in running order, and the workspace's bytes.

        `level` is that of all decoder layers, None for what the settings say.
        """
        if level is None:
            again = self.settings.checkpointing and _checkpoints(self.meta.base)
            level = levels.RECOMPUTE if again else levels.KEEP
        cap = min(capacities) // WORKSPACE_PART if capacities else meta_step.NO_CAP
        activities, workspace = self._step(batch, seq, cap, level)
        if activities and self.settings.prepared and self.model_type in LIGER_LOSS:
            part, more = self._ligers_loss(batch * seq)
            last = activities[-1]
            sizes = [int(s * part) + more for s in (last.saved, last.forward, last.backward)]
            activities = (*activities[:-1], Activity(last.name, *sizes))
        return activities, workspace

    def budget(self, step: Step) -> StepBudget:
        """Return the budget of what `activities` has returned."""
        activities, workspace = step
        settings = replace(self.settings, workspace=workspace)
        run = {activity.name: place for place, activity in enumerate(activities)}
        # What does not run (a vision tower) and what holds buffers alone comes first.
        ordered = sorted(self.rank_blocks, key=lambda block: run.get(block.name, -1))
        leader = {block.name: block.name for block in ordered}
        for first, second in self.meta.tied:
            leader[second] = leader[first]
        groups: dict[str, list[Block]] = {}
        for block in ordered:
            groups.setdefault(leader[block.name], []).append(block)
        extra = {"packed experts": slots_nbytes(self.expert_layers) if settings.offload else 0}
        if (engine := settings.engine) is not None:
            whole = {block.name: block for block in self.meta.blocks}
            activities = engine.with_gathered(activities, whole)
            extra |= engine.buffers(whole.values(), self.itemsize)
        return StepBudget([*groups.values()], activities, settings, self.itemsize, extra=extra)

    def _ligers_loss(self, tokens: int) -> tuple[float, int]:
        """Return the part of a loss that Liger computes at once, and the bytes of its gradient.

        Its fused linear cross-entropy takes as many tokens at a time as make logits of about the
        size of all hidden states, and has the hidden states' gradient from forward on.
        """
        head = self.meta.base.get_output_embeddings()
        vocabulary, hidden = head.out_features, head.in_features
        chunk = 1 << (cdiv(tokens, cdiv(vocabulary, hidden)) - 1).bit_length()
        itemsize = next(self.meta.base.parameters()).dtype.itemsize
        return min(chunk / tokens, 1.0), tokens * hidden * itemsize

    def _run_step(self, batch: int, seq: int, cap: int, level: str) -> Step:
        meta = self.meta
        try:
            where: dict[str, Any] = {"card": self.card, "workspace_cap": cap}
            return meta_step.run_meta_step(
                meta, self.itemsize, batch=batch, seq=seq, level=level, **where
            )
        except MoeQloraError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)[:120]}"
            classes = map(type, meta.base.modules())
            liger = any(is_ligers(getattr(each, "forward", None)) for each in classes)
            raise ConfigError(
                f"{self.source.label}: a training step of this model cannot run on the meta device "
                f"({why}), so that its memory cannot be planned.{_LIGER if liger else ''}"
            ) from error

    def _ready(self, repeats: bool) -> MetaModel:
        source = self.source
        with named.quiet():
            model = source.build()
            if self.settings.attention is not None:
                attention.set_attention(model, self.settings.attention)
            self.eager = attention.eager_attention(model)
            if self.eager is not None and self.settings.attention is None:
                self.notes.append(self.eager)
            if (counted := attention.make_countable(model)) is not None:
                self.notes.append(counted)
            meta = meta_model.pack(source, model, repeats=repeats)
            with warnings.catch_warnings(record=True) as said:
                warnings.filterwarnings("always", targets.WARNING, UserWarning)
                meta_model.adapt(meta, self.settings, self.lora_config)
        if said and meta.emptied:  # It counts the weights that got no adapters
            return self._ready(False)
        self.notes += [f"{warning.message}" for warning in said]
        meta.model.train()
        base: Any = meta.base
        if self.settings.checkpointing and not _checkpoints(base):
            self.notes.append(
                f"{type(base).__name__} supports no gradient checkpointing; the plan is without."
            )
        for module in base.modules():  # levels are in its place
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        config = getattr(base, "config", None)
        if config is not None:
            config.use_cache = False
            config.get_text_config().use_cache = False
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


_LIGER = (
    " Liger has replaced classes of this model in this process, and its kernels cannot run there: "
    "plan before Liger is applied, or in another process."
)
