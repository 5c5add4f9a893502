"""A line that says how far a training is, on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Redraws one line on a terminal; elsewhere prints a plain line every ten seconds."""

    def __init__(self, label: str, steps: int, shown: bool = True, stream: TextIO | None = None) -> None:
        self.label = label
        self.steps = steps
        self.stream = stream or sys.stderr
        self.shown = shown
        self.terminal = shown and self.stream.isatty()
        self.started = time.monotonic()
        self.printed = self.started if self.terminal else self.started - 5.0

    def update(self, step: int, note: str = "") -> None:
        now = time.monotonic()
        if not self.shown or now - self.printed < (0.1 if self.terminal else 10.0):
            return
        self.printed = now
        left = (now - self.started) / max(step, 1) * (self.steps - step)
        line = f"{self.label}  {step:,}/{self.steps:,} steps  {_clock(left)} left  {note}"
        if self.terminal:
            done = round(20 * step / self.steps)
            line = f"[{'█' * done}{'·' * (20 - done)}] {line}"
            self.stream.write(f"\r\x1b[K{line[:119]}")
        else:
            self.stream.write(line.rstrip() + "\n")
        self.stream.flush()

    def close(self) -> None:
        if self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
