"""What the datasets of WILDS share: where they lie, their tables, and how many examples were published.

Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset

from shoal.data.augment import Box
from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.folders import SAY_WHERE, roots
from shoal.data.images import ImageFiles, Unreadable, by_chunks, described
from shoal.data.text import Column, Table, TextRows, scan
from shoal.data.text import described as described_text
from shoal.data.tree import FileList, packed, subfolders
from shoal.errors import InputError, shown, unknown_name
from shoal.files import check_regular, read_yaml

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

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of classes, countries and the like."""

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def folder(self) -> str:
        """The name of its folder, of the newest version."""
        return f"{self.name}_v{self.versions[-1]}"

    @property
    def how(self) -> str:
        return f"from {PAGE} (`{self.folder}`), whose server has been down since August 2026"


def published(name: str) -> Published:
    """The dataset ``name`` as ``wilds.yaml`` describes it."""
    about = _declared()[name]
    by_version = about["counts"]
    counts = {
        v: Counts(**(by_version[own] if isinstance(own, str) else own)) for v, own in by_version.items()
    }
    return Published(name=name, **{**about, "counts": counts})


@cache
def _declared() -> dict[str, Any]:
    return dict(read_yaml(Path(__file__).with_name("wilds.yaml")))


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
        result = ", ".join(dict.fromkeys(place.version or "unknown" for place in there))
        say = wanted or f"one of {', '.join(published.versions)}"
        raise InputError(
            f"{published.title} in {where} is version {result}; required is {say}. The version is set by the "
            f"name of the folder ({name}_v{published.versions[-1]}) or by version=."
        )
    raise InputError(
        f"{published.title} is not in {where}: there is no folder {name}_v{wanted or published.versions[-1]} "
        f"with {published.table}. {SAY_WHERE} to look; it can be obtained {published.how}."
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
            yield Place(place, next((one[1] for one in released if one), wanted or ""))


class Columns(dict[str, NDArray[Any]]):
    """Columns of a table by name; ``unused`` are those that it has and nobody knows."""

    unused: tuple[str, ...] = ()


def read_columns(path: Path, kinds: Mapping[str, type], others: Sequence[str] = ()) -> Columns:
    """Columns of a CSV file as arrays: of int64, float64, or (for ``str``) of objects, equal ones shared.

    An empty number is an error, an empty text is ``""``. ``others`` are columns that the file may have beside
    these; any more are ``unused``.
    """
    table = scan(path, tuple(kinds), strict=True)
    result = Columns((name, _typed(path, name, kind, table.columns[name])) for name, kind in kinds.items())
    result.unused = tuple(name for name in table.header if name not in (*kinds, *others, *ROW_NUMBER))
    return result


def _typed(path: Path, name: str, kind: type, column: Column) -> NDArray[Any]:
    if kind is str:
        return column.text()[column.codes]
    values, wrong = np.zeros(len(column.values), np.int64 if kind is int else np.float64), []
    for n, text in enumerate(column.values):
        try:
            values[n] = kind(text)
        except (ValueError, OverflowError):
            if kind is int and re.fullmatch(r"\s*[+-]?[0-9]{1,15}\.0*\s*", text):  # written as 1.0
                values[n] = int(float(text))
            else:
                wrong.append(n)
    if wrong:
        rows = np.flatnonzero(np.isin(column.codes, wrong))
        what = "a whole number" if kind is int else "a number"
        raise InputError(
            f"{str(path)!r} has {len(rows):,} rows with {name} that is not {what}, the first in record "
            f"{rows[0] + 1:,}: {column.values[column.codes[rows[0]]][:60]!r}."
        )
    return values[column.codes]


def coded(path: Path, name: str, values: NDArray[Any], known: Mapping[str, int]) -> NDArray[np.int64]:
    """The numbers that a column's texts stand for; ``known`` has all there may be."""
    if unknown := sorted(set(values) - set(known)):
        some = ", ".join(list(known)[:6]) + (", …" if len(known) > 6 else "")
        raise InputError(f"{str(path)!r}: {name} is {str(unknown[0])!r}; it must be one of {some}.")
    return np.fromiter((known[value] for value in values), np.int64, len(values))


def by_group(codes: NDArray[Any], name: Callable[[int], str], where: NDArray[Any]) -> Domains:
    """The examples at which ``where`` is true as domains, one a code, in the codes' order."""
    chosen = np.flatnonzero(where)
    grouped = Domains.from_labels(np.asarray(codes)[chosen])
    names = [name(int(code)) for code in grouped.names]
    return Domains(names, grouped.offsets, chosen[grouped.indices])


def by_groups(
    codes: NDArray[Any], name: Callable[[int], str], splits: Mapping[str, NDArray[Any]]
) -> dict[str, Domains]:
    """The same for every split that is not empty."""
    return {split: by_group(codes, name, where) for split, where in splits.items() if where.any()}


def check_splits(published: Published, place: Path, splits: Mapping[str, Domains]) -> None:
    """Refuses data without anything to learn from."""
    if "train" not in splits:
        raise InputError(f"{published.title} in {str(place)!r} has no example of split train.")


def notes(place: Place, *tables: Columns, **others: str) -> dict[str, str]:
    """What a reader of results must know: the version, and columns that the published table has not."""
    unused = [name for table in tables for name in table.unused]
    more = f"; columns that were not published: {', '.join(unused)}" if unused else ""
    return {"examples": f"version {place.version}{more}", **others}


class WildsImages(ImageFiles):
    """Images of a dataset of WILDS, in the order of its table; ``metadata`` has a number for each.

    With ``stacks=(rows, each)`` they lie ``each`` to an array: image ``i`` is row ``rows[i] % each`` of
    its array, whose path is the image's.
    """

    def __init__(
        self,
        files: FileList,
        metadata: Mapping[str, NDArray[Any]],
        stacks: tuple[NDArray[np.int64], int] | None = None,
        **options: Any,
    ) -> None:
        self.stacks = stacks
        super().__init__(files, **(options if stacks is None else {**options, "cache": False}))
        self.metadata = {name: values.astype(np.int32) for name, values in metadata.items()}

    def _decoded(self, index: int, crop: Callable[[int, int], Box] | None) -> tuple[Any, Box]:
        if self.stacks is None:
            return super()._decoded(index, crop)
        from PIL import Image

        rows, each = self.stacks
        image = Image.fromarray(np.array(row_of(self.files.path(index), int(rows[index]) % each)))
        return image, crop(*image.size) if crop else (0, 0, *image.size)


def row_of(path: str, row: int) -> NDArray[Any]:
    """One of the images in an array, of which only what is asked for is read."""
    stack = _mapped(path)
    if row >= len(stack):
        raise Unreadable(f"it has {len(stack)} images; number {row} is wanted")
    result: NDArray[Any] = stack[row]
    return result


@lru_cache(maxsize=128)
def _mapped(path: str) -> NDArray[Any]:
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
            f"it can be obtained {published.how}."
        )


def image_data(
    published: Published,
    place: Place,
    table: Columns,
    folder: Path,
    names: Iterable[str],
    metadata: Mapping[str, NDArray[Any]],
    groups: NDArray[Any],
    splits: Mapping[str, Domains],
    *,
    classes: int,
    options: Mapping[str, Any],
    **about: Any,
) -> DomainData:
    """The images ``names`` in ``folder``, each of the class ``metadata["y"]`` and of one of ``groups``."""
    need_folder(published, folder)
    check_splits(published, place.folder, splits)
    labels, number = tuple(map(str, range(classes))), tuple(map(str, range(int(groups.max()) + 1)))
    (letters, ends), codes = packed(names), [a.astype(np.int32) for a in (metadata["y"], groups)]
    files = FileList(str(folder), letters, ends, *codes, labels, number)  # type: ignore[call-arg, arg-type]
    examples = WildsImages(files, metadata, **options)
    return DomainData(
        examples=examples.in_splits(splits),
        splits=splits,
        classes=classes,
        input_shape=(3, examples.size, examples.size),
        notes=notes(place, table),
        inputs=described(examples.size),
        **about,
    )


def text_data(
    published: Published,
    place: Place,
    table: Table,
    column: str,
    metadata: Mapping[str, NDArray[Any]],
    splits: Mapping[str, Domains],
    *,
    options: Mapping[str, Any],
    rows: NDArray[Any] | None = None,
    names: Mapping[str, NDArray[Any]] | None = None,
    **about: Any,
) -> DomainData:
    """The text in a column of a table, each with the label ``metadata["y"]``."""
    check_splits(published, place.folder, splits)
    y, tokens = metadata["y"], options["max_tokens"]
    return DomainData(
        examples=TextRows(table, column, y, rows=rows, metadata=metadata, names=names, **options),
        splits=splits,
        input_shape=(tokens,),
        model=options["tokenizer"],
        inputs=described_text(options["tokenizer"], tokens, options["pad_to"], column),
        notes=notes(place),
        **about,
    )


class _Subsets(Examples):
    """Subsets of the `wilds` package one after the other, without the third part of every item."""

    def __init__(self, subsets: Sequence[Any], metadata: Mapping[str, NDArray[Any]], is_class: bool) -> None:
        self.joined: ConcatDataset[Any] = ConcatDataset(subsets)
        self.metadata = metadata
        self.dtype = torch.int64 if is_class else torch.float32
        self.labels = np.concatenate([np.asarray(subset.y_array).reshape(len(subset)) for subset in subsets])

    def __len__(self) -> int:
        return len(self.joined)

    def known_labels(self) -> NDArray[Any]:
        return self.labels

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        x, y, _ = self.joined[index]
        return x, torch.as_tensor(y, dtype=self.dtype).reshape(())


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
    """Convert subsets of the `wilds` package to domains, for :func:`shoal.fit`. ::

        data = from_wilds({name: dataset.get_subset(name, transform=t) for name in ("train", "val", "test")},
                          ["hospital"])

    Domains have the names of WILDS, such as ``"year = 3, region = Asia"``.

    Args:
        subsets: subsets by split, under the names of WILDS or of Shoal; each requires a transform that
            returns tensors.
        grouper: metadata fields, such as ``["year", "region"]``, of which every combination is a domain; or a
            grouper of the package, whose groups are the domains.
        scored_by: the same for the groups by which splits other than train are scored.
        model: name of the default model.
        input_shape: shape of an input (default: that of the first example).
        measures: metrics of the dataset (see :mod:`shoal.training.metrics`).
        uncounted: names of groups that are not considered for the worst group.
    """
    if not isinstance(subsets, Mapping):
        raise InputError(f"subsets must be a mapping such as {{'train': subset}}, got {shown(subsets)}.")
    if "train" not in subsets:
        raise InputError(f"subsets has no 'train' but {', '.join(map(repr, subsets)) or 'nothing'}.")
    tables = {name: _metadata(name, subset) for name, subset in subsets.items()}
    parts, splits, start = list(subsets.values()), {}, 0
    for name, subset in subsets.items():
        scored = name != "train" and scored_by is not None
        given, argument = (scored_by, "scored_by") if scored else (grouper, "grouper")
        split = SPLITS.get(name, name)
        if split in splits:
            raise InputError(f"subsets has split {split!r} twice, under WILDS' name and ours; remove one.")
        splits[split] = _domains(name, subset, tables[name], given, argument, start)
        start += len(subset)
    fields = [field for field in tables["train"] if all(field in table for table in tables.values())]
    metadata = {field: np.concatenate([table[field] for table in tables.values()]) for field in fields}
    classes = parts[0].n_classes
    examples = _Subsets(parts, metadata, classes is not None)
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


def _metadata(name: str, subset: Any) -> dict[str, NDArray[Any]]:
    """The columns of a subset's metadata by field."""
    needed = ("metadata_array", "metadata_fields", "y_array", "n_classes", "__len__", "__getitem__")
    if missing := [attribute for attribute in needed if not hasattr(subset, attribute)]:
        raise InputError(
            f"subset {name!r} is a {type(subset).__name__} without {missing[0]}; it must be a subset of the "
            "wilds package, as get_subset returns it."
        )
    if not len(subset):
        raise InputError(f"subset {name!r} is empty; remove it.")
    table, fields = subset.metadata_array, list(subset.metadata_fields or ())
    table = np.zeros((len(subset), 0)) if table is None else np.asarray(table)
    if not fields or table.shape != (len(subset), len(fields)):
        raise InputError(
            f"subset {name!r} has {len(subset):,} examples, {len(fields)} metadata fields and metadata of "
            f"shape {table.shape}; it must have a row for each example and a column for each field."
        )
    if (targets := np.asarray(subset.y_array)).size != len(subset):
        raise InputError(
            f"subset {name!r} has targets of shape {targets.shape} for {len(subset):,} examples; one number "
            "for each is needed."
        )
    return dict(zip(fields, table.T, strict=True))


def _domains(
    name: str, subset: Any, table: Mapping[str, NDArray[Any]], grouper: Any, argument: str, start: int
) -> Domains:
    """A subset's groups; its examples count from ``start``."""
    fields = _fields(grouper, table, argument)
    if fields is None:
        codes, label = np.asarray(grouper.metadata_to_group(subset.metadata_array)), grouper.group_str
        if codes.shape != (len(subset),) or codes.dtype.kind not in "iu":
            raise InputError(
                f"{argument}'s metadata_to_group gives {codes.dtype} of shape {codes.shape} for subset "
                f"{name!r}; it must give a whole number for each of {len(subset):,} examples."
            )
    else:
        columns = [_whole_column(name, table, field) for field in fields]
        codes, first = _combined(columns)
        texts = [_texts(subset, field) for field in fields]

        def label(group: int) -> str:
            values = (int(column[first[group]]) for column in columns)
            named = (own[v] if v < len(own) else v for own, v in zip(texts, values, strict=True))
            return ", ".join(f"{field} = {value}" for field, value in zip(fields, named, strict=True))

    domains = by_group(codes, label, np.ones(len(codes), bool))
    return Domains(domains.names, domains.offsets, domains.indices + start)


def _fields(grouper: Any, table: Mapping[str, NDArray[Any]], argument: str) -> list[str] | None:
    """The metadata fields to combine, the most significant first; ``None`` for a grouper of another kind."""
    own = getattr(grouper, "groupby_fields", None)
    if own is not None:
        # Not group_str, which mixes fields up, or fails, where their order is not the metadata's.
        return [field for field in reversed(list(table)) if field in own] + [f for f in own if f not in table]
    if hasattr(grouper, "metadata_to_group") and hasattr(grouper, "group_str"):
        return None
    if not isinstance(grouper, (list, tuple)) or not all(isinstance(field, str) for field in grouper):
        hint = f"[{grouper!r}]" if isinstance(grouper, str) else "['year', 'region']"
        raise InputError(
            f"{argument} must be a list of metadata fields, such as {hint}, or a grouper of the wilds "
            f"package; got {shown(grouper)}."
        )
    if not grouper or len(set(grouper)) < len(grouper):
        raise InputError(f"{argument} must name one or more different metadata fields, got {shown(grouper)}.")
    return list(grouper)


def _whole_column(name: str, table: Mapping[str, NDArray[Any]], field: str) -> NDArray[np.int64]:
    if field not in table:
        raise unknown_name(f"metadata field of subset {name!r}:", field, table)
    values = np.asarray(table[field])
    wrong = ~(np.isfinite(values) & (values >= 0) & (values == np.floor(values)))
    if wrong.any():
        raise InputError(
            f"subset {name!r} has {int(wrong.sum()):,} examples whose metadata field {field!r} is no whole "
            f"number of at least 0, the first {values[np.argmax(wrong)]}; leave the field or them out."
        )
    return values.astype(np.int64)


def _combined(columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """A number for every combination that occurs, in lexicographic order, and where each occurs first."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        _, first, codes = np.unique(codes * len(values) + place, return_index=True, return_inverse=True)
    return codes, first


def _texts(subset: Any, field: str) -> Sequence[Any]:
    """What the values of a field are called."""
    return (getattr(subset, "metadata_map", None) or {}).get(field, ())


def _shape(examples: _Subsets) -> tuple[int, ...]:
    x, _ = examples[0]
    if not isinstance(x, Tensor):
        raise InputError(
            f"an example of the subset is a {type(x).__name__}; give get_subset a transform that makes a "
            "tensor of it, and input_shape= where x is a nest of tensors."
        )
    return tuple(x.shape)


def unreadable(examples: Examples, workers: int, tell: Callable[[int], None]) -> dict[int, str]:
    """Reads every file, in ``workers`` processes (0: in this one), and says which cannot be and why.

    ``tell`` is told how many were read.
    """
    result: dict[int, str] = {}
    done = 0
    for chunk in by_chunks(_problems, examples, range(len(examples)), workers):
        result.update({i: why for i, why in chunk if why is not None})
        done += len(chunk)
        tell(done)
    return result


def _problems(examples: Examples, chunk: Sequence[int]) -> list[tuple[int, str | None]]:
    return [(i, examples.problem(i)) for i in chunk]
