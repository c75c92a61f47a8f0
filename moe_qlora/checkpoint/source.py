"""Describe the files of a checkpoint: size, header, and samples of the content.

Object stores and reproducible archives give equal sizes and times to different files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..models.files import reading
from .manifest import CONFIG
from .prequantized.open import MODELOPT_CONFIG
from .reader import INDEX_SUFFIX, header_bytes

# Samples of a file: number of pieces at even distances, bytes of each.
_PIECES, _PIECE = 64, 1 << 16


def describe_source(folder: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Return the manifest's entry for the checkpoint in a folder, of which `files` are packed."""
    return {
        "folder": folder.name,
        "config_sha256": _describe(folder / CONFIG)["sample_sha256"],
        "files": {file.name: _describe(file) for file in files},
    }


def file_facts(folder: Path) -> dict[str, str]:
    """Return size and content hash of each file, to compare copies that ranks read."""
    facts = {}
    for file in sorted(folder.glob("*")):
        named = file.name in (CONFIG, MODELOPT_CONFIG)
        named = named or file.name.endswith((".safetensors", INDEX_SUFFIX))
        if named and file.is_file():  # opening a pipe would wait for its writer
            one = _describe(file)
            both = one["header_sha256"] + one["sample_sha256"]
            content = hashlib.sha256(both.encode()).hexdigest()
            facts[f"{file.name} of the checkpoint"] = f"{one['nbytes']:,} bytes, {content[:12]}"
    return facts


def _describe(file: Path) -> dict[str, Any]:
    header = ""
    with suppress(CheckpointError):  # configurations have none
        header = hashlib.sha256(header_bytes(file)).hexdigest()
    with reading(file):
        size = file.stat().st_size
        sample = _sample(file, size)
    return {"nbytes": size, "header_sha256": header, "sample_sha256": sample}


def _sample(file: Path, size: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        if size <= _PIECES * _PIECE:
            digest.update(handle.read())
        else:
            for number in range(_PIECES):
                handle.seek((size - _PIECE) * number // (_PIECES - 1))
                digest.update(handle.read(_PIECE))
    return digest.hexdigest()
