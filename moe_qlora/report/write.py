"""`moe_qlora.write_report`: measure a model, an adapter or a run, and write one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import transformers

from ..checkpoint.manifest import is_packed
from ..checkpoint.staging import replace_file, replaceable
from ..checkpoint.training_codec import from_note
from ..errors import ConfigError, MoeQloraError
from ..layout import ModelLayout
from ..lora.load import config_to_train
from ..memory.rehearsal import Inventory, take_inventory
from ..memory.source import bnb_config, source_of
from ..progress import Progress, reporting
from ..versions import installed_version
from . import measure, page, routing
from .pieces import (
    LoraPiece,
    MemoryPiece,
    Missing,
    Report,
    TrainingPiece,
)
from .routing import file_of
from .subject import RunSettings, Subject, read_settings, subject_of

_Piece = TypeVar("_Piece")


def write_report(
    source: Any,
    out: str | Path,
    *,
    against: str | Path | None = None,
    text: str | Path | Iterable[str] | None = None,
    base: str | Path | None = None,
    tokenizer: Any = None,
    quantization_config: Any = None,
    batch: int | None = None,
    seq: int | None = None,
    max_tokens: int = 16384,
    trust_remote_code: bool = False,
    progress: bool | Progress | None = None,
) -> Report:
    """Write one self-contained HTML page about a model, an adapter or a training run.

    For each piece that cannot be measured, the page gives the reason.

    Args:
        source: A checkpoint folder, packed or not; an adapter's folder; the folder of a Trainer's
            run; a configuration, path, model type or hub id as `plan` takes it; or a live model.
        out: The file to write; an existing .html file is replaced at once when the page is
            complete.
        against: The checkpoint that a packed folder was packed from: shows the quantization error.
        text: A JSONL, JSON or text file, or strings: shows which experts these texts go to, which
            loads and runs the model.
        base: The model of an adapter or run, if its folder does not name one that exists here.
        tokenizer: Reads `text`; None takes that of the adapter's or the model's folder.
        quantization_config: As `plan` takes it.
        batch: Sequences in the rehearsed step; None for the batch in a run's log, else 1.
        seq: Tokens in each; None for the longest row that the run allowed, else the mean of its
            rows, else 4,096: the page says which.
        max_tokens: Most tokens of `text`.
        trust_remote_code: Run model code that the folders bring.
        progress: True for a bar, or a function as `quantize_experts` takes it.

    Returns:
        The content of the page, as records.

    Raises:
        CheckpointError: A folder or file is missing or damaged.
        ConfigError: A setting makes no sense, or `out` cannot be written.
    """
    target = Path(out).expanduser()
    if not replaceable(target):
        raise ConfigError(
            f"out is {target}, which is no file that can be written; name one in a folder that "
            "exists."
        )
    if target.exists() and target.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"out is {target}, which exists and is no .html file; name another file.")
    for name, value in {"seq": seq, "max_tokens": max_tokens, "batch": batch}.items():
        if value is None and name != "max_tokens":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number of 1 or more.")
    if isinstance(text, (str, Path)):
        file_of(text)
    subject = subject_of(source, base)
    with reporting(progress, "Reading", "Written", stderr=True, transient=True) as tell:
        collector = _Collector(subject, quantization_config, trust_remote_code, tell)
        report = collector.report(against, text, tokenizer, batch, seq, max_tokens)
        content = page.render(report).encode("utf-8")
    try:
        replace_file(target, content)
    except OSError as error:
        raise ConfigError(
            f"out is {target}, which cannot be written: {error.strerror}; name another file."
        ) from error
    return report


class _Collector:
    """Measures the pieces of one report, in turn."""

    def __init__(self, subject: Subject, quantization: Any, remote: bool, tell: Progress) -> None:
        self.subject, self.remote, self.tell = subject, remote, tell
        self.quantization = quantization
        self.inventory: Inventory | Missing = Missing(subject.no_model or _NO_MODEL)
        if subject.model is not None:
            tell(0, _STEPS, "layout")
            # Nothing else to report: the error is the answer.
            alone = subject.log is None and subject.adapter is None
            self.inventory = self._inventory() if alone else _unless(self._inventory)

    def _inventory(self) -> Inventory:
        folder, adapter = self.subject.weights, self.subject.adapter
        if self.quantization is None and adapter and not (folder and is_packed(folder)):
            note = from_note(adapter)  # the codec of the training
            self.quantization = note.settings if note else None
        return take_inventory(self.subject.model, self.quantization, trust_remote_code=self.remote)

    def report(
        self, against: Any, text: Any, tokenizer: Any, batch: int | None, seq: int | None, most: int
    ) -> Report:
        """Measure everything."""
        subject = self.subject
        read = partial(measure.read_log, subject.log)
        done = read() if subject.model is None else _unless(read)
        run = done if isinstance(done, TrainingPiece) else None
        self.tell(1, _STEPS, "quantization error")
        error = measure.measure(
            subject.weights,
            against,
            trust_remote_code=self.remote,
            progress=self._within(1, "quantization error"),
        )
        self.tell(2, _STEPS, "memory of a step")
        memory = self._memory(batch or (run and run.batch) or 1, *self._length(run, seq))
        covered = self._lora()
        self.tell(3, _STEPS, "routing")
        routed = routing.measure(
            subject,
            text,
            tokenizer=tokenizer,
            quantization_config=bnb_config(self.quantization),
            most_tokens=most,
            trust_remote_code=self.remote,
            progress=self._within(3, "routing"),
        )
        inventory = self.inventory
        layout = inventory if isinstance(inventory, Missing) else measure.describe(inventory)
        notes = () if isinstance(inventory, Missing) else inventory.notes
        if isinstance(memory, MemoryPiece):
            notes = (*notes, *memory.plan.notes)
        self.tell(_STEPS, _STEPS, "")
        return Report(
            subject.title,
            subject.source,
            _made(),
            layout,
            error,
            routed,
            covered,
            memory,
            done,
            tuple(dict.fromkeys(notes)),
        )

    def _within(self, step: int, name: str) -> Progress:
        """Return a progress function for the parts of one step."""
        return lambda done, total, _: self.tell(step, _STEPS, f"{name}, {done} of {total}")

    def _length(self, run: TrainingPiece | None, seq: int | None) -> tuple[int, str]:
        """Return the tokens in a row of the rehearsed step, and a sentence on their source."""
        if seq is not None:
            return seq, "Rows are as long as asked for."
        log = self.subject.log
        settings = RunSettings()
        if log is not None:
            folders = (log.parent, self.subject.adapter, self.subject.weights)
            every = [read_settings(folder) for folder in folders if folder is not None]
            settings = max(every, key=lambda found: found.length or found.accumulation or 0)
        if settings.length is not None:
            return settings.length, "Rows are as long as the run allowed them to be, max_length."
        if run and run.tokens and run.batch and run.steps and settings.accumulation:
            rows = run.steps * run.batch * settings.accumulation
            mean = max(1, round(run.tokens / rows))
            return mean, "Rows are as long as those of the run on average, if it had one GPU."
        return _LENGTH, "How long rows are in training is not known here: name it with seq."

    def _memory(self, batch: int, seq: int, length: str) -> MemoryPiece | Missing:
        if isinstance(self.inventory, Missing):
            return self.inventory
        return _unless(
            lambda: measure.rehearsed(
                self.subject.model,
                self.quantization,
                self._lora_config(),
                batch=batch,
                seq=seq,
                length=length,
                trust_remote_code=self.remote,
            )
        )

    def _lora_config(self) -> Any:
        """Return the config of the adapter; None without one."""
        live, folder = self.subject.live, self.subject.adapter
        if names := measure.active_adapters(live):
            return live.peft_config[names[0]]
        return None if folder is None else config_to_train(folder)

    def _lora(self) -> LoraPiece | Missing:
        subject = self.subject
        if isinstance(self.inventory, Missing):
            return self.inventory
        layout: ModelLayout = self.inventory.layout
        total = sum(kind.weights for kind in self.inventory.kinds)
        if measure.active_adapters(subject.live):
            return _unless(lambda: measure.of_live(subject.live, layout, total))
        if subject.adapter is None:
            return Missing(
                "There is no adapter: name the folder that save_pretrained wrote one to."
            )
        folder = subject.adapter

        def of_folder() -> LoraPiece:
            source = source_of(subject.model, self.quantization, None, self.remote)
            return measure.of_folder(folder, source.build(), layout, total)

        return _unless(of_folder, "What LoRA covers was not read: ")


_STEPS = 4
_LENGTH = 4096  # tokens in a row where nothing says how many
_NO_MODEL = "There is no model."


def _unless(measure: Callable[[], _Piece], lead: str = "") -> _Piece | Missing:
    """Return the measured piece, or `Missing` with the error after `lead`."""
    try:
        return measure()
    except MoeQloraError as error:
        return Missing(f"{lead}{error}", fault=True)


def _made() -> str:
    own = f"moe-qlora {installed_version('moe-qlora') or ''}".rstrip()
    now = datetime.now().astimezone()
    return f"{now:%Y-%m-%d %H:%M}, {own}, transformers {transformers.__version__}"
