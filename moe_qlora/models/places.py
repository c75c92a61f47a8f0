"""Where a model that a person named lies: a path that is there, or a name to look up.

Importing this module imports neither torch nor transformers, so that a misspelt path is answered at
once.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError

YAML = (".yml", ".yaml")


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
