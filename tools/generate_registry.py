"""Write model_registry/ from the installed transformers, or check that it still agrees.

    python tools/generate_registry.py                  write every file
    python tools/generate_registry.py --only mixtral   write one (may be given more than once)
    python tools/generate_registry.py --check          print what has drifted; exit 1 on any

What a file says of well-known checkpoints (`checkpoints`) is written by hand, and kept. Each file
describes one `model_type` that can hold fused experts. What is an expert is read from
transformers' own class definitions (see tools/registry/definitions.py), never from
`moe_qlora.detect`, so that the tests can hold the two against each other. Models are built on the
meta device; nothing is downloaded or allocated.

A file names the transformers that it was written from, and stays as it is where another one agrees.
Types of a later transformers than the installed one are left as they are, and not checked.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import multiprocessing
import os
import re
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "model_registry"
VERSION = re.compile(r'"transformers(_version)?": ')
sys.path.insert(0, str(ROOT))


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def text_of(model_type: str) -> tuple[str, str | None, str | None]:
    """Return the model type, its file's text (None: no experts), and the error (None: none)."""
    _quiet()
    from tools.registry.describe import describe

    try:
        entry: dict[str, Any] | None = describe(model_type)
    except Exception as error:  # noqa: BLE001 - one type that fails must not hide the others
        return model_type, None, f"{type(error).__name__}: {error}"
    if entry is None:
        return model_type, None, None
    return model_type, json.dumps(entry, indent=1, sort_keys=True, allow_nan=False) + "\n", None


def drift(path: Path, text: str | None) -> str:
    """Return a unified diff from the file as it is to `text`; empty where they agree.

    The version of transformers by itself is no difference.
    """
    before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    after = (text or "").splitlines()
    one, other = ([x for x in lines if not VERSION.search(x)] for lines in (before, after))
    names = f"{path.name} (in the repository)", f"{path.name} (from transformers)"
    lines = difflib.unified_diff(before, after, *names, lineterm="", n=1)
    return "" if one == other else "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print the drift")
    parser.add_argument("--only", action="append", default=[], metavar="TYPE")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    _quiet()
    import transformers

    from moe_qlora.versions import release_of
    from tools.registry.classes import candidates

    types = options.only or list(candidates())
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        results = list(pool.map(text_of, types))
    texts = {model_type: text for model_type, text, _ in results if text is not None}
    failures = {model_type: problem for model_type, _, problem in results if problem is not None}
    for model_type, problem in failures.items():
        print(f"{model_type}: {problem}", file=sys.stderr)

    known = {*texts, *failures}
    others = [] if options.only else sorted(p for p in FOLDER.glob("*.json") if p.stem not in known)
    series = release_of(transformers.__version__)[:2]
    of_files = {p: json.loads(p.read_text(encoding="utf-8"))["transformers"] for p in others}
    stale = [path for path, wrote in of_files.items() if release_of(wrote)[:2] <= series]
    wanted = {FOLDER / f"{name}.json": text for name, text in sorted(texts.items())}
    changed = {path: diff for path, text in wanted.items() if (diff := drift(path, text))}
    left = f", {len(others) - len(stale)} are of a later transformers" if others != stale else ""
    if options.check:
        print("\n".join([*changed.values(), *(drift(path, None) for path in stale)]))
        print(f"{len(changed) + len(stale)} of {len(texts)} files have drifted{left}.")
        return 1 if changed or stale or failures else 0
    FOLDER.mkdir(exist_ok=True)
    for path in changed:
        path.write_text(wanted[path], encoding="utf-8")
    for path in stale:
        path.unlink()
    print(f"{len(changed)} files written to {FOLDER}, {len(stale)} removed{left}.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
