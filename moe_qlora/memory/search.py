"""Searches the settings of docs/what-fits.md for the best combination that fits some devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import MoeQloraError
from .attention import FLEX, attended
from .budget import DeviceUse, Engine, Settings
from .choice import RECOMPUTE, Choice, Choices, Ladder
from .devices import reserve_nbytes
from .planner import LevelError, Planner
from .report import Best, PlannedFit


def fit_of(planner: Planner, uses: Sequence[DeviceUse]) -> PlannedFit | None:
    """Return what layers can keep on devices with these blocks.

    None where the model has no decoder layers, and, with a note of the planner's, where these do
    not run on a level.
    """
    try:
        return _fit_of(planner, uses)
    except LevelError as error:
        planner.notes.append(f"What layers can keep of their activations is not known ({error}).")
        return None


def _fit_of(planner: Planner, uses: Sequence[DeviceUse]) -> PlannedFit | None:
    # Blocks stay on their devices. Whether the settings have gradient checkpointing does not
    # matter, since this is in its place.
    batch, seq = planner.settings.batch, planner.settings.seq
    capacities = [use.capacity for use in uses]
    blocks, workspace = planner.activities(batch, seq, capacities, level=RECOMPUTE)
    activities = {RECOMPUTE: blocks}
    layers = [block.name for block in blocks if planner.rank_blocks[block.name].layer]
    if not layers:
        return None
    settings = replace(planner.settings, checkpointing=True)
    hosting = planner.hosting(blocks) if settings.offload else None

    def fullest(choice: Choice) -> tuple[int, DeviceUse]:
        """Return the peak of the fullest device, which the planner has no experts on."""
        budget = planner.budget_of(choice.activities, replace(settings, workspace=workspace))
        brought = 0 if hosting is None else hosting.freed(hosting.most) - hosting.freed(choice.host)
        peaks = zip((peak + brought for peak in budget.peaks_on(uses)), uses, strict=True)
        return max(peaks, key=lambda pair: _needed(pair[0]) / pair[1].capacity)

    def fits(choice: Choice) -> bool:
        peak, use = fullest(choice)
        return _needed(peak) <= use.capacity

    ladder = Ladder.of(attended(planner.text_config, seq))
    choices = Choices(tuple(layers), ladder, hosting)
    none = choices.at(choices.path[0], activities)
    choice = none
    if fits(none):
        for level in ladder.levels[1:]:
            activities[level], more = planner.activities(batch, seq, capacities, level=level)
            workspace = max(workspace, more)
        choice = choices.most_kept(activities, fits) or none
    peak, use = fullest(choice)
    times = 1.0 if choice is none else choices.gain(activities, choice)
    return PlannedFit(
        choice.layers(hosting),
        peak,
        _needed(peak),
        use.capacity,
        times,
        hosting,
        choices.saved_by(choice),
    )


def _needed(peak: int) -> int:
    return peak + reserve_nbytes(peak) if peak else 0


_BOTH: dict[str, Any] = {"targets": "attention,experts"}
_SMALL: dict[str, Any] = {"adapter_dtype": "bfloat16", "optimizer": "adamw_8bit"}
_LOW_RANK = {**_SMALL, "rank": 8}

RUNGS: tuple[dict[str, Any], ...] = (
    {**_BOTH},
    {**_BOTH, **_SMALL},
    {**_BOTH, **_LOW_RANK},
    {"targets": "attention"},
    {"targets": "attention", **_LOW_RANK},
    {**_BOTH, **_LOW_RANK, "offload": True},
    {"targets": "attention", **_LOW_RANK, "offload": True},
)
"""Arguments of `plan`, the best first: more trained weights come before less memory, and experts in
host memory, whose copies take time, last."""

LIGER_LOSS = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma4", "gemma4_text", "glm4v_moe"),
        *("gpt_oss", "hunyuan_v1_moe", "llama4", "llama4_text", "mixtral", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    )
)
"""Model types with fused experts whose loss Liger 0.8.5 computes in chunks."""

# Settings under which a planner's model and its steps are the same.
_SHARED = ("batch", "seq", "optimizer", "accumulation", "liger", "offload", "engine")
_SHORTEST = 64  # tokens


def best_of(planner: Planner, capacities: Sequence[int], fixed: Collection[str]) -> Best | None:
    """Return the best combination of settings that fits devices of these bytes; None for none.

    Settings in `fixed` are kept. Where nothing fits with them, all but the LoRA's targets, the
    batch and the sequence may change, and at last the sequence is halved, and one at a time.
    """
    search = _Search(planner, capacities)
    targets = {"targets"} & set(fixed)
    if planner.lora_config is not None:
        targets |= {"targets", "rank"}
    batch = planner.settings.batch
    for kept in (targets | set(fixed), targets):
        for settings in search.candidates(kept):
            if (found := search.tried(settings)) is not None:
                return found
    smallest = list(search.candidates(targets))[-1:]
    for settings in smallest:
        seq = settings.seq if batch > 1 else settings.seq // 2
        while seq >= _SHORTEST:
            found = search.tried(replace(settings, batch=1, seq=seq))
            if found is not None:
                return found
            seq //= 2
    return None


class _Search:
    def __init__(self, planner: Planner, capacities: Sequence[int]) -> None:
        self.planner = planner
        self.capacities = capacities
        self._known: list[Planner] = [planner]

    def candidates(self, fixed: Collection[str]) -> Iterator[Settings]:
        """Yield the settings to try, the best first; those in `fixed` are as they were asked."""
        asked = self.planner.settings
        has_liger = getattr(self.planner.source.config, "model_type", None) in LIGER_LOSS
        base: dict[str, Any] = {"checkpointing": True, "liger": has_liger}
        if self.planner.eager is not None and self.planner.eager.flex:
            base["attention"] = FLEX
        engines = [asked.engine]
        if asked.engine is None and len(self.capacities) > 1:
            engines = [Engine(name, len(self.capacities)) for name in ("ddp", "fsdp")]
        seen: list[Settings] = []
        for rung in RUNGS:
            given = {name: value for name, value in rung.items() if name not in fixed}
            if not self.planner.expert_layers:
                given = {**given, "targets": "attention"} if "targets" in given else given
                if given.get("offload"):
                    continue
            if "rank" in given:
                given["rank"] = min(given["rank"], asked.rank)
            given |= {name: value for name, value in base.items() if name not in fixed}
            for engine in engines:
                alone = len(self.capacities) == 1 if engine is None else engine.name == "ddp"
                if given.get("offload") and not alone:
                    continue
                settings = replace(asked, engine=engine, **given)
                if settings not in seen:
                    seen.append(settings)
                    yield settings

    def tried(self, settings: Settings) -> Best | None:
        """Return settings with the bytes that they take; None where they do not fit."""
        try:
            planner = self._planner(settings)
            report = planner.report(self.capacities)
        except MoeQloraError:  # A target that the model does not have
            return None
        if not report.fits:
            return None
        use = max(report.devices, key=lambda use: use.needed / use.capacity)
        host = 0 if report.hosting is None else report.hosting.host_nbytes(report.hosting.most)
        kept = fit_of(planner, report.devices)
        return Best(settings, use.needed, use.capacity, host, kept)

    def _planner(self, settings: Settings) -> Planner:
        same = replace(settings, **{name: getattr(Settings(), name) for name in _SHARED})
        for known in self._known:
            if same == replace(known.settings, **{name: getattr(same, name) for name in _SHARED}):
                break
        else:
            first = self.planner
            known = Planner(first.source, settings, first.lora_config, first.card, first.pace)
            self._known.append(known)
        return known.with_settings(settings)
