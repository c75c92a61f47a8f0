"""The curves of a Trainer's run, from its trainer_state.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..build.files import MAX_JSON, read_json
from ..errors import CheckpointError
from .pieces import Curve, Missing, TrainingPiece

_FIRST = ("loss", "eval_loss", "learning_rate", "grad_norm")
_NO_CURVES = re.compile(
    r"step|epoch|total_flos|train_.*|num_.*tokens.*|.*_runtime|.*_per_second|.*_time"
)
_MOST = 16
"""Curves; trainers of TRL log some dozens, of which these say most."""


def read_log(file: Path | None) -> TrainingPiece | Missing:
    """Read the log of a run; without a file say so."""
    if file is None:
        return Missing(
            "There is no log of a training run: name the folder that Trainer wrote, with its "
            "trainer_state.json or checkpoints."
        )
    state = read_json(file, MAX_JSON)
    history = state.get("log_history")
    if not isinstance(history, list):
        raise CheckpointError(f"{file} has no log_history: it is no state of a Trainer.")
    entries = [entry for entry in history if isinstance(entry, dict)]
    logged = sorted({name for entry in entries for name in entry if not _NO_CURVES.fullmatch(name)})
    names = sorted(logged, key=lambda name: _FIRST.index(name) if name in _FIRST else 9)
    curves = [curve for name in names if (curve := _curve(name, entries)) is not None][:_MOST]
    if not curves:
        return Missing("The run logged no loss: set logging_steps in its TrainingArguments.")
    batch = state.get("train_batch_size")
    steps, most, epochs = (_number(state.get(n)) for n in ("global_step", "max_steps", "epoch"))
    return TrainingPiece(
        str(file),
        int(steps or 0),
        int(most or 0),
        epochs or 0.0,
        batch if isinstance(batch, int) and batch > 0 else None,
        tuple(curves),
    )


def _curve(name: str, entries: list[dict[str, Any]]) -> Curve | None:
    """Return what was logged by this name, by step; a step logged again counts as it was last."""
    values: dict[float, float | None] = {}
    for entry in entries:
        step = _number(entry.get("step"))
        if step is not None and isinstance(entry.get(name), (int, float)):
            values[step] = _number(entry[name])
    steps = sorted(values)
    points = tuple((step, value) for step in steps if (value := values[step]) is not None)
    lost = tuple(step for step in steps if values[step] is None)
    return Curve(name, points, lost) if values else None


def _number(value: Any) -> float | None:
    """Return a number of a log, None where there is none or it is not finite."""
    if isinstance(value, (int, float)) and abs(value) < 1e15:
        return float(value)
    return None
