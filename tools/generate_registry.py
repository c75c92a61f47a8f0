"""Write model_registry/ from the installed transformers, or check that it still agrees.

    python tools/generate_registry.py                  write every file
    python tools/generate_registry.py --only mixtral   write one (may be given more than once)
    python tools/generate_registry.py --check          print the files that drifted; exit 1 on any

Each file describes one `model_type` that can hold fused experts. Its configurations are kept: the
tiny one, which a new file gets, additions to the published defaults, and those of well-known
checkpoints. Where a new type fails, copy the file of a type that is like it and mend these by hand.
What is an expert is read from transformers' own classes, never from `moe_qlora.detect`, so that
tests can hold the two against each other. Models are built on the meta device. A file stays as it
is where another transformers agrees; types of a later one than the installed are not checked.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "model_registry"
sys.path.insert(0, str(ROOT))


def text_of(model_type: str) -> tuple[str, str]:
    """Return a file's text ("": no experts), and the error that forbade it ("": none)."""
    from tools.registry.describe import describe

    try:
        entry = describe(model_type)
    except Exception as error:  # noqa: BLE001 - one type that fails must not hide the others
        return "", f"{type(error).__name__}: {error}"
    text = json.dumps(entry, indent=1, sort_keys=True, allow_nan=False) + "\n"
    return text if entry else "", ""


def lines_of(text: str) -> list[str]:
    """Return the lines but for the version of transformers, which by itself is no difference."""
    return [line for line in text.splitlines() if '"transformers' not in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print the drift")
    parser.add_argument("--only", action="append", default=[], metavar="TYPE")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers

    from moe_qlora.versions import release_of
    from tools.registry.classes import candidates

    types = options.only or list(candidates())
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        results = dict(zip(types, pool.map(text_of, types), strict=True))
    wanted = {FOLDER / f"{name}.json": text for name, (text, _) in results.items() if text}
    failures = {name: problem for name, (_, problem) in results.items() if problem}
    for name, problem in failures.items():
        print(f"{name}: {problem}", file=sys.stderr)
    series, later = release_of(transformers.__version__)[:2], 0
    for path in [] if options.only else sorted({*FOLDER.glob("*.json")} - {*wanted}):
        wrote = json.loads(path.read_text(encoding="utf-8"))["transformers"]
        if release_of(wrote)[:2] > series:
            later += 1
        elif path.stem not in failures:
            wanted[path] = ""  # it is to go
    files = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in wanted}
    changed = [path for path in wanted if lines_of(files[path]) != lines_of(wanted[path])]
    left = f", {later} are of a later transformers" if later else ""
    if options.check:
        print(*(path.name for path in changed), sep="\n")
        print(f"{len(changed)} of {len(wanted)} files have drifted{left}: git diff after a write.")
        return int(bool(changed or failures))
    for path in changed:
        if wanted[path]:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    print(f"{len(changed)} files of {FOLDER} were written or removed{left}.")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
