"""`shoal soup`."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.api.soup import soup
from shoal.cli.arguments import add_options, argument_help, options_of, warnings_in_words
from shoal.cli.showing import show

EXAMPLE = """\
Example:
  shoal soup runs/a runs/b runs/c --greedy --out runs/soup

The result is a run folder, accepted by predict, score, export, show, results and report. The runs should \
have started from the same pretrained weights. References: Model soups, Wortsman et al., ICML 2022; DiWA, \
Ramé et al., NeurIPS 2022."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("runs", nargs="+", metavar="RUN", help=argument_help(soup)["runs"])
    add_options(parser, ("greedy", "out", "data_dir", "device", "workers", "predictions"), soup)


def run(args: Any) -> None:
    with warnings_in_words():
        try:
            result = soup(**options_of(args, soup), progress=not args.json)
        except KeyboardInterrupt as stop:
            stop.args = ("interrupted. Nothing was written.",)
            raise
    show(result.to_dict(), str(result), args)
