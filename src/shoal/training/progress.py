"""A line that says how far a training is, on a terminal or in a log."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from shoal.terminal import clean, clear_line
from shoal.training.callbacks import Callback, State

if TYPE_CHECKING:
    from shoal.training.evaluate import Scores


EVERY = 1.0
"""Seconds between two drawings of a phase."""


class Told(Callback):
    """Calls a function with the step and a note now and then."""

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self.tell = tell

    def on_progress(self, state: State) -> None:
        self.tell(state.step, state.note)


class Progress(Callback):
    """Redraws one line on a terminal; elsewhere prints a plain line now and then, and ever more rarely.

    A resumed training goes on from step ``start``. The time left is reckoned from the last minute or so. A
    stream that fails, such as that of a closed terminal, ends the progress line and not the training.
    """

    def __init__(
        self, label: str, steps: int, shown: bool = True, stream: TextIO | None = None, start: int = 0
    ) -> None:
        self.label, self.steps = clean(label), steps
        self.stream = sys.stderr if stream is None else stream
        self.shown = shown and self.stream is not None
        self.terminal = self.shown and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.begin(start)
        self.encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.marks = "█·" if self._encoded("█·") == "█·" else "#-"

    def begin(self, start: int) -> None:
        self.step = start
        self.started = self.printed = time.monotonic()
        self.wait = 0.1 if self.terminal else 5.0
        self.drawn = self.finished = False
        self.recent = deque([(self.started, start)], maxlen=60)

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
        """Within the block a thread draws every second what is done meanwhile; the block may say more."""
        if not self.shown:
            yield lambda text, done, total: None
            return
        began, over, now = time.monotonic(), threading.Event(), [text]

        def draw() -> None:
            while not over.wait(EVERY):
                clock = _clock(time.monotonic() - began)
                self.update(self.step, f"{now[0]}, {clock}" if now[0] else "", meanwhile=True)

        def tell(text: str, done: int, total: int) -> None:
            now[0] = f"{text} {done:,}/{total:,}"

        thread, before = threading.Thread(target=draw, daemon=True), self.printed
        thread.start()
        try:
            yield tell
        finally:
            over.set()
            thread.join()
            if self.printed != before:
                self.close()

    def update(self, step: int, note: str = "", meanwhile: bool = False) -> None:
        """Draws the line, unless it is still new; ``meanwhile`` the work of this step is not yet done."""
        now = time.monotonic()
        if not self.shown:
            return
        self.step = step
        left = self._left(now, step)
        over = step >= self.steps and not meanwhile
        last = over and self.drawn and not self.finished
        if now - self.printed < self.wait and not last:
            return
        numbers = f"{step:,}/{self.steps:,} steps"
        if over:
            numbers += f"  done in {_clock(now - self.started)}"
        elif left is not None:
            numbers += f"  {_clock(left)} left"
        if self.terminal:
            self._write(self._fitted(step, numbers, clean(note)), clear=True)
        else:
            self._write(f"{self.label}  {numbers}  {clean(note)}".rstrip() + "\n")
            self.wait = min(2 * self.wait, 60.0)
        self.printed, self.drawn, self.finished = now, True, over

    def close(self) -> None:
        if self.terminal and self.drawn and self.shown:
            self._write("", clear=True)
            self.drawn = False

    def _left(self, now: float, step: int) -> float | None:
        """Seconds to the end at the recent pace; None while there is none."""
        then, before = self.recent[0]
        if now - self.recent[-1][0] >= 1.0:
            self.recent.append((now, step))
        if now <= then or step <= before:
            return None
        return (now - then) / (step - before) * max(self.steps - step, 0)

    def _fitted(self, step: int, numbers: str, note: str) -> str:
        """A line that does not wrap: where room is short, note and bar go first and the numbers last."""
        wide = self._columns()
        room = wide - 1
        line = f"{cut(self.label, max(room - columns(numbers) - 2, 8))}  {numbers}"
        size = min(20, wide // 4, room - columns(line) - 3)
        if size >= 5:
            done = round(size * min(max(step / max(self.steps, 1), 0.0), 1.0))
            line = f"[{self.marks[0] * done}{self.marks[1] * (size - done)}] {line}"
        left = room - columns(line) - 2
        return f"{line}  {cut(note, left)}".rstrip() if left >= 5 else cut(line, room)

    def _columns(self) -> int:
        """Of the stream's own terminal; standard output, which shutil asks, may be a file."""
        try:
            wide = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError, AttributeError):
            wide = 0
        return wide or shutil.get_terminal_size().columns

    def _encoded(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def _write(self, text: str, clear: bool = False) -> None:
        try:
            if clear:
                clear_line(self.stream)
            self.stream.write(self._encoded(text))
            self.stream.flush()
        except (OSError, ValueError):
            self.shown = False


def losses_note(losses: Mapping[str, float], width: int) -> str:
    """Such as "oslo 0.31 lima 0.35 … (12 more)", at most ``width`` columns; worst first if not all fit."""
    parts = {name: f"{clean(name) or '(no name)'} {_number(value)}" for name, value in losses.items()}
    everything = " ".join(parts.values())
    if columns(everything) <= width:
        return everything
    worst = sorted(
        losses, key=lambda name: math.inf if math.isnan(losses[name]) else losses[name], reverse=True
    )
    for count in range(min(len(worst) - 1, width), 0, -1):
        note = f"{' '.join(parts[name] for name in worst[:count])} … ({len(worst) - count:,} more)"
        if columns(note) <= width:
            return note
    end = f" {_number(losses[worst[0]])}" + (f" … ({len(worst) - 1:,} more)" if len(worst) > 1 else "")
    return cut(cut(clean(worst[0]), max(width - columns(end), 2)) + end, width)


def scores_note(split: str, scores: Scores) -> str:
    """Such as "test 81.2%": what selects, named unless it is plain accuracy."""
    name = scores.metric if scores.selects is None else scores.selects
    if name == "accuracy":
        return f"{split} {scores.selection_score:.1%}"
    return f"{split} {name} {scores.selection_score:.3g}"


def columns(text: str) -> int:
    """How wide a terminal draws ``text``."""
    return sum(map(_columns_of, text))


def cut(text: str, width: int) -> str:
    """``text`` if it fits in so many columns, else as much as does, and an ellipsis."""
    if columns(text) <= width:
        return text
    kept = 0
    for i, c in enumerate(text):
        kept += _columns_of(c)
        if kept > width - 1:
            return text[:i] + "…" * (width > 0)
    return text


def _columns_of(c: str) -> int:
    if c == "\ufe0f":  # makes the symbol before it an emoji, which is wider
        return 1
    if unicodedata.category(c) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def _number(value: float) -> str:
    """Two digits after the point, or two that count where those would say little."""
    return f"{value:.2g}" if 0 < abs(value) < 0.1 or abs(value) >= 1000 else f"{value:.2f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
