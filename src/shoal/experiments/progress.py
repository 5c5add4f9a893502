"""One display of progress, with an estimate of the remaining time."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store
from shoal.terminal import clean

EVERY, LINE_EVERY = 1.0, 10.0
"""Seconds between two updates of the display, and between two lines where output is not a terminal."""


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

    def __init__(
        self, title: str, state: Callable[[], tuple[float, float | None, str]], shown: bool = True
    ) -> None:
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


class Runs:
    """How far a list of runs is, by the steps that active runs write to their progress files.

    Work is counted in seconds, by the pace of finished runs of the same algorithm, or of all where none has
    finished; its speed is that since the first run started, whatever the number of processes.
    """

    def __init__(self, configs: Sequence[RunConfig], missing: Sequence[RunConfig], store: Store) -> None:
        self.store, self.total = store, len({c.identity for c in configs})
        self.left, self.ended = {c.identity: c for c in missing}, list[RunConfig]()
        self.started: float | None = None
        self.resumed = dict[str, int]()
        """The steps that a run already had when it was first seen."""
        self.paces = defaultdict[str, list[float]](list)
        """Seconds per step of finished runs, by algorithm."""
        for record in store.found(configs):
            self.paces[record.config.algorithm].append(record.seconds / record.config.steps)

    def add(self, record: RunRecord) -> None:
        """A run has ended."""
        self.started = self.started or time.monotonic() - record.seconds
        if record.status != "failed":
            self.paces[record.config.algorithm].append(record.seconds / record.config.steps)
        self.ended.append(self.left.pop(record.config.identity))

    def state(self) -> tuple[float, float | None, str]:
        """The completed fraction, the remaining seconds if they can be estimated, and the active runs."""
        left, steps = dict(self.left), dict[str, int]()
        for path in list(self.store.working.glob("*.progress")):
            with contextlib.suppress(KeyError, OSError, ValueError):  # it has just ended, or is being written
                steps[path.stem] = min(int(path.read_text()), left[path.stem].steps)
                self.resumed.setdefault(path.stem, steps[path.stem])
        if self.started is None and any(steps.values()):
            self.started = time.monotonic()
        means = {algorithm: statistics.fmean(pace) for algorithm, pace in self.paces.items()}
        overall = statistics.fmean(means.values()) if means else 1.0

        def work(config: RunConfig, count: int) -> float:
            return count * means.get(config.algorithm, overall)

        done = sum(work(config, config.steps) for config in self.ended)
        done += sum(work(left[name], step - self.resumed[name]) for name, step in steps.items())
        remaining = sum(work(config, config.steps - steps.get(name, 0)) for name, config in left.items())
        elapsed, seconds = time.monotonic() - (self.started or time.monotonic()), None
        if done > 0.02 * (done + remaining) or (done > 0 and elapsed > 60):  # the first steps are slow
            seconds = remaining * elapsed / done
        shares = {name: step / left[name].steps for name, step in steps.items()}
        active = ", ".join(f"{left[name].describe()} {100 * share:.0f} %" for name, share in shares.items())
        count = self.total - len(left)
        note = f"{count}/{self.total} runs: {active}"[:100].rstrip(": ")
        return (count + sum(shares.values())) / self.total, seconds, note
