"""Change one place of the package at a time, and see whether tests or the corpus notice.

    python tools/mutations.py --count 100 --seed 1 --out mutations.json

Each change is made in a copy of the checkout. Then run, until one fails: the tests of the file's
name, those of its folder, and the corpus. A command of over --limit seconds is a catch; one that
fails without a mutation too is left out, and says so.
"""

import argparse
import ast
import difflib
import json
import os
import queue
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build")
OTHERS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
LEFT_ALONE = ("annotation", "returns", "bases", "decorator_list")


class Mutation(NamedTuple):
    """One change of a file's tree: the number of a node, and of a change of it."""

    file: str
    line: int
    node: int
    change: int

    def sources(self) -> tuple[str, str]:
        """Return the file as the parser has it, and changed."""
        tree = ast.parse((ROOT / self.file).read_text(encoding="utf-8"))
        plain = ast.unparse(tree)
        node = list(nodes(tree))[self.node]
        vars(node).update(changes(node)[self.change][1])
        return plain, ast.unparse(tree)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code, without annotations and texts of errors."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in LEFT_ALONE and not isinstance(node, ast.Raise):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes(child)


def changes(node: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the kind of each change of a node, and the fields that it sets."""
    match node:
        case ast.UnaryOp(op=ast.USub()):
            return [("sign", {"op": ast.UAdd()})]
        case ast.UnaryOp(op=ast.Not()):
            return [("not", {"operand": ast.UnaryOp(ast.Not(), node.operand)})]
        case ast.BinOp(left=ast.JoinedStr() | ast.Constant(value=str())):
            return []
        case ast.BinOp(left=left) if type(node.op) in OTHERS:
            swaps = isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv)
            swap = [("swap", {"left": node.right, "right": left})] if swaps else []
            return [("sign", {"op": OTHERS[type(node.op)]()}), *swap]
        case ast.BoolOp():
            return [("and/or", {"op": OTHERS[type(node.op)]()})]
        case ast.Compare(ops=[op]):
            return [("comparison", {"ops": [OTHERS[type(op)]()]})]
        case ast.Call(args=[one, two, *rest]):
            starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
            called = ast.unparse(node.func).rpartition(".")[2]
            alike = starred or ast.unparse(one) == ast.unparse(two)
            alike |= called in ("min", "max", "minimum", "transpose")
            return [] if alike else [("swap", {"args": [two, one, *rest]})]
        case ast.Subscript(slice=ast.Constant(value=int(value))):
            return [("index", {"slice": ast.Constant(value + step)}) for step in (1, -1)]
        case ast.Constant(value=bool(value)):
            return [("constant", {"value": not value})]
        case ast.Constant(value=int(value) | float(value)):
            return [("constant", {"value": value + 1})]
    return []


def draw(count: int, seed: int, only: list[str]) -> list[Mutation]:
    """Draw mutations: each kind as often, and of a kind each place as likely."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "moe_qlora").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(tuple(only)):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for number, node in enumerate(nodes(tree)):
                for change, (kind, _) in enumerate(changes(node)):
                    line = getattr(node, "lineno", 0)
                    kinds[kind].append(Mutation(name, line, number, change))
    lots = random.Random(seed)
    chosen: list[Mutation] = []
    while len(chosen) < count and any(kinds.values()):
        places = kinds[lots.choice(sorted(kind for kind in kinds if kinds[kind]))]
        chosen.append(places.pop(lots.randrange(len(places))))
    return chosen


@cache
def commands(file: str) -> list[list[str]]:
    """Return the commands that should notice a mutation of this file, the quickest first."""
    path, tests = Path(file), ROOT / "tests"
    own = [*tests.rglob(f"test_{path.stem}*.py")], [*tests.glob(f"**/{path.parent.name}")]
    test = [sys.executable, *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")]
    test += ["-m", "not gpu and not multi_gpu and not nightly"]
    found = [[*test, *(str(p.relative_to(ROOT)) for p in paths)] for paths in own if paths]
    return [*found, [sys.executable, "tools/corpus.py", "check", "--jobs", "1"]]


def fails(command: list[str], copy: Path, limit: float) -> bool:
    """Whether a command fails in this copy, or takes too long."""
    paths = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ours |= {"PYTHONDONTWRITEBYTECODE": "1"}  # swaps keep the size, by which caches are told
    limited = ["timeout", "--signal=KILL", str(limit), *command]  # its children end with it
    done = subprocess.run(
        limited, cwd=copy, env={**os.environ, **ours}, capture_output=True, check=False
    )
    return done.returncode != 0


def judge(mutation: Mutation, copies: queue.Queue[Path], limit: float) -> dict[str, Any]:
    """Return the place, the change and the command that noticed it, None if nothing did."""
    copy, caught = copies.get(), None
    file, (plain, changed) = copy / mutation.file, mutation.sources()
    try:
        for command in commands(mutation.file):
            file.write_text(changed, encoding="utf-8")
            failed = fails(command, copy, limit)
            file.write_text(plain, encoding="utf-8")
            if failed and not fails(command, copy, limit):
                caught = shlex.join(command)
                break
            if failed:
                print(f"left out, as it fails without a mutation: {shlex.join(command)}")
    finally:
        shutil.copyfile(ROOT / mutation.file, file)
        copies.put(copy)
    diff = [*difflib.unified_diff(plain.splitlines(), changed.splitlines(), n=0, lineterm="")][3:]
    return {"place": f"{mutation.file}:{mutation.line}", "diff": diff, "caught_by": caught}


def main() -> None:
    """Draw mutations, judge them, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="as in moe_qlora/lora")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900, help="seconds for a command")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    options = parser.parse_args()
    results, copies = [], queue.Queue[Path]()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            ignore = shutil.ignore_patterns(*LEFT_OUT)
            to = Path(scratch) / str(number)
            copies.put(shutil.copytree(ROOT, to, ignore=ignore, symlinks=True))
        drawn = draw(options.count, options.seed, options.only)
        for result in pool.map(lambda one: judge(one, copies, options.limit), drawn):
            results.append(result)
            print("caught" if result["caught_by"] else "SURVIVED", result["place"])
            print("\n".join(f"    {line}" for line in result["diff"]), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(bool(each['caught_by']) for each in results)} of {len(results)} caught")


if __name__ == "__main__":
    main()
