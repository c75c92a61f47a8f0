"""The head's loss in chunks, beside torch's of all logits in float64; compiled where a GPU is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from moe_qlora.integrations.liger_loss import linear_cross_entropy
from moe_qlora.kernels import cross_entropy
from moe_qlora.kernels.cross_entropy import IGNORED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXACT = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}


def case(
    rows: int, columns: int, width: int, labelled: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a GPU is there, and with it the compiled kernel")
    torch.manual_seed(rows + columns)
    hidden = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(columns, width, device=device).to(dtype)
    labels = torch.randint(columns, (rows,), device=device)
    labels[torch.randperm(rows, device=device)[labelled:]] = IGNORED
    return hidden, weight, labels


def check(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int, labelled: int | None
) -> None:
    count = max(1, int((labels != IGNORED).sum()))
    scale = torch.tensor(1 / count, device=hidden.device)
    x = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, labels, scale, chunk=chunk, labelled=labelled)
    (loss * 3).backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    (loss * 3).backward()
    torch.testing.assert_close(x.grad, 2 * once, rtol=0, atol=0)
    exact = hidden.double().requires_grad_()
    wanted = F.cross_entropy(exact @ weight.double().T, labels, reduction="sum") / count
    (wanted * 3).backward()
    assert exact.grad is not None
    tolerance = EXACT[hidden.dtype]
    assert loss.dtype == torch.float32 and x.grad.dtype == hidden.dtype
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=tolerance)
    most = float(exact.grad.abs().max()) + 1e-12
    torch.testing.assert_close(once.double(), exact.grad, rtol=0, atol=tolerance * most)
    assert not once[labels == IGNORED].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize(
    ("rows", "columns", "width", "labelled", "chunk"),
    [(7, 33, 8, 7, 16), (37, 1000, 24, 30, 16), (65, 129, 16, 1, 64), (48, 16500, 8, 40, 16)],
)
def test_as_torch(
    rows: int, columns: int, width: int, labelled: int, chunk: int, dtype: torch.dtype, device: str
) -> None:
    check(*case(rows, columns, width, labelled, dtype, device), chunk=chunk, labelled=None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize("labelled", [0, 1, 256, 257, 511, 700])
def test_rows_without_a_label_are_left_out(
    labelled: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = cross_entropy.cross_entropy_

    def counted(logits: Tensor, *rest: Tensor, gradients: bool) -> None:
        seen.append(len(logits))
        original(logits, *rest, gradients=gradients)

    monkeypatch.setattr(cross_entropy, "cross_entropy_", counted)
    check(*case(700, 50, 8, labelled, dtype, device), chunk=128, labelled=labelled)
    assert sum(seen) == {0: 256, 1: 256, 256: 256, 257: 512, 511: 512, 700: 700}[labelled]
    assert max(seen) <= 128


@pytest.mark.usefixtures("interpreted")
def test_extreme_logits() -> None:
    inf = float("inf")
    z = torch.tensor([[1e4, -1e4, 0.0], [-inf, 2.0, 1.0], [88.0, 88.0, 88.0]])
    labels = torch.tensor([0, 1, 2])
    wanted = F.cross_entropy(z, labels, reduction="none")
    softmax = z.softmax(-1) - F.one_hot(labels, 3)
    losses = torch.empty(3)
    cross_entropy.cross_entropy_(z, labels, losses, gradients=True)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(z, softmax)


@pytest.mark.usefixtures("interpreted")
def test_a_label_that_is_no_column_gives_nan() -> None:
    z, losses = torch.randn(3, 5), torch.empty(3)
    cross_entropy.cross_entropy_(z, torch.tensor([5, -1, 4]), losses, gradients=True)
    assert losses.isnan().tolist() == [True, True, False]
    assert z.isnan().all(1).tolist() == [True, True, False]


@pytest.mark.usefixtures("interpreted")
def test_without_gradients_logits_stay() -> None:
    z, losses = torch.randn(4, 9), torch.empty(4)
    before, labels = z.clone(), torch.tensor([1, IGNORED, 3, 8])
    cross_entropy.cross_entropy_(z, labels, losses, gradients=False)
    assert torch.equal(z, before)
    torch.testing.assert_close(losses, F.cross_entropy(z, labels, reduction="none"))
    hidden, weight = torch.randn(4, 3), torch.randn(9, 3)
    loss = linear_cross_entropy(hidden, weight, labels, torch.tensor(1.0), chunk=16)
    assert not loss.requires_grad
    torch.testing.assert_close(
        loss, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("interpreted")
def test_labels_apart_in_memory() -> None:
    hidden, weight, labels = case(40, 33, 8, 30, torch.float32, "cpu")
    apart = torch.full((80,), 7)
    apart[::2] = labels
    check(hidden, weight, apart[::2], chunk=16, labelled=None)
    check(hidden, weight, apart[::2], chunk=16, labelled=30)


@pytest.mark.usefixtures("interpreted")
def test_what_it_refuses() -> None:
    hidden, weight, labels = case(6, 9, 4, 6, torch.float32, "cpu")
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="5 labels were given for 6 hidden states"):
        linear_cross_entropy(hidden, weight, labels[1:], one, chunk=16)
    x = hidden.requires_grad_()
    loss = linear_cross_entropy(x**3, weight, labels, one, chunk=16)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        grad.pow(2).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_is_not_rounded(dtype: torch.dtype, device: str) -> None:
    """By 65,536, as a GradScaler has it, float16 would be infinite."""
    hidden, weight, labels = case(20, 30, 8, 1, dtype, device)
    x = hidden.requires_grad_()
    scale = torch.tensor(1 / 3000, device=device)
    loss = linear_cross_entropy(x, weight, labels, scale, chunk=16)
    (once,) = torch.autograd.grad(loss, x, torch.tensor(3000.0, device=device), retain_graph=True)
    (grad,) = torch.autograd.grad(loss, x, torch.tensor(65536.0, device=device))
    assert grad.isfinite().all() and not grad[labels == IGNORED].any()
    ratio = float((grad.double() * once.double()).sum() / once.double().square().sum())
    assert ratio == pytest.approx(65536 / 3000, rel=1e-3 if dtype == torch.float16 else 2e-3)
