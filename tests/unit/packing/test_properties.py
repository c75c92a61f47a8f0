"""Random expert weights and random experts modules: what must hold for all of them."""

from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_qlora import detect, quantize_experts
from moe_qlora.packing import codec
from moe_qlora.packing.codec import pack, unpack, unpack_range
from moe_qlora.packing.settings import CodecSettings, why_not

KINDS = st.one_of(
    st.builds(
        CodecSettings,
        st.sampled_from(["nf4", "fp4"]),
        st.booleans(),
        st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    ),
    st.just(CodecSettings("int8")),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(1, 40), min_size=2, max_size=4).filter(lambda s: math.prod(s) < 60000)
WORDS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8).map(lambda word: "p" + word)
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(SHAPES, DTYPES, KINDS, st.integers(64, 5000), st.data())
def test_any_range_of_any_stack(
    shape: list[int],
    dtype: torch.dtype,
    kind: CodecSettings,
    limit: int,
    data: st.DataObject,
) -> None:
    weight = torch.randn(shape).to(dtype)
    if why_not(weight, kind):
        return
    packed = pack(weight, kind)
    whole = unpack(packed)
    with mock.patch.object(codec, "MAX_ELEMENTS", limit):
        chunked = pack(weight, kind)
        assert torch.equal(packed.codes.view(torch.uint8), chunked.codes.view(torch.uint8))
        assert torch.equal(whole, unpack(chunked))
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    assert torch.equal(unpack_range(packed, start, stop), whole[start:stop])
    # One step of the coarsest table is under a third of the block's or row's largest weight; fp4's
    # and the 8-bit absmax table's errors fit in the rest.
    assert (whole.float() - weight.float()).abs().max() <= 0.4 * weight.float().abs().max()


class Experts(nn.Module):
    """A routed layer whose parameters have the given names, registered in the given order."""

    def __init__(
        self, sizes: tuple[int, int, int], names: list[str], order: list[int], seed: int
    ) -> None:
        super().__init__()
        count, hidden, inner = sizes
        generator = torch.Generator().manual_seed(seed)
        shapes = [(count, hidden), (count, 2 * inner, hidden), (count, hidden, inner)]
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        self.names = names
        for index in order:
            self.register_parameter(names[index], nn.Parameter(tensors[index]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router, gate_up, down = (getattr(self, name) for name in self.names)
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = (tokens @ router.T).softmax(-1).topk(2)
        result = torch.zeros_like(tokens)
        for expert in range(len(router)):
            rows, slots = torch.where(chosen == expert)
            gate, up = (tokens[rows] @ gate_up[expert].T).chunk(2, -1)
            part = (nn.functional.silu(gate) * up) @ down[expert].T
            result.index_add_(0, rows, part * weights[rows, slots, None])
        return result.view_as(x)


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(3, 9), st.integers(10, 40), st.integers(10, 40)),
    st.lists(WORDS, min_size=3, max_size=3, unique=True),
    st.permutations([0, 1, 2]),
    st.sampled_from([CodecSettings("nf4", True), CodecSettings("fp4")]),
    st.integers(0, 2**16),
)
def test_detect_pack_unpack_is_the_codecs_round_trip_under_any_names(
    sizes: tuple[int, int, int],
    names: list[str],
    order: list[int],
    kind: CodecSettings,
    seed: int,
) -> None:
    model = Experts(sizes, names, order, seed)
    plain = Experts(sizes, ["router", "gate_up", "down"], [0, 1, 2], seed)
    layout = detect(model)
    assert {param.name for param in layout.experts} == set(names[1:])
    roles = {param.name: param.role for param in detect(plain).experts}
    assert {param.name: param.role for param in layout.experts} == {
        names[1]: roles["gate_up"],
        names[2]: roles["down"],
    }
    expected = {name: unpack(pack(getattr(model, name), kind)) for name in names[1:]}
    config = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind.kind,
        "bnb_4bit_use_double_quant": kind.double_quant,
    }
    quantize_experts(model, config)
    for name in names[1:]:
        assert torch.equal(getattr(model, name), expected[name])
    again = detect(model)
    shapes = {param.name: (param.shape, kind.kind) for param in layout.experts}
    assert {param.name: (param.shape, param.packed) for param in again.experts} == shapes
