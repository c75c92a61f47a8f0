"""Write model_registry/ from the installed transformers, or check that it still agrees.

    python tools/generate_registry.py                  write every file
    python tools/generate_registry.py --only mixtral   write one (may be given more than once)
    python tools/generate_registry.py --check          print what has drifted; exit 1 on any

Each file describes one `model_type` that can hold fused experts. What is an expert is read from
transformers' own class definitions (see tools/registry/definitions.py), never from
`moe_qlora.detect`, so that the tests can hold the two against each other. Models are built on the
meta device; nothing is downloaded or allocated.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import multiprocessing
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "model_registry"
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
    """Return a unified diff from the file as it is to `text`; empty where they agree."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = difflib.unified_diff(
        before.splitlines(),
        (text or "").splitlines(),
        f"{path.name} (in the repository)",
        f"{path.name} (from transformers)",
        lineterm="",
        n=1,
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print the drift")
    parser.add_argument("--only", action="append", default=[], metavar="TYPE")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    _quiet()
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
    stale = [] if options.only else [p for p in FOLDER.glob("*.json") if p.stem not in known]
    if options.check:
        diffs = [drift(FOLDER / f"{name}.json", text) for name, text in sorted(texts.items())]
        diffs += [drift(path, None) for path in sorted(stale)]
        changed = [diff for diff in diffs if diff]
        print("\n".join([*changed, f"{len(changed)} of {len(texts)} files have drifted."]))
        return 1 if changed or failures else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts.items():
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    for path in stale:
        path.unlink()
    print(f"{len(texts)} files written to {FOLDER}, {len(stale)} removed.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
