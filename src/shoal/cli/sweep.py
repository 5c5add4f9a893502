"""`shoal sweep`."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.api.sweep import sweep
from shoal.cli.arguments import (
    EXECUTION,
    add_data,
    add_data_dir,
    add_model,
    add_options,
    argument_help,
    data_options,
    in_data_dir,
    model_options,
    options_of,
)
from shoal.cli.showing import show
from shoal.errors import InputError

EXAMPLE = """\
Each domain is held out in turn. Each seed has its own split of the data and its own random search, which \
starts with the default hyperparameters.

Example:
  shoal sweep rotated-mnist --algorithms erm fish --seeds 3

The same command runs what is missing, including failed runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    explained = argument_help(sweep)
    parser.add_argument("datasets", nargs="*", metavar="DATA", help=explained["datasets"])
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help=explained["algorithms"])
    parser.add_argument("--rules", nargs="+", metavar="RULE", help=explained["rules"])
    add_data(parser)
    add_data_dir(parser)
    add_model(parser)
    names = ("seeds", "search", "steps", "eval_every", "precision", "memory_format", "domainbed", "out")
    add_options(parser, (*names, "budget", *EXECUTION), sweep)
    parser.add_argument("--plan", action="store_true", help="print the number of runs and exit")
    parser.add_argument(
        "--no-run", action="store_true", help="start no runs and show the results of finished ones"
    )


@in_data_dir
def run(args: Any) -> int:
    if not args.domainbed and not (args.datasets and args.algorithms):
        raise InputError(
            "DATA and --algorithms are required, such as: shoal sweep rotated-mnist --algorithms erm fish."
        )
    options = options_of(args, sweep) | model_options(args) | {"data_options": data_options(args)}
    result = sweep(**options | {"run": not (args.plan or args.no_run)})
    if args.plan:
        runs = {"runs": len(result.found.planned), "missing": result.missing, "seconds": result.seconds}
        show(runs, result.plan, args)
        return 0
    if args.no_run:
        result.save(args.out)
    show(result.to_dict(), str(result), args)
    return 1 if result.failed else 0
