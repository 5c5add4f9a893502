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
        "Examples: shoal track cdsprites, as in the paper (N=15; meant for a GPU); "
        "shoal track rotated-digits --steps 300 --seeds 2; "
        "shoal track camelyon17 --preset paper --data-dir ~/data. "
        "The same command again keeps the seeds that are finished. "
        "Any single training is tracked by shoal train … --track-every 50."
    )
    add = parser.add_argument
    add("dataset", metavar="DATA", help="see `shoal list datasets`")
    cli.add_data(parser, "the dataset's")
    cli.add_data_dir(parser)
    presets = ("paper", "authors-code")
    add("--preset", choices=presets, help="a dataset of WILDS: train as the paper or its authors' program")
    add("--seeds", type=cli.few, default=3, metavar="N", help="seeds 0 to N−1 (default: 3)")
    add("--steps", type=cli.count, help="iterations of S minibatches (default: 1000, or the preset's)")
    add("--batch-size", type=cli.count, metavar="B", help="examples per minibatch (default: 32)")
    per_step = "domains per iteration (default: all up to 16, else 5)"
    add("--domains-per-step", type=cli.count, metavar="S", help=per_step)
    add("--model", help="(default: the dataset's own)")
    add("--model-set", nargs="+", default=[], metavar="NAME=VALUE", help="the model's options")
    add("--weights", metavar="FILE", help="start from these")
    add("--optimizer", help="of both: adam, adamw or sgd (default: adam)")
    add("--lr", type=cli.rate, help="α, of both (default: 0.001)")
    add("--meta-lr", type=cli.positive, metavar="EPS", help="Fish's ε (default: 0.5)")
    add("--inner-state", choices=("carry", "reset"), help="Fish's moments between inner loops")
    warm = "ERM first, for both: steps (500), share of the data (0.1), plateau"
    add("--warm-start", metavar="W", help=warm)
    add("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    add("--every", type=cli.count, default=1, metavar="K", help="compare gradients every K-th iteration")
    limit = "held-out examples to score (default: %(default)s)"
    add("--eval-limit", type=cli.count, default=5000, metavar="N", help=limit)
    add("--workers", type=cli.workers, default=0, metavar="N", help="processes that read examples")
    add("--no-run", action="store_true", help="only show the seeds that are there")
    add("--out", type=Path, default=Path("shoal-track"), metavar="DIR", help="(default: %(default)s)")
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
