"""What no test has run is compared with plain torch once, and given up where it is wrong."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.experts import backend, self_check
from moe_qlora.kernels import cards, moe_layer, table
from moe_qlora.versions import OPTIONAL

CPU = torch.device("cpu")


@pytest.mark.usefixtures("interpreted")
def test_a_small_layer_is_right():
    pytest.importorskip("triton")
    assert self_check.layer_is_right(CPU)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("part", ["apply_gate", "sum_to_tokens", "factor_grad"])
def test_what_is_wrong_is_said(part, monkeypatch):
    pytest.importorskip("triton")
    own = getattr(moe_layer, part)

    def wrong(*args, **options):
        next(arg for arg in args if isinstance(arg, torch.Tensor)).mul_(1.1)
        return own(*args, **options)

    monkeypatch.setattr(moe_layer, part, wrong)
    with pytest.warns(UserWarning, match="kernels give wrong results on cpu"):
        assert not self_check.layer_is_right(CPU)


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
    if untested:
        with pytest.warns(UserWarning, match=r"do not run \(ZeroDivisionError\)"):
            assert not backend.kernels_run(device)
        reason = backend._device_obstacle(device, None)
        assert "cuda:0, or are not right there" in reason
    assert backend.kernels_run(device) is not untested
    again = untested and capability == (9, 0)  # without the kernels in Gluon
    assert len(checked) == untested + again and again != any(k.hopper for k in table.KERNELS)
    if hip:
        backend._kernels_run.clear()
        monkeypatch.setattr(self_check, "layer_is_right", lambda device: True)
        with pytest.warns(UserWarning, match="not tested on ROCm"):
            assert backend.kernels_run(device)
        assert backend.kernels_run(device)  # once
