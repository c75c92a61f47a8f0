"""DeepSpeed's configuration, as far as memory depends on it: a JSON file, or a block of a YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..files import read_json


def read_zero(value: Any, folder: Path | None = None) -> Mapping[str, Any] | None:
    """Return the configuration that `deepspeed:` has or names; None where its file is not here.

    A file is looked for from the working directory, as axolotl does, then from `folder`.
    """
    if isinstance(value, Mapping):
        return value
    for path in (Path(str(value)), *([folder / str(value)] if folder else [])):
        if path.is_file():
            try:
                return read_json(path)
            except CheckpointError:
                return None
    return None


def zero_stage(value: Any, folder: Path | None = None) -> int | None:
    """Return the ZeRO stage of `deepspeed:`; of a file that is not here, the one in its name.

    None where neither says so.
    """
    if not value:
        return None
    found = read_zero(value, folder)
    if found is None:
        match = re.search(r"zero[-_]?(?:stage)?[-_]?([0-3])", str(value).lower())
        return int(match[1]) if match else None
    section = found.get("zero_optimization")
    stage = section.get("stage", 0) if isinstance(section, Mapping) else 0
    return int(stage) if str(stage) in ("0", "1", "2", "3") else None
