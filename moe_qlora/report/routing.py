"""Run the model on the user's own text, and count the tokens of each expert by layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging

from ..checkpoint.manifest import is_packed
from ..errors import CheckpointError, ConfigError, MoeQloraError, first_line
from ..experts.use import expert_use
from ..hf.switch import enabled
from ..lora.load import load_adapter
from ..models import named
from ..models.files import check_depth
from ..packing.settings import CodecSettings
from ..progress import Progress
from .pieces import LayerUse, Missing, RoutingPiece
from .subject import Subject

LONGEST = 2048
"""Most tokens of a text; the rest is left out."""
_LONGEST_LINE = 16 << 20  # characters
_MESSAGES = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's, as chat templates name them
_JOINED = (("prompt", "completion"), ("prompt", "chosen"), ("instruction", "input", "output"))


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
    """Run the model on a sample of text, and count the tokens of each expert.

    A live model runs unchanged. One on disk is loaded packed as in training, with its adapter if it
    has one, to the GPU if there is one.
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
    except Exception as error:  # noqa: BLE001 - chat templates may raise anything
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
    except Exception as error:  # noqa: BLE001 - code of models may raise anything
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
        except Exception as error:  # noqa: BLE001 - transformers may raise anything here
            why = first_line(error)
    return Missing(
        "Routing was not measured: neither the model's folder nor the adapter's has a tokenizer "
        f"that can be loaded ({why}); pass one as tokenizer, or save it there.",
        fault=True,
    )


def _load(subject: Subject, quantization_config: Any, trust_remote_code: bool) -> nn.Module:
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
    """Switch off transformers' progress bars, which would break the report's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def texts_of(text: str | Path | Iterable[str]) -> Iterator[str | list[dict[str, Any]]]:
    """Yield the texts of a sample, one at a time; a conversation as its messages.

    A row, of a .jsonl file or of the list in a .json file, is a string, or an object with `text`,
    `messages`, `prompt` and `completion`, or `instruction` and `output`. Any other file is one text
    for each paragraph. A list gives its strings.
    """
    if not isinstance(text, (str, Path)):
        items: Iterable[Any] = text
        for number, item in enumerate(items):
            if not isinstance(item, str):
                kind = type(item).__name__
                raise ConfigError(f"text[{number}] is a {kind}; give strings, or name a file.")
            yield item
        return
    file = file_of(text)
    try:
        with file.open(encoding="utf-8-sig") as lines:  # editors on Windows write a mark first
            kind = file.suffix.lower()
            if kind == ".json" and _is_list(lines):
                yield from _rows_of_list(file, lines)
            elif kind in (".jsonl", ".ndjson", ".json"):
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        where = f"{file}, line {number}"
                        yield _text_of_row(_parsed(where, line), where)
            else:
                paragraphs = lines.read(_LONGEST_LINE).split("\n\n")
                yield from (part.strip() for part in paragraphs if part.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def file_of(text: str | Path) -> Path:
    """Return the file of a sample; a `ConfigError` where there is none."""
    file = Path(text).expanduser()
    if not file.is_file():
        raise ConfigError(f"text is {text}, which is no file; name a JSONL or text file.")
    return file


def _is_list(lines: TextIO) -> bool:
    """True if a file contains one JSON list; rewinds it."""
    start = lines.read(1 << 10).lstrip()[:1]
    lines.seek(0)
    return start == "["


def _rows_of_list(file: Path, lines: TextIO) -> Iterator[str | list[dict[str, Any]]]:
    rows = _parsed(str(file), lines.read(_LONGEST_LINE + 1))
    for number, row in enumerate(rows, 1):
        yield _text_of_row(row, f"{file}, row {number}")


def _parsed(where: str, text: str) -> Any:
    try:
        if len(text) > _LONGEST_LINE:
            raise ValueError("it is too long")
        row = json.loads(text)
        check_depth(row)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no valid JSON: {error}.") from error
    return row


def _text_of_row(row: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return row["text"]
        for name in _MESSAGES:
            if isinstance(row.get(name), list):
                return [_message(item, where) for item in row[name]]
        for names in _JOINED:
            parts = [row.get(name) for name in names]
            if isinstance(parts[0], list) and isinstance(parts[-1], list):
                return [_message(item, where) for item in (*parts[0], *parts[-1])]
            if isinstance(parts[0], str) and isinstance(parts[-1], str):
                return "\n".join(part for part in parts if isinstance(part, str) and part)
    raise CheckpointError(
        f"{where} has no text: expected a string, or an object with text, messages, prompt and "
        "completion, or instruction and output."
    )


def _message(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, dict):
        key = "content" if "content" in item else "value"
        # null in a message of tool calls only
        content = "" if key in item and item[key] is None else item.get(key)
        if isinstance(content, str):
            role = str(item.get("role", item.get("from", "user")))
            return {"role": _ROLES.get(role, role), "content": content}
    raise CheckpointError(f"{where} has a message without role and content as strings.")


def token_ids(
    texts: Iterable[str | list[dict[str, Any]]], tokenizer: Any, *, longest: int, most: int
) -> list[list[int]]:
    """Return the ids of each text, cut to `longest`, until `most` tokens are there.

    Conversations go through the tokenizer's chat template where it has one.
    """
    rows: list[list[int]] = []
    left = most
    for text in texts:
        if left <= 0:
            break
        ids = _ids(text, tokenizer)[: min(longest, left)]
        if ids:
            rows.append(ids)
            left -= len(ids)
    return rows


def _ids(text: str | Sequence[dict[str, Any]], tokenizer: Any) -> list[int]:
    if isinstance(text, str):
        return list(tokenizer(text)["input_ids"])
    if getattr(tokenizer, "chat_template", None):
        shown = tokenizer.apply_chat_template(list(text), tokenize=False)
        return list(tokenizer(shown, add_special_tokens=False)["input_ids"])
    return list(tokenizer("\n".join(message["content"] for message in text))["input_ids"])
