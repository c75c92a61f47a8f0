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
    """Bytes that are there for a moment beside what is kept: (in forward, in backward).

    Each stage is counted with what of the activations is there then; these, kept as they are,
    are taken off at the end.
    """
    rows, wide = call.rows, _WIDE * call.tokens * call.hidden
    hidden = rows * call.hidden * call.itemsize
    inner = rows * call.intermediate * call.itemsize
    outer = rows * call.width * call.itemsize
    up, down = _decoded(call, call.width), _decoded(call, call.intermediate)
    forward = [
        hidden + up + outer,  # tokens gathered to rows, the stack decoded, the product
        outer + inner + down + hidden,
        outer + inner + 2 * hidden + wide,  # rows scaled, put in the tokens' order, summed
    ]
    backward = [
        outer + inner + hidden + down + inner,  # the gradient's rows, decoded, the product
        outer + inner + hidden + inner + 3 * rows * call.intermediate * _WIDE,  # routing weights
        2 * outer + 4 * inner,  # the gate, computed again; the activations have gone
        outer + 2 * hidden + up,  # pre-activations have gone too: this is their gradient
        outer + 3 * hidden + wide,
    ]
    for term in call.first:
        in_rows, out_rows = rows * call.hidden, rows * call.width
        forward.append(hidden + outer + _sums(call, term, out_rows))
        forward.append(hidden + outer + _cast(call, term, in_rows))
        # The input as the term computes, what goes on to the input, and the sum brought to tokens.
        onward = _sums(call, term, in_rows) + in_rows * max(term.itemsize, call.itemsize)
        factors = _factors(call, term, call.hidden, call.width)
        backward.append(outer + hidden + _cast(call, term, in_rows) + onward + wide + factors)
    for term in call.second:
        in_rows, out_rows = rows * call.intermediate, rows * call.hidden
        casts = _cast(call, term, in_rows) + _cast(call, term, out_rows)
        forward.append(outer + inner + hidden + _sums(call, term, out_rows))
        factors = _factors(call, term, call.intermediate, call.hidden)
        backward.append(outer + 2 * inner + 2 * hidden + casts + factors)
    activations = outer + inner
    return max(forward) - activations, max(backward) - activations


def _decoded(call: ExpertsCall, features: int) -> int:
    """One projection's decoded stack; one expert's matrix where the stack is too large for that."""
    matrix = call.hidden * features
    aligned = call.hidden % _ALIGN == 0 and features % _ALIGN == 0
    if aligned and 2 * call.experts * matrix <= SCRATCH_BYTES:
        return call.experts * matrix * call.weight_itemsize
    return matrix * call.weight_itemsize


def _sums(call: ExpertsCall, term: Adapter, elements: int) -> int:
    """What a term adds, and the sum, in the wider of both types."""
    return elements * (term.itemsize + max(term.itemsize, call.itemsize))


def _cast(call: ExpertsCall, term: Adapter, elements: int) -> int:
    """Rows in the term's type, where that is another."""
    return elements * term.itemsize if term.itemsize != call.itemsize else 0


def _factors(call: ExpertsCall, term: Adapter, inputs: int, outputs: int) -> int:
    """The factors laid out for grouped products, and their gradients."""
    rank = -(-term.rank // _ALIGN) * _ALIGN
    return 2 * call.experts * rank * (inputs + outputs) * term.itemsize
