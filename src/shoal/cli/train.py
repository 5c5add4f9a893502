"""`shoal train`."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import (
    DRAWS,
    OPTIMIZERS,
    PRECISIONS,
    add_data,
    add_data_dir,
    add_device,
    add_model,
    add_rate,
    add_table,
    count,
    few,
    in_data_dir,
    make_folder,
    model_options,
    positive,
    seed,
    show_chosen,
    show_columns,
    source,
    values,
    warm_start,
    warnings_in_words,
    workers,
)
from shoal.cli.showing import run_seeds, show_run
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig

SUMMARY = "Train one algorithm on a dataset or on data of your own."
EXAMPLE = (
    "Examples: shoal train fish cdsprites --data size=32 per_domain=2000 "
    "--set meta_lr=0.2 inner_state=reset --steps 1000 --batch-size 64; "
    "shoal train erm patients.csv --label ill --domain hospital --held-out none --out model. "
    "The same command again, or `shoal resume DIR`, goes on with a run that was stopped. Several GPUs: "
    "torchrun --nproc-per-node 4 -m shoal train …; each batch is split over them."
)
HOW = (
    "workers",
    "compile",
    "deterministic",
    "checkpoint_every",
    "keep",
    "log_every",
    "predictions",
    "track_every",
    "track_layers",
)
"""Options that change no result."""
OF_BASELINES = ("algorithm", "dataset", "held_out", "set", "seed", "metric", "out")
"""What a baseline takes beside the options of the data; others belong to the training of a network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("algorithm", help="or a baseline; see `shoal list algorithms`")
    parser.add_argument(
        "dataset",
        metavar="DATA",
        help="one of `shoal list datasets`, a table (.csv, .tsv, .parquet), "
        "or a folder of pictures as folder/domain/class",
    )
    add_data(parser, "the dataset's")
    add_data_dir(parser)
    parser.add_argument(
        "--held-out",
        nargs="+",
        action="extend",
        default=[],
        metavar="DOMAIN",
        help="domains to test on and not train on; none: all of your own data are trained on (default: the "
        "dataset's)",
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="the algorithm's settings"
    )
    parser.add_argument("--steps", type=count, default=1000, help="meta-steps (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=count, default=32, help="examples a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--domains-per-step", type=count, metavar="S", help="domains a step (default: all up to 16, else 5)"
    )
    add_model(parser, "the dataset's own")
    parser.add_argument("--draw", choices=DRAWS, help="how batches are drawn (default: the algorithm's own)")
    parser.add_argument(
        "--warm-start",
        type=warm_start,
        metavar="W",
        help="ERM first: steps (500), share of the data (0.1), plateau",
    )
    parser.add_argument("--seed", type=seed, default=0, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=few, metavar="N", help="N runs at once, with seeds SEED, SEED+1, …")
    add_table(parser)
    _add_optimization(parser)
    _add_running(parser)


def _add_optimization(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimization")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(default: %(default)s)")
    add_rate(group)
    group.add_argument("--clip", type=positive, metavar="NORM", help="the largest norm of a gradient")
    group.add_argument(
        "--accumulate", type=count, default=1, metavar="K", help="take each batch in K pieces, to save memory"
    )
    group.add_argument("--precision", choices=PRECISIONS, help="(default: fp32)")
    group.add_argument(
        "--average", choices=("sma", "swad"), help="average weights: swad by the validation loss"
    )
    group.add_argument(
        "--average-start", type=count, metavar="STEP", help="where sma begins (default: steps / 10)"
    )
    group.add_argument(
        "--select", choices=("best", "last"), help="keep the best weights on validation, or the last"
    )
    group.add_argument(
        "--metric", help='what selects: "worst-group accuracy", AUC … (default: as the dataset is judged)'
    )
    group.add_argument(
        "--patience", type=count, metavar="N", help="stop after N evaluations without a better one"
    )
    group.add_argument(
        "--on-nan",
        choices=("stop", "skip"),
        default="stop",
        help="a step that is not finite is never applied; stop, or skip it",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: one in runs/, named by the run)"
    )
    add_device(group)
    group.add_argument("--workers", type=workers, default=0, help="processes that read examples (default: 0)")
    group.add_argument("--jobs", type=few, metavar="P", help="--seeds: runs side by side")
    group.add_argument(
        "--eval-every",
        type=count,
        metavar="K",
        help="steps (default: so that evaluation costs less than training)",
    )
    group.add_argument(
        "--eval-limit",
        type=count,
        metavar="N",
        help="score a random sample of N examples per split (default: all, of train 5,000)",
    )
    group.add_argument(
        "--eval-splits", nargs="+", metavar="SPLIT", help="what is measured (default: all there is)"
    )
    group.add_argument(
        "--predictions", action="store_true", help="write what is predicted, as WILDS' leaderboard takes it"
    )
    group.add_argument(
        "--log-every", type=count, default=50, metavar="K", help="steps (default: %(default)s)"
    )
    group.add_argument(
        "--track-every",
        type=count,
        metavar="K",
        help="steps between measurements of how well the domains' gradients agree",
    )
    group.add_argument("--track-layers", action="store_true", help="--track-every: in each layer too")
    group.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="K",
        help="steps (default: at evaluations and every five minutes)",
    )
    group.add_argument(
        "--keep", type=count, default=2, help="checkpoints that stay, beside the best (default: %(default)s)"
    )
    group.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    group.add_argument(
        "--deterministic", action="store_true", help="the same bits every time on CUDA too; slower"
    )
    group.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases too")


@in_data_dir
def run(given: Any) -> int:
    from shoal.experiments.run import check

    config = configuration(given)
    with warnings_in_words():
        check(config)
        return _run(config, given) or 0


def _run(config: RunConfig, given: Any) -> int | None:
    from shoal.experiments import baselines
    from shoal.experiments.run import Turns

    show_columns(given)
    name = f"{config.algorithm}-{config.dataset}-{config.identity[:8]}" + "-seeds" * bool(given.seeds)
    out = given.out or Path("runs") / name
    how = {name: getattr(given, name) for name in HOW}
    if baselines.is_one(config):
        make_folder(out, given.dataset, run=True)
        try:
            show_run(baselines.train(config, out), out, given)
        except InputError:
            with contextlib.suppress(OSError):
                out.rmdir()  # it was made for this run and nothing is in it
            raise
        return None
    if given.seeds:
        show_chosen(given)
        return several(config, given.seeds, out, how, given)
    make_folder(out, given.dataset, run=True)
    turns = Turns(config, given.device, not given.json, out, how, given.wandb)
    if turns.training is not None:  # after all that could be wrong
        show_chosen(given)
    show_run(turns.to_the_end(), out, given)
    return None


def _of_baseline(given: Any) -> RunConfig:
    """A baseline's configuration; options that it has no use for are refused."""
    from shoal.experiments import baselines
    from shoal.experiments.config import RunConfig

    every, taken = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_arguments(every)
    for add in (lambda p: add_data(p, ""), add_data_dir, add_table):
        add(taken)
    known = {*OF_BASELINES, *(action.dest for action in taken._actions)}
    for action in every._actions:
        value = getattr(given, action.dest, action.default)
        if action.dest not in known and value not in (action.default, "cpu"):
            raise InputError(
                f"{action.option_strings[0]} is for training a network, and {given.algorithm} is none. "
                f"Its settings (--set): {', '.join(baselines.SPACES[given.algorithm]) or 'none'}."
            )
    dataset, options = _data(given)
    steps = baselines.TREES if given.algorithm == baselines.BOOSTING else 1
    settings = values(given.set, "--set")
    return RunConfig(
        dataset,
        given.algorithm,
        steps,
        options,
        settings,
        seed=given.seed,
        metric=given.metric,
        select="best",
    )


def _data(given: Any) -> tuple[str, dict[str, Any]]:
    """The dataset and its options, --held-out among them."""
    dataset, options = source(given)
    names = list(dict.fromkeys(given.held_out))
    if names:
        if "test" in options:
            raise InputError("--held-out and --data test=… say the same thing; give one of them.")
        if "none" in names and len(names) > 1:
            raise InputError("--held-out none holds no domain out; give no other name with it.")
        options["test"] = [] if names == ["none"] else names[0] if len(names) == 1 else names
    return dataset, options


def configuration(given: Any) -> RunConfig:
    from shoal.experiments.baselines import SPACES
    from shoal.experiments.config import RunConfig
    from shoal.experiments.search import with_rate

    given.algorithm = given.algorithm.lower().replace("_", "-")
    if given.algorithm in SPACES:
        return _of_baseline(given)
    dataset, options = _data(given)
    config = RunConfig(
        dataset=dataset,
        algorithm=given.algorithm,
        steps=given.steps,
        data_options=options,
        settings=values(given.set, "--set"),
        **model_options(given),
        optimizer=given.optimizer,
        clip=given.clip,
        accumulate=given.accumulate,
        precision=given.precision,
        average=given.average,
        average_start=given.average_start,
        select=given.select,
        patience=given.patience,
        on_nan=given.on_nan,
        batch_size=given.batch_size,
        domains_per_step=given.domains_per_step,
        draw=given.draw,
        seed=given.seed,
        eval_every=given.eval_every,
        eval_limit=given.eval_limit,
        metric=given.metric,
        eval_splits=given.eval_splits,
        warm_start=given.warm_start,
    )
    config, given.chosen = with_rate(config, given.lr, given.schedule)
    return config


def several(config: RunConfig, seeds: int, out: Path, how: dict[str, Any], given: Any) -> int:
    """The same run with several seeds, each in a folder of its own."""
    from shoal.training.processes import together

    if together():
        raise InputError("--seeds runs whole trainings side by side; start it without torchrun.")
    if given.wandb:
        raise InputError("--wandb logs one run; give --seed instead of --seeds.")
    make_folder(out, given.dataset)
    configs = [replace(config, seed=config.seed + n) for n in range(seeds)]
    return run_seeds(configs, out, how, given)
