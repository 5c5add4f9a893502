"""One display of progress, with an estimate of the remaining time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
        self.terminal = (
            shown and bool(self.stream and self.stream.isatty()) and os.environ.get("TERM") != "dumb"
        )
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.bar: Any = None

    def __enter__(self) -> Self:
        if self.terminal:
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
                fraction, left, note = self.state()
                text = " · ".join(part for part in (left is not None and _left(left), clean(note)) if part)
                if self.bar is not None:
                    self.bar.update(0, completed=fraction, note=text)
                elif time.monotonic() - printed >= LINE_EVERY - EVERY / 2:
                    printed = time.monotonic()
                    self.print(f"{self.title}: {100 * fraction:.0f} % · {text}".rstrip(" ·"))


def _left(seconds: float) -> str:
    return f"about {duration(seconds)} left"


class Runs:
    """How far a list of runs is, by the steps that active runs write to their progress files.

    The remaining time follows from the work done since the first run started. Work is counted in seconds, by
    the pace of finished runs of the same algorithm, or else of active ones; in steps while none is known.
    """

    def __init__(self, configs: Sequence[RunConfig], missing: Sequence[RunConfig], store: Store) -> None:
        self.store, self.total = store, len({c.identity for c in configs})
        self.left = {c.identity: c for c in missing}
        self.several = len({c.dataset for c in configs}) > 1
        self.started: float | None = None
        self.ended: list[RunConfig] = []
        self.costs: dict[str, list[float]] = {}
        """Seconds per step, by algorithm."""
        for record in store.found(configs):
            self._learn(record)
        self.resumed = {c.identity for c in missing if store.workplace(c).is_dir()}
        self.first: dict[str, tuple[float, float]] = {}
        """When an active run started here, and the fraction that was done before."""
        done = self.total - len(missing)
        self.title = f"{len(missing)} run{'s' * (len(missing) > 1)} to do" + f", {done} finished" * bool(done)

    def _learn(self, record: RunRecord) -> None:
        if record.seconds > 0:
            self.costs.setdefault(record.config.algorithm, []).append(record.seconds / record.config.steps)

    def add(self, record: RunRecord) -> None:
        """A run has ended."""
        if self.started is None:
            self.started = time.monotonic() - record.seconds
        self._learn(record)
        if (config := self.left.pop(record.config.identity, None)) is not None:
            self.ended.append(config)

    def _work(self, config: RunConfig, paces: Mapping[str, list[float]]) -> float:
        costs = self.costs.get(config.algorithm) or paces.get(config.algorithm)
        costs = costs or [cost for each in (*self.costs.values(), *paces.values()) for cost in each]
        return float(config.steps) * (sum(costs) / len(costs) if costs else 1.0)

    def active(self) -> dict[str, float]:
        """The completed fraction of each active run."""
        found = {}
        for path in list(self.store.working.glob("*.progress")):
            if (config := self.left.get(path.stem)) is not None:
                with contextlib.suppress(OSError, ValueError):  # it has just ended, or is being written
                    found[path.stem] = min(int(path.read_text()) / config.steps, 1.0)
        return found

    def state(self) -> tuple[float, float | None, str]:
        """The completed fraction, the remaining seconds if they can be estimated, and the active runs."""
        now, left, ended = time.monotonic(), dict(self.left), list(self.ended)
        active = {name: fraction for name, fraction in self.active().items() if name in left}
        if self.started is None and active:
            self.started = now
        paces: dict[str, list[float]] = {}
        """Seconds per step of active runs, by algorithm."""
        progress: dict[str, float] = {}
        for name, fraction in active.items():
            if name in self.resumed and not fraction:  # its checkpoint is being read
                continue
            start, before = self.first.setdefault(name, (now, fraction if name in self.resumed else 0.0))
            progress[name] = fraction - before
            if progress[name] > 0 and now > start:
                pace = (now - start) / (left[name].steps * progress[name])
                paces.setdefault(left[name].algorithm, []).append(pace)
        done = sum(self._work(config, paces) for config in ended)
        done += sum(self._work(left[name], paces) * part for name, part in progress.items())
        remaining = [self._work(c, paces) * (1 - active.get(name, 0.0)) for name, c in left.items()]
        seconds = None
        if done > 0 and self.started is not None and remaining:
            seconds = sum(remaining) * (now - self.started) / done
            if ended:  # then work is in seconds, and no run is divided among processes
                seconds = max(seconds, *remaining)
        count = self.total - len(left)
        names = [f"{self.describe(left[n])} {100 * f:.0f} %" for n, f in active.items()]
        note = f"{count}/{self.total} runs: {', '.join(names)}"
        return (count + sum(active.values())) / self.total, seconds, note[:100].rstrip(": ")

    def describe(self, config: RunConfig) -> str:
        """A run among others: what they mostly differ in."""
        held_out = config.protocol.get("held_out") or config.data_options.get("held_out")
        names = [held_out] if isinstance(held_out, str) else list(held_out or ())
        listed = " and ".join(map(str, names)) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
        parts = [config.dataset] * self.several + [config.name]
        parts += [f"held out: {listed}"] * bool(names) + [f"seed {config.seed}"]
        return clean(", ".join(parts))
