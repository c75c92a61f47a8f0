"""`moe_qlora.plan`: what a model takes on its devices, packed, loading and in training.

Nothing of the model is loaded, downloaded or moved. What it holds is counted on its twin on the
meta device (`memory/meta_model.py`), what a step needs is read off a step that runs there
(`memory/meta_step.py`), and both are added up, for one device or several (`memory/budget.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from .. import build
from ..errors import ConfigError, MoeQloraError
from ..kernels.limits import WORKSPACE_PART
from ..layout import dtype_name
from ..packing.settings import CodecSettings
from ..packing.sizes import load_extra_nbytes
from . import meta_model, meta_ops, meta_step
from .budget import (
    ALIASES,
    OPTIMIZERS,
    Activity,
    Block,
    DeviceUse,
    Settings,
    estimate,
    estimate_head,
    resident_nbytes,
    spread,
)
from .devices import exact_size, parse_devices, reserve_nbytes
from .experts import held_nbytes
from .report import Hint, MemoryPlan
from .source import Source, bnb_config, source_of

_LONGEST = 1 << 20
_MOST = 1 << 12
_STEP = 64  # tokens
_DEVICES = 16
_SMALLEST = 1 << 12  # bytes of a device; what is less was meant as GiB
_CHUNK = 1024  # tokens of a loss that is computed in chunks


def plan(
    model: Any,
    quantization_config: Any = None,
    *,
    gpus: str | int | Sequence[str | int] | None = None,
    batch: int = 1,
    seq: int = 4096,
    rank: int = 16,
    targets: str = "attention",
    lora_config: Any = None,
    adapter_dtype: str = "float32",
    optimizer: str = "adamw",
    checkpointing: bool = True,
    accumulation: int = 1,
    dtype: Any = None,
    search: bool = True,
    trust_remote_code: bool = False,
) -> MemoryPlan:
    """Plan a model's memory without loading it.

    Args:
        model: A transformers configuration; a path, model type or hub id as `moe-qlora dump` takes
            it; or a model: on meta it stands for what `from_pretrained` will load, elsewhere for
            itself, packed already or with experts that `quantize_experts` will pack.
        quantization_config: `BitsAndBytesConfig` or dict; None is what the configuration says, else
            nf4 with double quantization, computing in bfloat16. A model whose experts are packed
            stays as it is.
        gpus: Sizes of the devices: "2x24GiB", bytes, or a list of either; None for none.
        batch: Sequences in a micro-batch.
        seq: Tokens in each.
        rank: LoRA rank.
        targets: "attention", "all-linear", "experts", names of modules, or several of these
            separated by commas.
        lora_config: A `LoraConfig` in the place of `rank` and `targets`.
        adapter_dtype: "float32", which PEFT's default gives, or "bfloat16".
        optimizer: "adamw", "adamw_8bit", "paged_adamw" or "paged_adamw_8bit".
        checkpointing: Whether gradient checkpointing is on.
        accumulation: Micro-batches to an optimizer step.
        dtype: What the rest is loaded in; None is what the configuration says.
        search: Look for the longest sequence and the largest batch that fit `gpus`.
        trust_remote_code: Run model code that a checkpoint brings.

    Raises:
        CheckpointError: There is no such model, or transformers cannot build it.
        ConfigError: A setting makes no sense, or cannot be followed.
    """
    settings = Settings(
        batch=batch,
        seq=seq,
        rank=rank,
        targets=targets,
        adapter_dtype=dtype_name(adapter_dtype),
        optimizer=ALIASES.get(optimizer, optimizer),
        checkpointing=bool(checkpointing),
        accumulation=accumulation,
    )
    if lora_config is not None:
        settings = replace(settings, rank=getattr(lora_config, "r", rank), targets="lora_config")
    _check(settings)
    capacities = _capacities(gpus)
    source = source_of(model, quantization_config, dtype, trust_remote_code)
    planner = _Planner(source, settings, lora_config)
    return planner.report(capacities, search=search and bool(capacities))


def _check(settings: Settings) -> None:
    for name in ("batch", "seq", "rank", "accumulation"):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number of 1 or more.")
    if settings.seq > _LONGEST:
        raise ConfigError(f"seq is {settings.seq}; plans go up to {_LONGEST} tokens.")
    if settings.adapter_dtype not in meta_model.DTYPES:
        known = ", ".join(meta_model.DTYPES)
        raise ConfigError(f"adapter_dtype is {settings.adapter_dtype!r}; give one of {known}.")
    if settings.optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ConfigError(f"optimizer is {settings.optimizer!r}; give one of {known}.")


def _capacities(gpus: Any) -> tuple[int, ...]:
    if gpus is None:
        return ()
    given = [gpus] if isinstance(gpus, (str, int)) else list(gpus)
    sizes: list[int] = []
    try:
        for entry in given:
            if isinstance(entry, int) and entry <= 0:
                raise ValueError(f"{entry} is no size of a device; it must be over 0")
            sizes += [entry] if isinstance(entry, int) else parse_devices(str(entry))
            if min(sizes) < _SMALLEST:
                raise ValueError(f"{min(sizes)} is a number of bytes; write {min(sizes)}GiB")
    except ValueError as error:
        raise ConfigError(f"gpus: {error}.") from error
    return tuple(sizes)


class _Planner:
    """One model with one set of settings."""

    def __init__(self, source: Source, settings: Settings, lora_config: Any = None) -> None:
        self.source = source
        self.settings = settings
        self.lora_config = lora_config
        self.notes: list[str] = []
        self.estimated = False
        self.itemsize = meta_model.DTYPES[settings.adapter_dtype].itemsize
        self._unpacked: meta_model.Twin | None = None
        self._known: dict[tuple[int, int], tuple[Activity, ...]] = {}
        self._buffers: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    @cached_property
    def twin(self) -> meta_model.Twin:
        """Packed, adapted, and ready to run."""
        return self._ready(self.source)

    @cached_property
    def sizes(self) -> meta_model.Sizes:
        """What the model is before it is packed."""
        return meta_model.sizes_of(self.source.make())

    def _ready(self, source: Source) -> meta_model.Twin:
        twin = source.twin()
        with build.quiet():
            meta_model.adapt(twin, self.settings, self.lora_config)
            meta_model.stand_in(twin)
            twin.model.train()
            if self.settings.checkpointing:
                self._checkpoint(twin.base)
        text = getattr(twin.base, "config", None)
        if text is not None:
            text.use_cache = False
            text.get_text_config().use_cache = False
        return twin

    def _checkpoint(self, model: Any) -> None:
        try:
            meta_step.checkpointed(model)
        except (ValueError, AttributeError):
            self.notes.append(
                f"{type(model).__name__} supports no gradient checkpointing; the plan is without."
            )

    def activities(self, batch: int, seq: int) -> tuple[Activity, ...]:
        """What each block does, in running order."""
        if (batch, seq) not in self._known:
            self._known[batch, seq] = self._activities(batch, seq)
            twin = self._unpacked or self.twin
            found: list[Any] = meta_ops.calls(twin.base)
            if self.estimated:
                every = (self.sizes.call(name, batch * seq) for name in self.sizes.experts)
                found = [call for call in every if call is not None]
            checkpointing = self.settings.checkpointing
            sizes = {held_nbytes(call, checkpointing=checkpointing) for call in found}
            self._buffers[batch, seq] = tuple(sizes)
        return self._known[batch, seq]

    def _activities(self, batch: int, seq: int) -> tuple[Activity, ...]:
        while not self.estimated:
            twin = self._unpacked or self.twin
            try:
                return self._rehearse(twin, batch, seq)
            except MoeQloraError:
                raise
            except Exception as error:  # noqa: BLE001 - models raise anything on meta tensors
                if self._unpacked is None and self.source.linears:
                    # Some models read a Linear layer's weight past its forward.
                    self._unpacked = self._ready(replace(self.source, linears=False))
                else:
                    self._cannot(error)
        return self._estimate(batch, seq)

    def _cannot(self, error: Exception) -> None:
        self.estimated = True
        lines = str(error).strip().splitlines() or [""]
        self.notes.append(
            "The step cannot be rehearsed without data "
            f"({type(error).__name__}: {lines[0][:120]}); activations are a rough estimate."
        )

    def _rehearse(self, twin: meta_model.Twin, batch: int, seq: int) -> tuple[Activity, ...]:
        modules = meta_model.whole_modules(twin.base)
        trained = {block.name: self.itemsize * sum(block.trained) for block in twin.blocks}
        counts = [param.num_experts for param in twin.layout.experts]
        return meta_step.rehearse(
            twin.model,
            modules,
            trained,
            batch=batch,
            seq=seq,
            experts=max(counts, default=1),
        )

    def _estimate(self, batch: int, seq: int) -> tuple[Activity, ...]:
        settings = replace(self.settings, batch=batch, seq=seq)
        sizes = self.sizes
        rows = [
            estimate(
                block,
                settings,
                sizes.hidden,
                sizes.outputs.get(block.name, 0),
                sizes.call(block.name, batch * seq),
            )
            for block in self.twin.blocks
            if block.name in sizes.outputs or block.name in sizes.experts
        ]
        head = rows[-1].name if rows else "head"
        return (*rows[:-1], estimate_head(head, settings, sizes.vocabulary))

    def groups(self, activities: Iterable[Activity]) -> list[list[Block]]:
        """Blocks in placing order; those that hold one tensor together."""
        run = {activity.name: place for place, activity in enumerate(activities)}
        # What does not run (a vision tower) and what holds buffers alone comes first.
        blocks = sorted(self.twin.blocks, key=lambda block: run.get(block.name, -1))
        leader = {block.name: block.name for block in blocks}
        for first, second in meta_model.tied_blocks(self.twin.base):
            leader[second] = leader[first]
        groups: dict[str, list[Block]] = {}
        for block in blocks:
            groups.setdefault(leader[block.name], []).append(block)
        return list(groups.values())

    def _scratch(self, batch: int, seq: int, capacities: Sequence[int]) -> int:
        """Bytes of the decoded experts' shared buffers, each within what the kernels allow it."""
        cap = min(capacities) // WORKSPACE_PART if min(capacities) > 1 else None
        buffers = zip_longest(*self._buffers[batch, seq], fillvalue=0)
        most = [max(sizes) for sizes in buffers]
        return sum(most if cap is None else (min(size, cap) for size in most))

    def uses(
        self, batch: int, seq: int, capacities: Sequence[int], head: float = 1.0
    ) -> tuple[DeviceUse, ...]:
        """The blocks over devices; `head` is the part of the loss's tensors that is there."""
        activities = self.activities(batch, seq)
        last = activities[-1] if activities else Activity("", 0, 0, 0)
        if head < 1.0:
            cut = [int(value * head) for value in (last.kept, last.forward, last.backward)]
            activities = (*activities[:-1], Activity(last.name, *cut))
        return spread(
            self.groups(activities),
            activities,
            replace(
                self.settings,
                batch=batch,
                seq=seq,
                scratch=self._scratch(batch, seq, capacities),
            ),
            self.itemsize,
            capacities,
            last.name,
        )

    def fits(self, batch: int, seq: int, capacities: Sequence[int]) -> bool:
        """Whether a step fits these devices."""
        return all(use.fits for use in self.uses(batch, seq, capacities))

    def report(self, capacities: tuple[int, ...], *, search: bool) -> MemoryPlan:
        """The plan."""
        batch, seq = self.settings.batch, self.settings.seq
        (whole,) = self.uses(batch, seq, (1,))
        assert whole.peak is not None
        resident = resident_nbytes(self.twin.blocks)
        uses = self.uses(batch, seq, capacities) if capacities else ()
        quantization = self.source.quantization
        nested = bool(getattr(quantization, "bnb_4bit_use_double_quant", False))
        if quantization is None:
            nested = meta_model.is_nested(self.twin)
        made = MemoryPlan(
            label=self.source.label,
            model_type=str(getattr(self.source.config, "model_type", "")),
            kind=self.twin.kind,
            double_quant=nested and self.twin.kind != "int8",
            settings=self.settings,
            trained_weights=sum(sum(block.trained) for block in self.twin.blocks),
            unpacked=self.sizes.nbytes,
            resident=resident,
            load_peak=resident + self._load_extra(nested),
            peak=whole.peak,
            reserve=reserve_nbytes(whole.peak.nbytes),
            devices=uses,
            device_map={name: use.index for use in uses for name in use.blocks} or None,
        )
        if search:
            found_seq = _largest(lambda n: self.fits(batch, n, capacities), seq, _LONGEST, _STEP)
            found_batch = _largest(lambda n: self.fits(n, seq, capacities), batch, _MOST, 1)
            made = replace(made, largest_seq=found_seq, largest_batch=found_batch)
        if made.fits is False:
            made = replace(made, hints=tuple(_hints(self, made, capacities)))
        notes = dict.fromkeys((*self.source.notes, *self.notes))
        return replace(made, notes=tuple(notes), estimated=self.estimated)

    def _load_extra(self, nested: bool) -> int:
        kind = self.twin.kind
        if kind is None:
            return 0
        extras = [
            load_extra_nbytes(shapes, itemsize, CodecSettings(kind, nested))
            for shapes, itemsize in meta_model.loaded_together(self.twin)
        ]
        return max(extras, default=0)


def _largest(fits: Callable[[int], bool], start: int, limit: int, step: int) -> int:
    """The largest multiple of `step` up to `limit` that fits (within 1/128); 0 where none does."""
    low, high = 0, max(start // step, 1)
    while high * step <= limit and fits(high * step):
        low, high = high, high * 2
    if high * step > limit:
        high = limit // step + 1
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


@dataclass(frozen=True)
class _Change:
    """One thing to do otherwise.

    Attributes:
        what: In words.
        setting: For `plan` and the command line.
        fields: Of `Settings`.
        packing: Gives the quantization config, None leaves it as it is.
        head: The part of the loss's tensors that is there at once.
    """

    what: str
    setting: str
    fields: dict[str, Any]
    packing: Callable[[Any], Any] | None = None
    head: float = 1.0


def _hints(planner: _Planner, made: MemoryPlan, capacities: Sequence[int]) -> Iterable[Hint]:
    """Changes that save something, those that cost least first: each by itself, then together."""

    def tried(what: str, setting: str, changes: Sequence[_Change]) -> Hint:
        other, head = _changed(planner, changes)
        batch, seq = other.settings.batch, other.settings.seq
        (whole,) = other.uses(batch, seq, (1,), head)
        assert whole.peak is not None
        fits = all(use.fits for use in other.uses(batch, seq, capacities, head))
        return Hint(what, setting, made.peak.nbytes - whole.peak.nbytes, fits)

    least = made.peak.nbytes // 200
    useful: list[_Change] = []
    alone = False
    for change in _changes(planner, made):
        hint = tried(change.what, change.setting, [change])
        if hint.saves >= least:
            useful.append(change)
            alone = alone or hint.fits
            yield hint
    for count in range(2, len(useful) + 1) if not alone else ():
        chosen = useful[:count]
        hint = tried(f"the first {count} together", "", chosen)
        if hint.fits:
            # Of two changes of one setting the later one holds.
            settings = {change.setting.partition("=")[0]: change.setting for change in chosen}
            yield replace(hint, setting=", ".join(settings.values()))
            break
    yield from _more_devices(planner, made, capacities)


def _changed(planner: _Planner, changes: Sequence[_Change]) -> tuple[_Planner, float]:
    source, settings, head = planner.source, planner.settings, 1.0
    for change in changes:
        settings = replace(settings, **change.fields)
        if change.packing is not None:
            source = replace(source, quantization=change.packing(source.quantization))
        head = min(head, change.head)
    if source is planner.source and settings == planner.settings:
        return planner, head
    # A caller's LoraConfig stands for rank and targets until a change names others.
    lora = planner.lora_config if settings.targets == planner.settings.targets else None
    return _Planner(source, settings, lora), head


def _more_devices(planner: _Planner, made: MemoryPlan, capacities: Sequence[int]) -> Iterable[Hint]:
    size, fullest = max(capacities), max(use.needed for use in made.devices)
    for count in range(len(capacities) + 1, _DEVICES + 1):
        uses = planner.uses(planner.settings.batch, planner.settings.seq, [size] * count)
        if all(use.fits for use in uses):
            saves = fullest - max(use.needed for use in uses)
            what = f"spread it over {count} devices like the largest"
            yield Hint(what, f"gpus='{count}x{exact_size(size)}'", saves, True)
            return


def _changes(planner: _Planner, made: MemoryPlan) -> Iterable[_Change]:
    settings, source = planner.settings, planner.source
    if not settings.checkpointing:
        fields = {"checkpointing": True}
        yield _Change("compute layers again in backward", "checkpointing=True", fields)
    if source.free and made.kind in ("nf4", "fp4") and not made.double_quant:
        setting = "bnb_4bit_use_double_quant=True"
        yield _Change("quantize the statistics too", setting, {}, _nested)
    if source.free and made.kind == "int8":
        yield _Change("pack to 4 bit", "load_in_4bit=True", {}, lambda asked: bnb_config(None))
    tokens = settings.batch * settings.seq
    if tokens > _CHUNK:
        what = f"compute the loss {_CHUNK} tokens at a time"
        yield _Change(what, "use_liger_kernel=True (Trainer)", {}, head=_CHUNK / tokens)
    yield from _smaller(settings, made, planner.lora_config is None)


def _nested(asked: Any) -> Any:
    nested = copy.deepcopy(asked)
    nested.bnb_4bit_use_double_quant = True
    return nested


def _smaller(settings: Settings, made: MemoryPlan, free: bool) -> Iterable[_Change]:
    """Changes of the training settings alone; `free`: no `LoraConfig` fixes rank and targets."""
    less: dict[str, Any]
    if settings.optimizer == "adamw":
        less = {"optimizer": "adamw_8bit"}
        yield _Change("keep the optimizer's moments in 8 bit", "optimizer='adamw_8bit'", less)
    if not settings.optimizer.startswith("paged"):
        less = {"optimizer": "paged_adamw_8bit"}
        yield _Change("and in pages", "optimizer='paged_adamw_8bit'", less)
    if settings.adapter_dtype == "float32":
        less = {"adapter_dtype": "bfloat16"}
        yield _Change("train adapters in bfloat16", "adapter_dtype='bfloat16'", less)
    if settings.batch > 1:
        less = {"batch": 1, "accumulation": settings.accumulation * settings.batch}
        what = f"batch=1, accumulation={less['accumulation']}"
        yield _Change("one sequence at a time", what, less)
    shorter = made.largest_seq or settings.seq // 2
    if 0 < shorter < settings.seq:
        yield _Change("shorter sequences", f"seq={shorter}", {"seq": shorter})
    if free and settings.rank > 8:
        rank = settings.rank // 2
        yield _Change("half the rank", f"rank={rank}", {"rank": rank})
    if free and settings.targets != "attention":
        less = {"targets": "attention"}
        yield _Change("LoRA on attention alone", "targets='attention'", less)


__all__ = [
    "MemoryPlan",
    "plan",
]
