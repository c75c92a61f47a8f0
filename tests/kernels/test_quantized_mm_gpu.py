"""On a CUDA device: products on codes, each configuration and the kernel for Hopper."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings

pytestmark = pytest.mark.gpu


def problem(shape, back, kind="nf4", double=True, dtype=torch.bfloat16, each=90, rank=16):
    from moe_qlora.kernels import dequantize, quantized_check
    from moe_qlora.kernels import routing as routing_

    quantized_check.prepare(torch.device("cuda", 0))
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape, device="cuda", dtype=dtype) * 0.05
    storage = torch.int8 if kind == "int8" else torch.uint8
    packed = codec.pack(weight, CodecSettings(kind, double, storage))
    experts, n, k = shape
    inner, outer = (n, k) if back else (k, n)
    index = torch.randint(experts - 1, (experts * each, 1), device="cuda")  # the last has no rows
    routing = routing_.route(index, experts)
    x = torch.randn(len(index), inner + rank, device="cuda", dtype=dtype)
    factor = torch.randn(experts, outer, rank, device="cuda", dtype=dtype)
    decoded = torch.empty(shape, device="cuda", dtype=dtype)
    dequantize.decode(packed, decoded)
    right = torch.empty(len(index), outer, device="cuda", dtype=torch.float64)
    offsets = routing.expert_offsets[: experts + 1].tolist()
    for e in range(experts):
        rows = x[offsets[e] : offsets[e + 1]].double()
        w = decoded[e].double() if back else decoded[e].double().t()
        right[offsets[e] : offsets[e + 1]] = (
            rows[:, :inner] @ w + rows[:, inner:] @ factor[e].double().t()
        )
    return packed, routing, x, factor, right


def run(packed, routing, x, factor, config, tile, back, span, gather=None):
    from moe_qlora.kernels import quantized_mm
    from moe_qlora.kernels.routing import _tiles_launch

    count = routing.count // tile + packed.experts
    tiles = torch.empty(2 * count, dtype=torch.int32, device="cuda")
    _tiles_launch(packed.experts, tile, (count, 0, 0), 0)(
        routing.expert_offsets, tiles, tiles, tiles, count, 0, 0
    )
    room = None
    if packed.nested is not None and not config.direct:
        room = torch.empty(packed.absmax.shape, device="cuda")
    return quantized_mm.launch(x, packed, factor, room, routing.expert_offsets, tiles, tile, config,
                        back=back, span=span, gather=gather)  # fmt: skip


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_every_configuration(tile, back):
    from moe_qlora.kernels import autotune, quantized_check

    packed, routing, x, factor, right = problem((4, 192, 320), back)
    ran = 0
    for config in autotune._CANDIDATES:
        if (config.features if back else config.step) > 128:
            continue
        if config.own and not (
            config.hopper
            and tile >= 64
            and quantized_check.on_hopper(packed.spec, x.dtype, back=back)
        ):
            continue
        if tile * config.features > 128 * 256 or (
            config.warps == 4 and tile * config.features > 128 * 128
        ):
            continue  # spills, minutes to compile
        y = run(packed, routing, x, factor, config, tile, back, (0, right.shape[1]))
        assert (y.double() - right).norm() < 3e-3 * right.norm(), (config, tile)
        again = run(packed, routing, x, factor, config, tile, back, (0, right.shape[1]))
        assert torch.equal(y, again)
        ran += 1
    assert ran > 5


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("kind", [("nf4", True), ("nf4", False), ("fp4", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 16, 128])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("each", [90, 170])
@pytest.mark.parametrize("span", [(0, None), (64, 128)])
def test_hopper_is_as_exact_as_decoding(back, kind, dtype, rank, tile, each, span):
    from moe_qlora.kernels import quantized_check, quantized_mm

    packed, routing, x, factor, right = problem(
        (4, 192, 320), back, *kind, dtype, each=each, rank=rank
    )
    if not quantized_check.on_hopper(packed.spec, dtype, back=back):
        pytest.skip("no Hopper GPU")
    span = span[0], right.shape[1] if span[1] is None else span[1]
    y = run(packed, routing, x, factor if rank else None, quantized_mm.HOPPER, tile, back, span)
    right = right[:, slice(*span)]
    # One rounding of the result: everything else is in fp32 or exact.
    assert (y.double() - right).norm() < (
        2.0e-3 if dtype == torch.bfloat16 else 2.5e-4
    ) * right.norm()
    for _ in range(5):
        again = run(
            packed, routing, x, factor if rank else None, quantized_mm.HOPPER, tile, back, span
        )
        assert torch.equal(y, again)


@pytest.mark.parametrize("kind", [("nf4", True), ("nf4", False), ("fp4", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 16, 128])
@pytest.mark.parametrize("shape", [(8, 200, 512), (5, 192, 1280), (3, 64, 768)])
@pytest.mark.parametrize("each", [1, 4, 12, 40])  # the last in several tiles an expert
@pytest.mark.parametrize("span", [(0, None), (64, 128)])
@pytest.mark.parametrize("expert_last", [False, True])
def test_few_rows_are_as_exact_as_decoding(kind, dtype, rank, shape, each, span, expert_last):
    from moe_qlora.kernels import quantized_check
    from moe_qlora.kernels.quantized_config import FEW

    packed, routing, x, factor, right = problem(shape, False, *kind, dtype, each=each, rank=rank)
    assert quantized_check.multiplies_few(packed.spec, dtype, 16, back=False)
    span = span[0], min(right.shape[1], right.shape[1] if span[1] is None else span[1])
    if span[0] >= span[1]:
        pytest.skip("no such features")
    if expert_last:  # as PEFT stores lora_B
        factor = factor.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    wide = torch.zeros(len(x), x.shape[1] + 64, dtype=dtype, device="cuda")  # rows lie apart
    wide[:, : x.shape[1]] = x
    rows = wide[:, : x.shape[1]]
    y = run(packed, routing, rows, factor if rank else None, FEW, 16, False, span)
    right = right[:, slice(*span)]
    bound = 2.0e-3 if dtype == torch.bfloat16 else 2.5e-4
    assert (y.double() - right).norm() < bound * right.norm()
    for _ in range(3):
        again = run(packed, routing, rows, factor if rank else None, FEW, 16, False, span)
        assert torch.equal(y, again)


@pytest.mark.parametrize("kind", [("nf4", True), ("nf4", False), ("fp4", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 16, 128])
@pytest.mark.parametrize("each", [90, 170, 300])  # rows in tiles of 64, 128 and 256
@pytest.mark.parametrize("span", [(0, None), (64, 128)])
@pytest.mark.parametrize("gathers", [False, True])
def test_registers_are_as_exact_as_decoding(kind, dtype, rank, each, span, gathers):
    from moe_qlora.kernels import quantized_check, quantized_mm_registers
    from moe_qlora.kernels.quantized_config import REGISTERS, Gather

    inner = 512 if rank else 1280
    packed, routing, x, factor, right = problem(
        (4, 192, inner), False, *kind, dtype, each=each, rank=rank
    )
    if not quantized_check.in_registers(packed.spec, dtype, back=False):
        pytest.skip("no Hopper GPU")
    span, gather = (span[0], right.shape[1] if span[1] is None else span[1]), None
    rows, tail = x[:, :inner].contiguous(), x[:, inner:].contiguous()
    if gathers:
        tokens = torch.empty_like(rows)
        tokens[routing.order[: len(rows)].long()] = rows
        x, gather = quantized_mm_registers.reorder(tokens), Gather(routing.order, tail, 1, len(x))
    else:
        x = torch.cat([quantized_mm_registers.reorder(rows), tail], 1)
    factor = factor if rank else None
    found = [run(packed, routing, x, factor, REGISTERS, 256, False, span, gather) for _ in range(5)]
    assert quantized_check.in_registers(packed.spec, dtype, back=False)  # it has compiled
    right = right[:, slice(*span)]
    # One rounding of the result: everything else is in fp32 or exact.
    assert (found[0].double() - right).norm() < (
        2.0e-3 if dtype == torch.bfloat16 else 2.5e-4
    ) * right.norm()
    assert all(torch.equal(found[0], again) for again in found)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("each", [200, 700])
def test_a_layer_whose_rows_are_reordered_equals_the_portable_one(transposed, each):
    """Forward takes reordered columns where weights are stored (out, in), and backward never."""
    from moe_qlora.kernels import cards, moe_layer, quantized_check, row_launches

    device, dtype, experts, size = torch.device("cuda", 0), torch.bfloat16, 4, 512
    quantized_check.prepare(device)
    torch.manual_seed(0)

    def stack(out, inp):
        shape = experts, *((inp, out) if transposed else (out, inp))
        weight = torch.randn(shape, device=device, dtype=dtype) * 0.05
        return codec.pack(weight, CodecSettings("nf4", True, torch.uint8))

    def lora(out, inp):
        a = torch.randn(experts * 8, inp, device=device, dtype=dtype) * 0.05
        return moe_layer.Lora(a, torch.randn(out, 8 * experts, device=device, dtype=dtype), 0.5)

    first, second = stack(2 * size, size), stack(size, size)
    if not quantized_check.in_registers(first.spec, dtype, back=False):
        pytest.skip("no Hopper GPU")
    layer = moe_layer.Layer(first, second, transposed, False, row_launches.Gate("silu"), dtype)
    tokens = experts * each // 2
    x, grad = torch.randn(2, tokens, size, device=device, dtype=dtype)
    weights = torch.rand(tokens, 2, device=device, dtype=dtype)
    index = torch.rand(tokens, experts, device=device).topk(2).indices
    loras = lora(2 * size, size), lora(size, size)
    operands = moe_layer.Operands(x, weights, (None, None), loras)

    def results():
        state = moe_layer.gate_up_forward(layer, index, operands)
        out = moe_layer.down_forward(layer, state)
        return out, *moe_layer.backward(layer, state.routing, state.saved, grad, operands)

    found = results()
    with cards.acting_as(cards.PORTABLE):
        expected = results()
    for mine, other in zip(found, expected, strict=True):
        assert (mine.double() - other.double()).norm() < 0.01 * other.double().norm()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_int8_codes_are_taken(tile, back):
    from moe_qlora.kernels import autotune, quantized_check, quantized_mm

    packed, routing, x, factor, right = problem((4, 192, 320), back, "int8", False)
    assert quantized_mm.supports(packed.spec) and quantized_check.takes_int8(x.device)
    config = autotune.chosen(packed, x.dtype, tile, back=back)
    y = run(packed, routing, x, factor, config, tile, back, (0, right.shape[1]))
    assert (y.double() - right).norm() < 3e-3 * right.norm()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("inner", [64, 128])
def test_the_fewest_steps(inner, back):
    """A single step is no loop for Hopper's kernel: the portable one takes it."""
    from moe_qlora.kernels import autotune, quantized_check

    shape = (4, inner, 192) if back else (4, 192, inner)
    packed, routing, x, factor, right = problem(shape, back)
    assert inner > 64 or not quantized_check.on_hopper(packed.spec, x.dtype, back=back)
    config = autotune.chosen(packed, x.dtype, 128, back=back)
    y = run(packed, routing, x, factor, config, 128, back, (0, right.shape[1]))
    assert (y.double() - right).norm() < 3e-3 * right.norm()


def test_the_tuner_finds_a_right_configuration(tmp_path, monkeypatch):
    from moe_qlora.kernels import autotune

    monkeypatch.setattr(autotune, "cache_file", lambda device: tmp_path / "table.json")
    autotune._load.cache_clear()
    packed, *_ = problem((4, 192, 320), False)
    picked = autotune.tune(packed, torch.bfloat16, (32, 128))
    assert set(picked) == {(32, False), (32, True), (128, False), (128, True)}
    autotune._load.cache_clear()
    for (tile, back), config in picked.items():
        assert autotune.chosen(packed, torch.bfloat16, tile, back=back) == config
    autotune._load.cache_clear()
