"""CSV files that several processes append to, a row at a time."""

from __future__ import annotations

import csv
import fcntl
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file, whose heading is the first row's keys."""
    rows = list(rows)
    if not rows:
        return
    with file.open("a", newline="", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        if stream.seek(0, 2) == 0:
            writer.writeheader()
        writer.writerows(rows)
        stream.flush()


@cache
def where() -> dict[str, str]:
    """Return the GPU and the versions of packages, which every row ends with."""
    row = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        try:
            row[package] = version(package)
        except PackageNotFoundError:
            row[package] = "none"
    return row
