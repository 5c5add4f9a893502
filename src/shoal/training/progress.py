"""How far a training is: a bar of rich on a terminal, otherwise a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from shoal.terminal import clean

EVERY = 10.0
"""Seconds between two lines where the output is no terminal."""


class Progress:
    """On stderr: a live bar on a terminal, elsewhere a plain line every ten seconds.

    A stream that fails, such as that of a closed terminal, ends the progress and not the training.

    Args:
        label: what the bar is of.
        steps: number of steps.
        shown: whether anything is shown, or a function that is called with the step and a note instead.
    """

    def __init__(self, label: str, steps: int, shown: bool | Callable[[int, str], None] = True) -> None:
        self.label, self.steps = clean(label), steps
        self.function = shown if callable(shown) else None
        stream: Any = sys.stderr
        self.stream: Any = getattr(stream, "stream", stream)  # all text is cleaned here
        self.shown = shown is True and self.stream is not None
        self.terminal = bool(self.shown and self.stream.isatty()) and os.environ.get("TERM") != "dumb"
        self._bar: Any = None
        self.start(0)

    def start(self, step: int) -> None:
        """Steps are counted, and their time is taken, from here on."""
        self.first = self.step = step
        self.began = self.printed = time.monotonic()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows what is done within the block."""
        opened = self._bar is None
        self.show(text)
        try:
            yield
        finally:
            if opened:
                self.close()

    def update(self, step: int, note: str = "") -> None:
        """Show the step and a note; the function is told as well."""
        self.step = step
        if self.function is not None:
            self.function(step, note)
        self.show(note)

    def show(self, note: str) -> None:
        """Show a note; on a terminal at once."""
        if not self.shown:
            return
        try:
            if self.terminal:
                self._draw(clean(note))
            elif time.monotonic() - self.printed >= EVERY:
                self._print(clean(note))
        except (OSError, ValueError):
            self.shown = False

    def _print(self, note: str) -> None:
        self.printed, left = time.monotonic(), ""
        if done := self.step - self.first:
            seconds = (self.printed - self.began) / done * (self.steps - self.step)
            left = f"  {timedelta(seconds=round(seconds))} left"
        line = f"{self.label}  {self.step:,}/{self.steps:,} steps{left}  {note}".rstrip()
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=self.stream, flush=True)

    def _draw(self, note: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn()
            more = TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False)
            self._bar = Progress(*columns, *more, console=Console(file=self.stream), transient=True)
            self._bar.add_task(self.label, total=self.steps, completed=self.first, note="")
            self._bar.start()
        self._bar.update(0, completed=self.step, note=note)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None
