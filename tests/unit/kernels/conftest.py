"""What several tests of kernels need."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def own_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own grouped matmul wherever there is a choice; torch's is an error."""
    from moe_qlora.kernels import cards, grouped_mm

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch's grouped matmul")

    small = grouped_mm.Cut(32, 32, 2, 4, 3)
    monkeypatch.setattr(cards, "multiplies_by_torch", lambda device, dtype: False)
    monkeypatch.setattr(grouped_mm, "default", lambda tile, device: small)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", forbidden)
