"""``demo``: Fish against ERM on a small version of CdSprites."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shoal.paper.reproduce import Reproduction, Request

INTRODUCTION = """\
Square or ellipse? In each of ten training domains, squares have one colour and ellipses another, so
that colour predicts the label. In the held-out domain colours are shuffled, and only the shape does.
Three methods train the same network with the same optimizer, learning rate and number of passes.
This takes a few minutes on a CPU with two cores.
"""


def demo(
    *, seeds: int = 1, out: str | Path = "shoal-demo", jobs: int | None = None, progress: bool = True
) -> Reproduction:
    """Show on generated images how Fish finds what ERM misses; takes a few minutes.

    The same call resumes: finished runs in the output folder are not repeated.

    Args:
        seeds: number of seeds, starting at 0.
        out: folder for runs, the table and the figure.
        jobs: number of runs in parallel (default: one per core, or one per GPU).
        progress: print an introduction and show progress on stderr.

    Returns:
        Reproduction: accuracies of Fish, Fish with random grouping and ERM, and a figure.
    """
    request = Request("demo", Path(out), seeds=seeds, jobs=jobs, progress=progress)
    if progress:  # before torch is imported, which takes seconds
        print(INTRODUCTION, file=sys.stderr, flush=True)
    from shoal.api.source import make_folder
    from shoal.paper import cdsprites
    from shoal.paper.figures import demo_figure

    make_folder(out)
    start, size = time.monotonic(), cdsprites.preset("sizes")["demo"]
    planned = cdsprites.plan(["adam"], size, range(seeds))
    records, failed = request.run(config for row in planned for config in row.runs)
    entries = [cdsprites.entry(row, records) for row in planned]
    titles = {"method": "method", "train, last": "training domains", "test, last": "held-out domain"}
    table = [{title: cdsprites.shown(e)[name] for name, title in titles.items()} for e in entries]
    curves = {
        split: {
            row.method: [records[c.identity].curve(split) for c in row.runs if c.identity in records]
            for row in planned
        }
        for split in ("train", "test")
    }
    samples = cdsprites.samples(planned[0].runs[0].data_options)
    figures = {"demo": demo_figure(samples, curves["train"], curves["test"])} if records else {}
    text = {"seconds": time.monotonic() - start, "passes": size["passes"]}
    return request.result({"": table}, {"rows": entries, **text}, text, figures=figures, failed=failed)
