"""`shoal sweep`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.arguments import (
    add_data,
    add_data_dir,
    add_execution,
    add_model,
    count,
    data_options,
    few,
    in_data_dir,
    model_options,
    positive,
)
from shoal.cli.showing import show
from shoal.errors import InputError

SUMMARY = "Compare algorithms on datasets by DomainBed's protocol."
EXAMPLE = (
    "Every domain is held out in turn; each seed splits the data anew and tries the default hyperparameters "
    "and those of a random search. Example: shoal sweep rotated-mnist --algorithms erm fish --seeds 3. "
    "The same command again does what is missing, failed runs included."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("datasets", nargs="*", metavar="DATA", help="see `shoal list datasets`")
    add("--algorithms", nargs="+", metavar="NAME", help="see `shoal list algorithms`")
    add_data(parser, "the datasets'")
    add_data_dir(parser)
    add("--seeds", type=few, default=3, metavar="N", help="(default: %(default)s)")
    add("--search", type=few, default=20, metavar="K", help="trials, the defaults first (default: 20)")
    rules = "how hyperparameters are chosen: training, leave-one-out (many more runs), oracle"
    default = ["training", "oracle"]
    add("--rules", nargs="+", default=default, metavar="RULE", help=f"{rules} (default: training oracle)")
    add("--steps", type=count, default=5001, help="(default: %(default)s)")
    every = "(default: 100, large images 300, DomainNet 1,000)"
    add("--eval-every", type=count, metavar="K", help=every)
    add_model(parser, "each dataset's own")
    add("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    add("--domainbed", type=Path, metavar="DIR", help="tables of DomainBed's own sweep folder")
    add("--out", type=Path, default=Path("shoal-sweep"), metavar="DIR", help="(default: %(default)s)")
    add("--plan", action="store_true", help="only say how many runs there are and how long they take")
    add("--no-run", action="store_true", help="only show the runs that are there")
    add("--budget", type=positive, metavar="MINUTES", help="start no further run after so long")
    add_execution(parser)


NAMES = (
    *("datasets", "seeds", "search", "rules", "steps", "eval_every", "precision", "domainbed", "out"),
    *("device", "jobs", "engine", "address", "gpus_per_run", "cpus_per_run", "budget"),
)


@in_data_dir
def run(args: Any) -> int:
    from shoal.api.sweep import sweep

    if not args.domainbed and not (args.datasets and args.algorithms):
        raise InputError("say which: shoal sweep rotated-mnist --algorithms erm fish.")
    options = {name: getattr(args, name) for name in NAMES} | model_options(args)
    options |= {"algorithms": args.algorithms or (), "data_options": data_options(args)}
    result = sweep(**options, run=not (args.plan or args.no_run))
    if args.plan:
        show({"runs": result.runs, "missing": result.missing, "seconds": result.seconds}, result.plan, args)
        return 0
    if args.no_run:
        result.save(args.out)
    show(result.to_dict(), str(result), args)
    return 1 if result.failed else 0
