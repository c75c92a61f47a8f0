"""What the choice of a backend says to the user."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch

from moe_qlora.experts import backend, self_check
from moe_qlora.kernels import cards, moe_layer, table
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import pack
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_model
from moe_qlora.versions import OPTIONAL


class OnGpu:
    """Hidden states as the choice sees them, on a GPU that need not be there."""

    device, is_cuda, shape = torch.device("cuda", 0), False, (5, 64)
    numel = staticmethod(lambda: 5 * 64)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("compute", "dtype", "autocast", "warns"),
    [
        (torch.float32, torch.bfloat16, None, True),
        (torch.bfloat16, torch.bfloat16, None, False),
        (None, torch.bfloat16, None, False),
        (torch.float32, torch.float32, None, False),  # a float32 model is computed as it is
        (torch.float32, torch.bfloat16, torch.bfloat16, False),  # autocast decides
    ],
)
def test_float32_on_a_gpu_warns_once_with_the_cure(compute, dtype, autocast, warns, monkeypatch):
    monkeypatch.setattr(backend, "kernels_run", lambda device: device.type == "cuda")
    monkeypatch.setattr(backend, "_warn_of_float32", cache(backend._warn_of_float32.__wrapped__))
    model: Any = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    module = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        packed = pack(getattr(module, name), CodecSettings("nf4", compute_dtype=compute))
        parametrize.attach(module, name, packed)
    x: Any = OnGpu(dtype)
    call = backend.read_call(module, torch.zeros(5, 64))._replace(x=x, autocast=autocast)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = [backend.choose_backend(module, call) for _ in range(2)]
    assert len(caught) == warns
    if warns:
        assert "gate_up_proj is to be computed in torch.float32" in chosen[0].reason
        assert str(caught[0].message).endswith("bnb_4bit_compute_dtype=torch.bfloat16.")


@pytest.mark.usefixtures("interpreted")
def test_a_small_layer_is_right_and_what_is_wrong_is_said(monkeypatch):
    own, cpu, right = moe_layer.factor_grad, torch.device("cpu"), self_check._is_right
    few = lambda device, tokens: right(device, min(tokens, 128))  # noqa: E731
    monkeypatch.setattr(self_check, "_is_right", few)
    assert self_check.layer_is_right(cpu)

    def wrong(*args, **options):
        next(arg for arg in args if isinstance(arg, torch.Tensor)).mul_(1.1)
        return own(*args, **options)

    monkeypatch.setattr(moe_layer, "factor_grad", wrong)
    with pytest.warns(UserWarning, match="kernels give wrong results on cpu"):
        assert not self_check.layer_is_right(cpu)


LAST = OPTIONAL["triton"].last


@pytest.mark.parametrize(
    ("capability", "triton", "hip", "untested"),
    [
        ((9, 0), LAST, None, False),
        ((9, 0), "3.99.0", None, True),
        ((8, 0), LAST, None, True),
        ((9, 4), LAST, "7.0", True),
    ],
)
def test_only_what_no_test_has_seen_is_checked(capability, triton, hip, untested, monkeypatch):
    checked, device = [], torch.device("cuda", 0)
    card = cards.Card("amd", (0, 0), 0) if hip else cards.of_capability(capability)
    monkeypatch.setattr(backend, "_kernels_run", {})
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(cards, "actual", lambda device: card)
    monkeypatch.setattr(self_check, "installed_version", lambda name: triton)
    monkeypatch.setattr(table, "KERNELS", table.kernels()[:])
    monkeypatch.setattr(self_check, "_is_right", lambda *_: checked.append(1) or 1 / 0)
    # By code that is compiled before an eager call, as of a model that was packed on the CPU
    run = torch.compile(lambda x: x if backend.kernels_run(device) else -x, backend="eager")
    if untested:
        with pytest.warns(UserWarning, match=r"do not run \(ZeroDivisionError\)"):
            assert run(torch.ones(1)) == -1
        reason = backend._device_obstacle(device, None)
        assert "cuda:0, or are not right there" in reason
    assert run(torch.ones(1)) == (-1 if untested else 1)
    assert backend.kernels_run(device) is not untested
    again = untested and capability == (9, 0)  # without the kernels in Gluon
    assert len(checked) == untested + again and again != any(k.hopper for k in table.KERNELS)
    if hip:
        backend._kernels_run.clear()
        monkeypatch.setattr(self_check, "layer_is_right", lambda device: True)
        with pytest.warns(UserWarning, match="not tested on ROCm"):
            assert backend.kernels_run(device)
        assert backend.kernels_run(device)  # once
