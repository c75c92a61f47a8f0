"""The subject of a report: a checkpoint, an adapter, a Trainer's run or a live model.

Its parts, by the source that the user named:

    checkpoint folder, packed or not    model and weights
    adapter folder                      adapter; the model is the adapter's base, or `base`
    folder of a Trainer's run           log, and the saved adapter or model, in the folder or in its
                                        latest checkpoint
    anything else that `plan` takes     model
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..checkpoint.adapter import CONFIG as ADAPTER_CONFIG
from ..errors import CheckpointError, ConfigError
from ..models.files import read_json

LOG = "trainer_state.json"
MODEL_CONFIG = "config.json"
_SAYS_NOTHING = re.compile(
    r"(base[-_]?)?(model|checkpoint|adapter|merged|packed|final|last|run|out|output|weights)s?"
    r"|checkpoint-\d+|tmp.*|pytest-.*",
    re.IGNORECASE,
)
"""Folder names that do not identify a model."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
FILE = "training_args.bin"
_LARGEST = 1 << 24  # bytes; a real one has some 5,000
_LENGTHS = ("max_length", "max_seq_length")
"""TRL's setting for the most tokens of a row, under its present and its old name."""


@dataclass(frozen=True)
class Subject:
    """The parts of a report's subject; missing ones are None."""

    title: str
    source: str
    model: Any = None  # As for `plan`
    weights: Path | None = None  # Folder of the model's weights
    adapter: Path | None = None  # Folder
    log: Path | None = None  # File
    live: Any = None  # The model itself, where it is in memory
    no_model: str = ""  # Why there is no model, a sentence


def subject_of(source: Any, base: str | Path | None = None) -> Subject:
    """Find the parts of a report's subject; `base` is the model that an adapter was trained on.

    A folder that is neither a checkpoint, nor an adapter, nor a run is a `CheckpointError`.
    """
    if isinstance(source, nn.Module):
        return _of_live(source)
    if isinstance(source, PretrainedConfig):
        name = source.name_or_path or source.model_type
        return Subject(str(name), str(name), source)
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"source is a {type(source).__name__}; give a model, a transformers configuration, a "
            "folder, or what moe-qlora dump takes."
        )
    path = Path(source).expanduser()
    if not path.is_dir():
        return Subject(path.name or str(source), str(source), str(source))
    return _of_folder(path, base)


def _of_live(model: Any) -> Subject:
    adapted = hasattr(model, "peft_config")
    config = getattr(model, "config", None)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = getattr(config, "name_or_path", "") or type(inner).__name__
    weights = Path(name) if name and Path(name).is_dir() else None
    described = config if adapted else model
    title = model_name(weights) if weights else str(name)
    return Subject(title, str(name), described, weights=weights, live=model)


def _of_folder(folder: Path, base: str | Path | None) -> Subject:
    own = [folder, *_checkpoints(folder)]
    log = next((place / LOG for place in own if (place / LOG).is_file()), None)
    saved = next((p for p in own if _has(p, ADAPTER_CONFIG) or _has(p, MODEL_CONFIG)), None)
    subject = Subject(model_name(folder), str(folder), log=log)
    if saved is not None and _has(saved, ADAPTER_CONFIG):
        return _with_base(replace(subject, adapter=saved), saved, base)
    if saved is not None:
        return replace(subject, model=str(saved), weights=saved)
    if base is not None:
        return _with_base(subject, folder, base)
    if log is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint, adapter or Trainer's run: it has no {MODEL_CONFIG}, "
            f"{ADAPTER_CONFIG} or {LOG}; name a folder that has one."
        )
    return replace(
        subject, no_model="The run's folder holds no model or adapter; name its model with base."
    )


def _with_base(subject: Subject, adapter: Path, base: str | Path | None) -> Subject:
    name = base
    if name is None:
        name = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, (str, Path)) or not str(name).strip():
        return replace(
            subject, no_model="The adapter does not say which model it is for; name it with base."
        )
    relative = adapter / name
    place = relative if not Path(name).is_dir() and relative.is_dir() else Path(name)
    if not place.is_dir() and base is None and (place.is_absolute() or str(name).count("/") > 1):
        return replace(
            subject,
            no_model=f"The adapter is for {name}, which is not here; name its model with base.",
        )
    title = model_name(place) if place.is_dir() else place.name or str(place)
    weights = place if place.is_dir() else None
    return replace(subject, title=title, model=str(place), weights=weights)


def model_name(folder: Path) -> str:
    """Return a name for a model: its folder's, unless any model's folder may have that name.

    Otherwise the name in its configuration, the parent folder's, or the model type.
    """
    whole = folder.resolve()
    config: Any = {}
    if _has(folder, MODEL_CONFIG):
        config = read_json(folder / MODEL_CONFIG)
    origin = config.get("_name_or_path") if isinstance(config, dict) else None
    names = [whole.name, Path(origin).name if isinstance(origin, str) else "", whole.parent.name]
    names.append(str(config.get("model_type") or ""))
    return next((name for name in names if name and not _SAYS_NOTHING.fullmatch(name)), whole.name)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, the one of the most steps first."""
    steps = {}
    for path in folder.iterdir():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            steps[int(match[1])] = path
    return [steps[step] for step in sorted(steps, reverse=True)]


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run; None if the file does not contain them."""

    length: int | None = None  # Most tokens of a row
    accumulation: int | None = None  # Batches in a step


def read_settings(folder: Path) -> RunSettings:
    """Read a run's settings without running its pickle; unreadable ones are None."""
    try:
        numbers = _numbers(_instructions(folder / FILE))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return RunSettings()
    length = next((numbers[name] for name in _LENGTHS if numbers.get(name, 0) > 0), None)
    return RunSettings(length, numbers.get("gradient_accumulation_steps"))


def _instructions(file: Path) -> bytes:
    """Return the pickle in a file of `torch.save`; a ValueError if it is too large."""
    with zipfile.ZipFile(file) as archive:
        name = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
        if name is None or archive.getinfo(name).file_size > _LARGEST:
            raise ValueError(f"{file} holds no settings.")
        return archive.read(name)


def _numbers(pickled: bytes) -> dict[str, int]:
    """Return integers by the string right before each, as in the items of a dict."""
    found: dict[str, int] = {}
    name: str | None = None
    for code, value, _ in pickletools.genops(pickled):
        if "PUT" in code.name or code.name == "MEMOIZE":
            continue
        if name is not None and isinstance(value, int) and code.name.startswith(("BININT", "INT")):
            found.setdefault(name, value)
        name = value if isinstance(value, str) and "UNICODE" in code.name else None
    return found
