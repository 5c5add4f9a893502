"""One display of progress, with an estimate of the remaining time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store
from shoal.terminal import clean

EVERY = 1.0
"""Seconds between two updates of the display."""
LINE_EVERY = 10.0
"""Seconds between two lines where output is not a terminal."""


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
        self.title, self.state = title, state
        # A stream that replaces control characters would break the bar.
        self.stream = getattr(sys.stderr, "stream", sys.stderr)
        self.shown = shown and self.stream is not None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.bar: Any = None

    def __enter__(self) -> Self:
        if self.shown and self.stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[note]}"))
            self.bar = Bar(*columns, console=Console(file=self.stream), transient=True)
            self.bar.add_task(clean(self.title), total=1.0, note="")
            self.bar.start()
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


class Runs:
    """How far a list of runs is, by the steps that active runs write to their progress files.

    Work is counted in seconds, by the pace of finished and active runs of the same algorithm; its speed is
    that since the first run started, whatever the number of processes and the time between runs.
    """

    def __init__(self, configs: Sequence[RunConfig], missing: Sequence[RunConfig], store: Store) -> None:
        self.store, self.total = store, len({c.identity for c in configs})
        self.left = {c.identity: c for c in missing}
        self.ended: list[RunConfig] = []
        self.several = len({c.dataset for c in configs}) > 1
        self.started: float | None = None
        self.first: dict[str, tuple[float, float]] = {}
        """When an active run was first seen, and the fraction that was done then."""
        self.paces: dict[str, list[float]] = {}
        """Seconds per step of finished runs, by algorithm."""
        for record in store.found(configs):
            self._learn(record)
        done = self.total - len(missing)
        self.title = f"{len(missing)} run{'s' * (len(missing) > 1)} to do" + f", {done} finished" * bool(done)

    def _learn(self, record: RunRecord) -> None:
        if record.seconds > 0:
            self.paces.setdefault(record.config.algorithm, []).append(record.seconds / record.config.steps)

    def add(self, record: RunRecord) -> None:
        """A run has ended."""
        if self.started is None:
            self.started = time.monotonic() - record.seconds
        self._learn(record)
        if (config := self.left.pop(record.config.identity, None)) is not None:
            self.ended.append(config)

    def state(self) -> tuple[float, float | None, str]:
        """The completed fraction, the remaining seconds if they can be estimated, and the active runs."""
        now, left = time.monotonic(), dict(self.left)
        fractions = dict[str, float]()
        for path in list(self.store.working.glob("*.progress")):
            if (config := left.get(path.stem)) is not None:
                with contextlib.suppress(OSError, ValueError):  # it has just ended, or is being written
                    fractions[path.stem] = min(int(path.read_text()) / config.steps, 1.0)
        active, steps = dict[str, list[float]](), list[tuple[RunConfig, float]]()
        for name, fraction in fractions.items():
            if not fraction and self.store.workplace(left[name]).is_dir():
                continue  # it is starting, or its checkpoint is being read
            start, before = self.first.setdefault(name, (now, fraction))
            steps.append((left[name], (fraction - before) * left[name].steps))
            if fraction > before and now > start:
                active.setdefault(left[name].algorithm, []).append((now - start) / steps[-1][1])
        if self.started is None and steps:
            self.started = now
        paces = {**active, **self.paces}
        every = [pace for own in paces.values() for pace in own]

        def work(config: RunConfig, count: float) -> float:
            own = paces.get(config.algorithm, every)
            return count * sum(own) / len(own) if own else 0.0

        done = sum(work(c, c.steps) for c in self.ended) + sum(work(c, count) for c, count in steps)
        remaining = [work(c, c.steps * (1 - fractions.get(name, 0.0))) for name, c in left.items()]
        seconds = None
        if done > 0 and self.started is not None and remaining:
            seconds = max(sum(remaining) * (now - self.started) / done, *remaining, 0.0)
        count = self.total - len(left)
        names = [f"{self.describe(left[n])} {100 * f:.0f} %" for n, f in fractions.items()]
        note = f"{count}/{self.total} runs: {', '.join(names)}"
        return (count + sum(fractions.values())) / self.total, seconds, note[:100].rstrip(": ")

    def describe(self, config: RunConfig) -> str:
        """A run among others: what they mostly differ in."""
        held_out = config.held_out
        names = [held_out] if isinstance(held_out, str) else list(held_out or ())
        listed = " and ".join(map(str, names)) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
        parts = [config.dataset] * self.several + [config.name]
        parts += [f"held out: {listed}"] * bool(names) + [f"seed {config.seed}"]
        return clean(", ".join(parts))
