"""Reading of JSON files that may be damaged or hostile, and errors that name the file.

Length, depth and digits are bounded, so that no later code, ours or transformers', trips over them.
"""

import json
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError, MoeQloraError, UnsupportedWeightError

MAX_CONFIG = 16 << 20  # bytes of a configuration
MAX_JSON = 512 << 20  # bytes of an index; that of a million tensors has a quarter of it
_DEPTH = 64  # configurations have fewer than ten levels
_DIGITS = 20  # of an integer
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # maybe: half of a pair is one too


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a file into a CheckpointError that names it."""
    try:
        yield
    except MoeQloraError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: copy the whole folder.") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{file} cannot be read: {reason}.") from error


def size_of(file: Path) -> int:
    """Return the bytes of a regular file; opening a pipe would wait for its writer."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is no regular file.")
    return status.st_size


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
            if _LONE_SURROGATE.search(raw):
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
        level = [one for one in level if isinstance(one, (dict, list))]
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise ValueError(f"it is nested more than {_DEPTH} levels deep")


def place_of(model: str) -> Path | None:
    """Return an existing folder or file; a `CheckpointError` unless it can be a name."""
    if not model.strip():
        raise CheckpointError("MODEL is empty; name a folder, a file, a checkpoint or a hub id.")
    path = Path(model).expanduser()
    if path.suffix.lower() in (".yml", ".yaml"):
        raise ConfigError(
            f"{model} is a YAML file, which moe-qlora does not read: run axolotl moe-experts "
            f"{model}, or name the model and give the settings as options."
        )
    readable = path.suffix.lower() == ".json"
    if path.is_dir() or (path.is_file() and readable):
        return path
    if path.is_file():
        raise CheckpointError(f"{model} is neither a folder nor a .json file.")
    hub_id = not model.startswith((".", "/", "~")) and model.count("/") < 2 and model[-1] != "/"
    if readable or not hub_id:
        raise CheckpointError(f"{model} does not exist.")
    return None


_EXPERT = re.compile(rb'"([^"]*\.experts\.\d+\.\w+\.weight)\.quant_state\.bitsandbytes__\w+"')


def check_no_codes_of_single_experts(files: Iterable[str | Path], names: Iterable[str]) -> None:
    """Refuse experts that bitsandbytes packed one by one, if `names` of a model has them fused."""
    for file in map(Path, files):
        with suppress(OSError), file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            found = _EXPERT.search(handle.read(min(length, MAX_JSON)))
            key = found[1].decode() if found else ""
            end = key[key.find(".experts.") :]
            if key and not any(name.endswith(end) for name in names):
                raise UnsupportedWeightError(
                    f"{file.parent} has experts that bitsandbytes packed one by one ({key}), as "
                    "transformers v4 saves them: name the 16-bit checkpoint."
                )
