"""How large the project is, held below the limits of pyproject.toml ([tool.totals]).

    python tools/totals.py            prints the totals
    python tools/totals.py --check    fails where one is above its limit (a step of tools/check)

A change that lowers a total lowers its limit. Lines are counted with comments and docstrings; code,
printed beside them, is what is left without these and blank lines. Tables in JSON, YAML, TOML and
templates count as lines, and helpers of tests count as tests. Recorded data do not count:
tests/fixtures, the corpus' figures, benchmarks' results, model_registry.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ("tests/fixtures", "tests/corpus", "tools/bench/results")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
TABLES = {".pyi", ".json", ".yaml", ".yml", ".toml", ".html", ".j2"}


def files(folder: str) -> list[Path]:
    """Return the files of a folder that people write."""
    found = sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    names = [(path, path.relative_to(ROOT).as_posix()) for path in found]
    return [
        path for path, name in names if "__pycache__" not in name and not name.startswith(RECORDED)
    ]


def lines(folder: str) -> int:
    """Count lines of Python and of tables."""
    counted = [path for path in files(folder) if path.suffix == ".py" or path.suffix in TABLES]
    return sum(len(path.read_text("utf-8").splitlines()) for path in counted)


def code(folder: str) -> int:
    """Count lines of Python that hold more than a comment or a docstring."""
    total = 0
    for path in files(folder):
        if path.suffix != ".py":
            continue
        source = path.read_text("utf-8")
        kept: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in _NO_CODE and token.string.strip():
                kept |= set(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                kept -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        total += len(kept)
    return total


def totals() -> dict[str, int]:
    """Return every total that has a limit."""
    pages = [ROOT / "README.md", *(ROOT / "moe_qlora/docs").glob("*.md")]
    names = (ROOT / "moe_qlora/__init__.pyi").read_text("utf-8")
    return {
        "package": lines("moe_qlora"),
        "tests": lines("tests"),
        "tools": lines("tools"),
        "words": sum(len(page.read_text("utf-8").split()) for page in pages),
        "names": sum(isinstance(node, ast.ImportFrom) for node in ast.parse(names).body),
    }


def main() -> int:
    """Print the totals; return 1 where `--check` finds one above its limit."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["totals"]
    folders = {"package": "moe_qlora", "tests": "tests", "tools": "tools"}
    above = False
    for name, total in totals().items():
        beside = f", {code(folders[name])} of them code" if name in folders else ""
        print(f"{name}: {total} of at most {limits[name]}{beside}")
        above |= total > limits[name]
    if "--check" in sys.argv and above:
        print("A total is above its limit in pyproject.toml, [tool.totals].", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
