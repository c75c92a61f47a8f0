"""AdamW's kernels against torch's step; on a GPU compiled, else in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_qlora.kernels import adamw
from moe_qlora.kernels.adamw import Kind, Row, advance, tabulate, update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [1, 7, 1023, 4097, 2048, 4096, 0]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("a GPU is there, and with it the compiled kernel")
        request.getfixturevalue("interpreted")
    return torch.device(request.param)


class Tensors:
    """Tensors of AdamW, which start `skew` elements into their memory."""

    def __init__(self, kind: Kind, device: torch.device, sizes: list[int], skew: int = 0) -> None:
        def of(dtype: torch.dtype, scale: float) -> list[Tensor]:
            room = [torch.randn(n + skew, device=device) * scale for n in sizes]
            return [t.to(dtype)[skew:] for t in room]

        self.kind = kind
        self.p, self.grad = of(kind.p, 1.0), of(kind.grad, 0.1)
        self.exp_avg = of(kind.state, 0.1)
        self.exp_avg_sq = [t.abs() for t in of(kind.state, 0.01)]
        if skew:
            self.exp_avg_sq = [torch.cat([t[:1], t])[1:] for t in self.exp_avg_sq]
        self.step = [torch.tensor(float(i % 3), device=device) for i in range(len(sizes))]

    @property
    def rows(self) -> list[Row]:
        every = zip(self.p, self.exp_avg, self.exp_avg_sq, self.step, strict=True)
        return [Row(p.numel(), *(t.data_ptr() for t in (p, *more))) for p, *more in every]

    def step_by_kernel(self, *numbers: float) -> None:
        device = self.p[0].device
        tables = tabulate(self.rows, device)
        grads = adamw.to_device([g.data_ptr() for g in self.grad], device)
        advance(tables, numbers[1], numbers[2])
        update(self.kind, tables, grads, *numbers)

    def step_in_double(
        self, lr: float, beta1: float, beta2: float, eps: float, decay: float
    ) -> list[tuple[Tensor, ...]]:
        """What a step makes of p, exp_avg and exp_avg_sq."""
        results = []
        every = zip(self.p, self.grad, self.exp_avg, self.exp_avg_sq, self.step, strict=True)
        for one in every:
            p, g, m, v, step = (t.double() for t in one)
            p = p - lr * decay * p
            m, v, step = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g, step + 1
            root = (v / (1 - beta2**step)).sqrt() + eps
            results.append((p - lr / (1 - beta1**step) * m / root, m, v))
        return results


def check(tensors: Tensors, *numbers: float) -> None:
    wanted, steps = tensors.step_in_double(*numbers), [t.item() for t in tensors.step]
    tensors.step_by_kernel(*numbers)
    assert [t.item() for t in tensors.step] == [step + 1 for step in steps]
    for *mine, (p, m, v) in zip(
        tensors.p, tensors.exp_avg, tensors.exp_avg_sq, wanted, strict=True
    ):
        for is_, should in zip(mine, (p, m, v), strict=True):
            # The interpreter cuts what it converts to bf16.
            bf16 = 2**-8 if is_.is_cuda else 2**-7
            rtol = {BF16: bf16, FP16: 2**-11, FP32: 2e-5}[is_.dtype]
            torch.testing.assert_close(is_.double(), should, rtol=rtol, atol=5e-6)


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, FP32, FP32), (FP32, FP32, BF16),
               (BF16, FP32, FP32)],
)  # fmt: skip
@pytest.mark.parametrize("aligned", [True, False])
def test_a_step(device: torch.device, dtypes: tuple[torch.dtype, ...], aligned: bool) -> None:
    torch.manual_seed(0)
    tensors = Tensors(Kind(*dtypes, aligned), device, SIZES, skew=0 if aligned else 1)
    check(tensors, 1e-2, 0.9, 0.999, 1e-8, 0.0)
    check(tensors, 1e-3, 0.8, 0.95, 1e-6, 0.1)


def test_more_tensors_than_a_program_counts(device: torch.device) -> None:
    tensors = Tensors(Kind(BF16, BF16, BF16, True), device, [8] * (adamw._COUNTS + 3))
    check(tensors, 1e-2, 0.9, 0.999, 1e-8, 0.01)


def test_integers_serve_as_numbers(device: torch.device) -> None:
    """None of which the kernels are compiled for."""
    check(Tensors(Kind(FP32, FP32, FP32, True), device, [5]), 1, 0.5, 0.5, 1, 0)


def test_nothing_beside_the_tensors_is_written(device: torch.device) -> None:
    tensors = Tensors(Kind(FP32, FP32, FP32, True), device, [])
    every = [torch.ones(64 + 2051 + 64, device=device) for _ in range(4)]
    inside = [t[64:-64] for t in every]
    tensors.p, tensors.grad, tensors.exp_avg, tensors.exp_avg_sq = ([t] for t in inside)
    tensors.step = [torch.zeros((), device=device)]
    tensors.step_by_kernel(0.1, 0.5, 0.5, 1e-8, 0.1)
    for t in every:
        assert (t[:64] == 1).all() and (t[-64:] == 1).all()
    assert (inside[0] != 1).all() and (inside[1] == 1).all()


def test_programs_of_a_table() -> None:
    rows = [Row(n, 16, 32, 48, 64) for n in (1, adamw._BLOCK, 0, 2 * adamw._BLOCK + 1)]
    tables = tabulate(rows, torch.device("cpu"))
    assert [divmod(program, 2**32) for program in tables.programs.tolist()] == [
        (0, 0), (1, 0), (3, 0), (3, 1), (3, 2)
    ]  # fmt: skip
    assert tables.rows.tolist() == [list(row) for row in rows]
    assert tables.corrections.shape == (4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, FP32, FP32)])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_the_same_as_torchs_up_to_a_rounding(dtypes: tuple[torch.dtype, ...], decay: float) -> None:
    """torch 2.11 rounds one number in some 4,000 to another neighbour.

    In fp32 a power may be its neighbour, of which a step then has 3e-5 more or less.
    """
    torch.manual_seed(0)
    eps = torch.finfo(dtypes[0]).eps
    tensors = Tensors(Kind(*dtypes, True), torch.device("cuda"), SIZES[:-1])
    ours = tensors.p, tensors.exp_avg, tensors.exp_avg_sq, tensors.step
    p, m, v, step = ([t.clone() for t in some] for some in ours)
    power = 1e-4 if dtypes[0] == FP32 else 0.0
    for _ in range(20):
        before = [t.clone() for t in p]
        torch._foreach_add_(step, 1)
        torch._fused_adamw_(
            p, tensors.grad, m, v, [], step, lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=decay,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        tensors.step_by_kernel(1e-2, 0.9, 0.999, 1e-8, decay)
        for here, there, old in zip(tensors.p, p, before, strict=True):
            most = 2 * eps * there.abs() + 8 * eps + power * (there - old).abs()
            assert ((here - there).abs() <= most).all()
        for mine, torchs in zip(ours, (p, m, v, step), strict=True):
            for here, there in zip(mine, torchs, strict=True):
                if torchs is not p:
                    torch.testing.assert_close(here, there, rtol=2 * eps, atol=8 * eps)
                alike = (here == there).float().mean()
                assert dtypes[0] == FP32 or here.numel() < 100 or alike > 0.98
                there.copy_(here)  # Differences are not to add up


@pytest.mark.gpu
def test_other_numbers_and_sizes_compile_nothing() -> None:
    tensors = Tensors(Kind(BF16, BF16, BF16, True), torch.device("cuda"), [5000])
    tensors.step_by_kernel(1e-2, 0.9, 0.999, 1e-8, 0.01)
    kernels = adamw.adamw_kernel, adamw.counts_kernel
    before = [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]
    for lr, sizes in ((1.0, [1]), (0.0, [16, 4096]), (16.0, [2048] * 16)):
        tensors = Tensors(tensors.kind, torch.device("cuda"), sizes)
        tensors.step_by_kernel(lr, 0.8, 0.9, 1e-6, 0.1)
    assert [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels] == before
