"""The commands `shoal reproduce`, `shoal track` and `shoal demo`, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord


def run_all(
    configs: Sequence[RunConfig], folder: Path, args: Any, how: Mapping[str, Any] | None = None
) -> tuple[list[RunRecord], list[str]]:
    """Runs what is missing in ``folder``, with --no-run nothing; the records, and a line per failed run."""
    from shoal.cli.arguments import executor_of
    from shoal.experiments.display import run_shown
    from shoal.experiments.execute import Store

    store, failed = Store(folder), dict[str, str]()
    if not configs or getattr(args, "no_run", False):
        records = store.found(configs)
    else:
        result = run_shown(configs, store, executor_of(args), how)
        records, failed = result.records, result.failed
    names = {c.identity: f"{c.name} on {c.dataset}, seed {c.seed}" for c in configs}
    lines = [f"failed: {names[identity]}: {why}" for identity, why in failed.items()]
    return [r for r in records if r.status != "failed"], lines
