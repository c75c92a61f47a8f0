"""LoRA's factors as the kernels read them."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
from moe_qlora.kernels import limits  # noqa: E402
from moe_qlora.kernels.factors import Lora, pad_factors  # noqa: E402
from moe_qlora.kernels.streams import SecondStream  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

ONE = SecondStream(torch.device("cpu"), 1024)  # which is the same stream there


def lora_of(rank, experts=3, inner=8, out=24, dtype=torch.float32):
    a, b = torch.randn(experts * rank, inner), torch.randn(out, rank * experts)
    return Lora(a.to(dtype), b.to(dtype), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_factors_are_put_experts_first_and_padded(dtype):
    strided = lora_of(16, out=48)
    unaligned = torch.randn(24 * 48 + 1)[1:].view(24, 48)
    loras = [
        lora_of(16), lora_of(20, out=40), lora_of(3, dtype=torch.float16),
        strided._replace(b=strided.b[::2]), lora_of(16)._replace(b=unaligned), None,
    ]  # fmt: skip
    for lora, f in zip(loras, pad_factors(loras, 3, dtype, ONE), strict=True):
        if lora is None:
            assert f is None
            continue
        rank = lora.a.shape[0] // 3
        assert f.a.dtype == f.b.dtype == dtype and f.b.is_contiguous()
        assert f.rank == f.b.shape[2] == limits.padded(rank)
        assert torch.equal(f.a[:, :rank], lora.a.to(dtype).view(3, rank, -1))
        assert torch.equal(f.b[..., :rank], lora.b.to(dtype).view(-1, rank, 3).permute(2, 0, 1))
        assert not f.a[:, rank:].any() and not f.b[..., rank:].any()
