"""`shoal report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.arguments import add_data_dir, count, in_data_dir
from shoal.cli.showing import show

SUMMARY = "Make one page of HTML from runs: tables, curves, settings, mistakes."
EXAMPLE = (
    "RUNS are folders of runs, of comparisons and of sweeps, or single records. "
    "Example: shoal report shoal-compare -o report.html. The file needs nothing else: open it, or send it. "
    "Needs jinja2 and matplotlib: pip install 'shoal[report]'."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="records are found there and below")
    out = "what to write (default: %(default)s)"
    add("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help=out)
    add("--title", help="of the page (default: the names of RUNS)")
    samples = "show N images per domain, mistakes first, of up to 6 runs that kept their weights"
    add("--samples", type=count, metavar="N", help=samples)
    add_data_dir(parser)


@in_data_dir
def run(args: Any) -> None:
    from shoal.api.report import report

    page = report(args.runs, args.out, title=args.title, samples=args.samples)
    about = {"report": str(page.path), "runs": page.runs, "bytes": page.bytes, "notes": page.notes}
    show(about, str(page), args)
