"""The user's own text, as token ids: from a JSON, JSONL or text file, or a list of strings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..errors import CheckpointError, ConfigError
from ..models.files import check_depth

_LONGEST_LINE = 16 << 20  # characters
_MESSAGES = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's, as chat templates name them
_JOINED = (("prompt", "completion"), ("prompt", "chosen"), ("instruction", "input", "output"))


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
    """Whether a file holds one JSON list, as datasets do that are no JSONL; it is read anew."""
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
        # A message that is nothing but calls of tools has null there.
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
