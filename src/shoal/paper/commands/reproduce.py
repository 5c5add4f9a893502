"""`shoal reproduce`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from shoal.cli import sweep
from shoal.cli.arguments import (
    Parser,
    add_device,
    add_running,
    count,
    few,
    in_data_dir,
    make_folder,
    positive,
)
from shoal.cli.showing import draw, run_all, samples, show
from shoal.errors import InputError
from shoal.paper.commands import tables, track
from shoal.terminal import clear_line

if TYPE_CHECKING:
    from shoal.paper.evidence import Records
    from shoal.paper.views.evidence import Item

SUMMARY = "Repeat an experiment of the paper, beside the paper's numbers, or judge all it says."
OUT = Path("shoal-reproduce")
OF_ALL = {
    "all": "--all",
    "run_too": "--run",
    "sources": "--from",
    "budget": "--budget",
    "all_out": "--out",
    "all_data_dir": "--data-dir",
    "all_device": "--device",
}
"""What is typed before an experiment's name belongs to none."""
LONGEST = 1_000_000
"""Minutes of a budget."""
SHOWN = 10
"""Notes that the terminal shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Examples: shoal reproduce linear; shoal reproduce --all --from ~/gpu/shoal-reproduce. "
        "Each experiment has its own --help."
    )
    _add_all(parser)
    what = parser.add_subparsers(title="experiments", metavar="WHAT")
    for name, (summary, options, action) in EXPERIMENTS.items():
        own = what.add_parser(
            name, help=summary, description=f"{summary}.", formatter_class=parser.formatter_class
        )
        own.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="(default: %(default)s)")
        own.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        options(own)
        own.set_defaults(what=name, action=action)


def _add_all(parser: argparse.ArgumentParser) -> None:
    every = parser.add_argument_group(
        "every claim of the paper", "Reads the records that are there and writes one page, evidence.html."
    )
    every.add_argument("--all", action="store_true", help="judge every claim; runs the cheap experiments")
    every.add_argument(
        "--run",
        dest="run_too",  # what is called `run` is the command
        action="store_true",
        help="also the expensive ones, and tables of datasets that are there",
    )
    every.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders with more records, such as those a GPU made",
    )
    every.add_argument(
        "--budget",
        type=positive,
        metavar="MINUTES",
        help="stop running after so long; what is finished counts",
    )
    every.add_argument("--out", type=Path, dest="all_out", metavar="DIR", help=f"(default: {OUT})")
    every.add_argument(
        "--data-dir",
        type=Path,
        dest="all_data_dir",
        metavar="DIR",
        help="where datasets are (default: $SHOAL_DATA)",
    )
    every.add_argument(
        "--device",
        dest="all_device",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1 … (default: cuda where there is one)",
    )
    parser.set_defaults(what=None, action=_every_claim)


def run(given: Any) -> None:
    if given.what is None and not given.all:
        raise InputError(
            f"say which experiment ({', '.join(EXPERIMENTS)}), or --all to judge every claim of the paper."
        )
    if given.what is None:
        given.out, given.device, given.data_dir = given.all_out or OUT, given.all_device, given.all_data_dir
    elif early := [option for name, option in OF_ALL.items() if getattr(given, name)]:
        raise InputError(
            f"{early[0]} goes without an experiment, or after its name where it has it: {given.what}."
        )
    make_folder(given.out)
    given.action(given)


def _figure_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=few, default=5, metavar="N", help="seeds 0 to N−1 (default: 5)")
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
    parser.add_argument("--size", type=count, choices=(64, 32), default=64, help="of images (default: 64)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these parts, such as Adam")
    parser.add_argument("--no-run", action="store_true", help="only show the runs that are there")
    add_running(parser)


def _linear(given: Any) -> None:
    from shoal.files import write_atomically
    from shoal.paper import linear
    from shoal.paper.views import linear as view
    from shoal.paper.views.plots import linear_figure

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
    write_atomically(given.out / "linear.json", json.dumps(results).encode())
    about = {"printed": printed, "environment": _environment()}
    write_atomically(given.out / "linear-about.json", json.dumps(about).encode())
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
    from shoal.errors import check_names
    from shoal.experiments.record import Store
    from shoal.files import write_atomically
    from shoal.paper import cdsprites
    from shoal.paper.views import cdsprites as view
    from shoal.paper.views.plots import samples_figure

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
    gone = {k: [c for c in v if c.identity not in records] for k, v in parts.items()}
    missing = view.listed(gone)
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
        count = sum(map(len, gone.values()))
        text += f"\n{count} of {len(every)} runs are missing: {'; '.join(missing)}."
    show({"rows": entries, "missing": missing}, text, given, pictures)


def _theorem(given: Any) -> None:
    from shoal.files import write_atomically
    from shoal.paper.theorem import check_theorem
    from shoal.paper.views.plots import theorem_figure
    from shoal.report.tables import Table

    results = [check_theorem(domains).to_dict() for domains in (2, 3, 4)]
    table = Table(["domains S", "orders", "1 − cos at α=0.1", "1 − cos at α=0.0001", "slope (theorem: 2)"])
    for r, orders in zip(results, (2, 6, 24), strict=True):
        gaps: Any = r["one_minus_cos"]
        table.add(r["domains"], orders, f"{gaps[0]:.1e}", f"{gaps[-1]:.1e}", f"{r['slope']:.3f}")
    write_atomically(given.out / "theorem.json", json.dumps(results).encode())
    write_atomically(given.out / "theorem-about.json", json.dumps({"environment": _environment()}).encode())
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
    from shoal.errors import check_names
    from shoal.files import write_atomically
    from shoal.models import backbones
    from shoal.paper import cost
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


def _environment() -> dict[str, str]:
    import torch

    from shoal.training.summary import environment

    return environment(torch.device("cpu"))


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


# Every claim


@in_data_dir
def _every_claim(given: Any) -> None:
    from shoal.paper import evidence
    from shoal.paper.views import evidence as view

    if given.budget is not None and not 0 < given.budget <= LONGEST:
        raise InputError(f"--budget must be above 0 minutes and at most {LONGEST:,}, got {given.budget:g}.")
    folders = [given.out, *given.sources]
    records, failed = evidence.collect(folders), dict[str, str]()
    jobs = list(_jobs(records, given))
    if jobs:
        failed = _done(jobs, given.budget)
        records = evidence.collect(folders)
    items = _judged(records, failed, given.out)
    content = view.Content(
        items,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        sources=[str(folder) for folder in folders],
        notes=[*(f"{name}: {why}" for name, why in failed.items()), *records.broken],
    )
    written = _written(content, given.out)
    text = f"{view.terminal(items).text()}\n\n{view.summed_up(items)} Written: {', '.join(written)}."
    text += "".join(f"\n{note}" for note in content.notes[:SHOWN])
    if len(content.notes) > SHOWN:
        text += f"\n{len(content.notes) - SHOWN} more such notes are on the page."
    show(
        {"claims": [item.to_dict() for item in items], "notes": list(content.notes), "files": written},
        text,
        given,
    )


def _judged(records: Records, failed: Mapping[str, str], out: Path) -> list[Item]:
    """Twice where records are missing: what stands in the way is looked for only then."""
    import torch

    from shoal.paper import evidence
    from shoal.paper.views.evidence import Item

    claims = evidence.every_claim()
    first = [evidence.judge(claim, records) for claim in claims]
    missing = {
        c.needs
        for c, found in zip(claims, first, strict=True)
        if found.lacks or found.verdict == evidence.NOT_RUN
    }
    gpu = torch.cuda.is_available()
    why = evidence.obstacles(sorted(missing), _loads, gpu) if missing else {}
    why |= {name: f"It was begun and did not come to its end: {text}" for name, text in failed.items()}
    commands = evidence.commands(shlex.quote(str(out)))
    return [Item(c, evidence.judge(c, records, why), commands[c.needs]) for c in claims]


@lru_cache(maxsize=32)
def _loads(name: str) -> None:
    from shoal.data.sets import load

    load(name)


Job = tuple[str, Any, list[str]]
"""An experiment's name, the command's module and what is typed after it."""


def _jobs(records: Records, given: Any) -> Iterator[Job]:
    """What to run: the cheap ones if they are missing, with --run whatever else is not complete."""
    from shoal.paper import evidence

    out, this = ["--out", str(given.out)], sys.modules[__name__]
    device = ["--device", given.device] if given.device else []
    for name in evidence.CHEAP:
        if not (records.first(f"{name}.json") and records.first(f"{name}-about.json")):
            yield name, this, [name, *out]
    if not given.run_too:
        return
    if not records.first("cost.json"):
        yield "cost", this, ["cost", *out, *device]
    seeds, usual = evidence.tracked(records, "cdsprites")
    if not usual or len(seeds) < evidence.TRACKED:
        yield "track", track, ["cdsprites", "--out", str(given.out / "track"), *device]
    if _brought(records, given.out / "cdsprites"):
        yield "cdsprites", this, ["cdsprites", *out, *device]
    for name, wanted in evidence.datasets().items():
        there = [dataset for dataset in wanted if _there(dataset)]
        if not there:
            continue
        if name == "track-wilds":
            for dataset in there:
                where = ["--preset", "paper", "--out", str(given.out / "track")]
                yield f"track {dataset}", track, [dataset, *where, *device]
        elif name == "domainbed":
            where = ["--seeds", "5", "--out", str(given.out / "domainbed")]
            yield name, sweep, [*there, "--algorithms", *evidence.swept(), *where, *device]
        else:
            yield name, this, [name, "--datasets", *there, *out, *device]


def _brought(records: Records, folder: Path) -> bool:
    """Copies the runs that are elsewhere to where the experiment looks for them; whether some are missing."""
    found = records.sprites
    every = [c.identity for configs in found.parts.values() for c in configs] if found.usual else []
    missing = [identity for identity in every if identity not in found.known]
    for identity in every if missing else ():
        path = folder / f"{identity}.json"
        if identity in found.known and not path.exists():
            folder.mkdir(exist_ok=True)
            shutil.copy2(found.known[identity].path, path)
    return bool(missing) or not every


def _there(dataset: str) -> bool:
    try:
        _loads(dataset)
    except (InputError, OSError, ImportError):
        return False
    return True


def _done(jobs: Iterable[Job], minutes: float | None) -> dict[str, str]:
    """Runs one after the other; by name, what was wrong with those that did not come to their end."""
    import torch  # noqa: F401 (every job needs it, and the time it takes is not theirs)

    failed: dict[str, str] = {}
    with _Alarm(minutes) as alarm:
        for name, module, arguments in jobs:
            if alarm.rung:
                failed[name] = "the budget was spent before it began."
                continue
            print(f"{name}: {_typed(module, arguments)}", file=sys.stderr, flush=True)
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the page will say it
                    alarm.during(partial(_call, module, arguments))
            except InputError as error:
                failed[name] = str(error)
            except KeyboardInterrupt:
                if not alarm.rung:
                    raise
                failed[name] = f"stopped after {minutes:g} minutes, as asked; what is finished is kept."
    return failed


def _typed(module: Any, arguments: Sequence[str]) -> str:
    return shlex.join(["shoal", module.__name__.rpartition(".")[2], *arguments])


def _call(module: Any, arguments: Sequence[str]) -> None:
    """A command, as if it had been typed."""
    parser = Parser(prog="shoal", formatter_class=argparse.HelpFormatter)
    parser.add_argument("--json", action="store_true")
    module.add_arguments(parser)
    module.run(parser.parse_args(list(arguments)))


class _Alarm:
    """Interrupts a job as Ctrl-C would after so many minutes. Outside of jobs it only sets ``rung``.

    A module that is being imported is imported to its end: half of torch cannot be used, nor imported again.
    """

    AGAIN = 0.02
    """Seconds after which an import is looked at again."""

    def __init__(self, minutes: float | None) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.minutes = minutes if main and hasattr(signal, "setitimer") else None
        self.rung = self.at_work = False
        self.before: Any = None

    def __enter__(self) -> Self:
        if self.minutes is not None:
            self.before = signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, 60 * self.minutes)
        return self

    def __exit__(self, *error: object) -> None:
        if self.minutes is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.before)

    def during(self, job: Callable[[], None]) -> None:
        self.at_work = True
        try:
            if self.rung:  # since it was last looked at
                raise KeyboardInterrupt
            job()
        finally:
            self.at_work = False

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.at_work and self._imports(frame):
            signal.setitimer(signal.ITIMER_REAL, self.AGAIN)
            return
        self.rung = True
        if self.at_work:
            raise KeyboardInterrupt

    def _imports(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not _Alarm.during.__code__:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False


def _written(content: Any, out: Path) -> list[str]:
    """The page, and the same as Markdown and as data, which need nothing installed."""
    from shoal.files import write_atomically
    from shoal.paper.views import evidence as view

    files = {
        "evidence.json": lambda: json.dumps([item.to_dict() for item in content.items], ensure_ascii=False),
        "evidence.md": lambda: view.markdown(content),
        "evidence.html": lambda: view.render(content),
    }
    written = []
    for name, make in files.items():
        try:
            write_atomically(out / name, make().encode(errors="replace"))
            written.append(str(out / name))
        except InputError as error:
            print(f"shoal: no {name}: {error}", file=sys.stderr)
    return written
