"""`shoal track`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import arguments as cli
from shoal.cli.showing import draw, show
from shoal.errors import InputError
from shoal.paper.commands import run_all

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Examples:\n"
        "  shoal track cdsprites\n"
        "  shoal track rotated-digits --steps 300 --seeds 2\n"
        "  shoal track camelyon17 --preset paper --data-dir ~/data\n\n"
        "The first is the experiment of the paper, with 15 domains; a GPU is recommended. The same "
        "command runs "
        "only the seeds that are missing. To track a single run, use `shoal train --track-every 50`."
    )
    add = parser.add_argument
    add("dataset", metavar="DATA", help="name of a dataset (`shoal list datasets`)")
    cli.add_data(parser, "the dataset's")
    cli.add_data_dir(parser)
    presets = ("paper", "authors-code")
    add("--preset", choices=presets, help="for WILDS: hyperparameters of the paper or of its authors' code")
    add("--seeds", type=cli.few, default=3, metavar="N", help="number of seeds, starting at 0 (default: 3)")
    add(
        "--steps",
        type=cli.count,
        metavar="N",
        help="number of training steps (default: 1000, or as in the preset)",
    )
    add("--batch-size", type=cli.count, metavar="N", help="number of examples per batch (default: 32)")
    per_step = "number of domains per step (default: all if there are at most 16, otherwise 5)"
    add("--domains-per-step", type=cli.count, metavar="S", help=per_step)
    add("--model", help="name of a model (default: the dataset's model)")
    add("--model-set", nargs="+", default=[], metavar="NAME=VALUE", help="options of the model")
    add("--weights", metavar="FILE", help="file of initial weights")
    add("--optimizer", help="optimizer of both: adam, adamw or sgd (default: adam)")
    add("--lr", type=cli.rate, help="learning rate α of both (default: 0.001)")
    add("--meta-lr", type=cli.positive, metavar="EPS", help="meta learning rate ε of Fish (default: 0.5)")
    add(
        "--inner-state",
        choices=("carry", "reset"),
        help="keep or reset the optimizer state of Fish between inner loops",
    )
    warm = "train both with ERM first: number of steps (500), fraction of the data (0.1), or plateau"
    add("--warm-start", metavar="W", help=warm)
    add("--precision", help="precision of the forward pass: fp32, bf16 or fp16 (default: fp32)")
    add(
        "--every",
        type=cli.count,
        default=1,
        metavar="N",
        help="number of steps between measurements (default: 1)",
    )
    limit = "maximum number of test examples to evaluate on (default: %(default)s)"
    add("--eval-limit", type=cli.count, default=5000, metavar="N", help=limit)
    add(
        "--workers",
        type=cli.workers,
        default=0,
        metavar="N",
        help="number of processes that load examples (default: 0)",
    )
    add("--no-run", action="store_true", help="start no runs and show the results of finished ones")
    add(
        "--out",
        type=Path,
        default=Path("shoal-track"),
        metavar="DIR",
        help="folder for runs and results (default: %(default)s)",
    )
    cli.add_execution(parser)


@cli.in_data_dir
def run(args: Any) -> int:
    from shoal.paper import tracking
    from shoal.paper.views.figures import tracking_figure

    configs = _plan(args)
    if not args.no_run:
        cli.make_folder(args.out)
    folder = tracking.folder_of(args.out, configs, args.every)
    how = {"runner": tracking.RUNNER, "track_every": args.every, "workers": args.workers}
    records, failed = run_all(configs, folder, args, how)
    failed += [f"failed: {r.error}" for r in records if r.status != "finished"]
    try:
        results = [tracking.result_of(r) for r in records if r.status == "finished"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"a record in {str(folder)!r} is not what `shoal track` wrote; move it away."
        raise InputError(what) from error
    if not results:
        if failed:
            raise InputError(failed[0].removeprefix("failed: "))
        raise InputError(f"no seed of this is in {str(folder)!r}; run it without --no-run.")
    title = f"{configs[0].dataset}, {results[0]['domains']} domains per iteration"
    figures = draw(lambda: tracking_figure(results, title), folder / "tracking")
    text = f"{tracking.table(results).text()}\n\n{tracking.words(results)} Saved in {folder}."
    if missing := len(configs) - len(results):
        text += f"\n{missing} of {len(configs)} seeds are missing."
    content = {"results": results, "summary": tracking.summary(results), "failed": failed}
    show(content, "\n".join([text, *failed]), args, figures)
    return 1 if failed else 0


def _plan(args: Any) -> list[RunConfig]:
    from shoal.paper.tracking import plan

    asked = {"meta_lr": args.meta_lr, "inner_state": args.inner_state}
    warm = cli.values([f"w={args.warm_start}"], "--warm-start")["w"] if args.warm_start else None
    same = ("steps", "model", "optimizer", "batch_size", "domains_per_step", "precision", "weights")
    return plan(
        args.dataset,
        args.seeds,
        preset=args.preset,
        data_options=cli.data_options(args),
        lr=args.lr,
        settings={name: value for name, value in asked.items() if value is not None},
        eval_limit=args.eval_limit,
        model_options=cli.values(args.model_set, "--model-set"),
        warm_start=int(warm) if isinstance(warm, float) and warm > 1 else warm,
        **{name: getattr(args, name) for name in same},
    )
