"""Copy the repository's pages, and the files that they link to, to `source` in a folder.

    python tools/docs/stage.py build/docs

Every file keeps its place, so that relative links lead where they lead in the repository. Exit code
1, with a line for each, where a page links to a folder or to nothing: a site has neither.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")

target = Path(sys.argv[1]).resolve() / "source"
shutil.rmtree(target.parent, ignore_errors=True)
places = ["*.md", "moe_qlora/**/*.md", "tools/**/*.md"]  # not those of tests and environments
pages = sorted(page for place in places for page in ROOT.glob(place))
files, wrong = set(pages), []
for page in pages:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        there = (page.parent / link).resolve()
        if there.is_file() and there.is_relative_to(ROOT):
            files.add(there)
        else:
            wrong.append(f"{page.relative_to(ROOT)} links to {link}, which is no file")
for file in sorted(files):
    copy = target / file.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, copy)
shutil.copy(Path(__file__).parent / "mkdocs.yml", target.parent)
shutil.copy(Path(__file__).parent / "site.css", target)
print(*wrong, sep="\n", file=sys.stderr, end="\n" if wrong else "")
sys.exit(bool(wrong))
