"""What packed experts keep and what they need for a moment, in training; free of torch.

These functions are the only place where a plan depends on how the kernels compute. Whole layers
(`ExpertsCall.layered`) follow `kernels/moe_layer.py`, whose docstring names what is there at each
stage, and hold the shared scratch of `kernels/workspace.py` for good; everything else follows
`kernels/projection.py` (`DEQUANTIZED_WEIGHT_BYTES` is its limit) and the table of
`experts/forward.py`. A kernel that decodes less or keeps less changes these and nothing else.

Legend: T tokens, k choices a token, R = T k rows, E experts, H hidden and I intermediate size,
g = 2 for gated experts and 1 for others, b bytes of an activation, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.limits import DEQUANTIZED_WEIGHT_BYTES, LINE, MAX_LORA_RANK, ROWS_ON_QUANTIZED

_INDEX = 8  # bytes of an int64
_WIDE = 4  # bytes of a float32
_ALIGN = 8  # ranks are padded to this for grouped products
_BLOCK = 64  # weights to an absmax


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
        transposed: Whether stacks are stored `(E, in, out)`.
        codes: Whether few rows can be multiplied on the codes themselves.
        nested: Whether the codes' statistics are packed as well.
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
    transposed: bool = False
    codes: bool = True
    nested: bool = True

    @property
    def layered(self) -> bool:
        """Whether both projections run as one layer: 16-bit activations, ranks within its limit."""
        wide = all(size % _ALIGN == 0 for size in (self.hidden, self.intermediate))
        return (
            self.itemsize == 2
            and wide
            and max(_rank(self.first), _rank(self.second)) <= MAX_LORA_RANK
        )

    @property
    def few(self) -> bool:
        """Whether products run on the codes themselves, without decoding."""
        return self.codes and self.rows <= ROWS_ON_QUANTIZED * self.experts

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
    if call.layered:
        first, second = _ranks(call)
        return rows * (call.width + first + second) * call.itemsize + 8 * rows
    activations = rows * (call.width + call.intermediate) * call.itemsize
    order = _INDEX * (rows + call.experts + 1)
    return activations + order + rows * call.routing_itemsize


def scratch_nbytes(call: ExpertsCall) -> tuple[int, int]:
    """Bytes that are there for a moment beside what is kept: (in forward, in backward).

    Each stage is counted with what of the activations is there then; these, kept as they are,
    are taken off at the end.
    """
    if call.layered:
        return _layer_scratch(call)
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


def held_nbytes(call: ExpertsCall, *, checkpointing: bool) -> tuple[int, ...]:
    """Bytes of each buffer of the scratch that all layers of a device share, and that stays.

    What is decoded in a checkpoint's recomputation has a buffer for each projection, since backward
    follows at once; otherwise the two take turns. Products on codes decode nested statistics alone.
    """
    if not call.layered:
        return ()
    ranks = _ranks(call)
    stacks = [
        call.experts * (features + rank) * _apart(call, size + rank) * call.itemsize
        for features, size, rank in (
            (call.width, call.hidden, ranks[0]),
            (call.hidden, call.intermediate, ranks[1]),
        )
    ]
    if call.few:
        blocks = call.experts * call.hidden * call.width // _BLOCK
        return (blocks * _WIDE,) if call.nested else ()
    return (stacks[0], stacks[1]) if checkpointing else (max(stacks),)


def _ranks(call: ExpertsCall) -> tuple[int, int]:
    """Ranks as the layer's kernels hold them: a power of two of at least 16; 0 without LoRA."""
    first, second = (
        max(16, 1 << (_rank(terms) - 1).bit_length()) if terms else 0
        for terms in (call.first, call.second)
    )
    return first, second


def _rank(terms: tuple[Adapter, ...]) -> int:
    return sum(term.rank for term in terms)


def _layer_scratch(call: ExpertsCall) -> tuple[int, int]:
    """`scratch_nbytes` of `kernels/moe_layer.py`, in the names of its docstring, without it.

    The gradients of the factors and of x are counted by who asks for them, from the start: they are
    taken off the stages that have them anyway.
    """
    first, second = _ranks(call)
    rows, size = call.rows, call.itemsize
    result = call.tokens * call.hidden * size
    gathered = rows * _apart(call, call.hidden + first) * size
    inner = rows * _apart(call, call.intermediate + second) * size
    y = rows * call.hidden * size
    factors = (
        call.experts
        * size
        * (first * (call.hidden + call.width) + second * (call.hidden + call.intermediate))
    )
    forward = max(gathered, inner + y + result) + factors
    product = rows * second * size
    u = rows * call.intermediate * size
    d_pre = rows * _apart(call, call.width + first) * size
    grads = call.experts * (
        sum(t.rank * (call.hidden + call.width) * t.itemsize for t in call.first)
        + sum(t.rank * (call.hidden + call.intermediate) * t.itemsize for t in call.second)
    )
    stages = (
        rows * _apart(call, call.hidden + second) * size + product + u,
        product + u + d_pre,
        product + d_pre + y + grads,
        product + y + grads + result,
    )
    backward = max(stages) + factors - grads - result
    return forward, max(backward, 0)


def _apart(call: ExpertsCall, width: int) -> int:
    """Elements from one row of a product to the next: `row_stride` of kernels/weights.py."""
    line = LINE // call.itemsize
    whole = -(-width // line) * line
    return whole if call.few or 80 * (whole - width) <= width else width


def _decoded(call: ExpertsCall, features: int) -> int:
    """One projection's decoded stack; one expert's matrix where the stack is too large for that."""
    matrix = call.hidden * features
    aligned = call.hidden % _ALIGN == 0 and features % _ALIGN == 0
    if aligned and 2 * call.experts * matrix <= DEQUANTIZED_WEIGHT_BYTES:
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
