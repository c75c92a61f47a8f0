"""The content of a report in typed pieces; `Missing` replaces one that was not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..memory.budget import StepMoment
from ..memory.rehearsal import KindBytes
from ..memory.report import MemoryPlan


@dataclass(frozen=True, slots=True)
class Missing:
    """A piece that was not measured: the reason and what to do, in one sentence."""

    why: str
    fault: bool = False  # True for an error, False if it was not asked for


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Expert weights that differ in nothing but their layer."""

    pattern: str  # Full name with `*` for numbers
    count: int
    shape: tuple[int, ...]
    role: str
    dtype: str
    evidence: str


@dataclass(frozen=True, slots=True)
class LayoutPiece:
    """The experts of a model, and its weights by kind."""

    model_type: str
    packed: str | None  # Packed type of the sizes
    groups: tuple[WeightGroup, ...]
    layers: int  # Modules that own expert weights
    experts: tuple[int, ...]  # Numbers of experts in a layer that occur
    top_k: int | None  # Experts per token; None if the configuration does not say
    routers: tuple[tuple[str, int], ...]  # Name patterns and their counts
    linear_experts: tuple[tuple[str, int], ...]  # Experts that are lists of Linear layers, likewise
    rejected: int  # Other parameters of three or more dimensions
    kinds: tuple[KindBytes, ...]

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(kind.weights for kind in self.kinds)

    @property
    def before(self) -> int:
        """Bytes as the model is loaded."""
        return sum(kind.before for kind in self.kinds)

    @property
    def after(self) -> int:
        """Bytes once packed."""
        return sum(kind.after for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class ErrorMap:
    """Relative errors of one kind of expert weight."""

    pattern: str
    layers: tuple[str, ...]
    errors: tuple[tuple[float, ...], ...]  # A row of its experts' errors for each layer


@dataclass(frozen=True, slots=True)
class LinearErrors:
    """Relative errors of Linear layers that differ in nothing but their place."""

    pattern: str
    count: int
    mean: float
    worst: float
    worst_name: str


@dataclass(frozen=True, slots=True)
class ErrorPiece:
    """Quantization errors: Frobenius norms of the differences over the sources'."""

    kind: str  # The packed type
    source: str
    maps: tuple[ErrorMap, ...]
    linears: tuple[LinearErrors, ...]


@dataclass(frozen=True, slots=True)
class LayerUse:
    """How often each expert of one layer was chosen."""

    name: str
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of assignments of tokens to experts."""
        return sum(self.counts)

    @property
    def relative(self) -> tuple[float, ...]:
        """Each expert's share of the assignments over the even share: 1 is even use."""
        return tuple(count * len(self.counts) / max(self.total, 1) for count in self.counts)

    @property
    def balance(self) -> float:
        """Entropy of the shares, relative to even use: 1 is even, 0 is one expert for all."""
        shares = [count / max(self.total, 1) for count in self.counts if count]
        entropy = -sum(share * math.log(share) for share in shares)
        # Not -0.0, which formats as "-0.000"
        return max(0.0, entropy / math.log(len(self.counts))) if len(self.counts) > 1 else 1.0

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that no token went to."""
        return tuple(number for number, count in enumerate(self.counts) if not count)

    @property
    def hot(self) -> tuple[int, ...]:
        """Experts with at least twice the even share, the busiest first."""
        relative = self.relative
        order = sorted(range(len(relative)), key=lambda number: -relative[number])
        return tuple(number for number in order if relative[number] >= 2)

    @property
    def top_quarter(self) -> float:
        """The busiest quarter of experts' share of the assignments."""
        most = sorted(self.counts, reverse=True)[: max(len(self.counts) // 4, 1)]
        return sum(most) / max(self.total, 1)


@dataclass(frozen=True, slots=True)
class RoutingPiece:
    """How often the user's own text was routed to each expert."""

    layers: tuple[LayerUse, ...]
    tokens: int
    texts: int
    sample: str  # The text's file, or that it was a list
    adapted: bool  # The model had an adapter


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Weights that differ in nothing but their layer, and how many of them have LoRA."""

    pattern: str
    expert: bool  # Expert weights, otherwise a module's
    count: int
    covered: int
    ranks: tuple[int, ...]  # Ranks that occur
    trained: int  # Trained weights
    chosen: tuple[int, ...] = ()  # Numbers of experts with LoRA, for weights with LoRA on some


@dataclass(frozen=True, slots=True)
class LoraPiece:
    """The weights with LoRA, and other trained ones."""

    adapter: str
    groups: tuple[LoraGroup, ...]
    others: int  # Weights that are trained whole (biases, modules_to_save)
    total: int  # Weights of the model

    @property
    def trained(self) -> int:
        """Number of trained weights."""
        return self.others + sum(group.trained for group in self.groups)


@dataclass(frozen=True, slots=True)
class MemoryPiece:
    """A training step, rehearsed on the meta device."""

    plan: MemoryPlan
    moments: tuple[StepMoment, ...]
    length: str = ""  # A sentence: the source of `seq`


@dataclass(frozen=True, slots=True)
class Curve:
    """A logged value of a run."""

    name: str  # As the log has it
    points: tuple[tuple[float, float], ...]  # Step and value, in order; finite
    lost: tuple[float, ...] = ()  # Steps at which it was not finite, or over 1e15


@dataclass(frozen=True, slots=True)
class TrainingPiece:
    """The log of a Trainer's run."""

    log: str  # The file
    steps: int
    max_steps: int
    epochs: float
    batch: int | None
    curves: tuple[Curve, ...]
    tokens: float | None = None  # Seen in all, where the run counted them

    def curve(self, name: str) -> Curve | None:
        """Return the curve of this name, where there is one."""
        return next((curve for curve in self.curves if curve.name == name), None)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything on the page."""

    title: str
    source: str
    made: str  # When and by which version
    layout: LayoutPiece | Missing
    error: ErrorPiece | Missing
    routing: RoutingPiece | Missing
    lora: LoraPiece | Missing
    memory: MemoryPiece | Missing
    training: TrainingPiece | Missing
    notes: tuple[str, ...] = ()
