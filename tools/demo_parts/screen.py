"""What a person sees while the demo works: a bar on a terminal, elsewhere a line every 10 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from moe_qlora.progress import VisibleConsole

WIDTH = 80


@dataclass
class _Work:
    """What is being done.

    Attributes:
        name: In a few words.
        total: Steps, None where they cannot be counted.
        note: Such as the loss of the last step.
    """

    name: str
    total: int | None
    done: int = 0
    note: str = ""
    began: float = field(default_factory=time.monotonic)

    def state(self) -> str:
        """Return how far it is and about how long it will take: "step 3 of 9, loss 2.1, ..."."""
        if self.total is None:
            seconds = time.monotonic() - self.began
            return f"{seconds:.0f} s so far" if seconds >= 2 else "..."
        parts = [f"step {self.done} of {self.total}", self.note]
        if self.done:
            left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
            parts.append(f"about {_time(left)} left")
        return ", ".join(filter(None, parts))


class Screen:
    """Prints lines of at most 80 columns, and tells how far the work is.

    Args:
        every: Seconds without a line, where there is no terminal, after which one is printed.
    """

    def __init__(self, every: float = 10.0) -> None:
        console = VisibleConsole(highlight=False)
        width = min(console.width, WIDTH) if console.is_terminal else WIDTH
        self.console = VisibleConsole(highlight=False, width=width)
        self._every = every
        self._work: _Work | None = None
        self._printed = time.monotonic()
        self._closed = threading.Event()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            columns = (TextColumn("   {task.description}"), BarColumn(bar_width=None))
            self._bar = Progress(
                *columns,
                TextColumn("{task.fields[state]}"),
                console=self.console,
                transient=True,
                expand=True,
                refresh_per_second=4,
            )
            self._bar.start()
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._bar is not None:
            self._bar.stop()

    def title(self, text: str) -> None:
        """Print a line in bold."""
        self.show(Text(text, style="bold"))

    def say(self, text: str, style: str = "") -> None:
        """Print text as it is, indented, broken between words."""
        for line in Text(text, style=style).wrap(self.console, self.console.width - 3):
            line.rstrip()
            self.show(Text("   ").append_text(line))

    def show(self, what: RenderableType) -> None:
        """Print a line, a table or whatever rich prints."""
        self._printed = time.monotonic()
        self.console.print(what)

    @contextmanager
    def doing(self, name: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
        """Tell of this work as long as the block runs.

        Yields:
            A function that counts one step as done, with a note on it.
        """
        work = self._work = _Work(name, total)
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=total, state="")

        def step(note: str = "") -> None:
            work.done += 1
            work.note = note

        try:
            yield step
        finally:
            self._work = None
            if self._bar is not None and self._task is not None:
                self._bar.remove_task(self._task)
                self._task = None

    def _tick(self) -> None:
        """Bring the bar up to date, or print a line where none was printed for long."""
        pause = 0.25 if self._bar is not None else min(0.25, self._every)
        while not self._closed.wait(pause):
            work = self._work
            if work is None:
                continue
            if self._bar is None:
                if time.monotonic() - self._printed >= self._every:
                    self.say(f"{work.name}: {work.state()}")
            elif (task := self._task) is not None and task in self._bar.task_ids:
                options: dict[str, Any] = {"completed": work.done, "state": work.state()}
                self._bar.update(task, **options)


def _time(seconds: float) -> str:
    """Return "12 s" or "3 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
