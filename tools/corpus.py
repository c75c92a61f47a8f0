"""Record what the package computes, and check that it still does.

    python tools/corpus.py check                       the CPU's entries against tests/corpus
    python tools/corpus.py check --only qwen3_moe gpt_oss/int8
    python tools/corpus.py record [--only ...]         overwrites the entries named, or all
    python tools/corpus.py record --gpu --out DIR      14 entries on a GPU ($OUT if it is set)
    python tools/corpus.py check --gpu --out DIR       --device cpu for a smoke test
    python tools/corpus.py fixtures                    folders of today's format, tests/fixtures

An entry is a model type with a codec. Only public names and calls of PEFT and transformers are
used, so that the data outlive any change inside. Hashes, names and classes of errors must be equal;
floats and fingerprints (a norm, and a product with random signs) may differ by the tolerance of the
codec, bytes of a plan by 3 %. Each difference is a line: entry, field, recorded, seen.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DATA = ROOT / "tests" / "corpus"
FIXTURES = ROOT / "tests" / "fixtures" / "0.2"
TOLERANCES = {"int8": 2e-2, "gpu": 1e-1}  # int8 rounds activations as well; bf16 on a GPU
TOLERANCE = 1e-3
PLAN_TOLERANCE = 0.03


def differences(
    recorded: Any, seen: Any, tolerance: float, field: str = "", floor: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the field, what was recorded, and what is seen now, wherever these differ."""
    if isinstance(recorded, dict) and isinstance(seen, dict):
        inside = PLAN_TOLERANCE if field == "plan" else tolerance
        norms = [value[0] for value in recorded.values() if _is_fingerprint(value)]
        least = 1e-5 * max(norms, default=0.0)
        for name in sorted({*recorded, *seen}):
            one, two = recorded.get(name, "(nothing)"), seen.get(name, "(nothing)")
            yield from differences(one, two, inside, f"{field}.{name}".lstrip("."), least)
    elif _is_fingerprint(recorded) and _is_fingerprint(seen):
        allowed = tolerance * max(recorded[0], floor) + 1e-12
        if not all(abs(one - two) <= allowed for one, two in zip(recorded, seen, strict=True)):
            yield field, recorded, seen
    elif _is_number(recorded) and _is_number(seen) and ("plan" in field or type(seen) is float):
        if not abs(recorded - seen) <= tolerance * abs(recorded) + 1e-12:
            yield field, recorded, seen
    elif recorded != seen:
        yield field, recorded, seen


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is float for v in value)


def read(folder: Path) -> dict[str, Any]:
    """Return what was recorded of each entry."""
    return {
        f"{file.stem}/{codec}": part
        for file in sorted(folder.glob("*.json"))
        for codec, part in json.loads(file.read_text(encoding="utf-8")).items()
    }


def write(folder: Path, entry: str, measured: Any) -> None:
    """Overwrite an entry in the file of its model type, a line for each value."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, codec = entry.split("/", 1)
    file = folder / f"{kind}.json"
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    parts[codec] = measured
    file.write_text(_lines(dict(sorted(parts.items()))) + "\n", encoding="utf-8")


def _lines(value: Any, indent: int = 0) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    space = " " * (indent + 1)
    inside = [f"{space}{json.dumps(k)}: {_lines(v, indent + 1)}" for k, v in value.items()]
    return "{\n" + ",\n".join(inside) + "\n" + " " * indent + "}"


def main() -> int:
    """Record or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("command", choices=["record", "check", "fixtures"])
    parser.add_argument("--only", nargs="+", default=[], help="entries, model types or codecs")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--gpu", action="store_true", help="the entries of a GPU, in one process")
    parser.add_argument("--device", default="cuda", help="of --gpu")
    parser.add_argument("--out", type=Path, help="folder of the data, or of the fixtures")
    options = parser.parse_args()
    from tools import corpus_entries, corpus_fixtures

    if options.command == "fixtures":
        corpus_fixtures.write_fixtures(options.out or FIXTURES)
        return 0
    measure: Any = corpus_entries.measure_gpu if options.gpu else corpus_entries.measure
    every = [*(corpus_entries.GPU_ENTRIES if options.gpu else corpus_entries.ENTRIES)]
    chosen = [name for name in every if {name, *name.split("/")} & {*options.only}]
    chosen = chosen if options.only else every
    if not chosen:
        sys.exit(f"no entry is named by --only {' '.join(options.only)}; there are {every}")
    folder = options.out or (Path(os.environ.get("OUT", "corpus_gpu")) if options.gpu else DATA)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {} if options.gpu else {"OMP_NUM_THREADS": "1"}
    started, bad, given = time.monotonic(), 0, [options.device] if options.gpu else []
    recorded, spawn = read(folder), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1 if options.gpu else options.jobs, mp_context=spawn) as pool:
        waiting = {pool.submit(measure, name, *given): name for name in chosen}
        for done in as_completed(waiting):
            entry, error, found = waiting[done], done.exception(), list[tuple[str, Any, Any]]()
            if error is not None:
                found = [("(all)", "", f"{type(error).__name__}: {error}")]
            elif options.command == "record":
                write(folder, entry, done.result())
                print(f"{entry}: {time.monotonic() - started:.0f} s", flush=True)
            else:
                kind = "gpu" if options.gpu else entry.split("/")[1]
                tolerance = TOLERANCES.get(kind, TOLERANCE)
                found = list(differences(recorded.get(entry, {}), done.result(), tolerance))
            for field, *both in found:
                told = [json.dumps(value)[:300] for value in both]
                print(entry, field, *told, sep="\t", flush=True)
            bad += len(found)
    took = time.monotonic() - started
    print(f"{len(chosen)} entries, {bad} differences, {took:.0f} s", file=sys.stderr)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
