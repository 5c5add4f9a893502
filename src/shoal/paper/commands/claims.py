"""`shoal reproduce --all`: every claim of the paper, judged by the records that are there."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import arguments as cli
from shoal.cli.showing import show
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.paper.evidence.records import Records
    from shoal.paper.views.evidence import Content, Item

LONGEST = 1_000_000
"""Minutes of a budget."""
SHOWN = 10
"""Notes that the terminal shows."""
FAILED = "some of its runs failed."


def add_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    group = parser.add_argument_group(
        "all claims of the paper", "Check every claim against the available records and write evidence.html."
    )
    add = group.add_argument
    add("--all", action="store_true", help="check every claim, and run the cheap experiments")
    expensive = "with --all: also run the expensive experiments, on the datasets that are available"
    add("--run", dest="expensive", action="store_true", help=expensive)  # `run` is the command
    more = "folders with further records, such as from a GPU machine"
    add("--from", dest="sources", type=Path, nargs="+", default=[], metavar="DIR", help=more)
    budget = "time budget in minutes; finished runs are used"
    add("--budget", type=cli.positive, metavar="MINUTES", help=budget)
    add(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help="folder for runs and results (default: %(default)s)",
    )
    cli.add_data_dir(group)
    cli.add_execution(group)


@cli.in_data_dir
def run(args: Any) -> int:
    from shoal.paper.evidence.records import collect
    from shoal.paper.views import evidence as view

    if args.budget is not None and not 0 < args.budget <= LONGEST:
        raise InputError(f"--budget must be above 0 minutes and at most {LONGEST:,}, got {args.budget:g}.")
    folders = [args.out, *args.sources]
    records, failed = collect(folders), dict[str, str]()
    if jobs := list(_jobs(records, args)):
        failed = do_jobs(jobs, args.budget)
        records = collect(folders)
    items = _judged(records, failed, args.out)
    content = view.Content(
        items,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        sources=[str(folder) for folder in folders],
        notes=[*(f"{name}: {why}" for name, why in failed.items()), *records.broken],
    )
    written = _written(content, args.out)
    lines = [f"{view.summed_up(items)} Saved: {', '.join(written)}.", *content.notes[:SHOWN]]
    if len(content.notes) > SHOWN:
        lines.append(f"{len(content.notes) - SHOWN} more notes are in the report.")
    claims = [item.to_dict() for item in items]
    text = f"{view.terminal(items).text()}\n\n" + "\n".join(lines)
    show({"claims": claims, "notes": list(content.notes), "files": written}, text, args)
    return 1 if FAILED in failed.values() else 0


def _judged(records: Records, failed: Mapping[str, str], out: Path) -> list[Item]:
    """Twice where records are missing: what stands in the way is looked for only then."""
    import torch

    from shoal.paper.evidence import experiments
    from shoal.paper.evidence.rules import every_claim, judge
    from shoal.paper.evidence.verdicts import NOT_RUN
    from shoal.paper.views.evidence import Item

    claims = every_claim()
    first = [(claim, judge(claim, records)) for claim in claims]
    missing = {c.needs for c, judged in first if judged.lacks or judged.verdict == NOT_RUN}
    why = experiments.obstacles(sorted(missing), _load, torch.cuda.is_available())
    why |= {name: f"It was started and did not finish: {text}" for name, text in failed.items()}
    commands = experiments.commands(shlex.quote(str(out)))
    return [Item(c, judge(c, records, why), commands[c.needs]) for c in claims]


@cache
def _load(name: str) -> None:
    from shoal.data.sets import load

    load(name)


def _there(dataset: str) -> bool:
    try:
        _load(dataset)
    except (InputError, OSError, ImportError):
        return False
    return True


Job = tuple[str, str, list[str]]
"""An experiment's name, the command and what is typed after it."""


def _jobs(records: Records, args: Any) -> Iterator[Job]:
    """What to run: the cheap ones if they are missing, with --run whatever else is not complete."""
    from shoal.paper.evidence import experiments

    out, tracked = ["--out", str(args.out)], ["--out", str(args.out / "track")]
    names = ("device", "jobs", "engine", "address", "gpus_per_run", "cpus_per_run")
    asked = {name: getattr(args, name) for name in names}
    typed = {f"--{k.replace('_', '-')}": str(v) for k, v in asked.items() if v not in (None, "local")}
    how = [word for pair in typed.items() for word in pair]
    for name in experiments.CHEAP:
        if not (records.first(f"{name}.json") and records.first(f"{name}-about.json")):
            yield name, "reproduce", [name, *out]
    if not args.expensive:
        return
    if not records.first("cost.json"):
        yield "cost", "reproduce", ["cost", *out, *(["--device", args.device] if args.device else [])]
    seeds, usual = records.tracked("cdsprites")
    if not usual or len(seeds) < experiments.TRACKED:
        yield "track", "track", ["cdsprites", *tracked, *how]
    if _brought(records, args.out / "cdsprites"):
        yield "cdsprites", "reproduce", ["cdsprites", *out, *how]
    for name, wanted in experiments.datasets().items():
        there = [dataset for dataset in wanted if _there(dataset)]
        if name == "track-wilds":
            for dataset in there:
                yield f"track {dataset}", "track", [dataset, "--preset", "paper", *tracked, *how]
        elif there and name == "domainbed":
            where = ["--seeds", "5", "--out", str(args.out / "domainbed")]
            yield name, "sweep", [*there, "--algorithms", *experiments.swept(), *where, *how]
        elif there:
            yield name, "reproduce", [name, "--datasets", *there, *out, *how]


def _brought(records: Records, folder: Path) -> bool:
    """Copies the runs that are elsewhere to where the experiment looks for them; whether some are missing."""
    sprites = records.sprites
    every = [] if sprites.unusual else [c for configs in sprites.parts.values() for c in configs]
    kept = {c.identity: sprites.known[c.identity].path for c in every if c.identity in sprites.known}
    missing = len(kept) < len({c.identity for c in every})
    for identity, path in kept.items() if missing else ():
        folder.mkdir(exist_ok=True)
        if not (folder / f"{identity}.json").exists():
            shutil.copy2(path, folder / f"{identity}.json")
    return missing or not every


def do_jobs(jobs: Iterable[Job], minutes: float | None) -> dict[str, str]:
    """Runs one after the other; by name, what was wrong with those that did not come to their end."""
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    failed: dict[str, str] = {}
    for name, command, words in jobs:
        left = until - time.monotonic()
        if left <= 0:
            failed[name] = "the time budget was used up before it started."
            continue
        print(f"{name}: {shlex.join(['shoal', command, *words])}", file=sys.stderr, flush=True)
        if error := call(command, words, left):
            if time.monotonic() >= until:
                error = f"stopped after {minutes:g} minutes, the time budget; finished runs are saved."
            failed[name] = error
    return failed


def call(command: str, words: list[str], seconds: float) -> str:
    """A command in a process of its own, ended after so long; what was wrong, if it did not end well.

    What it prints is left out (the page will say it), but for its progress and errors.
    """
    last = ""
    arguments = [sys.executable, "-m", "shoal", command, *words]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(arguments, **pipes) as process:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), process.terminate)
        timer.start()
        try:
            for line in process.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
        finally:
            timer.cancel()
    if process.returncode == 1:
        return FAILED
    return (last.removeprefix("shoal: ") or "it was killed.") if process.returncode else ""


def _written(content: Content, out: Path) -> list[str]:
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
