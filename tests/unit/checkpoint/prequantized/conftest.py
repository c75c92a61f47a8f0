"""One folder of each maker's format, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
from prequantized import CASES, Stored, write_case


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Stored]]:
    """By the name in `CASES`: the folder, and the plain tensors that it stands for."""
    root = tmp_path_factory.mktemp("makers")
    return {name: write_case(root / name.replace(" ", "_"), name) for name in CASES}
