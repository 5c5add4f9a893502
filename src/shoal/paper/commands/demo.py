"""`shoal demo`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from shoal.cli.arguments import add_execution, few, make_folder
from shoal.cli.showing import draw, show
from shoal.paper.commands import run_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=few, default=1, metavar="N", help="run seeds 0 to N−1 (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("shoal-demo"), metavar="DIR", help="(default: %(default)s)"
    )
    add_execution(parser)


def run(args: Any) -> int:
    from shoal.paper import cdsprites
    from shoal.paper.views.figures import demo_figure

    make_folder(args.out)
    configs = cdsprites.demo(range(args.seeds))
    if not args.json:
        print(
            "Ten training domains. In each, squares have one colour and ellipses another, so colour gives\n"
            "the label away; in the held-out domain colours are shuffled and only the shape is left. The\n"
            "three rows get the same network, optimizer, learning rate and number of passes.\n"
        )
    began = time.monotonic()
    records, failed = run_all(configs, args.out / "records", args)

    def figure() -> Any:
        train, test = (cdsprites.curves(records, split) for split in ("train", "test"))
        return demo_figure(cdsprites.samples(configs[0].data_options), train, test)

    figures = draw(figure, args.out / "demo") if records else []
    seeds = "seed 0" if args.seeds == 1 else f"seeds 0 to {args.seeds - 1}, mean ± standard deviation"
    text = (
        f"\n{cdsprites.demo_table(records).text()}\n\nAccuracy in percent after the last step, {seeds}; "
        f"chance is 50. {time.monotonic() - began:.0f} s.\n"
        "Only the grouping differs between the two Fish rows: batches of one domain each, or mixed.\n"
        "On a table of yours: shoal compare data.csv --label COLUMN --domain COLUMN\n"
        "On your own model: see the README."
    )
    content = {"records": [r.to_dict() for r in records], "failed": failed}
    show(content, "\n".join([text, *failed]), args, figures)
    return 1 if failed else 0
