"""`shoal compare`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.arguments import (
    OPTIMIZERS,
    PRECISIONS,
    TOLD,
    add_execution,
    add_model,
    add_rate,
    add_source,
    count,
    data_options,
    few,
    in_data_dir,
    kinds_of,
    positive,
    values,
    warnings_in_words,
)
from shoal.cli.showing import show

SUMMARY = "Find out which algorithm works in a held-out domain."
EXAMPLE = (
    "Every domain is held out in turn; of more than ten, several together, in ten folds. Every algorithm "
    "gets the same random search, its defaults first, of which each seed takes the best on validation "
    "examples of the training domains; on data of your own each seed draws another validation split, the "
    "same for all. On rows of numbers, scikit-learn's gradient boosting and a linear model take part in the "
    "same way. Recommended is the simplest row within one standard error of the best. "
    "Examples: shoal compare patients.csv --label ill --domain hospital; "
    "shoal compare rotated-digits --algorithms erm fish idgm --seeds 5. "
    "The same command again resumes a comparison that was stopped, and shows one that is finished."
)
SAME = (
    *(
        "algorithms",
        "held_out",
        "folds",
        "seeds",
        "search",
        "budget",
        "criterion",
        "metric",
        "steps",
        "model",
    ),
    *("batch_size", "domains_per_step", "weights", "freeze_backbone", "optimizer", "lr", "schedule", "out"),
    *("eval_every", "eval_limit", "precision", "device", "jobs", "engine", "address", "gpus_per_run"),
    *("cpus_per_run", "plan", "day_first", *TOLD),
)
"""Options that the function takes under the same name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_source(parser)
    add = parser.add_argument
    add(
        "--algorithms",
        nargs="+",
        metavar="NAME",
        help="which, or all (default: all, for data of your own a few and controls); "
        "fish:regrouped is the control of Fish with random grouping",
    )
    add("--no-baselines", action="store_true", help="without gradient boosting and the other baselines")
    add(
        "--held-out",
        nargs="+",
        action="extend",
        default=[],
        metavar="DOMAIN",
        help="domains to hold out (default: each that can be scored, or the dataset's own test domain); a "
        "name with a dash in front needs an equals sign: --held-out=-90%%",
    )
    add(
        "--folds",
        type=few,
        metavar="K",
        help="hold domains out in K groups (default: one by one up to ten, else ten)",
    )
    add(
        "--criterion",
        choices=("mean", "worst"),
        default="mean",
        help="rank and recommend by the average over held-out domains or by the worst one (default: mean)",
    )
    add("--seeds", type=few, default=3, metavar="N", help="seeds 0 to N−1 (default: 3)")
    add(
        "--search",
        type=few,
        default=3,
        metavar="K",
        help="hyperparameter trials per row and seed: the defaults, then random search (default: 3)",
    )
    add(
        "--budget",
        type=positive,
        metavar="MINUTES",
        help="to stay within: fewer hyperparameter trials, then fewer seeds, then fewer folds",
    )
    group = parser.add_argument_group("every run")
    group.description = "Defaults are steps 1000, batch 32; for a table both go by its size."
    add = group.add_argument
    add("--steps", type=count, help="meta-steps")
    add("--batch-size", type=count, help="examples per batch")
    add(
        "--domains-per-step", type=count, metavar="S", help="domains per step (default: all up to 16, else 5)"
    )
    add_model(group, "the dataset's own")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="(default: %(default)s)")
    add_rate(group)
    add("--metric", help='selects on validation and is compared: AUC, "macro F1" … (default: the dataset\'s)')
    add("--eval-every", type=count, metavar="K", help="steps (default: a tenth of all)")
    add("--eval-limit", type=count, metavar="N", help="score about N examples of a split (default: all)")
    add("--precision", choices=PRECISIONS, help="(default: fp32)")
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="(default: shoal-compare, with a folder in it for each file or folder of yours)",
    )
    add(
        "--plan",
        action="store_true",
        help="write the plan of runs and stop; later commands with this --out must match it",
    )
    add("--no-run", action="store_true", help="show the results of finished runs and run nothing")
    add_execution(parser)


@in_data_dir
def run(given: Any) -> int:
    from shoal.api.compare import compare

    with warnings_in_words():
        found = compare(
            given.dataset,
            data_options=data_options(given),
            kinds=kinds_of(given),
            model_options=values(given.model_set, "--model-set"),
            baselines=not given.no_baselines,
            run=not given.no_run,
            **{name: getattr(given, name) for name in SAME},
        )
    show(found.result, str(found), given)
    return int(bool(found.failed))
