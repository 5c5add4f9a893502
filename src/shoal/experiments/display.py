"""How a list of runs comes along: the same display for every command."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.terminal import clean, clear_line

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord


QUIET = 5.0
"""Seconds after which a log, in which no line is redrawn, gets another one."""


class Display:
    """On stderr: a live line on a terminal; elsewhere a line per finished run and now and then another.

    Its methods are what :func:`shoal.experiments.execute.execute` takes as ``tell`` and ``done``.
    """

    def __init__(self, configs: Sequence[RunConfig], missing: int) -> None:
        self.total = len(configs)
        self.finished = self.total - missing
        self.at: dict[str, str] = {}
        self.shares: dict[str, float] = {}
        self.before = self.finished
        self.started = time.monotonic()
        self.terminal, self.shown = sys.stderr.isatty(), self.started
        self.several = len({c.dataset for c in configs}) > 1
        if missing:
            kept = f", {self.finished} already finished" if self.finished else ""
            print(f"{missing} run{'s' * (missing > 1)} to do{kept}.", file=sys.stderr, flush=True)

    def tell(self, config: RunConfig, step: int, note: str) -> None:
        self.at[config.identity] = f"{self._which(config)} {100 * step // config.steps}%"
        self.shares[config.identity] = step / config.steps
        line = f"[{self.finished}/{self.total}]{self.estimate} {' · '.join(self.at.values())}"[:130]
        if self.terminal:
            clear_line(sys.stderr)
            print(line, end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown >= QUIET:
            self.shown = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def done(self, record: RunRecord) -> None:
        self.finished += 1
        self.at.pop(record.config.identity, None)
        self.shares.pop(record.config.identity, None)
        error = f"failed: {clean(record.error)}" if record.status == "failed" else record.status
        result = _held_out_score(record) if record.status == "finished" else error
        if self.terminal:
            clear_line(sys.stderr)
        line = f"[{self.finished}/{self.total}] {self._which(record.config)}: {result}"
        print(f"{line} ({record.seconds:.0f} s){self.estimate}", file=sys.stderr, flush=True)

    @property
    def estimate(self) -> str:
        """What remains of the runs, at the pace of those that were done here, wherever they run."""
        done = self.finished - self.before + sum(self.shares.values())
        left = self.total - self.before - done
        if self.finished in (self.before, self.total) or left <= 0:
            return ""
        return f" about {duration((time.monotonic() - self.started) * left / done)} left"

    def _which(self, config: RunConfig) -> str:
        """A run among others: what they mostly differ in."""
        number = f", N={n}" if (n := config.data_options.get("domains")) else ""
        held_out = config.protocol.get("held_out") or config.data_options.get("held_out")
        names = held_out if isinstance(held_out, list | tuple) else [held_out]
        shown = " and ".join(map(str, names)) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
        without = f", held out: {clean(shown)}" if held_out else ""
        dataset = f"{config.dataset}, " if self.several else ""
        return f"{dataset}{config.name}{number}{without}, seed {config.seed}"


def duration(seconds: float) -> str:
    """Such as ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _held_out_score(record: RunRecord) -> str:
    """The result in the held-out domain, as tables and weights have it."""
    if record.headline is None:
        return "finished"
    name, value = record.headline
    if value is None:
        return f"{name} undefined"
    return f"accuracy {100 * value:.1f} %" if name == "accuracy" else f"{name} {value:.4g}"


def run_seeds(
    configs: Sequence[RunConfig],
    folder: Path,
    how: Mapping[str, Any],
    **options: Any,
) -> list[RunRecord]:
    """The same run with several seeds, each in a folder of its own.

    Returns the records of all runs, those of failed ones included. Where no run could begin, nothing is left
    and an InputError says why. ``options`` are those of :func:`shoal.experiments.execute.execute`.
    """
    from shoal.experiments.execute import execute
    from shoal.experiments.store import Store

    store = Store(folder, weights=True)
    outcome = execute(configs, store, how=how, **options)
    if outcome.failed and not outcome.records and not any(folder.glob("seed-*/config.yaml")):
        for config in configs:
            store.path(config).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                store.workplace(config).rmdir()
        store.claims.unlink()
        raise InputError(next(iter(outcome.failed.values())).removeprefix("InputError: "))
    return [record for config in configs if (record := store.look(config)) is not None]
