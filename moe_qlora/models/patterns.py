"""Regular expressions of files that others wrote: matched under a time limit before they are used.

Python's `re` backtracks, so that a few characters such as `(a|aa)*$` can run for ever, and nothing
in the same process can stop it. transformers and PEFT match such patterns with `re` too. So a
pattern that might run long is first matched with all names in a process that can be ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable

from ..errors import CheckpointError

SECONDS = 10.0
"""Time for all names; a pattern of a real checkpoint takes milliseconds."""
MAX_LENGTH = 100_000
"""Characters of a pattern. PEFT joins the names of all modules into one."""

_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    pattern = re.compile(pattern)
    for name in names:
        pattern.match(name)
        pattern.fullmatch(name)
"""
# A repeated group, or many repeats: without these, `re` takes at most cubic time.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MOST_REPEATS, _MOST_OPTIONS = 3, 12


def check_patterns(patterns: Iterable[str], names: Iterable[str], where: str) -> None:
    """Raise where a pattern takes too long to match these names, or is too long itself.

    Args:
        patterns: Regular expressions, each as it will be compiled. One that does not compile is
            left to its reader.
        names: What they will be matched with.
        where: The file or setting that the patterns are from, for the message.

    Raises:
        CheckpointError: It names the pattern and `where`.
    """
    doubtful = []
    for pattern in patterns:
        if len(pattern) > MAX_LENGTH:
            raise CheckpointError(
                f"{where} has a pattern of {len(pattern):,} characters ({pattern[:60]!r}, ...); at "
                f"most {MAX_LENGTH:,} are read."
            )
        if _may_run_long(pattern):
            doubtful.append(pattern)
    if not doubtful:
        return
    task = json.dumps([doubtful, sorted(set(names))])
    command = [sys.executable, "-I", "-c", _MATCH]
    try:
        subprocess.run(
            command, input=task, timeout=SECONDS, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        numbers = (error.stdout or b"0").decode().split()
        pattern = doubtful[int(numbers[-1])]
        raise CheckpointError(
            f"{where} has the pattern {pattern!r:.200}, which takes more than {SECONDS:.0f} "
            "seconds to match with the names of the model: it repeats a part in more than one way; "
            "write it so that each name can be matched in one way only."
        ) from None


def _may_run_long(pattern: str) -> bool:
    if _REPEATED_GROUP.search(pattern):
        return True
    repeats = sum(pattern.count(sign) for sign in "*+{")
    return repeats > _MOST_REPEATS or pattern.count("?") > _MOST_OPTIONS
