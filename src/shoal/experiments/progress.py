"""One display of progress, with an estimate of the remaining time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from shoal.terminal import clean

EVERY, LINE_EVERY = 1.0, 10.0
"""Seconds between two updates of the display, and between two lines where output is not a terminal."""
State = tuple[float, float | None, str]


def duration(seconds: float) -> str:
    """Such as ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """On stderr: a live bar on a terminal, elsewhere a line every ten seconds.

    Within ``with`` a thread calls ``state`` every second, which returns the completed fraction of the work,
    the remaining seconds if they are known, and what is being done.

    >>> with Progress("runs", lambda: (0.5, 12.0, "erm, seed 0"), shown=False):
    ...     pass
    """

    def __init__(self, title: str, state: Callable[[], State], shown: bool = True) -> None:
        self.title, self.state, self.shown, self.bar = title, state, shown, None
        # A stream that replaces control characters would break the bar.
        self.stream: Any = getattr(sys.stderr, "stream", sys.stderr)
        self.over, self.thread = threading.Event(), threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        if self.shown and self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self.bar = _bar(self.title, self.stream)
        if self.shown:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        if self.shown:
            self.thread.join()
        if self.bar is not None:
            self.bar.stop()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if self.bar is not None:
            self.bar.console.print(clean(text), markup=False, highlight=False)
        elif self.shown:
            print(clean(text), file=sys.stderr, flush=True)

    def _follow(self) -> None:
        printed = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            while not self.over.wait(EVERY):
                fraction, seconds, note = self.state()
                left = "" if seconds is None else f"about {duration(seconds)} left"
                text = " · ".join(part for part in (left, clean(note)) if part)
                if self.bar is not None:
                    self.bar.update(0, completed=fraction, note=text)
                elif time.monotonic() - printed >= LINE_EVERY - EVERY / 2:
                    printed = time.monotonic()
                    self.print(f"{self.title}: {100 * fraction:.0f} % · {text}".rstrip(" ·"))


def _bar(title: str, stream: Any) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[note]}"))
    bar = Bar(*columns, console=Console(file=stream), transient=True)
    bar.add_task(clean(title), total=1.0, note="")
    bar.start()
    return bar
