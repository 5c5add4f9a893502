"""`shoal reproduce`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.commands import tables
from shoal.commands.arguments import add_device, add_running, count, make_folder
from shoal.commands.showing import draw, run_all, samples, show

SUMMARY = "Repeat an experiment of the paper, beside the paper's numbers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: shoal reproduce linear. Each experiment has its own --help."
    what = parser.add_subparsers(title="experiments", metavar="WHAT", required=True)
    for name, (summary, options, action) in EXPERIMENTS.items():
        own = what.add_parser(
            name, help=summary, description=f"{summary}.", formatter_class=parser.formatter_class
        )
        own.add_argument(
            "--out", type=Path, default=Path("shoal-reproduce"), metavar="DIR", help="(default: %(default)s)"
        )
        own.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        options(own)
        own.set_defaults(what=name, action=action)


def run(given: Any) -> None:
    make_folder(given.out)
    given.action(given)


def _figure_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=count, default=5, metavar="N", help="seeds 0 to N−1 (default: 5)")
    parser.add_argument(
        "--numbers",
        type=count,
        nargs="+",
        metavar="N",
        help="of domains (default: 5, 10, 15, 20, 30, 40 and 50)",
    )
    parser.add_argument(
        "--passes", type=count, help="minibatches a run (default: 16,000 for N=10, 10,000 for 50, else 9,600)"
    )
    parser.add_argument("--size", type=int, default=64, help="of images, 64 or 32 (default: 64)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these parts, such as Adam")
    parser.add_argument("--no-run", action="store_true", help="only show the runs that are there")
    add_running(parser)


def _linear(given: Any) -> None:
    from shoal.bench.experiments import linear
    from shoal.files import write_atomically
    from shoal.report import linear as view
    from shoal.report.plots import linear_figure

    results: list[dict[str, Any]] = []
    jobs = [(row, decay) for decay in linear.DECAYS for row in linear.ROWS]
    for number, (row, decay) in enumerate(jobs):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K[{number}/{len(jobs)}] {row.label}, weight decay {decay:g}")
            sys.stderr.flush()
        results.append(linear.follow(row, decay).to_dict())
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    printed = linear.printed_accuracies()
    write_atomically(given.out / "linear.json", json.dumps(results).encode())
    path, ends = view.tables(results, linear.EARLY)
    pictures = []
    for decay in (linear.DECAYS[0], linear.DECAYS[-2]):
        shown = {r["row"]["label"]: r for r in results if r["weight_decay"] == decay}
        name = "linear" if decay == 0 else f"linear-decay-{decay:g}".replace(".", "_")
        pictures += draw(partial(linear_figure, shown, decay), given.out / name)
    text = (
        f"Without weight decay (train/test accuracy in percent):\n\n{path.text()}\n\n"
        f"At step {results[0]['steps'][-1]}, with weight decay:\n\n{ends.text()}\n\n"
        f"{view.reading(results, printed)}"
    )
    show({"results": results, "printed": printed}, text, given, pictures)


def _cdsprites(given: Any) -> None:
    from shoal.bench.experiments import cdsprites
    from shoal.bench.record import Store
    from shoal.errors import check_names
    from shoal.files import write_atomically
    from shoal.report import cdsprites as view
    from shoal.report.plots import samples_figure

    parts = cdsprites.figure(given.numbers or cdsprites.NUMBERS, range(given.seeds), given.passes, given.size)
    if given.parts:
        check_names("part", given.parts, parts)
        parts = {k: v for k, v in parts.items() if k in given.parts}
    every = [c for configs in parts.values() for c in configs]
    store = Store(given.out / "cdsprites")
    found = store.found(every) if given.no_run else run_all(every, store, given)
    records = {r.config.identity: r for r in found}
    entries = view.rows(
        {k: [records[c.identity] for c in v if c.identity in records] for k, v in parts.items()}
    )
    missing = [
        f"{c.name} ({part}), N={c.data_options['domains']}, seed {c.seed}"
        for part, configs in parts.items()
        for c in configs
        if c.identity not in records
    ]
    table = view.table(entries)
    write_atomically(given.out / "cdsprites.md", f"{table.markdown()}\n".encode())
    pictures = []
    if {"Adam", "IDGM"} & set(parts):
        pictures = draw(lambda: view.figure(entries), given.out / "cdsprites")
    pictures += draw(
        lambda: samples_figure(samples({"domains": 10, "size": given.size})), given.out / "cdsprites-samples"
    )
    devices = sorted({r.environment["device"] for r in records.values()})
    text = (
        f"{table.text()}\n\nAccuracy in percent, mean ± standard deviation over {given.seeds} seeds, "
        f"on {', '.join(devices) or 'no device'}.\n"
        'Validation is drawn like the test domain, so "selected" is oracle-like; "last" is the honest column.'
    )
    if missing:
        text += f"\n{len(missing)} of {len(every)} runs are missing: {'; '.join(missing)}."
    show({"rows": entries, "missing": missing}, text, given, pictures)


def _theorem(given: Any) -> None:
    from shoal.bench.experiments.theorem import check_theorem
    from shoal.files import write_atomically
    from shoal.report.plots import theorem_figure
    from shoal.report.tables import Table

    results = [check_theorem(domains).to_dict() for domains in (2, 3, 4)]
    table = Table(["domains S", "orders", "1 − cos at α=0.1", "1 − cos at α=0.0001", "slope (theorem: 2)"])
    for r, orders in zip(results, (2, 6, 24), strict=True):
        gaps: Any = r["one_minus_cos"]
        table.add(r["domains"], orders, f"{gaps[0]:.1e}", f"{gaps[-1]:.1e}", f"{r['slope']:.3f}")
    write_atomically(given.out / "theorem.json", json.dumps(results).encode())
    pictures = draw(lambda: theorem_figure(results), given.out / "theorem")
    text = (
        f"{table.text()}\n\nAs α falls, what Fish adds to plain training turns towards the gradient of the\n"
        "mean inner product: the angle falls with α, so 1 − cos with α², as the theorem says."
    )
    show({"results": results}, text, given, pictures)


def _cost_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks", nargs="+", metavar="NAME", help="sprite-cnn, resnet50 (default: both, with timm)"
    )
    parser.add_argument("--rounds", type=count, default=15, metavar="N", help="(default: %(default)s)")
    add_device(parser)


def _cost(given: Any) -> None:
    from shoal.bench.experiments import cost
    from shoal.errors import check_names
    from shoal.files import write_atomically
    from shoal.models import backbones
    from shoal.report.tables import Table

    names = given.networks or [n for n in cost.NETWORKS if n == "sprite-cnn" or backbones.known(n)]
    check_names("network", names, cost.NETWORKS)

    def tell(text: str) -> None:
        print(f"{text} …", file=sys.stderr, flush=True)

    found = cost.measure(names, given.device, given.rounds, tell)
    write_atomically(given.out / "cost.json", json.dumps(found).encode())
    table = Table(["network", "how", "method", "ms a step", "of Fish's", "of S plain steps"])
    for row in found["rows"]:
        ratios = (f"{row[r]:.2f} ×" for r in ("ratio_to_fish", "ratio_to_erm"))
        table.add(row["network"], row["how"], row["method"], f"{row['milliseconds']:.2f}", *ratios)
    text = (
        f"{table.text()}\n\nMedians over {given.rounds} rounds on {found['environment']['device']}; "
        "every step takes the same examples.\n"
        "The paper says that direct gradient matching takes about ten times as long as Fish."
    )
    show(found, text, given, [])


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


EXPERIMENTS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[Any], None]]] = {
    "linear": ("the linear example, step by step", _nothing, _linear),
    "cdsprites": ("accuracy against the number of domains; meant for a GPU", _figure_options, _cdsprites),
    "cost": ("what direct gradient matching costs beside Fish", _cost_options, _cost),
    "theorem": ("that Fish's direction is that of gradient matching, by enumeration", _nothing, _theorem),
    "grouping": ("Fish, Fish on random groups, ERM", tables.add_grouping, tables.grouping),
    "wilds": ("the table of WILDS", tables.add_wilds, tables.wilds),
    "warm-start": ("how long ERM trains before Fish, on WILDS", tables.add_ablation, tables.wilds),
    "rates": ("Fish's α with α·ε kept constant, on WILDS", tables.add_ablation, tables.wilds),
    "meta-steps": ("Fish with N = 5, 10, 20 domains a step, on WILDS", tables.add_ablation, tables.wilds),
    "smoothfish": ("SmoothFish's γ from 0 to 1, on WILDS", tables.add_ablation, tables.wilds),
}
"""By name: what it is, its options, what it does."""
