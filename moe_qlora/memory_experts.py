"""What packed experts keep and what they need for a moment, in training; free of torch.

These two functions are the only place where a plan depends on how the kernels compute.
`kept_nbytes` is the table of `experts.py`; `scratch_nbytes` follows `kernels/grouped.py`
(`SCRATCH_BYTES` is its limit), stage by stage. A kernel that decodes less or keeps less changes
these and nothing else.

Legend: T tokens, k choices a token, R = T k rows, E experts, H hidden and I intermediate size,
g = 2 for gated experts and 1 for others, b bytes of an activation, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

SCRATCH_BYTES = 2 << 30
"""Largest decoded stack that is held at once; larger ones are decoded expert by expert."""

_INDEX = 8  # bytes of an int64
_WIDE = 4  # bytes of a float32
_ALIGN = 8  # ranks are padded to this for grouped products


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA on one projection.

    Attributes:
        rank: r.
        itemsize: Bytes of an element of its factors.
    """

    rank: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """One call of one experts module.

    Attributes:
        tokens: T.
        top_k: k.
        experts: E.
        hidden: H.
        intermediate: I.
        gated: Whether the first projection gives out both halves of a gated unit.
        itemsize: b, of the activations.
        weight_itemsize: Bytes of an element that the weights are decoded to.
        routing_itemsize: Bytes of a routing weight.
        first: LoRA on the first projection, a term for each adapter.
        second: LoRA on the second.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    gated: bool = True
    itemsize: int = 2
    weight_itemsize: int = 2
    routing_itemsize: int = 2
    first: tuple[Adapter, ...] = ()
    second: tuple[Adapter, ...] = ()

    @property
    def rows(self) -> int:
        """R."""
        return self.tokens * self.top_k

    @property
    def width(self) -> int:
        """g I, what the first projection gives out for a row."""
        return self.intermediate * (2 if self.gated else 1)


def kept_nbytes(call: ExpertsCall) -> int:
    """Bytes that stay between forward and backward, beside the layer's input and the adapters.

    Pre-activations, activations, sorted order with the experts' bounds, sorted routing weights.
    """
    rows = call.rows
    activations = rows * (call.width + call.intermediate) * call.itemsize
    order = _INDEX * (rows + call.experts + 1)
    return activations + order + rows * call.routing_itemsize


def scratch_nbytes(call: ExpertsCall) -> tuple[int, int]:
    """Bytes that are there for a moment beside what is kept: (in forward, in backward)."""
    first, second = _decoded(call, call.width), _decoded(call, call.intermediate)
    rows, wide = call.rows, _WIDE * call.tokens * call.hidden
    hidden = rows * call.hidden * call.itemsize
    inner = rows * call.intermediate * call.itemsize
    outer = rows * call.width * call.itemsize
    up_terms = _terms(call, call.first, call.hidden, call.width)
    down_terms = _terms(call, call.second, call.intermediate, call.hidden)
    forward = (
        hidden + first,  # tokens gathered to rows, one stack decoded
        hidden + 2 * outer + up_terms if call.first else 0,  # the sum and what is added to it
        second + hidden,
        3 * hidden + down_terms if call.second else 0,
        2 * hidden + wide,  # rows scaled, brought back into the tokens' order, and summed
    )
    scale = 3 * rows * call.intermediate * _WIDE  # the routing weights' gradient, in float32
    backward = (
        hidden + second + inner,
        hidden + inner + scale,
        2 * hidden + 3 * inner + _gradients(call, call.second, call.intermediate, call.hidden)
        if call.second
        else 0,
        5 * inner + outer,  # the gate, computed again
        outer + 2 * hidden + first,
        outer + 2 * hidden + wide,
        outer + 4 * hidden + _gradients(call, call.first, call.hidden, call.width)
        if call.first
        else 0,
    )
    return max(forward), max(backward)


def _decoded(call: ExpertsCall, features: int) -> int:
    """One projection's decoded stack; one expert's matrix where the stack is too large for that."""
    matrix = call.hidden * features
    aligned = call.hidden % _ALIGN == 0 and features % _ALIGN == 0
    if aligned and 2 * call.experts * matrix <= SCRATCH_BYTES:
        return call.experts * matrix * call.weight_itemsize
    return matrix * call.weight_itemsize


def _terms(call: ExpertsCall, terms: tuple[Adapter, ...], inputs: int, outputs: int) -> int:
    """The largest term's factors laid out for grouped products, its input cast, its inner rows."""
    return max((_factors(call, term, inputs, outputs) for term in terms), default=0)


def _gradients(call: ExpertsCall, terms: tuple[Adapter, ...], inputs: int, outputs: int) -> int:
    """The same in backward: the factors' gradients stand beside them."""
    return max((2 * _factors(call, term, inputs, outputs) for term in terms), default=0)


def _factors(call: ExpertsCall, term: Adapter, inputs: int, outputs: int) -> int:
    rank = -(-term.rank // _ALIGN) * _ALIGN
    factors = call.experts * rank * (inputs + outputs) * term.itemsize
    cast = call.rows * inputs * term.itemsize if term.itemsize != call.itemsize else 0
    return factors + cast + call.rows * rank * term.itemsize
