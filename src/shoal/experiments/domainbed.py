"""Sweeps that DomainBed itself has run, read for the same selection and tables.

A sweep is a folder with one sub-folder a run. In it ``results.jsonl`` has a line of JSON for each checkpoint,
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
    """Why a run is left out."""


def read(folder: str | Path) -> tuple[Sweep, list[str]]:
    """The finished runs of a sweep, and what was left out, each with the reason.

    Runs that are not finished, or of which a line cannot be read, count as missing. What should be there is
    every draw and trial of every algorithm for whatever is left out in some run on the dataset.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give the output folder of a DomainBed sweep.")
    paths = sorted(folder.glob(f"*/{RESULTS}"))
    if not paths:
        raise InputError(f"{str(folder)!r} holds no DomainBed run: no folder in it has a {RESULTS}.")
    runs: dict[Key, Run] = {}
    begun: dict[Key, str] = {}
    troubles = []
    for path in paths:
        name = path.parent.name
        try:
            lines = _lines(path, begun)
            run = _run(lines)
            if run.key in runs:
                raise Unreadable(f"the same run as {begun[run.key]!r}, which is used")
            if not (path.parent / DONE).exists():
                raise Unreadable(f"not finished: there is no file {DONE!r}")
            runs[run.key], begun[run.key] = run, name
        except Unreadable as why:
            troubles.append(f"{name}: {why}.")
    return Sweep(_planned(begun), runs), troubles


def _lines(path: Path, begun: dict[Key, str]) -> list[dict[str, Any]]:
    """The checkpoints; what was ``begun`` is noted even where a later line is broken."""
    found: list[dict[str, Any]] = []
    try:
        text = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{RESULTS} cannot be read ({error})") from error
    for number, line in enumerate(text, 1):
        try:
            content = parse_json(line)
            key = _key(content["args"])
            step = int(content["step"])
        except (ValueError, KeyError, TypeError) as error:
            last = number == len(text)
            what = "the last line is cut off" if last else f"line {number} is not a checkpoint"
            raise Unreadable(f"{what} ({type(error).__name__}: {error})") from error
        begun.setdefault(key, path.parent.name)
        found.append({"key": key, "step": step, "scores": content})
    if not found:
        raise Unreadable(f"{RESULTS} is empty")
    return found


def _key(args: Mapping[str, Any]) -> Key:
    dataset, algorithm = str(args["dataset"]), str(args["algorithm"])
    names = tuple(sorted(_environment(dataset, int(number)) for number in args["test_envs"]))
    return Key(dataset, algorithm, names, int(args["trial_seed"]), int(args["hparams_seed"]))


def _environment(dataset: str, number: int) -> str:
    names = ENVIRONMENTS.get(dataset, ())
    return names[number] if number < len(names) else f"env{number}"


def _places(dataset: str, names: Sequence[str]) -> tuple[int, list[int]]:
    """By which what is left out is put in DomainBed's order, single domains first."""
    known = list(ENVIRONMENTS.get(dataset, ()))
    places = [known.index(n) if n in known else int(n.removeprefix("env")) for n in names]
    return len(names), sorted(places)


def _run(lines: Sequence[Mapping[str, Any]]) -> Run:
    key = lines[0]["key"]
    if any(line["key"] != key for line in lines):
        raise Unreadable("its lines are of different runs")
    points = {line["step"]: _point(key, line) for line in lines}  # of a run begun anew, the later line
    if not all(_complete(p, next(iter(points.values())), key) for p in points.values()):
        raise Unreadable("a checkpoint lacks accuracies")
    return Run(key, tuple(points[step] for step in sorted(points)))


def _point(key: Key, line: Mapping[str, Any]) -> Point:
    scores = line["scores"]

    def splits(which: str) -> dict[str, float]:
        numbers = itertools.takewhile(lambda n: f"env{n}_{which}_acc" in scores, itertools.count())
        return {_environment(key.dataset, n): float(scores[f"env{n}_{which}_acc"]) for n in numbers}

    return Point(line["step"], splits("in"), splits("out"))


def _complete(point: Point, first: Point, key: Key) -> bool:
    names = set(first.inside)
    return names == set(point.inside) == set(point.outside) and names > set(key.left_out)


def _planned(begun: Iterable[Key]) -> tuple[Key, ...]:
    """Every draw and trial of every algorithm for whatever is left out in some run on the dataset."""
    found: list[Key] = []
    begun = sorted(begun)
    for dataset in dict.fromkeys(k.dataset for k in begun):
        own = [k for k in begun if k.dataset == dataset]
        every = itertools.product(
            dict.fromkeys(k.algorithm for k in own),
            sorted({k.left_out for k in own}, key=lambda names: _places(dataset, names)),
            sorted({k.trial for k in own}),
            sorted({k.draw for k in own}),
        )
        found += [Key(dataset, *parts) for parts in every]
    return tuple(found)
