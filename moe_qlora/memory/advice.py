"""Says which engine to take for some GPUs: of those that fit, the one with the shortest step.

Memory is that of a rank (`engines.py`), time the arithmetic of `scaling.py`. Steps that are no
further apart than the arithmetic was from measured ones are taken to be alike: then DDP goes before
FSDP2, that before expert parallelism, and experts in host memory come last; of groups of ranks the
largest within a machine. ZeRO-3 is not among them: no step of it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import MoeQloraError
from ..layout import human_bytes
from .attention import attended
from .blocks import top_k_in
from .budget import Engine
from .engines import ENGINES, Sharding
from .planner import Planner
from .report import Advice
from .scaling import MEASURED, Links, Way, Work, step_seconds, trip_bytes

ERROR = 0.08
"""The part of a step by which the arithmetic is off at most, of the rows that it is fitted to."""

_BASIS = "Times are arithmetic from rows of one and two H200s; nothing else was run."


def advice_of(planner: Planner, capacities: Sequence[int], node: int) -> Advice | None:
    """Return which engine to take on GPUs of these bytes, `node` of them in a machine.

    None where none fits.
    """
    one = planner.with_engine(None)
    case = _Case(one.with_settings(replace(one.settings, offload=False)), capacities, node)
    found = [case.best(ways) for ways in ways_of(case.planner, len(capacities))]
    if found[0] is not None and not found[0].fits and case.planner.expert_layers:
        found.append(case.advice(Way("ddp", len(capacities), 1), offload=True))
    ways = [advice for advice in found if advice is not None]
    fitting = [advice for advice in ways if advice.fits]
    if not fitting:
        return None
    most = (1 + ERROR) * min(advice.seconds for advice in fitting)
    first = next(advice for advice in fitting if advice.seconds <= most)
    others = [_against(a, first, min(capacities)) for a in ways if a is not first]
    copies = f", {first.copies} copies" if first.copies > 1 else ""
    speed = f"{first.seconds:.3g} s a step, {first.tokens_per_s:,.0f} tokens/s"
    chosen = f"Take {_name(first)} over {first.ranks} ranks{copies}: {speed}; {first.reason}."
    divides = any(advice.engine == "ep" for advice in ways) or not case.planner.expert_layers
    without = [] if divides else ["Expert parallelism cannot divide these experts over these GPUs."]
    reason = " ".join([chosen, *(other.reason for other in others), *without, _BASIS])
    return replace(first, reason=reason, alternatives=tuple(others))


def _name(advice: Advice) -> str:
    return f"{ENGINES[advice.engine]} ({advice.setting})"


def _against(advice: Advice, first: Advice, capacity: int) -> Advice:
    """Return an alternative with the reason why it is not the first."""
    name = _name(advice)
    name = name[0].upper() + name[1:]
    if not advice.fits:
        needed = f"needs {human_bytes(advice.needed)} of a rank's {human_bytes(capacity)}"
        return replace(advice, reason=f"{name} {needed}.")
    times = f"{advice.seconds / first.seconds:.2f} times as long"
    if advice.seconds <= (1 + ERROR) * first.seconds:
        times += f", within the arithmetic's error of {ERROR:.0%}"
    return replace(advice, reason=f"{name} would take {times}: {advice.reason}.")


def ways_of(planner: Planner, gpus: int) -> list[list[Way]]:
    """Return the ways to train on so many GPUs by each engine, with groups of all sizes."""
    groups = [group for group in range(2, gpus + 1) if gpus % group == 0]
    totals = {param.num_experts for param in planner.meta.layout.experts}
    divided = [group for group in groups if not any(total % group for total in totals)]
    return [
        [Way("ddp", gpus, 1)],
        [Way("fsdp", gpus, group) for group in groups],
        [Way("ep", gpus, group) for group in divided if planner.expert_layers],
    ]


class _Case:
    """A model on some GPUs."""

    def __init__(self, planner: Planner, capacities: Sequence[int], node: int) -> None:
        self.planner, self.capacities = planner, capacities
        self.tokens = planner.settings.batch * planner.settings.seq
        self.work, self.speed = work_of(planner, capacities), MEASURED.on(planner.pace)
        self.links = Links.of(planner.pace, node)

    def best(self, ways: Sequence[Way]) -> Advice | None:
        """Return the quickest way of one engine that fits, of those alike that of a whole machine.

        Where none fits it is the one with the most ranks; None where the engine is not possible.
        """
        found: list[Advice] = []
        for way in sorted(ways, key=lambda way: (self._seconds(way), way.group)):
            if (advice := self.advice(way)) is None:
                continue
            found.append(advice)
            if advice.fits:  # and so do more ranks
                most = (1 + ERROR) * advice.seconds
                near = range(way.group + 1, self.links.node + 1)
                alike = [w for w in ways if w.group in near and self._seconds(w) <= most]
                return self.advice(alike[-1]) if alike else advice
        return max(found, key=lambda advice: advice.ranks, default=None)

    def _seconds(self, way: Way) -> float:
        return step_seconds(self.work, way, self.tokens, self.speed, self.links)

    def advice(self, way: Way, *, offload: bool = False) -> Advice | None:
        """Return one way, with what it costs as its reason; None where it is not possible."""
        ranks, settings = way.gpus if way.engine == "ddp" else way.group, self.planner.settings
        seconds, why = self._seconds(way), _cost(self.work, way, self.tokens)
        try:
            rank = self.planner.with_engine(Engine(way.engine, ranks))
            rank = rank.with_settings(replace(rank.settings, offload=offload))
            needed, fits = rank.needs(settings.batch, settings.seq, self.capacities)
        except MoeQloraError:  # Experts that expert parallelism cannot divide
            return None
        if offload:
            step = rank.activities(settings.batch, settings.seq, self.capacities)
            hosting = rank.hosting(step[0])
            waiting = hosting.waiting(hosting.most, {})
            seconds += waiting
            host = human_bytes(ranks * hosting.host_nbytes(hosting.most))
            why = f"it waits {waiting:.2g} s for copies of experts, {host} of host memory in all"
        rate = way.gpus * self.tokens / seconds
        copies = way.gpus // ranks
        return Advice(way.engine, ranks, copies, offload, seconds, rate, needed, fits, why)


def _cost(work: Work, way: Way, tokens: int) -> str:
    """Say what an engine moves in a step."""
    if way.engine == "ddp":
        return f"it sums {human_bytes(int(work.gradients))} of gradients"
    if way.engine == "fsdp":
        return f"it gathers {human_bytes(int(work.layer_bytes))} of layers twice a step"
    nbytes, kind = human_bytes(trip_bytes(work, way, tokens)), "all-to-alls"
    if way.cost == "ep":
        kind = "all-gathers and reduce-scatters"
    return f"it makes {work.trips} {kind} of {nbytes} in each of {work.expert_layers} layers"


def work_of(planner: Planner, capacities: Sequence[int] = ()) -> Work:
    """Return what a step of a model computes and moves; its planner has no engine."""
    settings, text = planner.settings, planner.text_config
    activities, _ = planner.activities(settings.batch, settings.seq, capacities)
    ran = {activity.name for activity in activities}
    blocks = [block for block in planner.meta.blocks if block.name in ran or not block.layer]
    layers = [block for block in blocks if block.layer]
    hidden, top_k = planner.hidden_size, top_k_in(planner.meta.base)
    cut = Sharding(Engine("fsdp", 2), hidden)
    gathered = {
        of_layer: sum(cut.whole(t) for b in blocks if b.layer is of_layer for t in b.tensors)
        for of_layer in (True, False)
    }
    adapters = [t for block in blocks for t in block.tensors if t.part == "trained"]
    of_experts = sum(tensor.numel for tensor in adapters if tensor.of_experts)
    rest = sum(tensor.numel for tensor in adapters) - of_experts
    experts = max((param.num_experts for param in planner.meta.layout.experts), default=1)
    # A product in each forward, and one for the gradient of its input; LoRA has one more, for that
    # of its weights. Scores of attention, half of them masked, have two, and four in backward.
    times = 3 if settings.checkpointing else 2
    active = sum(block.expert_active for block in blocks)
    others = sum(block.active for block in blocks) - active
    configs = getattr(text, "per_layer_config", None) or [text] * len(layers)
    scores = 2 * (times + 1) * attended(text, settings.seq)
    scores *= sum(_heads_width(each, hidden) for each in configs)
    return Work(
        layers=len(layers),
        expert_layers=sum(block.slot > 0 for block in layers),
        expert_flops=2 * (times * active + (times + 1) * of_experts * top_k / experts),
        other_flops=2 * (times * others + (times + 1) * rest) + scores,
        layer_bytes=gathered[True],
        root_bytes=gathered[False],
        expert_gradients=of_experts * planner.itemsize,
        other_gradients=rest * planner.itemsize,
        token_bytes=hidden * next(planner.meta.base.parameters()).dtype.itemsize,
        top_k=top_k,
        trips=2 * times,
    )


def _heads_width(config: Any, hidden: int) -> int:
    """Return the width of all queries and of all values of one layer, added."""
    heads = getattr(config, "num_attention_heads", None) or 0
    head = getattr(config, "head_dim", None) or hidden // max(heads, 1)
    return heads * sum(getattr(config, key, None) or head for key in ("qk_head_dim", "v_head_dim"))
