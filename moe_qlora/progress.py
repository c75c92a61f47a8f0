"""Tell how far long work is: to a caller's function, by a bar, or not at all.

Bars and tables are drawn on a `VisibleConsole`, since the names in them are other people's.
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
"""Called with how much is done, how much there is, and the name of what is next ("" at the end)."""


class VisibleConsole(Console):
    """A console on which control characters in names are seen, and obeyed by no terminal.

    The escape sequences of its own pass the filter that the command line lays over its streams.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(file=getattr(stream, "unfiltered", stream), emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a string, before its width is measured."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what is drawn; also of a text that came ready-made."""
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
    """Yield the function that `progress` asks for: itself, True for a bar, None or False for none.

    The bar says `doing` before anything has a name, and `done` at the end, where a transient one
    disappears.
    """
    if progress is None or progress is False:
        yield lambda done, total, name: None
    elif progress is True:
        from rich.progress import Progress as Bar

        with Bar(console=VisibleConsole(stderr=stderr), transient=transient) as bar:
            task = bar.add_task(escape(visible(doing)), total=None)  # it moves, and says nothing

            def update(count: int, total: int, name: str) -> None:
                bar.update(
                    task, completed=count, total=total, description=escape(visible(name)) or done
                )

            yield update
    else:
        yield progress
