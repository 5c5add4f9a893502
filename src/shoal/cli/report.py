"""`shoal report`."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.api.report import report
from shoal.cli.arguments import add_data_dir, add_options, argument_help, in_data_dir
from shoal.cli.showing import show

EXAMPLE = """\
Example:
  shoal report shoal-compare -o report.html

The file is self-contained. Requires jinja2 and matplotlib: pip install 'shoal[report]'."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    explained = argument_help(report)
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=explained["folders"])
    out = f"{explained['out']} (default: %(default)s)"
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE", help=out)
    add_options(parser, ("title", "samples"), report)
    add_data_dir(parser)


@in_data_dir
def run(args: Any) -> None:
    page = report(args.runs, args.out, title=args.title, samples=args.samples)
    show(page.to_dict(), str(page), args)
