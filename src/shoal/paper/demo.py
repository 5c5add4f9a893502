"""``demo``: Fish against ERM on a small version of CdSprites."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.result import Result
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.report.tables import Table

INTRODUCTION = """\
Square or ellipse? In each of ten training domains, squares have one colour and ellipses another, so
that colour predicts the label. In the held-out domain colours are shuffled, and only the shape does.
Three methods train the same network with the same optimizer, learning rate and number of passes.
This takes a few minutes on a CPU with two cores.
"""
CONCLUSION = """\
The two Fish rows differ only in their batches: each from one domain, or from random groups.

Next, with a table of your own or a generated one (shoal data example table):
  shoal compare patients.csv --label ill --domain hospital"""
SIZE: dict[str, Any] = {"passes": 6_000, "size": 32, "per_domain": 2000, "width": 24, "eval_limit": 2000}
"""What fits a laptop: 32×32 pixels, two thousand images per domain, a network three quarters as wide."""


@dataclass(frozen=True)
class Demo(Result):
    """The result of :func:`demo`.

    Attributes:
        table: accuracy of each method on the training domains and on the held-out one.
        rows: the same as plain data, one accuracy per seed.
        seconds: duration.
        failed: failed runs, one line each; the same call repeats them.
        files: the figure.
    """

    table: Table
    rows: Sequence[Mapping[str, Any]]
    seconds: float
    failed: Sequence[str] = ()
    files: Sequence[Path] = ()

    @property
    def problems(self) -> Sequence[str]:
        return self.failed

    def __str__(self) -> str:
        text = (
            f"{self.table.text()}\n\nAccuracy in percent at the last step (± standard deviation over seeds); "
            f"chance is 50. {self.seconds:.0f} s.\n{CONCLUSION}"
        )
        figure = [f"\nFigure: {', '.join(map(str, self.files))}"] if self.files else []
        return "\n".join([text, *self.failed, *figure])

    def to_dict(self) -> dict[str, Any]:
        files = [str(path) for path in self.files]
        return {"rows": list(self.rows), "seconds": self.seconds, "failed": list(self.failed), "files": files}


def demo(
    *, seeds: int = 1, out: str | Path = "shoal-demo", jobs: int | None = None, progress: bool = True
) -> Demo:
    """Show on generated images how Fish finds what ERM misses; takes a few minutes.

    The same call resumes: finished runs in the output folder are not repeated.

    Args:
        seeds: number of seeds, starting at 0.
        out: folder for runs and the figure.
        jobs: number of runs in parallel (default: one per core, or one per GPU).
        progress: print an introduction and show progress on stderr.

    Returns:
        Demo: accuracies of Fish, Fish with random grouping and ERM, and a figure.
    """
    for name, number in (("seeds", seeds), ("jobs", jobs)):
        if number is not None and number < 1:
            raise InputError(f"must be at least 1, got {number}.", option=name)
    if progress:  # before torch is imported, which takes seconds
        print(INTRODUCTION, file=sys.stderr, flush=True)
    from shoal.api.source import make_folder
    from shoal.paper import cdsprites
    from shoal.paper.figures import demo_figure
    from shoal.paper.reproduce import run_missing
    from shoal.report import plots
    from shoal.report.tables import Table

    make_folder(out)
    began = time.monotonic()
    configs = cdsprites.configs(cdsprites.CARRIED, [10], range(seeds), **SIZE)
    records, failed = run_missing(configs, Path(out) / "records", jobs=jobs, progress=progress)
    table = Table(["method", "training domains", "held-out domain", "passes"])
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, Any]] = {"train": {}, "test": {}}
    for method in dict.fromkeys(r.config.name for r in records if r.history):
        own = [r for r in records if r.config.name == method and r.history]
        scores = {split: [r.score(split, last=True) for r in own] for split in curves}
        rows.append({"method": method, "seeds": [r.config.seed for r in own], **scores})
        table.add(method, *(cdsprites.percent(v) for v in scores.values()), f"{SIZE['passes']:,}")
        for split in curves:
            curves[split][method] = [r.curve(split) for r in own]
    files = []
    if rows:
        samples = cdsprites.samples(configs[0].data_options)
        files = plots.save(demo_figure(samples, curves["train"], curves["test"]), Path(out) / "demo")
    return Demo(table, rows, time.monotonic() - began, failed, files)
