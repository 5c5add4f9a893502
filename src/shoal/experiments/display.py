"""The progress of a list of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.terminal import clean, clear_line

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord


class Display:
    """How a list of runs comes along, on stderr: a live line on a terminal, one line per run elsewhere."""

    def __init__(self, configs: Sequence[RunConfig], missing: int) -> None:
        self.total = len(configs)
        self.finished = self.total - missing
        self.at: dict[str, str] = {}
        self.terminal = sys.stderr.isatty()
        self.several = len({c.dataset for c in configs}) > 1
        if missing:
            kept = f", {self.finished} kept from before" if self.finished else ""
            print(f"{missing} run{'s' * (missing > 1)} to do{kept}.", file=sys.stderr, flush=True)

    def tell(self, config: RunConfig, step: int, note: str) -> None:
        self.at[config.identity] = f"{self._which(config)} {100 * step // config.steps}%"
        if self.terminal:
            running = " · ".join(self.at.values())
            clear_line(sys.stderr)
            sys.stderr.write(f"[{self.finished}/{self.total}] {running}"[:130])
            sys.stderr.flush()

    def done(self, record: RunRecord) -> None:
        self.finished += 1
        config = record.config
        self.at.pop(config.identity, None)
        result = _held_out_score(record) if record.status == "finished" else record.status
        line = f"[{self.finished}/{self.total}] {self._which(config)}: {result}"
        if self.terminal:
            clear_line(sys.stderr)
        print(f"{line} ({record.seconds:.0f} s)", file=sys.stderr, flush=True)

    def _which(self, config: RunConfig) -> str:
        return f"{config.dataset}, {_which(config)}" if self.several else _which(config)


def _which(config: RunConfig) -> str:
    """A run among others: what they mostly differ in."""
    number = f", N={n}" if (n := config.data_options.get("domains")) else ""
    names = config.protocol.get("leave_out") or [config.data_options.get("test")]
    held_out = f", held out: {clean(' and '.join(map(str, names)))}" if names[0] is not None else ""
    return f"{config.name}{number}{held_out}, seed {config.seed}"


def _held_out_score(record: RunRecord) -> str:
    """The result in the held-out domain, as tables and weights have it."""
    if record.headline is None:
        return "finished"
    name, value = record.headline
    if value is None:
        return f"{name} undefined"
    return f"accuracy {100 * value:.1f} %" if name == "accuracy" else f"{name} {value:.4g}"
