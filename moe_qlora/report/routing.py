"""Which experts the user's own text goes to: a model that runs, its tokenizer, counts by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging

from ..checkpoint.manifest import is_packed
from ..errors import MoeQloraError, first_line
from ..experts.use import expert_use
from ..hf.switch import enabled
from ..lora.load import load_adapter
from ..models import named
from ..packing.settings import CodecSettings
from ..progress import Progress
from .pieces import LayerUse, Missing, RoutingPiece
from .subject import Subject
from .text import texts_of, token_ids

LONGEST = 2048
"""Tokens of a text that are read at most; its later ones are left out."""


def measure(
    subject: Subject,
    text: str | Path | Iterable[str] | None,
    *,
    tokenizer: Any = None,
    quantization_config: Any = None,
    most_tokens: int,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> RoutingPiece | Missing:
    """Run the model on a sample of text, and count where its routers send the tokens.

    A live model runs as it is. One on disk is loaded packed, as training has it, with the adapter
    where there is one, onto the GPU where there is one.
    """
    if text is None:
        return Missing(
            "Routing is measured on your own text: give a JSONL or text file as text (--text on "
            "the command line)."
        )
    if subject.live is None and subject.weights is None:
        return Missing(
            "Routing needs a model that runs, and only a configuration was given: name a folder "
            "with its weights."
        )
    reader = tokenizer or _tokenizer(subject, trust_remote_code)
    if isinstance(reader, Missing):
        return reader
    try:
        rows = token_ids(texts_of(text), reader, longest=LONGEST, most=most_tokens)
    except MoeQloraError:
        raise
    except Exception as error:  # noqa: BLE001 - chat templates, which refuse what they do not expect
        return _failed("the tokenizer did not take the text", error)
    if not rows:
        return Missing("Routing was not measured: the sample has no text.")
    try:
        model = subject.live
        if model is None:
            model = _load(subject, quantization_config, trust_remote_code)
        used = expert_use(model, _batches(rows, progress))
    except MoeQloraError as error:
        return Missing(f"Routing was not measured: {error}", fault=True)
    except Exception as error:  # noqa: BLE001 - code of models, with what they do not expect
        return _failed("the model did not run on the text", error)
    sample = str(text) if isinstance(text, (str, Path)) else "texts given as a list"
    return RoutingPiece(
        tuple(LayerUse(name, tuple(counts.tolist())) for name, counts in used.items()),
        tokens=sum(map(len, rows)),
        texts=len(rows),
        sample=sample,
        adapted=subject.adapter is not None or hasattr(subject.live, "peft_config"),
    )


def _failed(what: str, error: Exception) -> Missing:
    why = f"{type(error).__name__}: {first_line(error)}"
    return Missing(f"Routing was not measured: {what} ({why}).", fault=True)


def _batches(rows: list[list[int]], progress: Progress | None) -> Iterator[dict[str, Tensor]]:
    """Yield each text by itself, so that padding goes to no expert."""
    for number, row in enumerate(rows):
        if progress is not None:
            progress(number, len(rows), f"text {number + 1}")
        yield {"input_ids": torch.tensor([row])}


def _tokenizer(subject: Subject, trust_remote_code: bool) -> Any:
    """Return the tokenizer of the adapter's or the model's folder."""
    why = ""
    for folder in (subject.adapter, subject.weights):
        if folder is None:
            continue
        try:
            with named.quiet():
                return AutoTokenizer.from_pretrained(
                    str(folder), trust_remote_code=trust_remote_code, local_files_only=True
                )
        except Exception as error:  # noqa: BLE001 - whatever transformers makes of such a folder
            why = first_line(error)
    return Missing(
        "Routing was not measured: neither the model's folder nor the adapter's has a tokenizer "
        f"that can be loaded ({why}); pass one as tokenizer, or save it there.",
        fault=True,
    )


def _load(subject: Subject, quantization_config: Any, trust_remote_code: bool) -> nn.Module:
    """Load a model packed, and its adapter."""
    folder = subject.weights
    assert folder is not None
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not is_packed(folder):
        settings = quantization_config
        if isinstance(settings, CodecSettings):
            settings = BitsAndBytesConfig(**settings.bnb_fields())
        options["quantization_config"] = settings
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    with named.quiet(), _no_bars(), enabled():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    return model if subject.adapter is None else load_adapter(model, subject.adapter)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' own progress bars out of the one of a report."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
