"""The k largest of each row, as torch finds them; on a GPU compiled, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from moe_qlora.kernels.top_k import MAX_COLUMNS, MAX_K, top_k


def check(x: torch.Tensor, k: int) -> None:
    values, index = top_k(x, k)
    wanted = torch.topk(x, k)
    assert index.dtype == torch.int64 and values.dtype == x.dtype
    torch.testing.assert_close(values, wanted.values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.gather(-1, index), values, rtol=0, atol=0, equal_nan=True)
    rows = index.view(-1, k).tolist()
    assert all(len({*row}) == k for row in rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "k"),
    [((37, 128), 8), ((5, 3), 3), ((1, 1), 1), ((2, 17, 100), 6), ((3, 257), 1), ((40, 384), 8)],
)
def test_as_torch(device: str, dtype: torch.dtype, shape: tuple[int, ...], k: int) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a GPU is there, and with it the compiled kernel")
    torch.manual_seed(0)
    check(torch.randn(shape, device=device).to(dtype), k)


@pytest.mark.usefixtures("interpreted")
def test_numbers_of_every_kind() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [
            [nan, 1.0, inf, -inf, 0.0],
            [-inf, -inf, -inf, -inf, -inf],
            [-2.0, -1.0, -3.0, -1e-40, 1e-40],
            [0.0, 0.0, 0.0, 0.0, 0.0],
            [-nan, 3.4e38, -3.4e38, nan, 1.0],
        ]
    )
    for k in range(1, 6):
        check(x, k)
    assert top_k(x, 3)[1][1].tolist() == top_k(x, 3)[1][3].tolist() == [0, 1, 2]


@pytest.mark.usefixtures("interpreted")
def test_the_most_and_the_least() -> None:
    check(torch.randn(3, MAX_COLUMNS), MAX_K)
    values, index = top_k(torch.empty(0, 8), 2)
    assert values.shape == index.shape == (0, 2)
    check(torch.randn(8, 6).t(), 2)
