"""Image files on disk: which there are, of which domain and class; how published datasets lay them out."""

from __future__ import annotations

import os
import re
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.folders import SAY_WHERE, roots
from shoal.errors import InputError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
LEFT_BEHIND = ("thumbs.db", "desktop.ini")  # by file managers; and hidden files
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "images")
"""Folders that are called so hold parts of a dataset, and no places that it comes from."""
SHAPE = "the layout is folder/domain/class/image"


@dataclass(frozen=True)
class FileList:
    """Files of a domain and a class each, in flat arrays: a path costs its letters and 16 bytes.

    File ``i`` is ``letters[offsets[i]:offsets[i + 1]]`` below ``root``, of class ``labels[i]`` and domain
    ``groups[i]``. Processes that are forked share the arrays.
    """

    root: str
    letters: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int32]
    groups: NDArray[np.int32]
    classes: tuple[str, ...]
    domains: tuple[str, ...]

    @classmethod
    def of(cls, root: str | Path, rows: Iterable[tuple[str, str, str]]) -> FileList:
        """From (path below ``root``, domain, class); domains in order of appearance, classes sorted."""
        labels, groups = array("i"), array("i")
        classes: dict[str, int] = {}
        domains: dict[str, int] = {}

        def paths() -> Iterator[str]:
            for path, domain, label in rows:
                labels.append(classes.setdefault(label, len(classes)))
                groups.append(domains.setdefault(domain, len(domains)))
                yield path

        letters, ends = packed(paths())
        names = in_order(classes)
        number = np.empty(len(names), np.int32)
        number[[classes[name] for name in names]] = np.arange(len(names))
        codes = number[np.array(labels, np.int32)]
        return cls(str(root), letters, ends, codes, np.array(groups, np.int32), tuple(names), tuple(domains))

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The path below ``root``."""
        return os.fsdecode(self.letters[self.offsets[index] : self.offsets[index + 1]].tobytes())

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.name(index))

    def counts(self) -> NDArray[np.int64]:
        """How many files there are, (domains, classes)."""
        shape = len(self.domains), len(self.classes)
        both = self.groups.astype(np.int64) * shape[1] + self.labels
        return np.bincount(both, minlength=shape[0] * shape[1]).reshape(shape)

    def missing(self) -> list[tuple[str, str]]:
        """Every domain and class of which there is no file."""
        return [(self.domains[d], self.classes[c]) for d, c in np.argwhere(self.counts() == 0).tolist()]

    def indices(self) -> dict[str, NDArray[np.int64]]:
        """The files of each domain."""
        return {name: np.flatnonzero(self.groups == d) for d, name in enumerate(self.domains)}


def packed(paths: Iterable[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The letters of all paths, and where each begins."""
    letters, ends = bytearray(), array("q", [0])
    for path in paths:
        letters += os.fsencode(path)
        ends.append(len(letters))
    return np.frombuffer(bytes(letters), np.uint8), np.array(ends, np.int64)


def domain_folders(root: str | Path) -> list[str]:
    """The folders in ``root``, each a domain; refused where their names are those of splits."""
    names = subfolders(root)
    splits = [n for n in names if n.lower() in SPLIT_NAMES]
    if len(splits) < 2 and (not names or len(splits) < len(names)):
        return names
    place, shown = Path(root), ", ".join(f"{n}/" for n in splits)
    deeper = [n for n in splits if any(subfolders(place / n / d) for d in subfolders(place / n))]
    advice = f"give {str(place / deeper[0])!r}" if deeper else f"{SHAPE}, and domains are not in it"
    raise InputError(
        f"{shown} in {str(root)!r} look like splits, not domains: {advice}. "
        "To use them as domains, set splits_are_domains in data_options."
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted; numbers by their value."""
    names = list(names)
    return sorted(names, key=int) if all(re.fullmatch(r"-?[0-9]{1,18}", n) for n in names) else sorted(names)


def read_tree(root: str | Path, domains: Mapping[str, Sequence[str]] | None = None) -> FileList:
    """The images in ``root/domain/class``, sorted by name in each folder.

    ``domains`` maps a domain to its folders below ``root``, each of which has classes in it; by default every
    folder is a domain. What is not an image, and a class that some domain lacks, is told in a warning.
    """
    if domains is None:
        domains = {name: [name] for name in subfolders(root)}
    others: list[str] = []
    files = FileList.of(root, _rows(os.fspath(root), domains, others))
    for name in domains:
        if name not in files.domains:
            where = os.path.join(root, domains[name][0])
            raise InputError(f"there is no image in the class folders of {str(where)!r}; {SHAPE}.")
    if not len(files):
        raise InputError(f"there is no image in {str(root)!r}; {SHAPE}.")
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{others[0]!r}{more} ignored: image extensions are {', '.join(ENDINGS)}.", stacklevel=2
        )
    warn_missing(files)
    return files


def warn_missing(files: FileList) -> None:
    """Says which domain lacks a class: a model cannot learn it from there."""
    if lacking := files.missing():
        shown = ", ".join(f"{label!r} in {domain!r}" for domain, label in lacking[:3])
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        warnings.warn(f"there is no image of class {shown}{more}.", stacklevel=3)


def _rows(
    root: str, domains: Mapping[str, Sequence[str]], others: list[str]
) -> Iterator[tuple[str, str, str]]:
    for domain, folders in domains.items():
        for folder in folders:
            for label in subfolders(os.path.join(root, folder)):
                below = os.path.join(folder, label)
                for name in image_names(root, below, others):
                    yield f"{below}{os.sep}{name}", domain, label


def subfolders(place: str | Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    try:
        with os.scandir(place) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise InputError(f"the folder {str(place)!r} cannot be read: {error.strerror}.") from error


def image_names(root: str, below: str, others: list[str]) -> list[str]:
    """The names of the images in a folder, sorted; ``others`` gets what else is there."""
    place, result = os.path.join(root, below), []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.lower() in LEFT_BEHIND:
                    continue
                if entry.name.lower().endswith(ENDINGS) and entry.is_file():
                    result.append(entry.name)
                else:
                    others.append(os.path.join(below, entry.name))
    except OSError as error:
        raise InputError(f"the folder {place!r} cannot be read: {error.strerror}.") from error
    return sorted(result)


@dataclass(frozen=True)
class Layout:
    """Where a published dataset's images are, and how many there should be."""

    title: str
    name: str
    """What it is called on the command line."""
    folders: tuple[str, ...]
    """Names its own folder goes by; case, spaces, _ and - do not count."""
    domains: Mapping[str, tuple[str, ...]]
    """The domains, each with the other names its folder goes by."""
    classes: int
    counts: Mapping[str, int]
    """Images of each domain."""
    source: str
    """Who counted."""
    page: str
    """Where it can be got by hand."""
    other_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What others counted, by who they are."""
    by_class: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parts: tuple[tuple[str, ...], ...] = ()
    """Folders that may lie between a domain and its classes; the first of these that are there are read."""

    @property
    def how(self) -> str:
        """How it can be got."""
        return f"with `shoal data get {self.name}`, or by hand from {self.page}"

    def find(self, folder: str | Path | None) -> tuple[Path, dict[str, list[str]]]:
        """The dataset's folder, and the folders below it of every domain that is there.

        ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA``.
        """
        top = roots(f"the images of {self.title}", folder, self.folders[0], self.name)
        places = [place for root in top for place in self._places(root, 2)]
        result = [(place, self._domains(place)) for place in dict.fromkeys(places)]
        if not any(domains for _, domains in result):
            where = f"{str(folder)!r}" if folder is not None else "the data folder"
            wanted = ", ".join(self.domains)
            raise InputError(
                f"{self.title} is not in {where}: there are no folders {wanted}. {SAY_WHERE} to look; "
                f"it can be obtained {self.how}."
            )
        return max(result, key=lambda one: len(one[1]))

    def read(self, folder: str | Path | None) -> FileList:
        """Its images; all domains must be there."""
        root, result = self.find(folder)
        lacking = [name for name in self.domains if name not in result]
        if lacking:
            raise InputError(
                f"{self.title} in {str(root)!r} has no folder for {', '.join(lacking)}; "
                f"it can be obtained {self.how}."
            )
        return read_tree(root, result)

    def _places(self, root: Path, depth: int) -> Iterator[Path]:
        if not root.is_dir():
            return
        yield root
        names = {plain(name) for name in self.folders}
        for name in subfolders(root) if depth else ():
            if plain(name) in names:
                yield from self._places(root / name, depth - 1)

    def _domains(self, place: Path) -> dict[str, list[str]]:
        there = {plain(name): name for name in subfolders(place)}
        result = {}
        for domain, others in self.domains.items():
            name = next((there[n] for n in map(plain, (domain, *others)) if n in there), None)
            if name is not None:
                result[domain] = self._with_parts(place, name)
        return result

    def _with_parts(self, place: Path, name: str) -> list[str]:
        there = subfolders(place / name) if self.parts else []
        for group in self.parts:
            if inside := [part for part in group if part in there]:
                return [os.path.join(name, part) for part in inside]
        return [name]

    def differences(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Who counted what is there: for each source, the domains in which it counted otherwise."""
        sources = {self.source: self.counts, **self.other_counts}
        return {
            who: {d: published[d] for d in published if counts.get(d, 0) != published[d]}
            for who, published in sources.items()
        }


def plain(name: str) -> str:
    """A folder's name without case, spaces and signs."""
    return re.sub(r"[\W_]", "", name.casefold())
