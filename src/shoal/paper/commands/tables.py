"""Experiments of `shoal reproduce` that end in a table with a column a dataset."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.arguments import (
    add_data,
    add_data_dir,
    add_device,
    count,
    data_options,
    few,
    in_data_dir,
    positive,
    rate,
    workers,
)
from shoal.cli.showing import show


def add_grouping(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Datasets that are not there are said to be missing, and the others go on. "
        "Example: shoal reproduce grouping --datasets cdsprites pacs --data-dir ~/data"
    )
    of_cdsprites = parser.add_argument_group("on CdSprites")
    of_cdsprites.add_argument("--passes", type=count, help="minibatches a run (default: 16,000)")
    of_cdsprites.add_argument(
        "--size", type=count, choices=(64, 32), default=64, help="of images (default: 64)"
    )
    of_domainbed = parser.add_argument_group("on DomainBed's datasets")
    of_domainbed.add_argument("--steps", type=count, default=5001, help="(default: %(default)s)")
    of_domainbed.add_argument("--weights", metavar="FILE", help="start from these, not from timm's")
    of_domainbed.add_argument(
        "--search",
        type=count,
        default=1,
        metavar="K",
        help="draws of settings (default: 1)",
    )
    _add_common(parser)


def add_wilds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="only these (default: all)")
    add_ablation(parser)


def add_ablation(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "To try it: shoal data fake wilds fake; shoal reproduce wilds --datasets camelyon17 --data-dir fake "
        "--epochs 1 --model small-cnn --seeds 1"
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help="only these (default: the paper's)")
    parser.add_argument("--seeds", type=few, metavar="N", help="(default: as many as the paper's)")
    parser.add_argument("--model", help="(default: each recipe's own)")
    add_data(parser, "the datasets'")
    parser.add_argument("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    parser.add_argument("--no-run", action="store_true", help="only show the runs that are there")
    parser.add_argument(
        "--workers", type=workers, default=0, metavar="N", help="processes that read examples"
    )
    of_wilds = parser.add_argument_group("on WILDS")
    of_wilds.add_argument(
        "--preset",
        default="paper",
        choices=("paper", "authors-code"),
        help="the paper's settings or its authors' program's",
    )
    of_wilds.add_argument("--epochs", type=positive, help="(default: each recipe's own)")
    of_wilds.add_argument("--lr", type=rate, help="α (default: each recipe's own)")
    of_wilds.add_argument("--batch-size", type=count, metavar="B", help="(default: each recipe's own)")
    of_wilds.add_argument(
        "--eval-limit",
        type=count,
        metavar="N",
        help="examples of a split to evaluate on (default: all)",
    )
    add_data_dir(parser)
    add_device(parser)
    parser.add_argument(
        "--jobs", type=few, metavar="P", help="runs side by side (default: one a core, or one a GPU)"
    )


@in_data_dir
def grouping(given: Any) -> None:
    from shoal.data.sets import registry
    from shoal.paper.grouping import Settings, columns

    for name in given.datasets or ():
        registry.module(name)
    settings = Settings(
        seeds=given.seeds or Settings.seeds,
        steps=given.steps,
        passes=given.passes or Settings.passes,
        size=given.size,
        model=given.model or Settings.model,
        weights=given.weights,
        draws=given.search,
        data=data_options(given),
        changes=_changes(given),
        preset=given.preset,
    )
    text = (
        "Unseen domains. DomainBed's datasets: every domain left out in turn, the step chosen by "
        "training-domain\nvalidation; CdSprites: the last step; WILDS: the step that is best on validation."
    )
    _beside(columns(settings, given.datasets), text, given, ("Fish", "Fish, RG"))


@in_data_dir
def wilds(given: Any) -> None:
    from shoal.errors import check_names
    from shoal.paper import recipes
    from shoal.paper import wilds as experiment

    names = given.datasets or recipes.datasets()
    check_names("dataset of WILDS:", names, recipes.datasets())
    if given.what == "wilds":
        algorithms = given.algorithms or list(recipes.ALGORITHMS)
        check_names("algorithm", algorithms, recipes.ALGORITHMS)
        columns = experiment.table(names, algorithms, given.preset, _changes(given))
    else:
        columns = experiment.ablation(given.what, names, given.preset, _changes(given))
    chosen = ", ".join(dict.fromkeys(f"{c.dataset} by {c.runs[0].metric}" for c in columns if c.runs))
    text = f"Test split, preset {given.preset}; the step is chosen on validation ({chosen or 'no runs'})."
    _beside(columns, text, given)


def _changes(given: Any) -> Any:
    from inspect import signature

    from shoal.data.sets import registry
    from shoal.errors import check_names
    from shoal.paper.recipes import Changes, datasets

    names = given.datasets or datasets()
    known = {option for name in names for option in signature(registry.module(name).load).parameters}
    check_names(f"option of {', '.join(names)}:", data_options(given), sorted(known))
    return Changes(
        epochs=given.epochs,
        model=given.model,
        data_options=data_options(given),
        batch=given.batch_size,
        lr=given.lr,
        eval_limit=given.eval_limit,
        precision=given.precision,
        seeds=given.seeds,
    )


def _beside(columns: Any, words: str, given: Any, control: tuple[str, str] | None = None) -> None:
    """Runs what a table is made of, and shows it with the paper's numbers beneath ours."""
    from shoal.experiments.display import run_shown
    from shoal.experiments.execute import Outcome, Store, make_executor
    from shoal.files import write_atomically
    from shoal.paper.views import beside as view

    every = list({c.identity: c for column in columns for c in column.runs}.values())
    store = Store(given.out / given.what)
    how, executor = (
        {"workers": given.workers, "predictions": True},
        make_executor(device=given.device, jobs=given.jobs),
    )
    outcome = Outcome(store.found(every)) if given.no_run else run_shown(every, store, executor, how)
    records, failed = outcome.usable(), outcome.failed
    entries = [column.entry(records) for column in columns]
    table = view.table(entries)
    for ending, text in {"md": table.markdown(), "tex": table.latex(), "csv": table.csv()}.items():
        write_atomically(given.out / f"{given.what}.{ending}", f"{text}\n".encode())
    lines = [f"{words} Mean ± standard deviation over seeds.", *view.gaps(entries)]
    lines += view.worth(entries, *control) if control else []
    lines += [f"failed: {why} ({store.folder / i}.json)" for i, why in failed.items()]
    show({"columns": entries, "failed": failed}, f"{table.text()}\n\n" + "\n".join(lines), given)
