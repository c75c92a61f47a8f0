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
from torch import nn

from ..errors import ConfigError, MoeQloraError, first_line
from ..experts.forward_override import is_ligers
from ..kernels.cards import PORTABLE, Card
from ..kernels.limits import WORKSPACE_PART, cdiv
from ..kernels.weights import PackedWeight
from ..lora import targets
from ..models import named
from ..packing.settings import CodecSettings, packed_tensors
from . import attention, meta_model, meta_step
from .budget import Activity, Block, DeviceUse, Engine, Peak, Settings, Sharding, StepBudget
from .devices import reserve_nbytes
from .hosting import ExpertLayer, Hosting, Pace, operations, slots_nbytes
from .meta_model import MetaModel, ModelSource, filled, tells_layers_apart
from .report import MemoryPlan

LIGER_LOSS = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma4", "gemma4_text", "glm4v_moe"),
        *("gpt_oss", "hunyuan_v1_moe", "llama4", "llama4_text", "mixtral", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    )
)
"""Model types with fused experts whose loss Liger 0.8.5 computes in chunks."""


class LevelError(Exception):
    """A step ran, but not with its layers on a level."""


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
        self.eager: attention.EagerAttention | None = None  # Where it need not be
        self.itemsize = meta_model.DTYPES[settings.adapter_dtype].itemsize
        self.model_type = str(getattr(source.config, "model_type", ""))
        self._step = cache(self._run_step)

    @cached_property
    def meta(self) -> MetaModel:
        """The model packed, adapted, and ready to run."""
        apart = tells_layers_apart(
            self.settings.targets, self.lora_config, self.source.quantization
        )
        if self.source.skeleton is not None and not apart:
            try:
                if (meta := self._ready(self.source.skeleton())) is not None:
                    return meta
            except MoeQloraError:  # which names what the whole model has
                pass
        meta = self._ready(None)
        assert meta is not None
        return meta

    @property
    def text_config(self) -> Any:
        """The configuration of the model, or of its language model."""
        config: Any = getattr(self.meta.base, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def sharding(self) -> Sharding | None:
        """How the engine cuts this model, None without one."""
        engine = self.settings.engine
        return None if engine is None else Sharding(engine)

    @cached_property
    def rank_blocks(self) -> list[Block]:
        """Each block as one process has it on its device."""
        blocks = list(self.meta.blocks)
        if self.sharding is not None:
            blocks = list(map(self.sharding.on_rank, blocks))
        return [block.without_experts() for block in blocks] if self.settings.offload else blocks

    @property
    def layers(self) -> set[str]:
        """Names of the decoder layers."""
        return {block.name for block in self.meta.blocks if block.layer}

    @property
    def expert_layers(self) -> tuple[ExpertLayer, ...]:
        """The blocks with packed experts, in the model's order."""
        return tuple(
            ExpertLayer(block.name, block.experts + block.expert_statistics, block.slot)
            for block in self.meta.blocks
            if block.slot
        )

    def hosting(self, activities: Sequence[Activity]) -> Hosting:
        """Return what packed experts cost in host memory, in a step with these activities."""
        tokens, ran = self.settings.batch * self.settings.seq, {a.name for a in activities}
        seconds = {
            block.name: operations(block.active, tokens) / self.pace.rate
            for block in self.meta.blocks
            if block.name in ran
        }
        return Hosting(self.expert_layers, len(self.expert_layers), self.pace, seconds)

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
        peak = self.peak(batch, seq, capacities)
        uses = self.uses(batch, seq, capacities) if capacities else ()
        hosting = None
        if self.settings.offload:
            hosting = self.hosting(self.activities(batch, seq, capacities)[0])
        return MemoryPlan(
            label=self.source.label,
            model_type=self.model_type,
            kind=self.meta.kind,
            double_quant=any(part.weight.nested is not None for part in self.meta.parts),
            settings=self.settings,
            trained_weights=sum(sum(block.trained) for block in self.meta.blocks),
            unpacked=self.source.nbytes,
            resident=self.resident,
            load_peak=self.load_peak,
            peak=peak,
            reserve=reserve_nbytes(peak.nbytes),
            devices=uses,
            device_map={name: use.index for use in uses for name in use.blocks} or None,
            whole=self.with_engine(None).resident if self.settings.engine else None,
            on_disk=self.source.on_disk,
            hosting=hosting,
        )

    def peak(self, batch: int, seq: int, capacities: Sequence[int] = ()) -> Peak:
        """Return the peak on one device that holds all.

        The workspace keeps to the cap that it has on devices of these bytes.
        """
        return self._budget(batch, seq, capacities).peak()

    def uses(self, batch: int, seq: int, capacities: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Return the blocks over devices of these bytes; the rest is as in `peak`."""
        budget = self._budget(batch, seq, capacities)
        return budget.on_each(capacities) if self.settings.engine else budget.spread(capacities)

    def fullness(self, batch: int, seq: int, capacities: Sequence[int]) -> float:
        """Return the part of its bytes that the fullest device needs; it fits up to 1."""
        return max(use.needed / use.capacity for use in self.uses(batch, seq, capacities))

    def _budget(self, batch: int, seq: int, capacities: Sequence[int]) -> StepBudget:
        activities, workspace = self.activities(batch, seq, capacities)
        settings = replace(self.settings, batch=batch, seq=seq, workspace=workspace)
        return self.budget_of(activities, settings)

    def activities(
        self, batch: int, seq: int, capacities: Sequence[int] = (), *, level: str | None = None
    ) -> tuple[tuple[Activity, ...], int]:
        """Return what each block does in a step, in running order, and the workspace's bytes.

        `level` is that of all decoder layers, None for what the settings say.
        """
        cap = min(capacities) // WORKSPACE_PART if capacities else meta_step.NO_CAP
        activities, workspace = self._step(batch, seq, cap, level)
        if activities and self.settings.prepared and self.model_type in LIGER_LOSS:
            part, more = self._ligers_loss(batch * seq)
            last = activities[-1]
            sizes = [int(s * part) + more for s in (last.saved, last.forward, last.backward)]
            activities = (*activities[:-1], Activity(last.name, *sizes))
        return activities, workspace

    def budget_of(self, activities: Sequence[Activity], settings: Settings) -> StepBudget:
        """Return the budget of a step."""
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
        if self.sharding is not None:
            whole = {block.name: block for block in self.meta.blocks}
            activities = self.sharding.with_gathered(activities, whole)
            extra |= self.sharding.buffers(whole.values(), self.itemsize)
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

    def _run_step(
        self, batch: int, seq: int, cap: int, level: str | None = None
    ) -> tuple[tuple[Activity, ...], int]:
        """Return what each block does in a step, and the bytes of the workspace of this cap."""
        meta = self.meta
        try:
            return meta_step.run_meta_step(
                meta.model,
                meta.modules,
                {block.name: self.itemsize * sum(block.trained) for block in meta.blocks},
                batch=batch,
                seq=seq,
                experts=max((param.num_experts for param in meta.layout.experts), default=1),
                groups=None if meta.skeleton is None else meta.skeleton.groups,
                card=self.card,
                workspace_cap=cap,
                level=level,
                layers=[block.name for block in meta.blocks if block.layer],
            )
        except MoeQloraError:
            raise
        except Exception as error:
            if level is not None:  # The step itself has run
                raise LevelError(f"{type(error).__name__}: {first_line(error)}") from error
            why = f"{type(error).__name__}: {first_line(error)[:120]}"
            classes = map(type, meta.base.modules())
            liger = any(is_ligers(getattr(each, "forward", None)) for each in classes)
            raise ConfigError(
                f"{self.source.label}: a training step of this model cannot run on the meta device "
                f"({why}), so that its memory cannot be planned.{_LIGER if liger else ''}"
            ) from error

    def _ready(self, skeleton: meta_model.Skeleton | None) -> MetaModel | None:
        """Return the model, or its skeleton, packed; None where notes count what it names."""
        source = self.source
        with named.quiet():
            model = source.build() if skeleton is None else copy.deepcopy(skeleton.model)
            meta = meta_model.pack(
                self._with_attention(model),
                source.quantization,
                linears=source.linears,
                native=source.native,
            )
            with warnings.catch_warnings(record=True) as said:
                warnings.filterwarnings("always", targets.WARNING, UserWarning)
                meta_model.adapt(meta, self.settings, self.lora_config)
            notes = [f"{warning.message}" for warning in said]
            if skeleton is not None:
                if notes:
                    return None
                meta.skeleton, meta.blocks = skeleton, filled(skeleton, meta.blocks)
            self.notes += notes
            meta_model.fake_packed(meta)
            meta.model.train()
            if self.settings.checkpointing and not meta_step.enable_checkpointing(meta.base):
                self.notes.append(
                    f"{type(meta.base).__name__} supports no gradient checkpointing; the plan is "
                    "without."
                )
        config = getattr(meta.base, "config", None)
        if config is not None:
            config.use_cache = False
            config.get_text_config().use_cache = False
        return meta

    def _with_attention(self, model: nn.Module) -> nn.Module:
        if self.settings.attention is not None:
            attention.set_attention(model, self.settings.attention)
        self.eager = attention.eager_attention(model)
        if self.eager is not None and self.settings.attention is None:
            self.notes.append(f"{self.eager.what} {self.eager.cure}")
        counted = attention.make_countable(model)
        if counted is not None:
            self.notes.append(counted)
        return model

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
        extras = (
            load_extra_nbytes(
                [weight.shape for weight in weights],
                max(weight.dtype.itemsize for weight in weights),
                CodecSettings.of(weights[0]),
                dequantizes=self.source.dequantizes,
            )
            for weights in modules.values()
        )
        return held + max(extras, default=0)


def load_extra_nbytes(
    shapes: Sequence[Sequence[int]],
    itemsize: int,
    settings: CodecSettings,
    *,
    dequantizes: bool = False,
) -> int:
    """Return the temporary bytes of packing one module's weights while loading."""
    # The largest expert's matrix in the checkpoint's dtype, and with double quantization the
    # float32 absmax of all weights, which are packed themselves only once a weight is complete.
    # A matrix that is dequantized first has its codes and fp32 values beside it, which the loads of
    # tools/bench/results/loading.csv show to be at most as much as two more of it.
    extra = itemsize * max(prod(shape[1:] if len(shape) > 2 else shape) for shape in shapes)
    extra *= 3 if dequantizes else 1
    if settings.double_quant:
        blocks = (packed_tensors(shape, settings)[settings.codec.scales].numel for shape in shapes)
        extra += torch.float32.itemsize * sum(blocks)
    return extra


_LIGER = (
    " Liger has replaced classes of this model in this process, and its kernels cannot run there: "
    "plan before Liger is applied, or in another process."
)
