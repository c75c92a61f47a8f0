"""Report the progress of long work: to a caller's function, by a bar, or not at all.

Bars and tables are drawn on a `VisibleConsole`, since names in them are not to be trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from .errors import visible

Progress = Callable[[int, int, str], None]
"""Called with the number done, the total, and the name of the next item ("" at the end)."""


class VisibleConsole(Console):
    """A console that escapes control characters in names.

    Its own escape sequences bypass the filter of the command line's streams.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(file=getattr(stream, "unfiltered", stream), emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else visible(segment.text, keep="\n")
            yield segment._replace(text=text)


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

        with Bar(console=VisibleConsole(stderr=stderr), transient=transient) as bar:
            task = bar.add_task(escape(visible(doing)), total=None)  # of unknown length

            def update(count: int, total: int, name: str) -> None:
                said = escape(visible(name)) or done
                bar.update(task, completed=count, total=total, description=said)

            yield update
    else:
        yield progress
