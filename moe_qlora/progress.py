"""Tell how far long work is: to a caller's function, by a bar, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and the name of what is next ("" at the end)."""


@contextmanager
def reporting(
    progress: bool | Progress | None,
    doing: str,
    done: str,
    *,
    stderr: bool = False,
    transient: bool = False,
) -> Iterator[Progress]:
    """Yield the function that `progress` asks for: itself, True for a bar, None or False for none.

    The bar says `doing` before anything has a name, and `done` at the end, where a transient one
    disappears.
    """
    if progress is None or progress is False:
        yield lambda done, total, name: None
    elif progress is True:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True) if stderr else None, transient=transient) as bar:
            task = bar.add_task(doing)

            def update(count: int, total: int, name: str) -> None:
                bar.update(task, completed=count, total=total, description=name or done)

            yield update
    else:
        yield progress
