"""Make the study's corpus from text that is installed here: code to train on, English to adapt to.

    python tools/study/corpus.py corpus.npz

Code is Python's standard library and installed packages; English is their documentation, licences
and notes, and the reference manual that `help()` shows. A byte-level BPE of 4,096 tokens is trained
on both. The file holds tokens alone, uint16: `code`, `code_held`, `text`, `text_held`; what is held
out is whole files, chosen by the hash of their contents.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 4096
CODE_BYTES = 18_000_000
LARGEST_FILE = 200_000
JUDGED = 256 * 256
"""Held-out tokens that losses are the mean of."""
PASSAGE = 32
_NOTES = (".md", ".rst")
_NAMES = ("license", "licence", "copying", "notice", "metadata", "authors", "readme")


def main() -> None:
    """Write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--code-bytes", type=int, default=CODE_BYTES)
    options = parser.parse_args()
    code, text = files("code", options.code_bytes), files("text", 10**9)
    code, code_held = split(code, 0.02)
    text, text_held = split(text, 0.12)
    tokenizer = train_tokenizer(code[:400] + text[:400])
    parts = {"code": code, "code_held": code_held, "text": text, "text_held": text_held}
    tokens: dict[str, Any] = {name: encode(tokenizer, part) for name, part in parts.items()}
    np.savez_compressed(options.out, **tokens)
    for name, ids in tokens.items():
        print(f"{name}: {len(parts[name])} files, {len(ids):,} tokens")
    for name in ("code", "text"):
        share = repeated(tokens[name], tokens[f"{name}_held"][:JUDGED])
        print(f"{name}: {share:.1%} of the tokens judged are in passages of the training files")
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


def files(kind: str, limit: int) -> list[str]:
    """Return the contents of distinct files of a kind, in the order of their hashes."""
    found = {hashlib.sha256(each.encode()).hexdigest(): each for each in _read(kind)}
    chosen, size = [], 0
    for _, content in sorted(found.items()):
        if size < limit:
            chosen.append(content)
            size += len(content)
    return chosen


def _read(kind: str) -> Iterator[str]:
    if kind == "text":
        from pydoc_data.topics import topics

        yield from topics.values()
    for root in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}:
        for path in sorted(Path(root).rglob("*")):
            name = path.name.lower()
            notes = path.suffix in _NOTES or (path.suffix != ".py" and name.startswith(_NAMES))
            wanted = path.suffix == ".py" if kind == "code" else notes
            if "topics.py" in name or not wanted or not path.is_file():
                continue
            try:
                content = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if 200 < len(content) < LARGEST_FILE:
                yield content


def split(contents: list[str], share: float) -> tuple[list[str], list[str]]:
    """Return files to train on, and about `share` of all for the held-out loss."""
    held = [
        int(hashlib.md5(each.encode()).hexdigest()[:8], 16) < share * 2**32 for each in contents
    ]
    pairs = list(zip(contents, held, strict=True))
    return [each for each, out in pairs if not out], [each for each, out in pairs if out]


def repeated(tokens: np.ndarray[Any, Any], held: np.ndarray[Any, Any]) -> float:
    """Return the share of held-out tokens that stand in a passage which `tokens` hold too."""
    known = np.unique(_passages(tokens))
    seen = np.zeros(len(held), bool)
    for start in np.flatnonzero(np.isin(_passages(held), known)):
        seen[start : start + PASSAGE] = True
    return float(seen.mean())


def _passages(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a 64-bit hash of each run of `PASSAGE` tokens."""
    count = max(len(tokens) - PASSAGE + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for place in range(PASSAGE):  # wraps around, as is meant
        hashes = (
            hashes * np.uint64(6364136223846793005) + tokens[place : place + count] + np.uint64(1)
        )
    return hashes


def train_tokenizer(contents: list[str]) -> Any:
    """Return a byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(contents, trainer)
    return tokenizer


def encode(tokenizer: Any, contents: list[str]) -> np.ndarray[Any, Any]:
    """Return all files' tokens, each file ended by token 0."""
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(contents):
        ids += [*encoded.ids, 0]
    return np.array(ids, dtype=np.uint16)


if __name__ == "__main__":
    main()
