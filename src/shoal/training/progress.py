"""How far a training is: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

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
    """A bar of rich on a terminal; elsewhere a plain line every ten seconds.

    A stream that fails, such as that of a closed terminal, ends the progress and not the training.
    """

    def __init__(self, label: str, steps: int, shown: bool = True, stream: TextIO | None = None) -> None:
        self.label, self.steps = clean(label), steps
        inside: Any = stream or sys.stderr
        self.stream: Any = getattr(inside, "stream", inside)  # all text is cleaned here
        self.shown = shown and self.stream is not None
        self.terminal = bool(self.shown and self.stream.isatty()) and os.environ.get("TERM") != "dumb"
        self._bar: Any = None
        self.begin(0)

    def begin(self, step: int) -> None:
        self.first = self.step = step
        self.began = self.printed = time.monotonic()
        self.printed_any = False

    def on_start(self, state: State) -> None:
        self.begin(state.step)

    def on_step(self, state: State) -> None:
        self.step = state.step

    def on_progress(self, state: State) -> None:
        self.update(state.step, state.note)

    def on_end(self, state: State) -> None:
        self.close()

    @contextmanager
    def phase(self, text: str = "") -> Iterator[Callable[[str, int, int], None]]:
        """Shows what is done within the block, also while one call takes long."""
        now, over = [text], threading.Event()

        def show(text: str, done: int, total: int) -> None:
            now[0] = f"{text} {done:,}/{total:,}"
            self.update(self.step, now[0], finished=False)

        def repeat() -> None:
            while not over.wait(EVERY):
                self.update(self.step, now[0], finished=False)

        opened = self._bar is None
        if self.shown and text:
            self.update(self.step, text, finished=False)
            threading.Thread(target=repeat, daemon=True).start()
        try:
            yield show
        finally:
            over.set()
            if opened and text:
                self.close()

    def update(self, step: int, note: str = "", finished: bool | None = None) -> None:
        """Shows the step and a note; on a terminal at once."""
        if not self.shown:
            return
        self.step, note = step, clean(note)
        finished = step >= self.steps if finished is None else finished
        try:
            if self.terminal:
                self._draw(note)
            elif time.monotonic() - self.printed >= EVERY or (finished and self.printed_any):
                seconds = time.monotonic() - self.began
                done, left = step - self.first, ""
                if finished:
                    left = f"  done in {_clock(seconds)}"
                elif done:
                    left = f"  {_clock(seconds / done * (self.steps - step))} left"
                line = f"{self.label}  {step:,}/{self.steps:,} steps{left}  {note}"
                encoding = getattr(self.stream, "encoding", None) or "utf-8"
                self.stream.write(line.rstrip().encode(encoding, "replace").decode(encoding) + "\n")
                self.stream.flush()
                self.printed, self.printed_any = time.monotonic(), not finished
        except (OSError, ValueError):
            self.shown = self.terminal = False

    def _draw(self, note: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn()
            note_column = TextColumn("{task.fields[note]}", markup=False)
            console = Console(file=self.stream)
            self._bar = Progress(
                *columns, TimeRemainingColumn(), note_column, console=console, transient=True
            )
            self._task = self._bar.add_task(self.label, total=self.steps, completed=self.first, note="")
            self._bar.start()
        self._bar.update(self._task, completed=self.step, note=note)

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


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
