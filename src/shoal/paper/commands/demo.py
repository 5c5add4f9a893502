"""`shoal demo`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from shoal.cli.arguments import (
    add_running,
    few,
    make_folder,
)
from shoal.cli.showing import draw, run_all, samples, show

SUMMARY = "See the paper's point in minutes: colour or shape?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=few, default=1, metavar="N", help="run seeds 0 to N−1 (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("shoal-demo"), metavar="DIR", help="(default: %(default)s)"
    )
    add_running(parser)


def run(given: Any) -> None:
    from shoal.experiments.record import Store
    from shoal.paper import cdsprites
    from shoal.paper.views import cdsprites as view
    from shoal.paper.views.plots import demo_figure

    make_folder(given.out)
    configs = cdsprites.demo(range(given.seeds))
    if not given.json:
        print(
            "Ten training domains. In each, squares have one colour and ellipses another, so colour gives\n"
            "the label away; in a domain never seen, colours are shuffled and only the shape is left. The\n"
            "three rows get the same network, optimizer, rate and number of passes.\n"
        )
    began = time.monotonic()
    records = run_all(configs, Store(given.out / "records"), given)
    table = view.demo_table(records)
    pictures = draw(
        lambda: demo_figure(
            samples(dict(configs[0].data_options)),
            view.curves(records, "train"),
            view.curves(records, "test"),
        ),
        given.out / "demo",
    )
    seeds = "seed 0" if given.seeds == 1 else f"seeds 0 to {given.seeds - 1}, mean ± standard deviation"
    text = (
        f"\n{table.text()}\n\nAccuracy in percent after the last step, {seeds}; chance is 50. "
        f"{time.monotonic() - began:.0f} s.\n"
        "Only the grouping differs between the two Fish rows: batches of one domain each, or mixed.\n"
        "On a table of yours: shoal compare data.csv --label COLUMN --domain COLUMN\n"
        "On your own model: see the README."
    )
    show({"records": [r.to_dict() for r in records]}, text, given, pictures)
