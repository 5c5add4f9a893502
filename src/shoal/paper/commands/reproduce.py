"""`shoal reproduce`: an experiment of the paper, or with --all every claim (see :mod:`.claims`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.cli import arguments as cli
from shoal.cli.showing import draw, show
from shoal.errors import InputError, check_names
from shoal.paper.commands import claims, run_all
from shoal.terminal import clear_line

OUT = Path("shoal-reproduce")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Examples: shoal reproduce linear; shoal reproduce --all --from ~/gpu/shoal-reproduce. "
        "Each experiment has its own --help."
    )
    before = len(parser._actions)
    claims.add_arguments(parser, OUT)
    own = parser._actions[before:]
    for action in own:  # else defaults of the experiments' options would take their place
        if action.nargs != 0 and not action.choices:
            action.metavar = action.metavar or action.dest.upper()
        action.dest = f"all_{action.dest}"
    parser.set_defaults(what=None, of_all={a.dest: (a.option_strings[0], a.default) for a in own})
    what = parser.add_subparsers(title="experiments", metavar="WHAT")
    for name, (summary, options, _) in EXPERIMENTS.items():
        experiment = what.add_parser(
            name, help=summary, description=f"{summary}.", formatter_class=parser.formatter_class
        )
        experiment.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="(default: %(default)s)")
        experiment.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        options(experiment)
        experiment.set_defaults(what=name)


def run(args: Any) -> int:
    if args.what is None and not args.all_all:
        names = ", ".join(EXPERIMENTS)
        raise InputError(f"say which experiment ({names}), or --all to judge every claim of the paper.")
    typed = [option for dest, (option, default) in args.of_all.items() if getattr(args, dest) != default]
    if args.what is not None and typed:
        where = f"or after its name where it has it: {args.what}."
        raise InputError(f"{typed[0]} goes without an experiment, {where}")
    action = claims.run
    if args.what is not None:
        action = EXPERIMENTS[args.what][2]
    else:
        vars(args).update({dest.removeprefix("all_"): getattr(args, dest) for dest in args.of_all})
    cli.make_folder(args.out)
    return action(args)


def _write(path: Path, content: Any) -> None:
    from shoal.files import write_atomically

    text = content if isinstance(content, str) else json.dumps(content)
    write_atomically(path, text.encode())


def _environment() -> dict[str, str]:
    import torch

    from shoal.training.summary import environment

    return environment(torch.device("cpu"))


def _no_options(parser: argparse.ArgumentParser) -> None:
    pass


def _linear(args: Any) -> int:
    from shoal.paper import linear
    from shoal.paper.views.figures import linear_figure

    results: list[dict[str, Any]] = []
    jobs = [(row, decay) for decay in linear.DECAYS for row in linear.ROWS]
    for number, (row, decay) in enumerate(jobs):
        if sys.stderr.isatty():
            clear_line(sys.stderr)
            sys.stderr.write(f"[{number}/{len(jobs)}] {row.label}, weight decay {decay:g}")
            sys.stderr.flush()
        results.append(linear.follow(row, decay).to_dict())
    if sys.stderr.isatty():
        clear_line(sys.stderr)
    printed = linear.printed_accuracies()
    _write(args.out / "linear.json", results)
    _write(args.out / "linear-about.json", {"printed": printed, "environment": _environment()})
    path, ends = linear.tables(results, linear.EARLY)
    figures = []
    for decay in (linear.DECAYS[0], linear.DECAYS[-2]):
        shown = {r["row"]["label"]: r for r in results if r["weight_decay"] == decay}
        name = "linear" if decay == 0 else f"linear-decay-{decay:g}".replace(".", "_")
        figures += draw(partial(linear_figure, shown, decay), args.out / name)
    text = (
        f"Without weight decay (train/test accuracy in percent):\n\n{path.text()}\n\n"
        f"At step {results[0]['steps'][-1]}, with weight decay:\n\n{ends.text()}\n\n"
        f"{linear.reading(results, printed)}"
    )
    show({"results": results, "printed": printed}, text, args, figures)
    return 0


def _theorem(args: Any) -> int:
    from shoal.paper.theorem import check_theorem
    from shoal.paper.views.figures import theorem_figure
    from shoal.report.tables import Table

    results = [check_theorem(domains)._asdict() for domains in (2, 3, 4)]
    table = Table(["domains S", "orders", "1 − cos at α=0.1", "1 − cos at α=0.0001", "slope (theorem: 2)"])
    for r, orders in zip(results, (2, 6, 24), strict=True):
        first, *_, last = r["one_minus_cos"]
        table.add(r["domains"], orders, f"{first:.1e}", f"{last:.1e}", f"{r['slope']:.3f}")
    _write(args.out / "theorem.json", results)
    _write(args.out / "theorem-about.json", {"environment": _environment()})
    figures = draw(lambda: theorem_figure(results), args.out / "theorem")
    text = (
        f"{table.text()}\n\nAs α falls, what Fish adds to plain training turns towards the gradient of the\n"
        "mean inner product: the angle falls with α, so 1 − cos with α², as the theorem says."
    )
    show({"results": results}, text, args, figures)
    return 0


def _cost_options(parser: argparse.ArgumentParser) -> None:
    which = "sprite-cnn, resnet50 (default: both, with timm)"
    parser.add_argument("--networks", nargs="+", metavar="NAME", help=which)
    parser.add_argument("--rounds", type=cli.count, default=15, metavar="N", help="(default: %(default)s)")
    cli.add_device(parser)


def _cost(args: Any) -> int:
    from shoal.models import backbones
    from shoal.paper import cost

    names = args.networks or [n for n in cost.NETWORKS if n == "sprite-cnn" or backbones.known(n)]
    check_names("network", names, cost.NETWORKS)

    def tell(text: str) -> None:
        print(f"{text} …", file=sys.stderr, flush=True)

    measured = cost.measure(names, args.device, args.rounds, tell)
    _write(args.out / "cost.json", measured)
    text = (
        f"{cost.table(measured['rows']).text()}\n\nMedians over {args.rounds} rounds on "
        f"{measured['environment']['device']}; every step takes the same examples.\n"
        "The paper says that direct gradient matching takes about ten times as long as Fish."
    )
    show(measured, text, args)
    return 0


def _cdsprites_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=cli.few, default=5, metavar="N", help="seeds 0 to N−1 (default: 5)")
    numbers = "of domains (default: 5, 10, 15, 20, 30, 40 and 50)"
    add("--numbers", type=cli.count, nargs="+", metavar="N", help=numbers)
    add("--passes", type=cli.count, help="minibatches per run (default: 12,000)")
    add("--size", type=cli.count, choices=(64, 32), default=64, help="of images (default: 64)")
    add("--parts", nargs="+", metavar="PART", help="only these parts, such as Adam")
    add("--no-run", action="store_true", help="only show the runs that are there")
    cli.add_execution(parser)


def _cdsprites(args: Any) -> int:
    from shoal.experiments.execute import Store
    from shoal.paper import cdsprites
    from shoal.paper.views.figures import cdsprites_figure, samples_figure

    numbers = args.numbers or cdsprites.NUMBERS
    parts = cdsprites.figure(numbers, range(args.seeds), args.passes, args.size, args.parts)
    every = [c for configs in parts.values() for c in configs]
    store = Store(args.out / "cdsprites")
    there_already = {r.config.identity for r in cdsprites.with_shorter(every, store.all())}
    _, failed = run_all(
        [c for c in cdsprites.longest(every) if c.identity not in there_already], store.folder, args
    )
    found = [r for r in store.all() if r.status != "failed"]
    there = {k: cdsprites.with_shorter(v, found) for k, v in parts.items()}
    known = {r.config.identity for records in there.values() for r in records}
    gone = {k: [c for c in v if c.identity not in known] for k, v in parts.items()}
    entries, missing = cdsprites.rows(there), cdsprites.listed(gone)
    table = cdsprites.table(entries)
    _write(args.out / "cdsprites.md", f"{table.markdown()}\n")
    figures = []
    if set(cdsprites.OF_THE_PAPER) & set(parts):
        setting = cdsprites.setting(args.passes or cdsprites.PASSES, args.size)
        train, test = (cdsprites.series(entries, split) for split in ("train", "test"))
        figures += draw(lambda: cdsprites_figure(train, test, setting), args.out / "cdsprites")
    samples = {"domains": 10, "size": args.size}
    figures += draw(lambda: samples_figure(cdsprites.samples(samples)), args.out / "cdsprites-samples")
    devices = ", ".join(sorted({r.environment["device"] for r in found})) or "no device"
    text = (
        f"{table.text()}\n\n{cdsprites.setting(args.passes or cdsprites.PASSES, args.size)}\n"
        f"Accuracy in percent, mean ± standard deviation over seeds, "
        f"on {devices}.\n"
        'Validation is drawn like the test domain, so "selected" is oracle-like; "last" is the honest column.'
    )
    if missing:
        count = sum(map(len, gone.values()))
        text += f"\n{count} of {len(every)} runs are missing: {'; '.join(missing)}."
    content = {"rows": entries, "missing": missing, "failed": failed}
    show(content, "\n".join([text, *failed]), args, figures)
    return 1 if failed else 0


# Tables with one column per dataset


def _grouping_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Datasets that are not there are said to be missing, and the others go on. "
        "Example: shoal reproduce grouping --datasets cdsprites pacs --data-dir ~/data"
    )
    add = parser.add_argument_group("on CdSprites").add_argument
    add("--passes", type=cli.count, help="minibatches per run (default: 12,000)")
    add("--size", type=cli.count, choices=(64, 32), default=64, help="of images (default: 64)")
    add = parser.add_argument_group("on DomainBed's datasets").add_argument
    add("--steps", type=cli.count, default=5001, help="(default: %(default)s)")
    add("--weights", metavar="FILE", help="start from these, not from timm's")
    add("--search", type=cli.count, default=1, metavar="K", help="trials of hyperparameters (default: 1)")
    _table_options(parser)


def _wilds_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="only these (default: all)")
    _ablation_options(parser)


def _ablation_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "To try it: shoal reproduce wilds --datasets camelyon17 --data-dir ~/data --epochs 0.01 "
        "--model small-cnn --seeds 1"
    )
    _table_options(parser)


def _table_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--datasets", nargs="+", metavar="NAME", help="only these (default: the paper's)")
    add("--seeds", type=cli.few, metavar="N", help="(default: as many as the paper has)")
    add("--model", help="(default: each recipe's own)")
    cli.add_data(parser, "the datasets'")
    add("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    add("--no-run", action="store_true", help="only show the runs that are there")
    add("--workers", type=cli.workers, default=0, metavar="N", help="processes that read examples")
    add = parser.add_argument_group("on WILDS").add_argument
    presets, meaning = ("paper", "authors-code"), "the paper's settings or its authors' program's"
    add("--preset", default="paper", choices=presets, help=meaning)
    board = "as many runs as WILDS' leaderboard asks for: 10, 5 or 3 seeds, PovertyMap's five folds"
    add("--leaderboard", action="store_true", help=board)
    add("--epochs", type=cli.positive, help="(default: each recipe's own)")
    add("--lr", type=cli.rate, help="α (default: each recipe's own)")
    add("--batch-size", type=cli.count, metavar="B", help="(default: each recipe's own)")
    limit = "examples of a split to evaluate on (default: all)"
    add("--eval-limit", type=cli.count, metavar="N", help=limit)
    cli.add_data_dir(parser)
    cli.add_execution(parser)


@cli.in_data_dir
def _grouping(args: Any) -> int:
    from shoal.data.sets import registry
    from shoal.paper import recipes, tables

    for name in args.datasets or ():
        registry.module(name)
    names = ("seeds", "steps", "passes", "size", "model", "weights", "preset")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    data, changes = cli.data_options(args), _changes(args)
    settings = tables.Settings(trials=args.search, data=data, changes=changes, **options)
    text = (
        "Held-out domains. DomainBed's datasets: every domain held out in turn, the step chosen by "
        "training-domain\nvalidation; CdSprites: the last step. "
    )
    columns = tables.grouping(settings, args.datasets)
    chosen = _selection([c for c in columns if c.dataset in recipes.datasets()])
    text += f"WILDS: {chosen}." if chosen else ""
    return _table(columns, text, args, ("Fish", "Fish, RG"))


@cli.in_data_dir
def _wilds(args: Any) -> int:
    from shoal.paper import recipes, tables

    names = args.datasets or recipes.datasets()
    check_names("dataset of WILDS:", names, recipes.datasets())
    algorithms = getattr(args, "algorithms", None) or recipes.ALGORITHMS
    check_names("algorithm", algorithms, recipes.ALGORITHMS)
    which = "main" if args.what == "wilds" else args.what
    columns = tables.wilds(which, names, args.preset, _changes(args), algorithms)
    text = f"Test split, preset {args.preset}. Steps: {_selection(columns) or 'no runs'}."
    return _table(columns, text, args)


def _selection(columns: Any) -> str:
    """By dataset, how the step is chosen whose weights are tested."""
    ways = {
        c.dataset: "the last" if c.runs[0].select == "last" else f"best on validation by {c.runs[0].metric}"
        for c in columns
        if c.runs
    }
    return ", ".join(f"{dataset} {way}" for dataset, way in ways.items())


def _changes(args: Any) -> Any:
    from inspect import signature

    from shoal.data.sets import registry
    from shoal.paper.recipes import Changes, datasets

    names, options = args.datasets or datasets(), cli.data_options(args)
    known = {option for name in names for option in signature(registry.module(name).load).parameters}
    check_names(f"option of {', '.join(names)}:", options, sorted(known))
    same = {
        name: getattr(args, name)
        for name in ("epochs", "model", "lr", "eval_limit", "precision", "seeds", "leaderboard")
    }
    return Changes(data_options=options, batch=args.batch_size, **same)


def _table(columns: Any, words: str, args: Any, control: tuple[str, str] | None = None) -> int:
    """Runs what a table is made of, and shows it with the paper's numbers beneath ours."""
    from shoal.paper import recipes, tables

    every = list({c.identity: c for column in columns for c in column.runs}.values())
    how = {"workers": args.workers, "predictions": True}
    records, failed = run_all(every, args.out / args.what, args, how)
    entries = [column.entry(records) for column in columns]
    table = tables.table(entries)
    by_recipe = [c.dataset for c in columns if c.dataset in recipes.datasets()]
    differs = recipes.differences(by_recipe, args.preset) if by_recipe else []
    source = {"paper": "the paper", "authors-code": "the authors' program"}[args.preset]
    beneath = [f"What differs from {source}, or is left open there:", *(f"- {line}" for line in differs)]
    beneath = beneath if differs else []
    markdown = "\n".join([table.markdown(), "", *beneath])
    for ending, text in {"md": markdown, "tex": table.latex(), "csv": table.csv()}.items():
        _write(args.out / f"{args.what}.{ending}", f"{text}\n")
    lines = [f"{words} Mean ± standard deviation over seeds.", *tables.gaps(entries)]
    lines += tables.gain(entries, *control) if control else []
    text = f"{table.text()}\n\n" + "\n".join([*lines, *beneath, *failed])
    show({"columns": entries, "differs": differs, "failed": failed}, text, args)
    return 1 if failed else 0


Options = Callable[[argparse.ArgumentParser], None]
EXPERIMENTS: dict[str, tuple[str, Options, Callable[[Any], int]]] = {
    "linear": ("the linear example, step by step", _no_options, _linear),
    "cdsprites": ("accuracy against the number of domains; meant for a GPU", _cdsprites_options, _cdsprites),
    "cost": ("what direct gradient matching costs beside Fish", _cost_options, _cost),
    "theorem": ("that Fish's direction is that of gradient matching, by enumeration", _no_options, _theorem),
    "grouping": ("Fish, Fish on random groups, ERM", _grouping_options, _grouping),
    "wilds": ("the table of WILDS", _wilds_options, _wilds),
    "warm-start": ("how long ERM trains before Fish, on WILDS", _ablation_options, _wilds),
    "rates": ("Fish's α with α·ε kept constant, on WILDS", _ablation_options, _wilds),
    "meta-steps": ("Fish with N = 5, 10, 20 domains per step, on WILDS", _ablation_options, _wilds),
    "smoothfish": ("SmoothFish's γ from 0 to 1, on WILDS", _ablation_options, _wilds),
}
"""By name: what it is, its options, what it does."""
