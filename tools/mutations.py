"""Change one place of the package at a time, and see whether tests or the corpus notice.

    pip install pytest-cov; tools/test --cov=moe_qlora --cov-context=test    writes .coverage, once
    python tools/mutations.py --count 100 --seed 1 --out mutations.json

A mutation is a sign, a comparison, an index, a swapped pair, a lost `not`, `and` for `or`, or
another constant. Each is applied in a copy of the checkout. Then run, until one fails: the tests
that ran the changed statement, those of the file's name first, and the corpus. A test that fails
without a mutation too is left out, and says so. A command of over --limit seconds is a catch.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = shlex.quote(sys.executable)
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
LEFT_ALONE = ("annotation", "returns", "bases", "decorator_list")


@dataclass(frozen=True)
class Mutation:
    """One change of a file's tree: the number of a node, and of a change of it."""

    file: str
    kind: str
    line: int
    node: int
    change: int

    def sources(self) -> tuple[str, str]:
        """Return the file as the parser has it, and changed."""
        tree = ast.parse((ROOT / self.file).read_text(encoding="utf-8"))
        plain = ast.unparse(tree)
        changes(list(nodes(tree))[self.node])[self.change][1]()
        return plain, ast.unparse(tree)

    def diff(self) -> list[str]:
        plain, changed = (source.splitlines() for source in self.sources())
        return list(difflib.unified_diff(plain, changed, n=0, lineterm=""))[3:]


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code, without annotations and texts of errors."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in LEFT_ALONE and not isinstance(node, ast.Raise):
            for child in value if isinstance(value, list) else [value]:
                # zip(strict=True) changes nothing where the lengths agree
                strict = isinstance(child, ast.keyword) and child.arg == "strict"
                if isinstance(child, ast.AST) and not strict:
                    yield from nodes(child)


def changes(node: Any) -> list[tuple[str, Callable[[], None]]]:
    """Return the kind of each change of a node, and how it is made."""

    def put(kind: str, **fields: Any) -> tuple[str, Callable[[], None]]:
        return kind, lambda: vars(node).update(fields)

    match node:
        case ast.UnaryOp(op=ast.USub()):
            return [put("sign", op=ast.UAdd())]
        case ast.UnaryOp(op=ast.Not()):
            return [put("not", op=ast.Not(), operand=ast.UnaryOp(ast.Not(), node.operand))]
        case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node.left):
            swaps = isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv)
            swap = [put("swap", left=node.right, right=node.left)] if swaps else []
            return [put("sign", op=OPERATORS[type(node.op)]()), *swap]
        case ast.BoolOp():
            return [put("and/or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())]
        case ast.Compare(ops=[op]):
            return [put("comparison", ops=[COMPARISONS[type(op)]()])]
        case ast.Call(args=[one, two, *rest]):
            starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
            alike = starred or ast.unparse(one) == ast.unparse(two)
            called = ast.unparse(node.func).rpartition(".")[2]
            plain = alike or called in ("min", "max", "minimum", "transpose")
            return [] if plain else [put("swap", args=[two, one, *rest])]
        case ast.Subscript(slice=ast.Constant(value=int(value))):
            return [put("index", slice=ast.Constant(value + step)) for step in (1, -1)]
        case ast.Constant(value=bool(value)):
            return [put("constant", value=not value)]
        case ast.Constant(value=int(value) | float(value)):
            return [put("constant", value=value + 1)]
    return []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def draw(options: argparse.Namespace) -> list[Mutation]:
    """Draw mutations: each kind as often, and of a kind each place as likely."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "moe_qlora").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if any(name.startswith(prefix) for prefix in options.only or [name]):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for number, node in enumerate(nodes(tree)):
                for change, (kind, _) in enumerate(changes(node)):
                    line = getattr(node, "lineno", 0)
                    kinds[kind].append(Mutation(name, kind, line, number, change))
    lots = random.Random(options.seed)
    chosen: list[Mutation] = []
    while len(chosen) < options.count and any(kinds.values()):
        places = kinds[lots.choice(sorted(kind for kind in kinds if kinds[kind]))]
        chosen.append(places.pop(lots.randrange(len(places))))
    return chosen


def covering(mutation: Mutation) -> list[str]:
    """Return the tests that ran the changed statement, by .coverage; those nearest to it first."""
    from coverage import CoverageData  # type: ignore[import-not-found]

    data, file = CoverageData(str(ROOT / ".coverage")), ROOT / mutation.file
    data.read()
    changed = range(0)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):  # Of a block, its head
            inner = getattr(node, "body", None)
            end = (node.end_lineno or 0) + 1 if inner is None else inner[0].lineno
            if mutation.line in (lines := range(node.lineno, max(end, node.lineno + 1))):
                changed = lines
    by_line = data.contexts_by_lineno(str(file))
    found = {context.rpartition("|")[0] for line in changed for context in by_line.get(line, ())}
    near = f"/test_{file.stem}", f"/{file.parent.name}/"
    return sorted(found - {""}, key=lambda test: ([part not in test for part in near], test))


def commands(mutation: Mutation, copy: Path) -> list[str]:
    """Return the commands that should notice a mutation, the quickest first."""
    path = Path(mutation.file)
    found = [*(ROOT / "tests").rglob(f"test_{path.stem}*.py")]
    # What runs in processes of its own, such as ranks and compilers, is in no map.
    found += (ROOT / "tests").glob(f"**/{path.parent.name}")
    own = [str(each.relative_to(ROOT)) for each in sorted(found)]
    (copy / "chosen.txt").write_text("\n".join(covering(mutation) or own), encoding="utf-8")
    marks = shlex.quote("not gpu and not multi_gpu and not nightly")
    test = f"{PYTHON} -m pytest -x -q -p no:cacheprovider -m {marks} @chosen.txt"
    return [test, f"{PYTHON} tools/corpus.py check --jobs 1"]


class Copies:
    """Copies of the checkout, one for each job, and which commands pass in one as it is."""

    def __init__(self, count: int, scratch: Path, limit: float) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._passes: dict[str, bool] = {}
        self._free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            ignore = shutil.ignore_patterns(*LEFT_OUT)
            to = scratch / str(number)
            self._free.put(shutil.copytree(ROOT, to, ignore=ignore, symlinks=True))

    def judge(self, mutation: Mutation) -> dict[str, Any]:
        """Return what was changed and which test or command noticed, or None."""
        copy, caught = self._free.get(), None
        file, (plain, changed) = copy / mutation.file, mutation.sources()
        source = file.read_text(encoding="utf-8")
        try:
            waiting = commands(mutation, copy)
            while waiting and caught is None:
                file.write_text(changed, encoding="utf-8")
                failed = self._failure(waiting[0], copy)
                file.write_text(plain, encoding="utf-8")
                if failed and self._passes_without(failed, copy):
                    caught = failed
                elif failed and failed.startswith("tests/"):
                    waiting[0] += f" --deselect {shlex.quote(failed)}"
                else:
                    del waiting[0]
        finally:
            file.write_text(source, encoding="utf-8")
            self._free.put(copy)
        return {
            "place": f"{mutation.file}:{mutation.line}",
            "kind": mutation.kind,
            "diff": mutation.diff(),
            "caught_by": caught,
        }

    def _passes_without(self, failed: str, copy: Path) -> bool:
        with self._lock:
            if failed not in self._passes or "@chosen.txt" in failed:  # Each has its own
                test = f"{PYTHON} -m pytest -q -p no:cacheprovider {shlex.quote(failed)}"
                command = test if failed.startswith("tests/") else failed
                self._passes[failed] = self._failure(command, copy) is None
                if not self._passes[failed] and "@chosen.txt" in failed:
                    raise RuntimeError("It fails as it is, with no test's name: is .coverage old?")
                if not self._passes[failed]:
                    print(f"left out, as it fails without a mutation: {failed}", flush=True)
            return self._passes[failed]

    def _failure(self, command: str, copy: Path) -> str | None:
        """Return the test that failed, or the command; None where all passed."""
        paths = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ours |= {"PYTHONDONTWRITEBYTECODE": "1"}  # swaps keep the size, by which caches are told
        process = subprocess.Popen(
            command, shell=True, cwd=copy, env={**os.environ, **ours}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=self._limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return command
        found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", said, re.MULTILINE)
        return None if process.returncode == 0 else found[1] if found else command


def main() -> None:
    """Draw mutations, judge them, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="files or folders, as in moe_qlora/lora")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900, help="seconds for a command")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    options = parser.parse_args()
    chosen, results = draw(options), []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies = Copies(options.jobs, Path(scratch), options.limit)
        for result in pool.map(copies.judge, chosen):
            results.append(result)
            noticed = result["caught_by"]
            print(f"{'caught' if noticed else 'SURVIVED'} {result['place']} {result['kind']}")
            print("\n".join(f"    {line}" for line in result["diff"]), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(bool(each['caught_by']) for each in results)} of {len(results)} caught")


if __name__ == "__main__":
    main()
