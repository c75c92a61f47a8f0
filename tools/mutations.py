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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build")
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.BitOr: "&", ast.BitAnd: "|", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
LEFT_ALONE = ("annotation", "returns", "bases", "decorator_list")
# Rooms whose tests lie elsewhere than in tests/unit/<room>.
TESTS = {"integrations": ["tests/integrations", "tests/unit/models"], "testing.py": ["tests/unit"]}


@dataclass(frozen=True)
class Mutation:
    """Text that takes the place of a part of one line."""

    file: str
    kind: str
    line: int  # from 1
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        raw = lines[self.line - 1].encode()
        lines[self.line - 1] = (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()
        return "".join(lines)

    def diff(self) -> list[str]:
        source = (ROOT / self.file).read_text(encoding="utf-8")
        lines = (source.splitlines(), self.apply(source).splitlines())
        return list(difflib.unified_diff(*lines, n=0, lineterm=""))[3:]


class Places:
    """The places of a file's code that can be changed: those within one line."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.lines = file, source.encode().splitlines()
        self.found: list[Mutation] = []
        self._visit(ast.parse(source))

    def _visit(self, node: ast.AST) -> None:
        self._look(node)
        for field, value in ast.iter_fields(node):  # without annotations and texts of errors
            if field not in LEFT_ALONE and not isinstance(node, ast.Raise):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._visit(child)

    def _look(self, node: Any) -> None:
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.Not()):
                kind = "sign" if isinstance(node.op, ast.USub) else "not"
                self._replace(kind, node, node, f"({self._text(node.operand)})")
            case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node.left):
                self._between("sign", node.left, node.right, OPERATORS[type(node.op)])
                if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv):
                    self._swap(node.left, node.right)
            case ast.BoolOp():
                new = "or" if isinstance(node.op, ast.And) else "and"
                self._between("and/or", node.values[0], node.values[1], new)
            case ast.Compare() if len(node.ops) == 1:
                new = COMPARISONS[type(node.ops[0])]
                self._between("comparison", node.left, node.comparators[0], new)
            case ast.Call(args=[one, two, *_]):
                starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
                if not starred and self._text(node.func) not in ("min", "max"):
                    self._swap(one, two)
            case ast.Subscript() if _is_number(node.slice):
                text = self._text(node.slice)
                self._replace("index", node.slice, node.slice, f"{text} + 1")
                self._replace("index", node.slice, node.slice, f"{text} - 1")
            case ast.Constant(value=bool(value)):
                self._replace("constant", node, node, str(not value))
            case ast.Constant() if _is_number(node):
                self._replace("constant", node, node, f"({self._text(node)} + 1)")

    def _text(self, node: Any) -> str:
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    def _inside(self, left: Any, right: Any) -> str:
        return self.lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()

    def _replace(self, kind: str, first: Any, last: Any, new: str) -> None:
        if first.lineno == last.end_lineno:
            span = (first.col_offset, last.end_col_offset)
            self.found.append(Mutation(self.file, kind, first.lineno, *span, new))

    def _between(self, kind: str, left: Any, right: Any, new: str) -> None:
        """Replace an operator, but not the brackets around it."""
        if left.end_lineno == right.lineno:
            inside = self._inside(left, right)
            head, tail = inside[: inside.rfind(")") + 1], inside[len(inside.rstrip("( ")) :].strip()
            span = (left.end_col_offset, right.col_offset)
            text = f"{head} {new} {tail}"
            self.found.append(Mutation(self.file, kind, right.lineno, *span, text))

    def _swap(self, one: Any, two: Any) -> None:
        if one.lineno == two.end_lineno and self._text(one) != self._text(two):
            middle = self._inside(one, two)
            self._replace("swap", one, two, f"{self._text(two)}{middle}{self._text(one)}")


def _is_number(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _compiles(mutation: Mutation) -> bool:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    try:
        compile(mutation.apply(source), mutation.file, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def draw(options: argparse.Namespace) -> list[Mutation]:
    """Draw mutations: each kind as often, and of a kind each place as likely."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "moe_qlora").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if any(name.startswith(prefix) for prefix in options.only or [name]):
            for mutation in Places(name, path.read_text(encoding="utf-8")).found:
                kinds[mutation.kind].append(mutation)
    lots = random.Random(options.seed)
    chosen: list[Mutation] = []
    while len(chosen) < options.count and any(kinds.values()):
        places = kinds[lots.choice(sorted(kind for kind in kinds if kinds[kind]))]
        mutation = places.pop(lots.randrange(len(places)))
        chosen += [mutation] if _compiles(mutation) else []
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
        file = copy / mutation.file
        source = file.read_text(encoding="utf-8")
        try:
            for command in commands(mutation.file, deselect):
                file.write_text(mutation.apply(source), encoding="utf-8")
                failed = not self._run(command, copy)
                file.write_text(source, encoding="utf-8")
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
