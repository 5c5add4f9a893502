"""How far a training is: a bar of rich on a terminal, otherwise a line now and then."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shoal.terminal import clean
from shoal.training.callbacks import Callback, State

if TYPE_CHECKING:
    from shoal.training.evaluate import Scores

EVERY = 10.0
"""Seconds between two lines where the output is no terminal."""


class ProgressFunction(Callback):
    """Calls a function with the step and a note now and then."""

    def __init__(self, function: Callable[[int, str], None]) -> None:
        self.function = function

    def on_progress(self, state: State) -> None:
        self.function(state.step, state.note)


class Progress(Callback):
    """On stderr: a live bar on a terminal, elsewhere a plain line every ten seconds.

    A stream that fails, such as that of a closed terminal, ends the progress and not the training.
    """

    def __init__(self, label: str, steps: int, shown: bool = True) -> None:
        self.label, self.steps = clean(label), steps
        stream: Any = sys.stderr
        self.stream: Any = getattr(stream, "stream", stream)  # all text is cleaned here
        self.shown = shown and self.stream is not None
        self.terminal = bool(self.shown and self.stream.isatty()) and os.environ.get("TERM") != "dumb"
        self._bar: Any = None
        self.first = self.step = 0
        self.began = self.printed = time.monotonic()

    def on_start(self, state: State) -> None:
        self.first = self.step = state.step
        self.began = self.printed = time.monotonic()

    def on_progress(self, state: State) -> None:
        self.update(state.step, state.note)

    def on_end(self, state: State) -> None:
        self.close()

    @contextmanager
    def phase(self, text: str = "") -> Iterator[None]:
        """Shows what is done within the block."""
        opened = self._bar is None
        if text:
            self.update(self.step, text)
        try:
            yield
        finally:
            if opened and text:
                self.close()

    def count(self, text: str, done: int, total: int) -> None:
        """Shows how much is done of what a step of the training waits for."""
        self.update(self.step, f"{text} {done:,}/{total:,}")

    def update(self, step: int, note: str = "") -> None:
        """Show the step and a note; on a terminal at once."""
        if not self.shown:
            return
        self.step, note = step, clean(note)
        try:
            if self.terminal:
                self._draw(note)
            elif time.monotonic() - self.printed >= EVERY:
                self._print(note)
        except (OSError, ValueError):
            self.shown = self.terminal = False

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


def losses_note(losses: Mapping[str, float], most: int = 3) -> str:
    """Such as "oslo 0.31 lima 0.35 … (12 more)": all, or only the highest."""
    names = list(losses)
    if len(names) > most:
        names = sorted(losses, key=lambda n: -math.inf if math.isnan(losses[n]) else -losses[n])[:most]
    more = f" … ({len(losses) - most:,} more)" if len(losses) > most else ""
    return " ".join(f"{clean(name)} {losses[name]:.3g}" for name in names) + more


def scores_note(split: str, scores: Scores) -> str:
    """Such as "test 81.2%": what selects, named unless it is plain accuracy."""
    name = scores.metric if scores.selects is None else scores.selects
    if name == "accuracy":
        return f"{split} {scores.selection_score:.1%}"
    return f"{split} {name} {scores.selection_score:.3g}"
