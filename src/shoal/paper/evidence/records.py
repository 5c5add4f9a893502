"""Finding the records of experiments, those of earlier versions included."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import read_record
from shoal.experiments.store import record_files
from shoal.files import read_json
from shoal.paper import cdsprites, tracking

FILES = ("linear.json", "linear-about.json", "theorem.json", "theorem-about.json", "cost.json")
"""Records that are one file; ``about`` is what the other does not say of itself."""
TRACK = ("config", "fish", "erm", "scores", "iterations")
"""What a file of `shoal track` has that was written before its seeds were ordinary records."""
SEEDS = 5
"""Of the paper, on CdSprites: so many should be there, and more count where they are."""
DAMAGED = (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


class Kept(NamedTuple):
    """A record and the file it was read from."""

    content: Any
    path: Path
    written: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class Records:
    """All that was found."""

    runs: Sequence[Kept] = ()
    tracks: Sequence[Kept] = ()
    files: Mapping[str, Sequence[Kept]] = field(default_factory=dict)
    broken: Sequence[str] = ()
    diverged: Sequence[Path] = ()
    """Files of trackings that diverged."""

    @cached_property
    def sprites(self) -> Sprites:
        return find_sprites(self.runs)

    def first(self, name: str) -> Kept | None:
        return next(iter(self.files.get(name, ())), None)

    def lost_tracks(self, folder: Path) -> int:
        """How many seeds of the tracking in a folder diverged."""
        return sum(path.parent == folder for path in self.diverged)

    def tracked(self, dataset: str) -> tuple[list[Kept], bool]:
        """The seeds of one tracking of a dataset, and whether it is in the experiment's own setting."""
        groups: dict[Path, list[Kept]] = {}
        for kept in self.tracks:
            if kept.content["config"]["dataset"] == dataset:
                groups.setdefault(kept.path.parent, []).append(kept)
        ordered = sorted(groups.values(), key=lambda g: (_usual_track(g[0].content["config"]), len(g)))
        return (ordered[-1], _usual_track(ordered[-1][0].content["config"])) if ordered else ([], False)


def _usual_track(content: Mapping[str, Any]) -> bool:
    from shoal.paper import recipes

    config = RunConfig.from_dict(content)
    if config.dataset in recipes.datasets():
        models = {recipes.settings(config.dataset, p)["model"] for p in recipes.PRESETS}
        return config.model in models and not recipes.changed(config)
    return config.identity in {c.identity for c in tracking.plan(config.dataset, config.seed + 1)}


def collect(folders: Iterable[Path]) -> Records:
    """Every record in these folders and below; of a run that is in several of one name, the first.

    The name counts because tables share runs: Fish of one is a row of another under another label.
    """
    runs: dict[tuple[str, str], Kept] = {}
    tracks: dict[str, Kept] = {}
    files: dict[str, dict[Path, Kept]] = {}
    broken: list[str] = []
    diverged: list[Path] = []

    def read(path: Path) -> Any:
        try:
            return read_json(path)
        except DAMAGED as error:
            broken.append(f"{path}: {error}")
            return None

    def keep_track(content: Mapping[str, Any], path: Path) -> None:
        RunConfig.from_dict(content["config"])
        odd = [name for name in ("fish", "erm", "scores") if not isinstance(content[name], Mapping)]
        if odd:
            raise InputError(f"{odd[0]} is not what `shoal track` writes.")
        tracks.setdefault(json.dumps(content["config"], sort_keys=True, default=dict), _kept(content, path))

    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder {str(folder)!r} to read records from.")
        for path in [folder / name for name in sorted(record_files(folder))]:
            try:
                record = read_record(path)
                if tracking.is_tracked(record):
                    if record.status == "finished":
                        keep_track(tracking.result_of(record), path)
                    elif record.status == "diverged":
                        diverged.append(path)
                else:
                    runs.setdefault((record.config.identity, path.parent.name), _kept(record, path))
            except DAMAGED as error:
                broken.append(str(error) if str(path) in str(error) else f"{path}: {error}")
        for path in sorted(folder.rglob("seed-*.json")):
            content = read(path)
            if isinstance(content, Mapping) and set(TRACK) <= set(content):
                try:
                    keep_track(content, path)
                except DAMAGED as error:
                    broken.append(f"{path}: {error}")
        for name in FILES:
            for path in sorted(folder.rglob(name)):
                if (content := read(path)) is not None:
                    files.setdefault(name, {}).setdefault(path, _kept(content, path))
    every = {name: list(kept.values()) for name, kept in files.items()}
    return Records(list(runs.values()), list(tracks.values()), every, broken, diverged)


def _kept(content: Any, path: Path) -> Kept:
    return Kept(content, path, path.stat().st_mtime)


@dataclass(frozen=True)
class Sprites:
    """The runs of `shoal reproduce cdsprites`: those there should be, and those there are, by identity."""

    parts: Mapping[str, Sequence[RunConfig]]
    known: Mapping[str, Kept]
    unusual: str = ""
    """In what they differ from the setting of that command's defaults."""

    def runs(self, method: str, number: int, part: str | None = None) -> list[RunConfig]:
        """Those of a method with N domains; by default in the parts of the figure that are the paper's."""
        names = [part] if part else cdsprites.OF_THE_PAPER
        every = [c for name in names for c in self.parts.get(name, ())]
        return [c for c in every if c.name == method and c.data_options["domains"] == number]

    def kept(self, runs: Iterable[RunConfig]) -> list[Kept]:
        return [self.known[c.identity] for c in runs if c.identity in self.known]

    def values(self, runs: Iterable[RunConfig], split: str) -> list[float]:
        """In percent at the last step, of those that finished."""
        return list(self.by_seed(runs, split).values())

    def by_seed(self, runs: Iterable[RunConfig], split: str) -> dict[int, float]:
        records = cdsprites.scored(k.content for k in self.kept(runs))
        every = {r.config.seed: 100 * r.score(split, last=True) for r in records}
        return {seed: value for seed, value in every.items() if math.isfinite(value)}

    def diverged(self, runs: Iterable[RunConfig]) -> int:
        return sum(k.content.status == "diverged" for k in self.kept(runs))

    def accuracies(self, method: str, split: str) -> dict[int, list[float]]:
        """By N, as shares, for the figure."""
        each = {number: self.values(self.runs(method, number), split) for number in self.numbers}
        return {number: [v / 100 for v in values] for number, values in each.items() if values}

    @property
    def methods(self) -> list[str]:
        parts = (self.parts.get(part, ()) for part in cdsprites.OF_THE_PAPER)
        return list(dict.fromkeys(c.name for configs in parts for c in configs))

    @property
    def numbers(self) -> list[int]:
        return sorted({c.data_options["domains"] for c in self.parts.get("Adam", ())})


def _count(value: object) -> bool:
    return isinstance(value, int) and value > 0


def find_sprites(runs: Sequence[Kept]) -> Sprites:
    """In the experiment's own setting where there is any such run, else in the most frequent other one."""
    known = {
        k.content.config.identity: k
        for k in runs
        if k.content.config.dataset == "cdsprites" and _count(k.content.config.data_options.get("domains"))
    }
    contents = [k.content for k in known.values()]
    mine = [r.config for r in contents]
    sources = {cdsprites.but_for_length(k.content.config): k for k in known.values()}
    seeds = sorted({*range(SEEDS), *(c.seed for c in mine)})

    def planned(numbers: Sequence[int], passes: int | None, size: int) -> dict[str, list[RunConfig]] | None:
        """What there should be; ``None`` where nothing of it is there."""
        every = cdsprites.figure(numbers, seeds, passes, size)
        for record in cdsprites.with_shorter([c for cs in every.values() for c in cs], contents):
            source = sources[cdsprites.but_for_length(record.config)]
            known.setdefault(record.config.identity, source._replace(content=record))
        parts = {p: [c for c in cs if c.seed < SEEDS or c.identity in known] for p, cs in every.items()}
        return parts if any(c.identity in known for cs in parts.values() for c in cs) else None

    if usual := planned(cdsprites.NUMBERS, None, 64):
        return Sprites(usual, known)
    passes_of = {c.identity: c.steps * (c.domains_per_step or 1) for c in mine}
    others = Counter((passes_of[c.identity], c.data_options.get("size", 64)) for c in mine)
    for (passes, size), _ in others.most_common():
        numbers = sorted({c.data_options["domains"] for c in mine if passes_of[c.identity] == passes})
        try:
            parts = planned(numbers, passes, size)
        except InputError:
            continue
        if parts:
            return Sprites(parts, known, f"{size}×{size} pixels and {passes:,} passes per run")
    return Sprites(cdsprites.figure(cdsprites.NUMBERS, range(SEEDS)), {})
