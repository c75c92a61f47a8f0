"""How large the project is, held below the limits of pyproject.toml ([tool.totals]).

    python tools/totals.py            prints the totals
    python tools/totals.py --check    fails where one is above its limit (a step of tools/check)

A change that lowers a total lowers its limit. Lines are counted with comments and docstrings, of
Python and of tables (JSON, YAML, TOML, templates); helpers of tests count as tests. Recorded data
do not count: tests/fixtures, the corpus' figures, benchmarks' results, model_registry.
"""

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"package": "moe_qlora", "tests": "tests", "tools": "tools"}
RECORDED = ("tests/fixtures", "tests/corpus", "tools/bench/results")
COUNTED = {".py", ".pyi", ".json", ".yaml", ".yml", ".toml", ".html", ".j2"}


def lines(folder: str) -> int:
    """Count the lines that people write in a folder."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in COUNTED]
    named = [(path, path.relative_to(ROOT).as_posix()) for path in paths if path.is_file()]
    own = [path for path, name in named if not name.startswith(RECORDED)]
    return sum(len(path.read_text("utf-8").splitlines()) for path in own)


pages = [ROOT / "README.md", *(ROOT / "moe_qlora/docs").glob("*.md")]
names = ast.parse((ROOT / "moe_qlora/__init__.pyi").read_text("utf-8")).body
limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["totals"]
totals = {folder: lines(path) for folder, path in FOLDERS.items()}
totals["words"] = sum(len(page.read_text("utf-8").split()) for page in pages)
totals["names"] = sum(isinstance(node, ast.ImportFrom) for node in names)
for name, total in totals.items():
    print(f"{name}: {total} of at most {limits[name]}")
if "--check" in sys.argv and any(total > limits[name] for name, total in totals.items()):
    sys.exit("A total is above its limit in pyproject.toml, [tool.totals].")
