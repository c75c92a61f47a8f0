"""Runs one of llama.cpp's converters on a model whose tokenizer was made for a test.

The converters know tokenizers by a hash of what they make of one text, and refuse all others; of
ours they take the commonest. Everything else is theirs. `bash tools/test_serving` puts copies of
this file beside links to the converters, named as these are.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

source = Path(__file__).parent / "source"
sys.path[:0] = [str(source), str(source / "gguf-py")]

from conversion.base import TextModel  # type: ignore[import-not-found]  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(str(source / Path(__file__).name), run_name="__main__")
