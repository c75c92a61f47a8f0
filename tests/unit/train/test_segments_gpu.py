"""Attention over segments by the kernels of the card, against plain attention in float64."""

import pytest
import torch

from moe_qlora.train import segments
from moe_qlora.train.segments import SegmentMask, attend

pytestmark = pytest.mark.gpu


def plain(q, k, v, lengths, sinks, window):
    """Return attention `(L, heads, D)` of each segment by itself."""
    share, start, outs = q.shape[0] // k.shape[0], 0, []
    k, v = (x.repeat_interleave(share, 0) for x in (k, v))
    for n in lengths:
        one = slice(start, start + n)
        scores = q[:, one] @ k[:, one].transpose(1, 2) * q.shape[-1] ** -0.5
        apart = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
        seen = (apart >= 0) & ((apart < window) if window else True)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([sinks[:, None, None].expand(-1, n, 1), scores], 2)
        p = scores.softmax(-1)
        outs.append((p if sinks is None else p[..., 1:]) @ v[:, one])
        start += n
    return torch.cat(outs, 1).transpose(0, 1)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(
    ("lengths", "rows"), [([1, 2, 33, 220], 0), ([256], 1), ([128, 128], 2), ([64] * 4, 0)]
)
@pytest.mark.parametrize(("dim", "narrow"), [(64, 64), (128, 128), (192, 128)])
def test_segments(lengths, rows, window, sinks, dim, narrow):
    torch.manual_seed(0)
    segments.segmented("sdpa")  # Defines the operator
    q, k, v = (
        torch.randn(1, heads, 256, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads, d in ((8, dim), (2, dim), (2, narrow))
    )
    s = torch.randn(8, device="cuda", requires_grad=True) if sinks else None
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    offsets = torch.cat([ends, ends[-1:].expand(3)])
    mask = SegmentMask(offsets, torch.tensor([256, rows]), window)
    inputs = [q, k, v] + ([s] if sinks else [])
    out = attend(q, k, v, mask, s, None)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*(x[0] for x in wide[:3]), lengths, wide[3] if sinks else None, window)
    grads = torch.autograd.grad(expected, wide, grad[0].double())
    for one, other in zip([out[0], *found], [expected, *grads], strict=True):
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 8e-3


def test_rows_of_one_length_go_to_cudnn_on_hopper():
    q = torch.empty(256, 8, 128, device="cuda", dtype=torch.bfloat16)
    hopper = torch.cuda.get_device_capability()[0] == 9
    for rows, window, wanted in ((2, -1, hopper), (0, -1, False), (2, 39, False), (2, 127, hopper)):
        assert segments.suits_cudnn(q, rows, window) is wanted
