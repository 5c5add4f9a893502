"""How far a training is: on a terminal a line that changes, elsewhere a line now and then."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from shoal.terminal import clean

EVERY = 10.0
"""Seconds between two lines where the output is no terminal."""


class Progress:
    """On stderr, where ``shown`` is no function, which is called with the step and a note instead.

    A stream that fails, such as that of a closed terminal, ends the progress and no more.
    """

    def __init__(self, label: str, steps: int, shown: bool | Callable[[int, str], None] = True) -> None:
        self.label, self.steps, self.step, self.first = clean(label), steps, 0, 0
        self.function = shown if callable(shown) else None
        # A stream that replaces control characters would break the line; all text is cleaned here.
        self.stream = getattr(sys.stderr, "stream", sys.stderr) if shown is True else None
        self.terminal = bool(self.stream and self.stream.isatty()) and os.environ.get("TERM") != "dumb"
        self.began = self.printed = time.monotonic()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows what is done within the block."""
        self.show(text)
        try:
            yield
        finally:
            self.close()

    def update(self, step: int, note: str = "") -> None:
        if self.step == 0:  # from here on steps are timed; those before may be of an earlier process
            self.first, self.began = step, time.monotonic()
        self.step = step
        if self.function is not None:
            self.function(step, note)
        self.show(note)

    def show(self, note: str) -> None:
        now = time.monotonic()
        if not (self.terminal or now - self.printed >= EVERY):
            return
        parts = [self.label, f"{self.step:,}/{self.steps:,} steps"]
        if done := self.step - self.first:
            seconds = (now - self.began) / done * (self.steps - self.step)
            parts.append(f"{timedelta(seconds=round(seconds))} left")
        line, self.printed = "  ".join([*parts, clean(note)]).rstrip(), now
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[K{line[:width]}" if self.terminal else f"{line}\n")

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self.terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            if self.stream is not None:
                self.stream.write(text)
                self.stream.flush()
        except (OSError, ValueError):  # also of an encoding that lacks a character
            self.stream = None
