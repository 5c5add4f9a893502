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
        "Examples:\n  shoal reproduce linear\n  shoal reproduce --all --from ~/gpu/shoal-reproduce\n\n"
        "See `shoal reproduce WHAT --help` for each experiment."
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
            name,
            help=summary[0].lower() + summary[1:],
            description=f"{summary}.",
            formatter_class=parser.formatter_class,
        )
        folder = "folder for runs and results (default: %(default)s)"
        experiment.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=folder)
        experiment.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON instead of tables"
        )
        options(experiment)
        experiment.set_defaults(what=name)


def run(args: Any) -> int:
    if args.what is None and not args.all_all:
        names = ", ".join(EXPERIMENTS)
        raise InputError(f"an experiment ({names}) or --all is required.")
    typed = [option for dest, (option, default) in args.of_all.items() if getattr(args, dest) != default]
    if args.what is not None and typed:
        where = f"and must come after its name if it has that option: {args.what}."
        raise InputError(f"{typed[0]} is an option of --all, {where}")
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
        f"{table.text()}\n\nAs α decreases, the difference between Fish and plain training approaches the "
        "direction of the\n"
        "gradient of the mean inner product: the angle scales with α and 1 − cos with α², as in the theorem."
    )
    show({"results": results}, text, args, figures)
    return 0


def _cost_options(parser: argparse.ArgumentParser) -> None:
    which = "networks: sprite-cnn, resnet50 (default: both if timm is installed)"
    parser.add_argument("--networks", nargs="+", metavar="NAME", help=which)
    parser.add_argument(
        "--rounds",
        type=cli.count,
        default=15,
        metavar="N",
        help="number of repetitions (default: %(default)s)",
    )
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
        f"{measured['environment']['device']}; every step uses the same examples.\n"
        "According to the paper, direct gradient matching takes about ten times as long as Fish."
    )
    show(measured, text, args)
    return 0


def _cdsprites_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=cli.few, default=5, metavar="N", help="number of seeds, starting at 0 (default: 5)")
    numbers = "numbers of training domains (default: 5, 10, 15, 20, 30, 40 and 50)"
    add("--numbers", type=cli.count, nargs="+", metavar="N", help=numbers)
    add("--passes", type=cli.count, help="number of minibatches per run (default: 12,000)")
    add("--size", type=cli.count, choices=(64, 32), default=64, help="image size (default: 64)")
    add(
        "--parts",
        nargs="+",
        metavar="PART",
        help="parts of the experiment to run, such as Adam (default: all)",
    )
    add("--no-run", action="store_true", help="start no runs and show the results of finished ones")
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
        'Validation is sampled like the test domain, so "selected" is oracle-like; use the column "last".'
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
        "Example:\n  shoal reproduce grouping --datasets cdsprites pacs --data-dir ~/data\n\n"
        "Datasets that are not available are reported as missing; the others are run."
    )
    add = parser.add_argument_group("on CdSprites").add_argument
    add("--passes", type=cli.count, help="number of minibatches per run (default: 12,000)")
    add("--size", type=cli.count, choices=(64, 32), default=64, help="image size (default: 64)")
    add = parser.add_argument_group("on DomainBed's datasets").add_argument
    add(
        "--steps",
        type=cli.count,
        default=5001,
        metavar="N",
        help="number of training steps per run (default: %(default)s)",
    )
    add("--weights", metavar="FILE", help="file of initial weights (default: those of timm)")
    add(
        "--search",
        type=cli.count,
        default=1,
        metavar="N",
        help="number of hyperparameter trials per seed (default: 1)",
    )
    _table_options(parser)


def _wilds_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="names of algorithms (default: all)")
    _ablation_options(parser)


def _ablation_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example, for a quick trial:\n"
        "  shoal reproduce wilds --datasets camelyon17 --epochs 0.01 --model small-cnn --seeds 1"
    )
    _table_options(parser)


def _table_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--datasets", nargs="+", metavar="NAME", help="names of datasets (default: those of the paper)")
    add(
        "--seeds", type=cli.few, metavar="N", help="number of seeds, starting at 0 (default: as in the paper)"
    )
    add("--model", help="name of a model (default: as in the preset)")
    cli.add_data(parser, "the datasets'")
    add("--precision", help="precision of the forward pass: fp32, bf16 or fp16 (default: fp32)")
    add("--no-run", action="store_true", help="start no runs and show the results of finished ones")
    add(
        "--workers",
        type=cli.workers,
        default=0,
        metavar="N",
        help="number of processes that load examples (default: 0)",
    )
    add = parser.add_argument_group("on WILDS").add_argument
    presets, meaning = (
        ("paper", "authors-code"),
        "hyperparameters of the paper or of its authors' code (default: paper)",
    )
    add("--preset", default="paper", choices=presets, help=meaning)
    board = "as many runs as the WILDS leaderboard requires: 10, 5 or 3 seeds; for PovertyMap, 5 folds"
    add("--leaderboard", action="store_true", help=board)
    add("--epochs", type=cli.positive, help="number of epochs (default: as in the preset)")
    add("--lr", type=cli.rate, help="learning rate α (default: as in the preset)")
    add(
        "--batch-size",
        type=cli.count,
        metavar="N",
        help="number of examples per batch (default: as in the preset)",
    )
    limit = "maximum number of examples per split to evaluate on, a random sample (default: all)"
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
        "Held-out domains. DomainBed's datasets: every domain held out in turn, the step selected by "
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
    source = {"paper": "the paper", "authors-code": "the authors' code"}[args.preset]
    beneath = [
        f"Differences from {source}, and what it does not specify:",
        *(f"- {line}" for line in differs),
    ]
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
    "linear": ("Train the linear example step by step", _no_options, _linear),
    "cdsprites": (
        "Measure accuracy as a function of the number of domains (GPU recommended)",
        _cdsprites_options,
        _cdsprites,
    ),
    "cost": ("Measure the cost of direct gradient matching relative to Fish", _cost_options, _cost),
    "theorem": (
        "Check numerically that Fish follows the direction of gradient matching",
        _no_options,
        _theorem,
    ),
    "grouping": ("Compare Fish, Fish with random grouping, and ERM", _grouping_options, _grouping),
    "wilds": ("Compare algorithms on WILDS", _wilds_options, _wilds),
    "warm-start": ("Vary the length of the ERM warm start of Fish on WILDS", _ablation_options, _wilds),
    "rates": ("Vary the learning rate α of Fish, with constant α·ε, on WILDS", _ablation_options, _wilds),
    "meta-steps": (
        "Vary the number of domains per step of Fish (5, 10, 20) on WILDS",
        _ablation_options,
        _wilds,
    ),
    "smoothfish": ("Vary γ of SmoothFish from 0 to 1 on WILDS", _ablation_options, _wilds),
}
"""By name: what it is, its options, what it does."""
