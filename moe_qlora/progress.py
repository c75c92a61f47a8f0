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
    """Yield the function that a `progress` argument asks for.

    Args:
        progress: A function; True for a bar; None or False for nothing.
        doing: The bar's text before anything has a name.
        done: Its text at the end.
        stderr: Whether the bar goes to the error stream.
        transient: Whether it disappears at the end.
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
