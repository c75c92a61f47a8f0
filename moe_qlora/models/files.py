"""Reading of JSON files that may be damaged or hostile, and errors that name the file.

Whoever wrote a checkpoint decides what is in its files. What is read here is bounded in length,
depth and digits, so that no later code, ours or transformers', trips over it.

Regular expressions of files are matched under a time limit before they are used. Python's `re`
backtracks, so that a few characters such as `(a|aa)*$` can run for ever, and nothing in the same
process can stop it. transformers and PEFT match such patterns with `re` too. So a pattern that
might run long is first matched with all names in a process that can be ended.

Importing this module imports neither torch nor transformers, so that a misspelt path is answered at
once.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, ConfigError, UnsupportedWeightError

MAX_CONFIG = 16 << 20
"""Longest configuration that is read, in bytes."""
MAX_JSON = 512 << 20
"""Longest index or manifest, in bytes; the index of a million tensors has a quarter of it."""
_SAMPLE = 1 << 16  # bytes of each of the samples of a file
_DEPTH = 64  # configurations have fewer than ten levels
_DIGITS = 20  # of an integer

_DAMAGE = (
    *(OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RuntimeError, MemoryError),
)
YAML = (".yml", ".yaml")
SECONDS = 10.0
"""Time for all names; a pattern of a real checkpoint takes milliseconds."""
MAX_LENGTH = 100_000
"""Characters of a pattern. PEFT joins the names of all modules into one."""

# The alarm ends it where its parent was killed meanwhile: nothing else would.
_MATCH = """
import json, re, signal, sys
if hasattr(signal, "alarm"):
    signal.alarm(int(sys.argv[1]))
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    pattern = re.compile(pattern)
    for name in names:
        pattern.match(name)
        pattern.fullmatch(name)
"""
# A repeated group, or many repeats: without these, `re` takes at most cubic time.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MOST_REPEATS, _MOST_OPTIONS = 3, 12


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
    """Build a JSON object; a repeated key is an error, since readers differ in which they take."""
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


def file_facts(folder: Path) -> dict[str, str]:
    """Return size and hash of samples of each file, to tell whether ranks read equal copies."""
    # object stores and reproducible archives give equal sizes and times to different files
    facts, names = {}, ("config.json", "hf_quant_config.json")
    for file in sorted(folder.glob("*")):
        if file.name not in names and not file.name.endswith(
            (".safetensors", ".safetensors.index.json")
        ):
            continue
        if file.is_file():  # opening a pipe would wait for its writer
            size, sample = file.stat().st_size, hashlib.sha256()
            with reading(file), file.open("rb") as handle:
                for number in range(64):
                    handle.seek(max(size - _SAMPLE, 0) * number // 63)
                    sample.update(handle.read(_SAMPLE))
            facts[f"{file.name} of the checkpoint"] = f"{size:,} bytes, {sample.hexdigest()[:16]}"
    return facts


def place_of(model: str) -> Path | None:
    """Return the folder or file that `model` names, None where it can only be a name.

    Raises:
        CheckpointError: It is empty, a path that does not exist, or a file of another kind.
    """
    if not model.strip():
        raise CheckpointError(
            "MODEL is empty; name a folder, a file, a checkpoint, a model type or a hub id."
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix in (".json", *YAML):
            return path
        raise CheckpointError(f"{model} is neither a folder, nor a .json or .yaml file.")
    if path.suffix in (".json", *YAML) or model.startswith((".", "/", "~")) or model[-1] == "/":
        raise CheckpointError(f"{model} does not exist.")
    if model.count("/") > 1:
        raise CheckpointError(f"{model!r} does not exist, and is no hub id (owner/name) either.")
    return None


def refuse_yaml(model: Any, command: str) -> None:
    """Raise a `ConfigError` where a command that reads no YAML is given the name of such a file."""
    if isinstance(model, (str, Path)) and Path(model).suffix.lower() in YAML:
        raise ConfigError(
            f"{model} is a YAML file, which moe-qlora {command} does not read: run axolotl "
            f"moe-experts {model}, or name the model and give the settings as options."
        )


def check_patterns(patterns: Iterable[str], names: Iterable[str], where: str) -> None:
    """Raise where a pattern takes too long to match these names, or is too long itself.

    Args:
        patterns: Regular expressions, each as it will be compiled. One that does not compile is
            left to its reader.
        names: What they will be matched with.
        where: The file or setting that the patterns are from, for the message.

    Raises:
        CheckpointError: It names the pattern and `where`.
    """
    doubtful = []
    for pattern in patterns:
        if len(pattern) > MAX_LENGTH:
            raise CheckpointError(
                f"{where} has a pattern of {len(pattern):,} characters ({pattern[:60]!r}, ...); at "
                f"most {MAX_LENGTH:,} are read."
            )
        if _may_run_long(pattern):
            doubtful.append(pattern)
    if not doubtful:
        return
    task = json.dumps([doubtful, sorted(set(names))])
    command = [sys.executable, "-I", "-c", _MATCH, str(int(2 * SECONDS))]
    try:
        subprocess.run(
            command, input=task, timeout=SECONDS, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        numbers = (error.stdout or b"0").decode().split()
        pattern = doubtful[int(numbers[-1])]
        raise CheckpointError(
            f"{where} has the pattern {pattern!r:.200}, which takes more than {SECONDS:.0f} "
            "seconds to match with the names of the model: it repeats a part in more than one way; "
            "write it so that each name can be matched in one way only."
        ) from None


def _may_run_long(pattern: str) -> bool:
    if _REPEATED_GROUP.search(pattern):
        return True
    repeats = sum(pattern.count(sign) for sign in "*+{")
    return repeats > _MOST_REPEATS or pattern.count("?") > _MOST_OPTIONS


_CODES_OF_AN_EXPERT = re.compile(
    rb'"([^"]*\.experts\.\d+\.\w+\.weight)\.quant_state\.bitsandbytes__\w+"'
)


def check_no_codes_of_single_experts(files: Iterable[str | Path], names: Iterable[str]) -> None:
    """Refuse experts that bitsandbytes packed one by one, for a model that has them fused.

    `names` are the model's; `files` those of the checkpoint, of which only headers are read.
    """
    for file in map(Path, files):
        with suppress(OSError), file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            found = _CODES_OF_AN_EXPERT.search(handle.read(min(length, MAX_JSON)))
            key = found[1].decode() if found else ""
            end = key[key.find(".experts.") :]
            if key and not any(name.endswith(end) for name in names):
                raise UnsupportedWeightError(
                    f"{file.parent} has experts that bitsandbytes packed one by one ({key}), as "
                    "transformers v4 saves them, and transformers v5 has them in one tensor: "
                    "name the 16-bit checkpoint."
                )
