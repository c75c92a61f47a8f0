"""Change one place of the package at a time, and see whether tests or the corpus notice.

    python tools/mutations.py --count 100 --seed 1 --jobs 16 --out mutations.json
    python tools/mutations.py --count 100 --seed 1 --shard 0/4        a quarter of the same hundred
    python tools/mutations.py --list --count 20                       what would be changed
    python tools/mutations.py --only moe_qlora/lora --deselect tests/unit/test_house.py

A mutation is a sign, a comparison, an index, a swapped pair, a lost `not`, `and` for `or`, or
another constant. Each is applied in a copy of the checkout. Then run, until one fails: the tests
of the file's name, those of its folder, and the corpus. A command that fails in a copy without a
mutation is left out, and says so. One that takes over --limit seconds is a catch.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import queue
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
# Rooms whose tests lie elsewhere than in tests/unit/<room>.
TESTS = {"integrations": ["tests/integrations", "tests/unit/models"], "testing.py": ["tests/unit"]}


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
                if isinstance(child, ast.AST):
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
            plain = alike or ast.unparse(node.func) in ("min", "max")
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
    part, parts = map(int, options.shard.split("/"))
    return chosen[part::parts]


def commands(file: str, deselect: list[str]) -> list[str]:
    """Return the commands that should notice a mutation of this file, the quickest first."""
    _, room, *rest = Path(file).parts
    stem = Path(file).stem
    places = TESTS.get(room) or [f"tests/unit/{room}" if rest else f"tests/unit/test_{stem}.py"]
    places = [place for place in places if (ROOT / place).exists()] or ["tests/unit"]
    own = [str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob(f"test_{stem}*.py"))]
    marks = "not gpu and not multi_gpu and not nightly"
    test = f"python -m pytest -x -q -p no:cacheprovider -m {shlex.quote(marks)} "
    test += "".join(f"--deselect {shlex.quote(each)} " for each in deselect)
    runs = [test + " ".join(own)] if own else []
    runs += [test + " ".join(places)] if places != own else []
    return [*runs, "python tools/corpus.py check --jobs 1"]


class Copies:
    """Copies of the checkout, one for each job, and which commands pass in one as it is."""

    def __init__(self, count: int, scratch: Path, limit: float) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._passes: dict[str, bool] = {}
        self._free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            ignore = shutil.ignore_patterns(*LEFT_OUT)
            self._free.put(
                shutil.copytree(ROOT, scratch / str(number), ignore=ignore, symlinks=True)
            )

    def judge(self, mutation: Mutation, deselect: list[str]) -> dict[str, Any]:
        """Return what was changed and which command noticed, or None."""
        copy, started, caught = self._free.get(), time.monotonic(), None
        file, (plain, changed) = copy / mutation.file, mutation.sources()
        source = file.read_text(encoding="utf-8")
        try:
            for command in commands(mutation.file, deselect):
                file.write_text(changed, encoding="utf-8")
                failed = not self._run(command, copy)
                file.write_text(plain, encoding="utf-8")
                if failed and self._passes_without(command, copy):
                    caught = command
                    break
        finally:
            file.write_text(source, encoding="utf-8")
            self._free.put(copy)
        return {
            "place": f"{mutation.file}:{mutation.line}",
            "kind": mutation.kind,
            "diff": mutation.diff(),
            "caught_by": caught,
            "seconds": round(time.monotonic() - started),
        }

    def _passes_without(self, command: str, copy: Path) -> bool:
        with self._lock:
            if command not in self._passes:
                self._passes[command] = self._run(command, copy)
                if not self._passes[command]:
                    print(f"left out, as it fails without a mutation: {command}", flush=True)
            return self._passes[command]

    def _run(self, command: str, copy: Path) -> bool:
        paths = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ours |= {"PYTHONDONTWRITEBYTECODE": "1"}  # swaps keep the size, by which caches are told
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        process = subprocess.Popen(
            command, shell=True, cwd=copy, env={**os.environ, **ours, "PATH": path},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(self._limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    """Draw mutations, judge them, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="i/n: each nth of them, from the ith")
    parser.add_argument("--only", nargs="+", help="files or folders, as in moe_qlora/lora")
    parser.add_argument("--deselect", nargs="+", default=[], help="files or ids, as pytest takes")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900, help="seconds for a command")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    parser.add_argument("--list", action="store_true", help="print the mutations, and run nothing")
    options = parser.parse_args()
    chosen, results = draw(options), []
    if options.list:
        for one in chosen:
            print(f"{one.file}:{one.line} {one.kind}", *one.diff(), sep="\n    ")
        return 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies = Copies(options.jobs, Path(scratch), options.limit)
        for result in pool.map(lambda one: copies.judge(one, options.deselect), chosen):
            results.append(result)
            noticed = result["caught_by"]
            print(f"{'caught' if noticed else 'SURVIVED'} {result['place']} {result['kind']}")
            print("\n".join(f"    {line}" for line in result["diff"]), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    caught = sum(result["caught_by"] is not None for result in results)
    print(f"{caught} of {len(results)} caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
