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
    """The runs of a sweep, and what is not whole or not used, each with the reason.

    A run that is not finished counts with the checkpoints that it has, as in DomainBed's
    ``collect_results``; one of which a line cannot be read, but for a last one that is cut off, is missing.
    What should be there is every hyperparameter and trial seed of every algorithm, for every domain of the
    dataset and whatever else some run held out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; specify the output folder of a DomainBed sweep.")
    paths = sorted(folder.glob(f"*/{RESULTS}"))
    if not paths:
        raise InputError(f"{str(folder)!r} contains no DomainBed run: no folder in it has a {RESULTS}.")
    runs: dict[Key, Run] = {}
    begun: dict[Key, str] = {}
    problems = []
    for path in paths:
        name = path.parent.name
        try:
            run, whole = _run(path, begun)
            if run.key in runs:
                raise Unreadable(f"the same run as {begun[run.key]!r}, which is used")
            runs[run.key], begun[run.key] = run, name
            if not whole or not (path.parent / DONE).exists():
                why = f"there is no file {DONE!r}" if whole else "the last line is truncated"
                last = max(point.step for point in run.points)
                problems.append(f"{name}: not finished: {why}; it is used up to step {last:,}.")
        except Unreadable as why:
            problems.append(f"{name}: {why}.")
    return Sweep(_planned(begun, runs), runs, by_domainbed=True), problems


def _run(path: Path, begun: dict[Key, str]) -> tuple[Run, bool]:
    """The run, and whether all lines could be read; what was ``begun`` is noted even where a line is broken.

    A step that is there twice, of a run that was begun anew, is there twice: so DomainBed reads it.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{RESULTS} cannot be read ({error})") from error
    if not lines:
        raise Unreadable(f"{RESULTS} is empty")
    keys: list[Key] = []
    points: list[Point] = []
    for number, line in enumerate(lines, 1):
        try:
            content = parse_json(line)
            keys.append(_key(content["args"]))
            step = int(content["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and points and isinstance(error, ValueError):
                break
            what = f"line {number} is not a checkpoint"
            raise Unreadable(f"{what} ({type(error).__name__}: {error})") from error
        begun.setdefault(keys[-1], path.parent.name)
        points.append(_point(keys[0].dataset, step, content))
    if set(keys) != {keys[0]}:
        raise Unreadable("its lines are of different runs")
    names = set(points[0].inside)
    complete = (names == set(p.inside) == set(p.outside) for p in points)
    if not (names > set(keys[0].left_out) and all(complete)):
        raise Unreadable("a checkpoint lacks accuracies")
    return Run(keys[0], tuple(points)), len(points) == len(lines)


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


def _planned(begun: Iterable[Key], runs: Mapping[Key, Run]) -> tuple[Key, ...]:
    """Every run of a complete sweep, what is held out in DomainBed's order, single domains first."""
    found: list[Key] = []
    begun = sorted(begun)
    for dataset in dict.fromkeys(k.dataset for k in begun):
        known = list(ENVIRONMENTS.get(dataset, ()))

        def place(names: Sequence[str], known: list[str] = known) -> tuple[int, list[int]]:
            numbers = (known.index(n) if n in known else int(n.removeprefix("env")) for n in names)
            return len(names), sorted(numbers)

        own = [k for k in begun if k.dataset == dataset]
        domains = {(name,) for k in own if k in runs for name in runs[k].points[0].inside}
        every = itertools.product(
            dict.fromkeys(k.algorithm for k in own),
            sorted({k.left_out for k in own} | domains, key=place),
            sorted({k.trial for k in own}),
            sorted({k.draw for k in own}),
        )
        found += [Key(dataset, *parts) for parts in every]
    return tuple(found)
