"""Every family is built without the advice that transformers gives about models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)
