"""What the choice of a backend says to the user."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from moe_qlora.experts import backend
from moe_qlora.experts.backend import Call, choose_backend, read_call
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import pack
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_model


class OnGpu:
    """Hidden states as the choice sees them, on a GPU that need not be there."""

    device, is_cuda, shape = torch.device("cuda", 0), False, (5, 64)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def numel(self) -> int:
        return 5 * 64


def experts(compute: torch.dtype | None) -> Any:
    model: Any = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    module = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        packed = pack(getattr(module, name), CodecSettings("nf4", compute_dtype=compute))
        parametrize.attach(module, name, packed)
    return module


def call_of(module: Any, dtype: torch.dtype, autocast: torch.dtype | None = None) -> Call:
    plain = read_call(module, torch.zeros(5, 64))
    x: Any = OnGpu(dtype)
    return plain._replace(x=x, autocast=autocast)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "kernels_run", lambda device: device.type == "cuda")
    backend._warn_of_float32.cache_clear()
    yield
    backend._warn_of_float32.cache_clear()


def test_float32_on_a_gpu_warns_once_with_the_cure() -> None:
    module, call = experts(torch.float32), call_of(experts(torch.float32), torch.bfloat16)
    with pytest.warns(UserWarning, match="is computed in float32") as caught:
        chosen = choose_backend(module, call)
    assert "gate_up_proj is to be computed in torch.float32" in chosen.reason
    assert len(caught) == 1
    assert str(caught[0].message).endswith("bnb_4bit_compute_dtype=torch.bfloat16.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_backend(module, call)


@pytest.mark.parametrize(
    ("compute", "dtype", "autocast"),
    [
        (torch.bfloat16, torch.bfloat16, None),
        (None, torch.bfloat16, None),
        (torch.float32, torch.float32, None),  # a float32 model is computed as it is
        (torch.float32, torch.bfloat16, torch.bfloat16),  # autocast decides
    ],
)
def test_nothing_is_said_otherwise(compute: Any, dtype: torch.dtype, autocast: Any) -> None:
    module = experts(compute)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_backend(module, call_of(module, dtype, autocast))
