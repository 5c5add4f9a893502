"""`shoal compare`."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.api.compare import compare
from shoal.cli.arguments import (
    EXECUTION,
    add_options,
    add_source,
    argument_help,
    data_options,
    in_data_dir,
    options_of,
    warnings_in_words,
)
from shoal.cli.showing import show

EXAMPLE = """\
Each domain is held out in turn; with more than ten domains, they are held out in ten groups. Every \
algorithm gets the same number of hyperparameter trials: its defaults, then random search. For each seed, \
the trial with the best validation score on the training domains is selected; on your own data, each seed \
has its own validation split, shared by all algorithms. On tabular data, the gradient boosting and a \
linear model of scikit-learn are included under the same protocol. The simplest algorithm within one \
standard error of the best is recommended.

Examples:
  shoal compare patients.csv --label ill --domain hospital
  shoal compare rotated-digits --algorithms erm fish idgm --seeds 5

The same command resumes an interrupted comparison, or shows a finished one. A domain whose name starts \
with a dash needs an equals sign: --held-out=-90."""
GROUPS = {
    "": ("held_out", "folds", "criterion", "seeds", "search", "budget", "out", "plan"),
    "every run": (
        *("steps", "batch_size", "domains_per_step", "model", "model_options", "weights", "freeze_backbone"),
        *("optimizer", "lr", "schedule", "metric", "eval_every", "eval_limit", "precision"),
        "memory_format",
    ),
    "running": EXECUTION,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_source(parser)
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help=argument_help(compare)["algorithms"])
    parser.add_argument("--no-baselines", action="store_true", help="exclude the baselines of scikit-learn")
    for title, names in GROUPS.items():
        add_options(parser.add_argument_group(title) if title else parser, names, compare)
    parser.add_argument(
        "--no-run", action="store_true", help="start no runs and show the results of finished ones"
    )


@in_data_dir
def run(args: Any) -> int:
    options = options_of(args, compare) | {"data": args.dataset, "data_options": data_options(args)}
    with warnings_in_words():
        found = compare(**options | {"baselines": not args.no_baselines, "run": not args.no_run})
    show(found.result, str(found), args)
    return int(bool(found.failed))
