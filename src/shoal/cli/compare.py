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

EXAMPLE = (
    "Every domain is held out in turn; of more than ten, several together, in ten folds. Every algorithm "
    "gets the same random search, its defaults first, of which each seed takes the best on validation "
    "examples of the training domains; on data of your own each seed draws another validation split, the "
    "same for all. On rows of numbers, scikit-learn's gradient boosting and a linear model take part in the "
    "same way. Recommended is the simplest row within one standard error of the best. A held-out domain with "
    "a dash in front needs an equals sign: --held-out=-90%%. "
    "Examples: shoal compare patients.csv --label ill --domain hospital; "
    "shoal compare rotated-digits --algorithms erm fish idgm --seeds 5. "
    "The same command again resumes a comparison that was stopped, and shows one that is finished."
)
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
    parser.add_argument("--no-baselines", action="store_true", help="without scikit-learn's baselines")
    for title, names in GROUPS.items():
        add_options(parser.add_argument_group(title) if title else parser, names, compare)
    parser.add_argument("--no-run", action="store_true", help="show the results of finished runs only")


@in_data_dir
def run(args: Any) -> int:
    options = options_of(args, compare) | {"data": args.dataset, "data_options": data_options(args)}
    with warnings_in_words():
        found = compare(**options | {"baselines": not args.no_baselines, "run": not args.no_run})
    show(found.result, str(found), args)
    return int(bool(found.failed))
