"""`shoal demo`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from shoal.cli.arguments import add_execution, few, make_folder
from shoal.cli.showing import draw, show
from shoal.paper.commands import run_all

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=few, default=1, metavar="N", help="run seeds 0 to N−1 (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("shoal-demo"), metavar="DIR", help="(default: %(default)s)"
    )
    add_execution(parser)


def run(args: Any) -> int:
    make_folder(args.out)
    if not args.json:
        # Before torch is imported, which takes seconds.
        print(INTRODUCTION, flush=True)
    from shoal.paper import cdsprites
    from shoal.paper.views.figures import demo_figure

    configs = cdsprites.demo(range(args.seeds))
    began = time.monotonic()
    records, failed = run_all(configs, args.out / "records", args)

    def figure() -> Any:
        train, test = (cdsprites.curves(records, split) for split in ("train", "test"))
        return demo_figure(cdsprites.samples(configs[0].data_options), train, test)

    figures = draw(figure, args.out / "demo") if records else []
    seeds = "seed 0" if args.seeds == 1 else f"seeds 0 to {args.seeds - 1}, mean ± standard deviation"
    text = (
        f"\n{cdsprites.demo_table(records).text()}\n\nAccuracy in percent after the last step, {seeds}; "
        f"chance is 50. {time.monotonic() - began:.0f} s.\n{CONCLUSION}"
    )
    content = {"records": [r.to_dict() for r in records], "failed": failed}
    show(content, "\n".join([text, *failed]), args, figures)
    return 1 if failed else 0
