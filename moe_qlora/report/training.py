"""The curves of a Trainer's run, from its trainer_state.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..models.files import MAX_JSON, read_json
from .pieces import Curve, Missing, TrainingPiece

_FIRST = ("loss", "eval_loss", "learning_rate", "grad_norm")
_NO_CURVES = re.compile(
    r"step|epoch|total_flos|train_.*|num_.*tokens.*|.*_runtime|.*_per_second|.*_time",
    re.DOTALL,  # also so that no name takes long
)
_LARGEST = 1e15
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
    logged = _values([entry for entry in history if isinstance(entry, dict)])
    names = sorted(logged, key=lambda name: (_FIRST.index(name) if name in _FIRST else 9, name))
    if not names:
        return Missing("The run logged no loss: set logging_steps in its TrainingArguments.")
    batch = state.get("train_batch_size")
    steps, most, epochs = (_number(state.get(n)) for n in ("global_step", "max_steps", "epoch"))
    return TrainingPiece(
        str(file),
        int(steps or 0),
        int(most or 0),
        epochs or 0.0,
        batch if isinstance(batch, int) and _is_number(batch) and batch > 0 else None,
        tuple(_curve(name, logged[name]) for name in names[:_MOST]),
        _tokens(state, history),
    )


def _tokens(state: dict[str, Any], history: list[Any]) -> float | None:
    """Return how many tokens the run saw: as Trainer counts them where asked to, or as TRL logs."""
    counts = [state.get("num_input_tokens_seen")]
    counts += [entry.get("num_tokens") for entry in history if isinstance(entry, dict)]
    return max((number for count in counts if (number := _number(count) or 0) > 0), default=None)


def _values(entries: list[dict[str, Any]]) -> dict[str, dict[float, float | None]]:
    """Return what was logged, by name and step; a step logged again counts as it was last."""
    logged: dict[str, dict[float, float | None]] = {}
    for entry in entries:
        step = _number(entry.get("step"))
        if step is not None:
            for name, value in entry.items():
                if _is_number(value) and not _NO_CURVES.fullmatch(name):
                    logged.setdefault(name, {})[step] = _number(value)
    return logged


def _curve(name: str, values: dict[float, float | None]) -> Curve:
    steps = sorted(values)
    points = tuple((step, value) for step in steps if (value := values[step]) is not None)
    lost = tuple(step for step in steps if values[step] is None)
    return Curve(name, points, lost)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """Return a number of a log, None where there is none, or it is not finite or too large."""
    return float(value) if _is_number(value) and abs(value) <= _LARGEST else None
