"""LoRA's factors as the kernels read them, and when B stays as PEFT stores it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
from fused_layer import Case, build, check_layer  # noqa: E402

from moe_qlora.kernels import factors, limits, moe_layer, table  # noqa: E402
from moe_qlora.kernels.factors import Lora, pad_factors  # noqa: E402
from moe_qlora.kernels.gate_kernels import Gate  # noqa: E402
from moe_qlora.kernels.streams import SecondStream  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

ONE = SecondStream(torch.device("cpu"), 1024)  # which is the same stream there
OSS = Gate("silu", interleaved=True, limit=0.7, alpha=1.7, shift=1.0)


def lora_of(rank, experts=3, inner=8, out=24, dtype=torch.float32):
    a, b = torch.randn(experts * rank, inner), torch.randn(out, rank * experts)
    return Lora(a.to(dtype), b.to(dtype), 0.5)


def test_b_stays_where_its_rank_and_dtype_suit():
    loras = lora_of(16), lora_of(32, out=40)
    for as_stored in [(False, False), (True, False), (False, True), (True, True)]:
        found = pad_factors(loras, 3, torch.float32, ONE, as_stored)
        for lora, f, stays in zip(loras, found, as_stored, strict=True):
            rank = f.rank
            assert (f.b.data_ptr() == lora.b.data_ptr()) == stays
            assert torch.equal(f.b, lora.b.view(-1, rank, 3).permute(2, 0, 1))
            assert torch.equal(f.a, lora.a.view(3, rank, -1))
    whole = lora_of(16, out=48)
    strided = whole._replace(b=whole.b[::2])
    for lora in (lora_of(8), lora_of(20), lora_of(16, dtype=torch.float16), strided):
        rank = lora.a.shape[0] // 3
        f, other = pad_factors((lora, loras[1]), 3, torch.float32, ONE, (True, True))
        assert f.b.is_contiguous() and f.b.shape == (3, 24, f.rank)
        assert torch.equal(f.b[..., :rank], lora.b.float().view(-1, rank, 3).permute(2, 0, 1))
        assert not f.b[..., rank:].any()
        assert other.b.data_ptr() == loras[1].b.data_ptr()
    assert pad_factors((None, None), 3, torch.float32, ONE, (True, True)) == [None, None]


def test_an_unaligned_b_is_copied_and_stays_strided():
    lora = lora_of(16)
    numel = lora.b.numel()
    lora = lora._replace(b=torch.randn(numel + 1)[1:].view(lora.b.shape))
    f, _ = pad_factors((lora, None), 3, torch.float32, ONE, (True, True))
    assert f.b.data_ptr() % 16 == 0 and f.b.stride() == (1, 48, 3)
    assert torch.equal(f.b, lora.b.view(-1, 16, 3).permute(2, 0, 1))


@pytest.mark.parametrize(("out", "stays"), [((1 << 27) - 1, True), (1 << 27, False)])
def test_a_b_of_2_31_numbers_is_copied(out, stays):
    a, b = torch.empty(16, 8, device="meta"), torch.empty(out, 16, device="meta")
    assert (factors._stored(Lora(a, b, 0.5), 1, torch.float32) is not None) == stays


@pytest.mark.parametrize(
    ("rows", "experts", "few"),
    [
        (8, 128, True), (16, 128, True), (17, 128, False), (32, 256, True), (2, 8, True),
        (3, 8, False), (1, 1, True), (4, 32, True), (5, 32, False),
    ],
)  # fmt: skip
def test_few_rows_read_fewer_bytes(rows, experts, few):
    assert limits.reads_stored_factors(rows, experts) == few


FEW = Case(tokens=2, top_k=2, experts=32, hidden=64, inner=64, ranks=(16, 32))
LAYERS = {
    "plain": FEW,
    "one-padded": replace(FEW, ranks=(8, 16)),
    "all-padded": replace(FEW, ranks=(8, 3)),
    "one-lora": replace(FEW, ranks=(0, 16)),
    "biased": replace(FEW, biased=True, gate=OSS),
    "transposed": replace(FEW, transposed=True, biased=True, gate=OSS),
    "int8": replace(FEW, kind=("int8", False)),
    "one-expert": replace(FEW, experts=1, tokens=2, top_k=1, ranks=(16, 16)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_same_to_the_bit(name, monkeypatch):
    case = LAYERS[name]
    stays = []
    real = factors._stored
    monkeypatch.setattr(factors, "_stored", lambda *a: stays.append(real(*a)) or stays[-1])
    check_layer(case)
    both = [rank for rank in case.ranks if rank]  # backward asks for none
    assert len(stays) == len(both)
    assert [b is not None for b in stays] == [rank in (16, 32) for rank in both]

    def forward():
        made, _, x, weights, index, biases, loras = build(case)
        with torch.no_grad():
            operands = moe_layer.Operands(x, weights, biases, loras)
            state = moe_layer.gate_up_forward(made, index, operands)
            out = moe_layer.down_forward(made, state)
        # Of what is held elsewhere no row is written.
        live = int(state.routing.expert_offsets[case.experts])
        return out, state.saved.pre[:live], state.inner[:live]

    mine = forward()
    monkeypatch.setattr(moe_layer, "reads_stored_factors", lambda rows, experts: False)
    spread = forward()
    assert len(stays) == 2 * len(both)
    for ours, theirs in zip(mine, spread, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dequantizes", [(True, True), (False, True), (True, False)])
def test_what_is_dequantized_takes_a_contiguous_b(dequantizes, monkeypatch):
    given = []
    real = factors._stored
    answers = iter([*(not d for d in dequantizes), False, False])
    every = table.KERNELS

    def choose(on_codes, *args, **options):
        monkeypatch.setattr(table, "KERNELS", [k for k in every if k.on_codes == on_codes])
        return real_choose(*args, **options)

    real_choose = table.choose
    monkeypatch.setattr(table, "choose", lambda *a, **k: choose(next(answers), *a, **k))
    monkeypatch.setattr(factors, "_stored", lambda *a: given.append(a[0]) or real(*a))
    check_layer(FEW)
    assert len(given) == 2 - sum(dequantizes)
