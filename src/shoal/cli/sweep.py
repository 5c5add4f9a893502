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

EXAMPLE = (
    "Every domain is held out in turn; each seed splits the data anew and tries the default hyperparameters "
    "and those of a random search. Example: shoal sweep rotated-mnist --algorithms erm fish --seeds 3. "
    "The same command again does what is missing, failed runs included."
)


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
    parser.add_argument("--plan", action="store_true", help="only say how many runs there are")
    parser.add_argument("--no-run", action="store_true", help="only show the runs that are there")


@in_data_dir
def run(args: Any) -> int:
    if not args.domainbed and not (args.datasets and args.algorithms):
        raise InputError("say which: shoal sweep rotated-mnist --algorithms erm fish.")
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
