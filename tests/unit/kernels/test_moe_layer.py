"""The Triton kernels in its interpreter, in fp32, beside plain products: paths and gradients."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.packing import codec

triton = pytest.importorskip("triton")
from fused_layer import CASES, check_layer, stack_of  # noqa: E402

from moe_qlora.kernels import cards, grouped_mm, moe_layer, table, workspace  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("kind", "double", "shape"),
    [
        ("nf4", True, (3, 24, 40)),
        ("nf4", False, (2, 17, 8)),
        ("fp4", True, (4, 64, 128)),
        ("int8", False, (3, 24, 40)),
        ("mxfp4", False, (3, 17, 96)),
    ],
)
@pytest.mark.parametrize("apart", [0, 24])
def test_decode_equals_the_codec(kind, double, shape, apart):
    torch.manual_seed(0)
    stack = stack_of(shape, kind, double)
    experts, rows, cols = shape
    right, below = torch.randn(rows, 16, experts).permute(2, 0, 1), torch.randn(experts, 32, cols)
    wide = torch.full((experts, rows + 32, cols + 16 + apart), float("nan"))
    out = wide[:, :, : cols + 16]
    offsets = torch.tensor([0, 2] + [5] * (experts - 1), dtype=torch.int32)
    grouped_mm.decode(stack, out, expert_offsets=offsets, right=right, below=below)
    expected = codec.unpack(stack)
    for e in range(experts):
        if offsets[e] == offsets[e + 1]:  # no rows
            assert out[e].isnan().all()
            continue
        assert torch.equal(out[e, :rows, :cols], expected[e])
        assert torch.equal(out[e, :rows, cols:], right[e])
        assert torch.equal(out[e, rows:, :cols], below[e])
        assert wide[e, :, cols + 16 :].isnan().all()
    whole = torch.full((experts, rows, cols), float("nan"))
    grouped_mm.decode(stack, whole)
    assert torch.equal(whole, expected)


def dequantize_all(monkeypatch):
    """Leave out the kernels on codes."""
    rows = [kernel for kernel in table.kernels() if not kernel.on_codes]
    monkeypatch.setattr(table, "KERNELS", rows)


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_plain_products(name, monkeypatch):
    if name.startswith("few"):  # Nothing is decoded
        monkeypatch.setattr(grouped_mm, "decode", lambda *args, **kwargs: 1 / 0)
    check_layer(CASES[name])


@pytest.mark.parametrize("name", ["plain", "interleaved", "gelu", "high-rank"])
def test_the_own_grouped_matmul_on_rows_any_distance_apart(name, monkeypatch):
    """As of wide rows, which start at whole lines; torch's is an error."""
    dequantize_all(monkeypatch)
    cut = grouped_mm.Cut(32, 32, 2, 4, 3)
    monkeypatch.setattr(cards, "multiplies_by_torch", lambda device, dtype: False)
    monkeypatch.setattr(grouped_mm, "default", lambda tile, device: cut)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *args, **kwargs: 1 / 0)
    for module in (moe_layer, grouped_mm):
        monkeypatch.setattr(module, "row_stride", lambda width, *args, **kwargs: width + 24)
    check_layer(CASES[name])


# Those whose stacks are cut into slices; and some of smaller ones.
@pytest.mark.parametrize("name", ["mxfp4", "tanh", "int8", "no-lora", "few", "few-mxfp4"])
def test_capped_workspace_in_slices(name, monkeypatch):
    case, few = CASES[name], name.startswith("few")
    if not few:
        dequantize_all(monkeypatch)
    sliced, real = [], table.Matmul.spans

    def spans(matmul):
        found = list(real(matmul))
        sliced.extend(found if len(found) > 1 else ())
        return iter(found)

    monkeypatch.setattr(table.Matmul, "spans", spans)
    workspace.set_workspace_cap(1)
    try:
        check_layer(case)
        assert sum(buffer.nbytes for buffer in workspace.buffers(torch.device("cpu"))) < 2**20
    finally:
        workspace.set_workspace_cap(None)
    assert few or max(case.hidden, case.inner) <= 64 or sliced
