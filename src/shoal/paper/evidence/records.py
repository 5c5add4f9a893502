"""Finding the records of experiments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import read_record
from shoal.experiments.store import record_files
from shoal.files import read_json

if TYPE_CHECKING:
    from shoal.paper.evidence.sprites import Sprites

FILES = ("linear.json", "linear-about.json", "theorem.json", "theorem-about.json", "cost.json")
"""Records that are one file; ``about`` is what the other does not say of itself."""
TRACK = ("config", "fish", "erm", "scores", "iterations")
"""What a record of `shoal track` has."""


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

    @cached_property
    def sprites(self) -> Sprites:
        from shoal.paper.evidence.sprites import find_sprites

        return find_sprites(self.runs)

    def first(self, name: str) -> Kept | None:
        return next(iter(self.files.get(name, ())), None)


def collect(folders: Iterable[Path]) -> Records:
    """Every record in these folders and below; of a run that is in several of one name, the first.

    The name counts because tables share runs: Fish of one is a row of another under another label.
    """
    runs: dict[tuple[str, str], Kept] = {}
    tracks: dict[str, Kept] = {}
    files: dict[str, list[Kept]] = {}
    broken: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder {str(folder)!r} to read records from.")
        for name in sorted(record_files(folder)):
            path = folder / name
            try:
                record = read_record(path)
                runs.setdefault((record.config.identity, path.parent.name), _kept(record, path))
            except InputError as error:
                broken.append(str(error))  # which names the file
            except (OSError, LookupError, AttributeError, RecursionError) as error:
                broken.append(f"{path}: {error}")
        for path in sorted(folder.rglob("seed-*.json")):
            if (one := _read(path, TRACK, broken)) is not None and _is_track(one, broken):
                tracks.setdefault(json.dumps(one.content["config"], sort_keys=True), one)
        for name in FILES:
            for path in sorted(folder.rglob(name)):
                if (one := _read(path, (), broken)) is not None and one.path not in [
                    k.path for k in files.get(name, ())
                ]:
                    files.setdefault(name, []).append(one)
    return Records(list(runs.values()), list(tracks.values()), files, broken)


def _kept(content: Any, path: Path) -> Kept:
    return Kept(content, path, path.stat().st_mtime)


def _read(path: Path, keys: Sequence[str], broken: list[str]) -> Kept | None:
    try:
        content = read_json(path)
        if keys and not (isinstance(content, Mapping) and set(keys) <= set(content)):
            return None
        return _kept(content, path)
    except (OSError, ValueError, RecursionError) as error:
        broken.append(f"{path}: {error}")
        return None


def _is_track(one: Kept, broken: list[str]) -> bool:
    """Whether it can be judged at all: one file that cannot must not cost what the others show."""
    try:
        RunConfig.from_dict(one.content["config"])
    except (InputError, TypeError) as error:
        broken.append(f"{one.path}: {error}")
        return False
    odd = [name for name in ("fish", "erm", "scores") if not isinstance(one.content[name], Mapping)]
    if odd:
        broken.append(f"{one.path}: {odd[0]} is not what `shoal track` writes.")
    return not odd
