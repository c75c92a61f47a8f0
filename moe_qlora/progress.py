"""Report the progress of long work: to a caller's function, by a bar, or not at all."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from .errors import visible

Progress = Callable[[int, int, str], None]
"""Called with the number done, the total, and the name of the next item ("" at the end)."""


def console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a console on a stream, without the command line's filter of control characters."""
    # The filter would escape the console's own sequences: callers pass names through `visible`.
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=getattr(stream, "unfiltered", stream), emoji=False, **options)


@contextmanager
def reporting(
    progress: bool | Progress | None,
    doing: str,
    done: str,
    *,
    stderr: bool = False,
    transient: bool = False,
) -> Iterator[Progress]:
    """Yield a progress function: `progress` itself, a bar for True, no effect for None or False.

    The bar shows `doing` before the first name and `done` at the end; a transient bar disappears
    then.
    """
    if progress is None or progress is False:
        yield lambda done, total, name: None
    elif progress is True:
        from rich.progress import Progress as Bar

        with Bar(console=console(stderr=stderr), transient=transient) as bar:
            task = bar.add_task(escape(visible(doing)), total=None)  # of unknown length

            def update(count: int, total: int, name: str) -> None:
                said = escape(visible(name)) or done
                bar.update(task, completed=count, total=total, description=said)

            yield update
    else:
        yield progress
