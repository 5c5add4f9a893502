"""``demo``: Fish against ERM on a small version of CdSprites."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from shoal.paper.reproduce import Reproduction, Request
from shoal.settings import Few, checked

INTRODUCTION = """\
Square or ellipse? In each of ten training domains, squares have one colour and ellipses another, so
that colour predicts the label. In the held-out domain colours are shuffled, and only the shape does.
Three methods train the same network with the same optimizer, learning rate and number of passes.
This takes a few minutes on a CPU with two cores.
"""


@checked
def demo(
    *, seeds: Few = 1, out: str | Path = "shoal-demo", jobs: Few | None = None, progress: bool = True
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
    from shoal.paper import cdsprites, columns
    from shoal.paper.figures import SPLITS, demo_figure

    make_folder(out)
    start, size = time.monotonic(), cdsprites.preset("sizes")["demo"]
    (column,) = cdsprites.plan("adam", size, range(seeds)).values()
    records, failed = request.run(column.runs)
    scores = {split: column.scores(records, split, last=True) for split in SPLITS}
    curves: dict[str, dict[str, list[Any]]] = {title: {} for title in SPLITS.values()}
    for record in records.values():
        for split, title in SPLITS.items():
            curves[title].setdefault(record.config.name, []).append(record.curve(split))
    table = [
        {"method": method, **{t: columns.shown(scores[s][method], column.metric) for s, t in SPLITS.items()}}
        for method in scores["test"]
    ]
    text = {"seconds": time.monotonic() - start, "passes": size["passes"]}
    samples = cdsprites.samples(column.runs[0].data_options)
    figures = {"demo": demo_figure(samples, curves)} if records else {}
    return request.result({"": table}, {**scores, **text}, text, figures=figures, failed=failed)
