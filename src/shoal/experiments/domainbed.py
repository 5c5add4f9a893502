"""Sweeps that DomainBed itself has run, read for the same selection and tables.

A sweep is a folder with one sub-folder per run. Its ``results.jsonl`` has a line of JSON per checkpoint,
with ``args`` (``dataset``, ``algorithm``, ``test_envs``, ``trial_seed``, ``hparams_seed``), ``step``, and
``env0_in_acc``, ``env0_out_acc`` and so on; a file ``done`` says that the run came to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.experiments.selection import Key, Point, Run, Sweep
from shoal.files import parse_json, read_text

RESULTS, DONE = "results.jsonl", "done"

ENVIRONMENTS: Mapping[str, Sequence[str]] = {
    "ColoredMNIST": ("+90%", "+80%", "-90%"),
    "RotatedMNIST": ("0°", "15°", "30°", "45°", "60°", "75°"),
    "VLCS": ("C", "L", "S", "V"),
    "PACS": ("A", "C", "P", "S"),
    "OfficeHome": ("A", "C", "P", "R"),
    "TerraIncognita": ("L100", "L38", "L43", "L46"),
    "DomainNet": ("clip", "info", "paint", "quick", "real", "sketch"),
}
"""What DomainBed calls the domains that its files number."""


class Unreadable(ValueError):
    """Why a run is not used."""


def read(folder: str | Path) -> tuple[Sweep, list[str]]:
    """The finished runs of a sweep, and what is not used, each with the reason.

    Runs that are not finished, or of which a line cannot be read, count as missing. What should be there is
    every hyperparameter and trial seed of every algorithm, for whatever some run on the dataset held out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give the output folder of a DomainBed sweep.")
    paths = sorted(folder.glob(f"*/{RESULTS}"))
    if not paths:
        raise InputError(f"{str(folder)!r} holds no DomainBed run: no folder in it has a {RESULTS}.")
    runs: dict[Key, Run] = {}
    begun: dict[Key, str] = {}
    problems = []
    for path in paths:
        name = path.parent.name
        try:
            run = _run(path, begun)
            if run.key in runs:
                raise Unreadable(f"the same run as {begun[run.key]!r}, which is used")
            if not (path.parent / DONE).exists():
                raise Unreadable(f"not finished: there is no file {DONE!r}")
            runs[run.key], begun[run.key] = run, name
        except Unreadable as why:
            problems.append(f"{name}: {why}.")
    return Sweep(_planned(begun), runs), problems


def _run(path: Path, begun: dict[Key, str]) -> Run:
    """What was ``begun`` is noted even where a later line is broken."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{RESULTS} cannot be read ({error})") from error
    if not lines:
        raise Unreadable(f"{RESULTS} is empty")
    keys: list[Key] = []
    points: dict[int, Point] = {}
    for number, line in enumerate(lines, 1):
        try:
            content = parse_json(line)
            keys.append(_key(content["args"]))
            step = int(content["step"])
        except (ValueError, KeyError, TypeError) as error:
            last = number == len(lines)
            what = "the last line is cut off" if last else f"line {number} is not a checkpoint"
            raise Unreadable(f"{what} ({type(error).__name__}: {error})") from error
        begun.setdefault(keys[-1], path.parent.name)
        points[step] = _point(keys[0].dataset, step, content)  # of a run begun anew, the later line
    if set(keys) != {keys[0]}:
        raise Unreadable("its lines are of different runs")
    names = set(next(iter(points.values())).inside)
    complete = (names == set(p.inside) == set(p.outside) for p in points.values())
    if not (names > set(keys[0].left_out) and all(complete)):
        raise Unreadable("a checkpoint lacks accuracies")
    return Run(keys[0], tuple(points[step] for step in sorted(points)))


def _key(args: Mapping[str, Any]) -> Key:
    dataset, algorithm = str(args["dataset"]), str(args["algorithm"])
    names = tuple(sorted(_environment(dataset, int(number)) for number in args["test_envs"]))
    return Key(dataset, algorithm, names, int(args["trial_seed"]), int(args["hparams_seed"]))


def _environment(dataset: str, number: int) -> str:
    names = ENVIRONMENTS.get(dataset, ())
    return names[number] if number < len(names) else f"env{number}"


def _point(dataset: str, step: int, scores: Mapping[str, Any]) -> Point:
    def splits(which: str) -> dict[str, float]:
        numbers = itertools.takewhile(lambda n: f"env{n}_{which}_acc" in scores, itertools.count())
        return {_environment(dataset, n): float(scores[f"env{n}_{which}_acc"]) for n in numbers}

    return Point(step, splits("in"), splits("out"))


def _planned(begun: Iterable[Key]) -> tuple[Key, ...]:
    """Every run of a complete sweep, what is held out in DomainBed's order, single domains first."""
    found: list[Key] = []
    begun = sorted(begun)
    for dataset in dict.fromkeys(k.dataset for k in begun):
        known = list(ENVIRONMENTS.get(dataset, ()))

        def place(names: Sequence[str], known: list[str] = known) -> tuple[int, list[int]]:
            numbers = (known.index(n) if n in known else int(n.removeprefix("env")) for n in names)
            return len(names), sorted(numbers)

        own = [k for k in begun if k.dataset == dataset]
        every = itertools.product(
            dict.fromkeys(k.algorithm for k in own),
            sorted({k.left_out for k in own}, key=place),
            sorted({k.trial for k in own}),
            sorted({k.draw for k in own}),
        )
        found += [Key(dataset, *parts) for parts in every]
    return tuple(found)
