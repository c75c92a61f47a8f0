"""The settings of a run that training_args.bin holds, which Trainer pickles beside its weights.

A pickle runs code when it is loaded, and this may be anybody's: its instructions are read here as
a list, and none of them is carried out.
"""

from __future__ import annotations

import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

FILE = "training_args.bin"
_LARGEST = 1 << 24  # bytes; a real one has some 5,000
_LENGTHS = ("max_length", "max_seq_length")
"""What TRL calls the most tokens of a row, now and before."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run was started with; None where the file does not say."""

    length: int | None = None  # Most tokens of a row
    accumulation: int | None = None  # Batches in a step


def read_settings(folder: Path) -> RunSettings:
    """Return the settings in a folder; what cannot be read is None."""
    try:
        numbers = _numbers(_instructions(folder / FILE))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return RunSettings()
    length = next((numbers[name] for name in _LENGTHS if numbers.get(name, 0) > 0), None)
    return RunSettings(length, numbers.get("gradient_accumulation_steps"))


def _instructions(file: Path) -> bytes:
    """Return the pickle in what `torch.save` wrote; a ValueError where it is too large."""
    with zipfile.ZipFile(file) as archive:
        name = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
        if name is None or archive.getinfo(name).file_size > _LARGEST:
            raise ValueError(f"{file} holds no settings.")
        return archive.read(name)


def _numbers(pickled: bytes) -> dict[str, int]:
    """Return whole numbers by the string that comes right before each, as in a dict's items."""
    found: dict[str, int] = {}
    name: str | None = None
    for code, value, _ in pickletools.genops(pickled):
        if "PUT" in code.name or code.name == "MEMOIZE":
            continue
        if name is not None and isinstance(value, int) and code.name.startswith(("BININT", "INT")):
            found.setdefault(name, value)
        name = value if isinstance(value, str) and "UNICODE" in code.name else None
    return found
