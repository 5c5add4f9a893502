"""`shoal track`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import (
    add_data,
    add_data_dir,
    add_running,
    count,
    data_options,
    few,
    in_data_dir,
    make_folder,
    positive,
    rate,
    values,
    workers,
)
from shoal.cli.showing import draw, show
from shoal.errors import InputError
from shoal.terminal import clear_line

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.paper.tracking import Result, TrackStore

SUMMARY = "Watch the domains' gradients agree: Fish and ERM side by side on the same batches."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Examples: shoal track cdsprites, as in the paper (N=15; meant for a GPU); "
        "shoal track rotated-digits --steps 300 --seeds 2; "
        "shoal track camelyon17 --preset paper --data-dir ~/data. "
        "The same command again keeps the seeds that are finished. "
        "Any single training is tracked by shoal train … --track-every 50."
    )
    parser.add_argument("dataset", help="see `shoal list datasets`")
    add_data(parser, "the dataset's")
    add_data_dir(parser)
    parser.add_argument(
        "--preset",
        choices=("paper", "authors-code"),
        help="a dataset of WILDS: train as the paper or its authors' program",
    )
    parser.add_argument("--seeds", type=few, default=3, metavar="N", help="seeds 0 to N−1 (default: 3)")
    parser.add_argument(
        "--steps", type=count, help="iterations of S minibatches (default: 1000, or the preset's)"
    )
    parser.add_argument("--batch-size", type=count, metavar="B", help="examples a minibatch (default: 32)")
    parser.add_argument(
        "--domains-per-step",
        type=count,
        metavar="S",
        help="domains an iteration (default: all up to 16, else 5)",
    )
    parser.add_argument("--model", help="(default: the dataset's own)")
    parser.add_argument(
        "--model-set", nargs="+", default=[], metavar="NAME=VALUE", help="the model's options"
    )
    parser.add_argument("--weights", metavar="FILE", help="start from these")
    parser.add_argument("--optimizer", help="of both: adam, adamw or sgd (default: adam)")
    parser.add_argument("--lr", type=rate, help="α, of both (default: 0.001)")
    parser.add_argument("--meta-lr", type=positive, metavar="EPS", help="Fish's ε (default: 0.5)")
    parser.add_argument("--inner-state", choices=("carry", "reset"), help="Fish's moments between walks")
    parser.add_argument(
        "--warm-start", metavar="W", help="ERM first, for both: steps (500), share of the data (0.1), plateau"
    )
    parser.add_argument("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    parser.add_argument(
        "--every", type=count, default=1, metavar="K", help="compare gradients every K-th iteration"
    )
    parser.add_argument(
        "--eval-limit",
        type=count,
        default=5000,
        metavar="N",
        help="unseen examples to score (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=workers, default=0, metavar="N", help="processes that read examples"
    )
    parser.add_argument("--no-run", action="store_true", help="only show the seeds that are there")
    parser.add_argument(
        "--out", type=Path, default=Path("shoal-track"), metavar="DIR", help="(default: %(default)s)"
    )
    add_running(parser)


@in_data_dir
def run(given: Any) -> None:
    from shoal.paper import tracking
    from shoal.paper.views import tracking as view
    from shoal.paper.views.plots import tracking_figure

    configs = _plan(given)
    if not given.no_run:
        make_folder(given.out)
    store = tracking.TrackStore(given.out, configs, given.every)
    if given.no_run:
        results = [found for c in configs if (found := store.find(c)) is not None]
    else:
        results = _tracked(configs, store, given)
    if not results:
        raise InputError(f"no seed of this is in {str(store.folder)!r}; run it without --no-run.")
    first = configs[0]
    title = f"{first.dataset}, {results[0]['domains']} domains an iteration"
    pictures = draw(lambda: tracking_figure(results, title), store.folder / "tracking")
    words = f"{view.table(results).text()}\n\n{view.words(results)} Saved in {store.folder}."
    if missing := len(configs) - len(results):
        words += f"\n{missing} of {len(configs)} seeds are missing."
    show({"results": results, "summary": view.summary(results)}, words, given, pictures)


def _plan(given: Any) -> list[RunConfig]:
    from shoal.paper.tracking import plan

    asked = {"meta_lr": given.meta_lr, "inner_state": given.inner_state}
    warm = values([f"w={given.warm_start}"], "--warm-start")["w"] if given.warm_start else None
    return plan(
        given.dataset,
        given.seeds,
        preset=given.preset,
        steps=given.steps,
        data_options=data_options(given),
        model=given.model,
        model_options=values(given.model_set, "--model-set"),
        optimizer=given.optimizer,
        lr=given.lr,
        batch_size=given.batch_size,
        domains_per_step=given.domains_per_step,
        settings={name: value for name, value in asked.items() if value is not None},
        warm_start=int(warm) if isinstance(warm, float) and warm > 1 else warm,
        precision=given.precision,
        weights=given.weights,
        eval_limit=given.eval_limit,
    )


def _tracked(configs: list[RunConfig], store: TrackStore, given: Any) -> list[Result]:
    from shoal.paper.tracking import track_all
    from shoal.training.stopping import Interrupted

    terminal, at = sys.stderr.isatty(), dict[int, str]()
    missing = sum(store.find(c) is None for c in configs)
    if missing:
        kept = f", {len(configs) - missing} kept from before" if missing < len(configs) else ""
        print(f"{missing} seed{'s' * (missing > 1)} to do{kept}.", file=sys.stderr, flush=True)

    def tell(config: RunConfig, step: int, note: str) -> None:
        at[config.seed] = f"seed {config.seed} {100 * step // config.steps}%"
        if terminal:
            clear_line(sys.stderr)
            sys.stderr.write(" · ".join(at.values()))
            sys.stderr.flush()

    def done(result: Result) -> None:
        at.pop(result["config"]["seed"], None)
        if terminal:
            clear_line(sys.stderr)
        name = store.path_of(result).stem.replace("-", " ")
        print(f"{name}: done ({result['seconds']:.0f} s)", file=sys.stderr, flush=True)

    how = {"workers": given.workers}
    options = {"device": given.device, "jobs": given.jobs, "how": how, "tell": tell, "done": done}
    try:
        return track_all(configs, store, every=given.every, **options)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", None) or signal.SIGINT
        finished = sum(store.find(c) is not None for c in configs)
        raise Interrupted(
            f"stopped; {finished} of {len(configs)} seeds are finished and kept in {store.folder}. "
            "The same command goes on from there.",
            number,
        ) from stop
