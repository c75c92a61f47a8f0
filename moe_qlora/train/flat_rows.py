"""Batches of any shape as one flat row of a fixed number of tokens.

    (B, T) tokens, padded or packed
        -> (1, L): the real tokens of all sequences, one after the other, and a segment that fills
        -> the model's own forward, whose attention sees segments (segments.py)
        -> hidden states, router logits `(B, T, ...)`, zeros at padding

`L` is one of a few lengths, which come from the batches that come (`RowLengths`): CUDA graphs are
recorded for each of these. Compiled layers serve all of them. The forward of the decoder stack is
replaced on its instance, so that the head, the loss and a trainer see no difference. Where there is
a mask or positions, numbers of tokens and segments are read from the device.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..lora.packed_rows import (
    CACHES,
    OF_SEGMENTS,
    PLACES,
    SEPARATES,
    decoder_stacks,
    kept_apart,
    packed_starts,
    parameters_of,
    sequences_of,
    state_of,
    tokens_of,
    watch_packed_rows,
)
from .segments import Segments, running, segmented

_log = logging.getLogger(__name__)

_FLAT = "_moe_qlora_flat_rows"  # Entry of a decoder stack's `__dict__`: its `FlatRows`
_TABLE = 16
"""Least size of the table of segments, and how much larger each next one is: 4 times. Flash
attention takes a microsecond for an empty segment and head, or so (4,096 tokens, one H200)."""
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_STEP = 64  # Lengths are multiples: kernels are compiled anew for those that are not of 16
# How often a length comes before it is recorded although a longer one serves. Recording takes 1.2 s
# (48 layers of Qwen3-30B-A3B, H200).
_OFTEN = 8
_RECORDED = 8  # Most lengths that are recorded
_SHORT = 1024  # Fewer tokens take hardly less time: all experts are read for them
_OF_LOSS = ("num_items_in_batch", "labels")


def flatten_rows(model: nn.Module, batch_size: int, seq_len: int, *, fixed: bool) -> list[FlatRows]:
    """Let the decoder stacks of a model run each batch as one flat row; return what was set."""
    # Rows of up to `batch_size * seq_len` tokens; with `fixed`, filled up to one of a few lengths.
    largest = batch_size * seq_len if fixed else None
    return [FlatRows(stack, seq_len, largest) for stack in decoder_stacks(model)]


class RowLengths:
    """Which lengths rows are filled up to, and which sizes their tables of segments have.

    CUDA graphs are recorded for the next power of two where no recorded length serves a row (filled
    to 69 %), and for its own length once that has come often (89 %). Recorded rows of up to four
    times the tokens are quicker than rows that are not. Where memory holds no other length, those
    that are recorded serve.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.memory = RowMemory()
        self.alone = False  # Whether memory holds the last row alone, without graphs of others
        self.recorded: list[tuple[int, int]] = []  # (L, S)
        self._came: Counter[tuple[int, int]] = Counter()

    def pick(self, tokens: int, segments: int) -> tuple[int, int, bool]:
        """Return a row's length, the size of its table, and whether it is recorded."""
        self.alone, size = False, table_size(segments)
        if tokens > self.largest:
            return rounded(tokens), size, False
        length = min(max(rounded(tokens), _SHORT), self.largest)
        own = length, size
        self._came[own] += 1
        if own in self.recorded:
            return *own, True
        long = [each for each in self.recorded if each[0] >= length]
        free = self._is_free(length)
        if not (free and self._came[own] >= _OFTEN):
            fits = [each for each in long if each[1] >= size]
            if serve := [each for each in fits if not free or each[0] <= 4 * length]:
                return *min(serve), True
            wide = min(1 << (length - 1).bit_length(), self.largest)
            own = (wide if self._is_free(wide) else length), size
            if not free:
                self.alone = len(self.recorded) < _RECORDED
                if not (self.alone and long):
                    return *own, False
                own = min(long)[0], size  # In place of the one whose table is too small
                self.recorded.remove(min(long))
        self.recorded.append(own)
        return *own, True

    def _is_free(self, length: int) -> bool:
        lengths = [each for each, _ in self.recorded]
        return len(lengths) < _RECORDED and self.memory.holds(lengths, length, self.largest)


class RowMemory(NamedTuple):
    """The memory that graphs of rows may take, as parts of what those of the largest row take."""

    room: float = math.inf  # All that there is
    kept: float = 0  # What the largest row needs beside a longer one, with which it shares the rest

    def holds(self, recorded: Sequence[int], length: int, largest: int) -> bool:
        """Whether a row of this length can be recorded beside others; the first one always can."""
        longest = max([*recorded, length])
        others = sum(recorded) + length - longest
        return not recorded or longest + self.kept * others <= self.room * largest


def rounded(tokens: int) -> int:
    """Return the next length: in steps of a quarter of the power of two below."""
    step = max(_STEP, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


def table_size(segments: int) -> int:
    """Return the size of the table for this number of segments."""
    size = _TABLE
    while size < segments:
        size *= 4
    return size


def has_flat_rows(model: nn.Module) -> bool:
    """Whether batches of a model run as flat rows."""
    return any(rows.obstacle is None for rows in _of(model))


def limit_lengths(model: nn.Module, memory: RowMemory) -> None:
    """Let the flat rows of a model have no more recorded lengths than memory holds."""
    for rows in _of(model):
        if rows.lengths is not None:
            rows.lengths.memory = memory


def _of(model: nn.Module) -> list[FlatRows]:
    return [vars(stack)[_FLAT] for stack in decoder_stacks(model) if _FLAT in vars(stack)]


def obstacle(stack: Any) -> str | None:
    """Return why the rows of a decoder stack stay apart, or None."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    config = stack.config
    if (state := state_of(stack)) is not None:
        return state
    if not any(isinstance(each, GradientCheckpointingLayer) for each in stack.modules()):
        return "its layers are not of transformers' class for checkpointing"
    if not getattr(stack, "_supports_attention_backend", False):
        return "its attention is not one of transformers' interface"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    if others := set(getattr(config, "layer_types", None) or ()) - _KINDS:
        return f"it has layers of {', '.join(sorted(others))}"
    return None


class FlatRows:
    """The forward of one decoder stack, in place of its own."""

    def __init__(self, stack: Any, longest: int, largest: int | None = None) -> None:
        self.stack, self.longest = stack, longest
        self.lengths = None if largest is None else RowLengths(largest)
        self.obstacle = obstacle(stack)
        self._names = parameters_of(stack)
        self._said: set[str] = set()
        self._before = vars(stack).get("forward")
        self._attention = stack.config._attn_implementation
        self._watch = watch_packed_rows(stack)
        vars(stack)[SEPARATES] = self.obstacle is None
        if self.obstacle is None:
            stack.config._attn_implementation = segmented(self._attention or "eager")
        stack.__dict__[_FLAT] = self
        self.__signature__ = inspect.signature(self._before or stack.forward)
        stack.forward = self

    def remove(self) -> None:
        held = vars(self.stack)
        self._watch.close()
        if held.get(_FLAT) is self:
            held.pop(SEPARATES, None)
            del held[_FLAT], held["forward"]
            if self._before is not None:
                self.stack.forward = self._before
            self.stack.config._attn_implementation = self._attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch as one flat row; as before where it cannot be."""
        given = kwargs | dict(zip(self._names, args, strict=False))
        if torch.compiler.is_compiling() or self.obstacle is not None:
            return self._own(**given)
        trains = self.stack.training and torch.is_grad_enabled()
        # An evaluation of plain rows expects a cache, unless it says that it does not.
        cached = any(given.get(name) is not None for name in CACHES)
        wanted = trains or given.get("use_cache") is False
        if not wanted and (cached or packed_starts(given) is None):
            return self._own(**given)
        reason, row = _reason(self.stack, given, cached), None
        if reason is None:
            # Attention wants masks of all pairs of tokens where flash attention has none.
            dense = not getattr(self.stack, "_supports_flash_attn", False)
            row = _Row.of(given, self.longest, self.lengths if trains else None, dense)
        elif trains and reason not in self._said:
            self._said.add(reason)
            _log.warning("prepare_training: a batch runs in its own shape: it %s.", reason)
        if row is None:
            return self._own(**kept_apart(self.stack, given, self._own))
        flat = {
            name: row.gathered(value) if row.has_tokens(value) else value
            for name, value in given.items()
            if name not in (*OF_SEGMENTS, *_OF_LOSS)
        }
        flat |= {"position_ids": row.positions, "use_cache": False}
        flat |= {name: None for name in CACHES if name in self._names}
        # All of one: without a mask, transformers would look for segments by itself.
        flat["attention_mask"] = torch.ones_like(row.positions, dtype=torch.long)
        token = running.set(row.segments)
        try:
            return row.spread(self._own(**flat))
        finally:
            running.reset(token)

    def _own(self, **given: Any) -> Any:
        return (self._before or partial(type(self.stack).forward, self.stack))(**given)


def _reason(stack: Any, given: dict[str, Any], cached: bool) -> str | None:
    """Return why a call cannot run as a flat row, or None."""
    if given.get("use_cache") or cached:
        return "has a key-value cache (use_cache)"
    attentions = given.get("output_attentions")
    if getattr(stack.config, "output_attentions", False) if attentions is None else attentions:
        return "asks for attention weights (output_attentions)"
    if tokens_of(given) is None:
        return "has neither input_ids nor inputs_embeds"
    tokens = tokens_of(given).shape[:2]
    for name, value in given.items():
        if value is None or name in (*_OF_LOSS, *OF_SEGMENTS):
            continue
        shape = tuple(getattr(value, "shape", ()))
        if name in PLACES:
            fits = shape == tokens or (name == "position_ids" and shape == (1, tokens[1]))
        else:
            fits = len(shape) < 2 or shape[:2] == tokens
        if not fits:
            return f"has {name} of shape {shape}, for tokens of shape {tuple(tokens)}"
    return None


@dataclass
class _Row:
    """One flat row: where its tokens come from, and where they go."""

    shape: torch.Size  # (B, T) of the batch
    segments: Segments
    positions: Tensor  # (1, L)
    source: Tensor | None  # (L,) of the batch's tokens, B * T for filling; None: in their order
    target: Tensor | None  # (B * T,) in the row, L for padding

    @classmethod
    def of(
        cls, given: dict[str, Any], longest: int, lengths: RowLengths | None, dense: bool
    ) -> _Row | None:
        real, starts = sequences_of(given)
        shape, device = real.shape, real.device
        mask, positions = map(given.get, PLACES)
        positions = None if positions is None else positions.to(device).expand(shape)
        flags, begins = real.flatten(), starts.flatten()
        places = flags.cumsum(0) - 1  # Of each token in the row
        within = places - torch.where(begins, places, 0).cummax(0).values  # and in its segment
        count, segments, most = real.numel(), *shape
        if mask is not None or positions is not None:  # transformers reads masks, too
            before = functional.pad(real[:, :-1], (1, 0))
            holes = (real & ~before & ~starts).any() & (starts.sum(1) < 2).all()
            found = [real.sum(), starts.sum(), torch.where(flags, within, 0).max() + 1, holes]
            count, segments, most, holes = torch.stack(found).tolist()
            if holes or not count:  # Positions go on behind a hole, and windows with them
                return None
        length, size, recorded = count, table_size(segments), False
        if lengths is not None:
            # Two more than fill any row: by at most a quarter, or up to the shortest length.
            length, size, recorded = lengths.pick(count, segments + 2)
            recorded = recorded and most <= longest
        longest = max(longest, most)
        if (needed := segments + -(-(length - count) // longest)) > size:
            size, recorded = table_size(needed), False
        offsets = _offsets(begins, places, length, longest, size)
        source = target = None
        if count < shape.numel():
            target = torch.where(flags, places, length)
            numbers = torch.arange(shape.numel(), device=device)
            source = numbers.new_full((length + 1,), shape.numel())
            source = source.scatter_(0, target, numbers)[:length]
        # What fills a row may follow its only segment: nothing before sees it.
        whole = segments == len(real) and count == real.numel() == length
        rows = 1 if segments == 1 else len(real) if whole else 0
        alone = lengths is not None and lengths.alone
        held = Segments(length, offsets, longest, recorded, dense, rows, alone)
        row = cls(shape, held, offsets, source, target)
        # Zeros fill it: some rotary embeddings depend on the last position.
        row.positions = row.gathered(within.view(shape) if positions is None else positions)
        return row

    def has_tokens(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == self.shape

    def gathered(self, x: Tensor) -> Tensor:
        """Return `(1, L, ...)` of `(B, T, ...)`, zero where the row is filled."""
        x = x.flatten(0, 1)
        fill = self.segments.length - len(x) if self.source is None else 1
        if fill > 0:
            x = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, fill))
        return (x if self.source is None else x.index_select(0, self.source))[None]

    def spread(self, out: Any) -> Any:
        """Return a model's output with tensors of the row as of the batch."""
        if isinstance(out, Tensor):
            if out.dim() > 1 and out.shape[:2] == (1, self.segments.length):
                return self._spread(out[0]).unflatten(0, self.shape)
            return self._spread(out) if out.dim() and len(out) == self.segments.length else out
        if type(out) in (tuple, list):
            return type(out)(self.spread(each) for each in out)
        if isinstance(out, dict):  # transformers' ModelOutput
            for name, value in list(out.items()):
                out[name] = self.spread(value)
        return out

    def _spread(self, x: Tensor) -> Tensor:
        if self.target is None:
            return x[: self.shape.numel()]
        padding = self.target == len(x)
        found = x.index_select(0, self.target.clamp(max=len(x) - 1))
        return found.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0)


def _offsets(starts: Tensor, places: Tensor, length: int, longest: int, size: int) -> Tensor:
    """Return where each segment begins in the row, `(size + 1,)` int32."""
    # What is left of the row is filled with segments that are not longer than others may be.
    ids = starts.cumsum(0)
    numbers = torch.arange(size + 1, device=starts.device)
    fill = places[-1] + 1 + (numbers - ids[-1]) * longest
    # Tokens that begin nothing go to an entry that is cut off.
    begins = numbers.new_zeros(size + 2)
    begins.scatter_(0, torch.where(starts, ids - 1, size + 1), places)
    found = torch.where(numbers < ids[-1], begins[:-1], fill.clamp(max=length))
    return found.to(torch.int32)
