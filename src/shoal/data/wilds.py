"""What the datasets of WILDS share: where they lie, their tables, and how many examples were published.

Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
"""

from __future__ import annotations

import csv
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.augment import Box
from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.folders import SAY_WHERE, roots
from shoal.data.images import ImageFiles, Unreadable
from shoal.data.tree import FileList, subfolders
from shoal.errors import InputError, unknown_name
from shoal.files import check_regular, lines_of, open_text

HOME = "wilds"
PAGE = "https://wilds.stanford.edu/downloads"
SPLITS = {
    "train": "train",
    "id_val": "id_validation",
    "val": "validation",
    "id_test": "id_test",
    "test": "test",
}
"""What WILDS calls a split, and what we do."""
ROWS = 2**15  # of a table, taken at a time
FEW = 10_000  # strings of a column that are remembered, to keep equal ones once
CHUNK = 256  # files that a process looks at before it says so
LARGEST = 2.0**63  # whole number
ROW_NUMBER = ("", "Unnamed: 0")  # what pandas calls the column of row numbers


@dataclass(frozen=True)
class Counts:
    """Examples and domains of one version, by split; ``source`` says who counted."""

    examples: Mapping[str, int]
    domains: Mapping[str, int] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Published:
    """A dataset of WILDS as it was published, by version, the newest last."""

    title: str
    name: str
    """Its folder is called ``name_vVERSION``."""
    table: str
    """A file that lies in its folder, and tells that this is it."""
    counts: Mapping[str, Counts]
    tables: Mapping[str, str] = field(default_factory=dict)
    """What that file is called in other versions."""

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def how(self) -> str:
        return f"from {PAGE} (`{self.name}_v{self.versions[-1]}`)"


class Place(NamedTuple):
    """Where a dataset is, and of which version."""

    folder: Path
    version: str


def find(published: Published, folder: str | Path | None, version: str | float | None = None) -> Place:
    """The folder ``name_vX.Y``: the given version, or the newest that is there.

    ``folder`` may be that folder itself, the one it is in, or ``None`` for ``$SHOAL_DATA/wilds`` and
    ``$SHOAL_DATA``.
    """
    name, wanted = published.name, None if version is None else str(version).removeprefix("v")
    if wanted is not None and wanted not in published.versions:
        raise unknown_name(f"version of {name}", wanted, published.versions)
    top = roots(f"the files of {published.title}", folder, HOME)
    there = [place for root in top if root.is_dir() for place in _places(published, root, wanted)]
    known = [place for place in there if place.version in published.versions]
    fitting = [place for place in known if wanted in (None, place.version)]
    if fitting:
        return max(fitting, key=lambda place: published.versions.index(place.version))
    where = " or ".join(repr(str(root)) for root in top)
    if there:
        found = ", ".join(dict.fromkeys(place.version or "unknown" for place in there))
        say = wanted or f"one of {', '.join(published.versions)}"
        raise InputError(
            f"{published.title} in {where} is of version {found}; wanted is {say}. A folder's name "
            f"({name}_v{published.versions[-1]}) or version= says which it is."
        )
    raise InputError(
        f"{published.title} is not in {where}: there is no folder {name}_v{wanted or published.versions[-1]} "
        f"with {published.table}. {SAY_WHERE} to look; it can be got {published.how}."
    )


def _places(published: Published, root: Path, wanted: str | None) -> Iterator[Place]:
    """Folders of the dataset: those named so below ``root``, and ``root`` itself."""
    named = re.compile(rf"{re.escape(published.name)}_v([0-9.]+)", re.IGNORECASE)
    for name in (".", *subfolders(root)):
        place = root if name == "." else root / name
        match = named.fullmatch(place.absolute().name)
        tables = (published.table, *published.tables.values())
        if not any((place / table).is_file() for table in tables) or (name != "." and match is None):
            continue
        if match is not None:
            yield Place(place, match[1])
        elif not re.fullmatch(r"[\w-]+_v[0-9.]+", place.absolute().name):  # renamed, and no other dataset
            released = [re.fullmatch(r"RELEASE_v([0-9.]+)\.txt", path.name) for path in place.iterdir()]
            yield Place(place, next((said[1] for said in released if said), wanted or ""))


class Columns(dict[str, NDArray[Any]]):
    """Columns of a table by name; ``unused`` are those that it has and nobody knows."""

    unused: tuple[str, ...] = ()


def read_columns(path: Path, kinds: Mapping[str, type], others: Sequence[str] = ()) -> Columns:
    """Columns of a CSV file as arrays: of int64, float64, or (for ``str``) of objects, mostly shared.

    A million rows take seconds, and little memory beside what is returned. An empty number is an error, an
    empty text is ``""``. Rows that do not fit are counted, and the first is named by its line. ``others``
    are columns that the file may have beside these; any more are ``unused``.
    """
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in kinds}
    shared: dict[str, dict[str, str]] = {name: {} for name, kind in kinds.items() if kind is str}
    header: list[str] = []
    for header, rows in chunks(path, tuple(kinds)):
        columns = zip(*rows, strict=True)
        for name, values in zip(header, columns, strict=True):
            if name in shared:
                kept = shared[name]
                part = np.empty(len(values), object)
                if len(kept) <= FEW:
                    part[:] = [kept.setdefault(value, value) for value in values]
                else:  # nearly every value is another
                    part[:] = values
                parts[name].append(part)
            elif name in kinds:
                parts[name].append(_numbers(path, name, kinds[name], values))
    if not header:
        raise InputError(f"{str(path)!r} has no rows; it must have a line of names and one for each example.")
    found = Columns((name, np.concatenate(parts.pop(name))) for name in kinds)
    found.unused = tuple(name for name in header if name not in (*kinds, *others, *ROW_NUMBER))
    return found


def chunks(path: Path, names: Sequence[str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The line of names, which must have ``names``, and some ten thousand rows at a time, all as long."""
    csv.field_size_limit(sys.maxsize)
    try:
        with open_text(path) as lines:
            table = csv.reader(lines_of(lines, path))
            header = next(table, [])
            _check_header(path, header, names)
            while rows := list(islice(table, ROWS)):
                if set(map(len, rows)) != {len(header)}:
                    rows = [row for row in rows if row]
                    if any(len(row) != len(header) for row in rows):
                        _explain(path, lambda row: len(row) != len(header), f"not {len(header)} values")
                if rows:
                    yield header, rows
    except FileNotFoundError as error:
        raise InputError(f"there is no file {str(path)!r}; {SAY_WHERE} to look.") from error
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}).") from error


def _check_header(path: Path, header: Sequence[str], names: Sequence[str]) -> None:
    lacking = [name for name in names if name not in header]
    if lacking:
        there = ", ".join(repr(name) for name in header if name) or "none"
        raise InputError(
            f"{str(path)!r} has no column {', '.join(map(repr, lacking))}; its columns are {there}."
        )
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise InputError(f"{str(path)!r} has two columns {twice!r}; rename one.")


def _numbers(path: Path, name: str, kind: type, values: Sequence[str]) -> NDArray[Any]:
    dtype = np.int64 if kind is int else np.float64
    try:
        return np.fromiter(map(kind, values), dtype, len(values))
    except (ValueError, OverflowError):
        pass
    try:  # whole numbers that were written as 1.0
        numbers = np.fromiter(map(float, values), np.float64, len(values))
        if kind is int and (abs(numbers) < LARGEST).all() and (numbers == np.floor(numbers)).all():
            return numbers.astype(np.int64)
    except ValueError:
        pass
    column = _header(path).index(name)
    what = "a whole number" if kind is int else "a number"
    _explain(path, lambda row: not _is_number(row[column], kind), f"{name} that is not {what}")
    raise AssertionError("the file changed while it was read")


def _is_number(text: str, kind: type) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return kind is float or (value.is_integer() and abs(value) < LARGEST)


def _header(path: Path) -> list[str]:
    with open_text(path) as lines:
        return next(csv.reader(lines))


def _explain(path: Path, is_bad: Any, what: str) -> None:
    """Reads the file once more to say which rows are bad."""
    bad, first, shown = 0, 0, []
    with open_text(path) as lines:
        table = csv.reader(lines)
        next(table, None)
        for row in table:
            if row and is_bad(row):
                bad += 1
                if bad == 1:
                    first, shown = table.line_num, row
    text = ",".join(shown)
    text = text if len(text) <= 60 else f"{text[:60]}…"
    raise InputError(f"{str(path)!r} has {bad:,} rows with {what}, the first in line {first}: {text!r}.")


def by_group(codes: NDArray[Any], name: Callable[[int], str], where: NDArray[Any]) -> Domains:
    """The examples at which ``where`` is true as domains, one a code, in the codes' order."""
    chosen = np.flatnonzero(where)
    grouped = Domains.from_labels(np.asarray(codes)[chosen])
    names = [name(int(code)) for code in grouped.names]
    return Domains(names, grouped.offsets, chosen[grouped.indices])


def check_splits(published: Published, place: Path, splits: Mapping[str, Domains]) -> None:
    """Refuses data without anything to learn from."""
    if "train" not in splits:
        raise InputError(f"{published.title} in {str(place)!r} has no example of split train.")


def notes(place: Place, *tables: Columns, **others: str) -> dict[str, str]:
    """What a reader of results must know: the version, and columns that the published table has not."""
    unused = [name for table in tables for name in table.unused]
    more = f"; columns that were not published: {', '.join(unused)}" if unused else ""
    return {"examples": f"version {place.version}{more}", **others}


def file_list(
    root: Path, names: Iterable[str], labels: NDArray[Any], groups: NDArray[Any], classes: int
) -> FileList:
    """Paths below ``root`` in the arrays of a :class:`FileList`; ``groups`` are numbers of domains."""
    letters, ends = bytearray(), array("q", [0])
    for name in names:
        letters += os.fsencode(name)
        ends.append(len(letters))
    return FileList(
        str(root),
        np.frombuffer(letters, np.uint8),
        np.frombuffer(ends, np.int64),
        labels.astype(np.int32),
        groups.astype(np.int32),
        tuple(map(str, range(classes))),
        tuple(map(str, range(int(groups.max()) + 1))),
    )


class WildsImages(ImageFiles):
    """Images of a dataset of WILDS, in the order of its table; ``metadata`` has a number for each."""

    def __init__(self, files: FileList, metadata: Mapping[str, NDArray[Any]], **options: Any) -> None:
        super().__init__(files, **options)
        self.metadata = {name: values.astype(np.int32) for name, values in metadata.items()}


class StackedImages(WildsImages):
    """Images that lie ``each`` to an array: number ``i`` is row ``i % each`` of array ``i // each``.

    ``rows`` are their numbers; an image's path is that of its array.
    """

    def __init__(
        self,
        files: FileList,
        metadata: Mapping[str, NDArray[Any]],
        *,
        rows: NDArray[np.int64],
        each: int,
        **options: Any,
    ) -> None:
        super().__init__(files, metadata, **{**options, "cache": False})  # the system keeps what was read
        self.rows, self.each = rows, each

    def _decoded(self, index: int, crop: Callable[[int, int], Box] | None) -> tuple[Any, Box]:
        from PIL import Image

        stack = mapped(self.files.path(index))
        row = int(self.rows[index]) % self.each
        if row >= len(stack):
            raise Unreadable(f"it has {len(stack)} images; number {row} is wanted")
        image = Image.fromarray(np.array(stack[row]))
        return image, crop(*image.size) if crop else (0, 0, *image.size)


@lru_cache(maxsize=128)
def mapped(path: str) -> NDArray[Any]:
    """An array in a file, of which only what is asked for is read; each process opens it for itself."""
    try:
        check_regular(path)
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise Unreadable("there is no such file") from error
    except (OSError, ValueError, EOFError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    return array


def need_folder(published: Published, folder: Path) -> None:
    """Refuses a dataset whose table is there and whose images are not."""
    if not folder.is_dir():
        raise InputError(
            f"{published.title} has a table but no images: there is no folder {str(folder)!r}; "
            f"it can be got {published.how}."
        )


def image_data(
    published: Published,
    place: Place,
    examples: WildsImages,
    splits: Mapping[str, Domains],
    *,
    classes: int,
    **others: Any,
) -> DomainData:
    """Images with a class each as the loop and the benchmarks take them."""
    check_splits(published, place.folder, splits)
    return DomainData(
        examples=examples.in_splits(splits),
        splits=splits,
        classes=classes,
        input_shape=(3, examples.size, examples.size),
        **others,
    )


class _Subsets(Examples):
    """Subsets of the `wilds` package one after the other, without the third part of every item."""

    def __init__(self, subsets: Sequence[Any], metadata: Mapping[str, NDArray[Any]], is_class: bool) -> None:
        self.subsets, self.metadata, self.is_class = subsets, metadata, is_class
        self.ends = np.cumsum([len(subset) for subset in subsets])
        self.labels = np.concatenate([np.asarray(subset.y_array).reshape(len(subset)) for subset in subsets])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def known_labels(self) -> NDArray[Any]:
        return self.labels

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        subset = self.subsets[part]
        x, y, _ = subset[index - int(self.ends[part]) + len(subset)]
        return x, torch.as_tensor(y, dtype=torch.int64 if self.is_class else torch.float32).reshape(())


def from_wilds(
    subsets: Mapping[str, Any],
    grouper: Any,
    *,
    scored_by: Any = None,
    model: str = "small-cnn",
    input_shape: Sequence[int] | None = None,
    measures: Sequence[str] = (),
    uncounted: Iterable[str] = (),
) -> DomainData:
    """Subsets of the `wilds` package as domains, for :func:`shoal.fit`. ::

        data = from_wilds({name: dataset.get_subset(name, transform=t) for name in ("train", "val", "test")},
                          CombinatorialGrouper(dataset, ["hospital"]))

    Args:
        subsets: by split, under WILDS' names or ours; each needs a transform that makes tensors.
        grouper: whose groups are the domains.
        scored_by: another whose groups the splits other than train are scored by.
        model: the name of the default model.
        input_shape: of one x; by default that of the first example.
        measures: what to judge by (see :mod:`shoal.training.metrics`).
        uncounted: names of groups that are never the worst.
    """
    if "train" not in subsets:
        raise InputError(f"subsets has no 'train' but {', '.join(map(repr, subsets)) or 'nothing'}.")
    parts, splits, start = list(subsets.values()), {}, 0
    for name, subset in subsets.items():
        if not len(subset):
            raise InputError(f"subset {name!r} is empty; leave it out.")
        judge = grouper if name == "train" or scored_by is None else scored_by
        groups = np.asarray(judge.metadata_to_group(subset.metadata_array))
        domains = by_group(groups, judge.group_str, np.ones(len(groups), bool))
        splits[SPLITS.get(name, name)] = Domains(domains.names, domains.offsets, domains.indices + start)
        start += len(subset)
    fields = list(parts[0].metadata_fields)
    table = np.concatenate([np.asarray(subset.metadata_array) for subset in parts])
    classes = parts[0].n_classes
    examples = _Subsets(parts, dict(zip(fields, table.T, strict=True)), classes is not None)
    shape = tuple(_shape(examples) if input_shape is None else input_shape)
    return DomainData(
        examples=examples,
        splits=splits,
        classes=None if classes is None else int(classes),
        input_shape=shape,
        model=model,
        measures=tuple(measures),
        uncounted=frozenset(uncounted),
    )


def _shape(examples: _Subsets) -> tuple[int, ...]:
    x, _ = examples[0]
    if not isinstance(x, Tensor):
        raise InputError(
            f"an example of the subset is a {type(x).__name__}; give get_subset a transform that makes a "
            "tensor of it, and input_shape= where x is a nest of tensors."
        )
    return tuple(x.shape)


def unreadable(examples: Any, workers: int, tell: Callable[[int], None]) -> dict[int, str]:
    """Reads every file, in ``workers`` processes (0: in this one), and says which cannot be and why.

    ``tell`` is told how many were read.
    """
    chunks_ = [range(i, min(i + CHUNK, len(examples))) for i in range(0, len(examples), CHUNK)]
    if not workers:
        _remember(examples)
        return _collect(map(_problems, chunks_), tell)
    with ProcessPoolExecutor(workers, initializer=_remember, initargs=(examples,)) as pool:
        return _collect(pool.map(_problems, chunks_), tell)


def _collect(answers: Iterable[tuple[int, dict[int, str]]], tell: Callable[[int], None]) -> dict[int, str]:
    found, done = {}, 0
    for count, bad in answers:
        found.update(bad)
        done += count
        tell(done)
    return found


_looked_at: list[Any] = []


def _remember(examples: Any) -> None:
    _looked_at[:] = [examples]


def _problems(chunk: Sequence[int]) -> tuple[int, dict[int, str]]:
    return len(chunk), {i: why for i in chunk if (why := _looked_at[0].problem(i)) is not None}
