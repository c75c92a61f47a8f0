"""Reading of JSON files that may be damaged or hostile, and errors that name the file.

Whoever wrote a checkpoint decides what is in its files. What is read here is bounded in length,
depth and digits, so that no later code, ours or transformers', trips over it.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError

MAX_CONFIG = 16 << 20
"""Longest configuration that is read, in bytes."""
MAX_JSON = 512 << 20
"""Longest index or manifest, in bytes; the index of a million tensors has a quarter of it."""
_DEPTH = 64  # configurations have fewer than ten levels
_DIGITS = 20  # of an integer

_DAMAGE = (
    *(OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RuntimeError, MemoryError),
)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a file into a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: copy the whole folder.") from error
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{file} cannot be read: {reason}.") from error


def size_of(file: Path) -> int:
    """Return the bytes of a regular file; opening a pipe would wait for its writer."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is no regular file.")
    return status.st_size


_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(file: Path, limit: int = MAX_CONFIG) -> dict[str, Any]:
    """Return the JSON object that a file of at most `limit` bytes holds."""
    return parse_json(file, read_raw(file, limit))


def read_raw(file: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most `limit` bytes."""
    with reading(file):
        if size_of(file) > limit:
            raise CheckpointError(f"{file} cannot be read: it is longer than {limit} bytes.")
        return file.read_bytes()


def parse_json(file: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a file's bytes."""
    with reading(file):
        try:
            value = json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_int=_integer)
            check_depth(value)
            if _HALF.search(raw):
                json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is no valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__} and no JSON object.")
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; a key that occurs twice, of which readers take either, is an error."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def check_depth(value: Any) -> None:
    """Raise ValueError where a JSON value is nested so deep that copying it would fail."""
    level = [value]
    for _ in range(_DEPTH):
        inner = [one for one in level if isinstance(one, (dict, list))]
        if not inner:
            return
        level = [item for one in inner for item in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"it is nested more than {_DEPTH} levels deep")
