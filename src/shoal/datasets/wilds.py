"""The six datasets of WILDS that Shoal reads, from the files as WILDS published them.

Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
"""

from __future__ import annotations

import copy
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.download import SAY_WHERE, roots
from shoal.data.images import ImageFiles, Unreadable, image_data
from shoal.data.text import DISTILBERT, MULTIPLE, MaxTokens, PadTo, TextExamples
from shoal.data.text import described as described_text
from shoal.errors import InputError, unknown_name
from shoal.files import read_yaml
from shoal.settings import Pixels

if TYPE_CHECKING:
    import pandas as pd

PAGE = "https://wilds.stanford.edu/downloads"
SPLITS = {
    "train": "train",
    "id_val": "id_validation",
    "val": "validation",
    "id_test": "id_test",
    "test": "test",
}
"""What WILDS calls a split, and what we do."""
Array = NDArray[Any]


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
    """A file in its folder that tells that this is it."""
    counts: Mapping[str, Counts]
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of classes, countries and the like."""
    unread: Sequence[str] = ()
    """Versions whose files are laid out differently, and are not read."""

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(v for v in self.counts if v not in self.unread)

    @property
    def folder(self) -> str:
        """The name of its folder, of the newest version."""
        return f"{self.name}_v{self.versions[-1]}"

    @property
    def how(self) -> str:
        return f"from {PAGE}, but {self.down}"

    @property
    def down(self) -> str:
        return (
            "the server of WILDS has been down since August 2026, so only a copy that somebody has will do; "
            f"`shoal data check FOLDER --dataset {self.name}` compares it with the published counts"
        )


@cache
def published(name: str) -> Published:
    """The dataset ``name`` as ``wilds.yaml`` describes it."""
    about = dict(read_yaml(Path(__file__).with_name("wilds.yaml")))[name]
    counts = {v: about["counts"][own] if isinstance(own, str) else own for v, own in about["counts"].items()}
    return Published(name=name, **{**about, "counts": {v: Counts(**each) for v, each in counts.items()}})


class Place(NamedTuple):
    """Where a dataset is, and of which version."""

    folder: Path
    version: str


def find(name: str, folder: str | Path | None, version: str | float | None = None) -> Place:
    """The folder ``name_vX.Y``: the given version, or the newest that is there.

    ``folder`` may be that folder itself, the one it is in, or ``None`` for ``$SHOAL_DATA/wilds`` and
    ``$SHOAL_DATA``.
    """
    known = published(name)
    wanted = None if version is None else str(version).removeprefix("v")
    if wanted not in (None, *known.versions):
        raise unknown_name(f"version of {name}", str(wanted), known.versions)
    top = roots(f"the files of {known.title}", folder, "wilds")
    there: list[Place] = []
    for root in top:
        for place in (root, *sorted(root.glob(f"{name}_v*"))):
            called = re.fullmatch(r"(\w+)_v([0-9.]+)", place.absolute().name)
            if (place / known.table).is_file() and (called is None or called[1] == name):
                there.append(Place(place, called[2] if called else wanted or known.versions[-1]))
    fitting = [
        place for place in there if place.version in known.versions and wanted in (None, place.version)
    ]
    if fitting:
        return max(fitting, key=lambda place: known.versions.index(place.version))
    where = " or ".join(repr(str(root)) for root in top)
    if there:
        raise InputError(
            f"{known.title} in {where} is version {', '.join(place.version for place in there)}; required is "
            f"{wanted or ' or '.join(known.versions)}. The version is set by the name of the folder or by "
            "version=."
        )
    raise InputError(
        f"{known.title} is not in {where}: there is no folder {known.folder} with {known.table}. "
        f"{SAY_WHERE} to "
        f"look. It can be obtained {known.how}."
    )


# Tables


def read_columns(path: Path, kinds: Mapping[str, type]) -> pd.DataFrame:
    """Columns of a CSV file: of int64, float64 or text. An empty cell is "", and no number."""
    import pandas as pd

    try:
        options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "encoding": "utf-8-sig"}
        table = pd.read_csv(path, usecols=lambda name: name in kinds, **options)
    except (OSError, ValueError) as error:  # no CSV, not UTF-8, or not there
        why = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise InputError(f"{str(path)!r} cannot be read ({why}); {SAY_WHERE} to look.") from error
    if lacking := [name for name in kinds if name not in table]:
        raise InputError(f"{str(path)!r} has no column {lacking[0]!r}.")
    if table.empty:
        raise InputError(f"{str(path)!r} has no rows after its header.")
    return table.assign(**{n: _numbers(path, table[n], kind) for n, kind in kinds.items() if kind is not str})


def _numbers(path: Path, column: pd.Series[Any], kind: type) -> pd.Series[Any]:
    import pandas as pd

    values = pd.to_numeric(column, errors="coerce")
    wrong = ~np.isfinite(values.astype(float)) | ((values != values.round()) & (kind is int))
    if wrong.any():
        first = int(np.argmax(wrong))
        what = "a whole number" if kind is int else "a number"
        raise InputError(
            f"{str(path)!r}: {column.name} is {column.iloc[first][:60]!r} in record {first + 1:,}; it "
            f"must be {what}."
        )
    return values.astype(np.int64 if kind is int else np.float64)


def coded(path: Path, column: pd.Series[Any], known: Sequence[Any]) -> NDArray[np.int64]:
    """The places of a column's values among ``known``, which has all there may be."""
    codes = column.map({value: n for n, value in enumerate(known)})
    if codes.isna().any():
        some = ", ".join(map(str, known[:6])) + (", …" if len(known) > 6 else "")
        wrong = column[codes.isna()].tolist()[0]
        raise InputError(f"{str(path)!r}: {column.name} is {wrong!r}; it must be one of {some}.")
    return codes.to_numpy(np.int64)


def by_group(codes: Array, name: Callable[[int], str], where: Array) -> Domains:
    """The examples at which ``where`` is true as domains, one per code, in the codes' order."""
    chosen = np.flatnonzero(where)
    grouped = Domains.from_labels(np.asarray(codes)[chosen])
    return Domains([name(int(code)) for code in grouped.names], grouped.offsets, chosen[grouped.indices])


def by_groups(codes: Array, name: Callable[[int], str], splits: Mapping[str, Array]) -> dict[str, Domains]:
    """The same for every split that is not empty."""
    return {split: by_group(codes, name, where) for split, where in splits.items() if where.any()}


def by_name(path: Path, split: pd.Series[Any]) -> dict[str, NDArray[np.bool_]]:
    """Where each split is, by a column of WILDS' names."""
    coded(path, split, list(SPLITS))
    return {ours: (split == theirs).to_numpy() for theirs, ours in SPLITS.items()}


def check_splits(name: str, place: Place, splits: Mapping[str, Domains]) -> None:
    """Refuses data without anything to learn from."""
    if "train" not in splits:
        raise InputError(f"{published(name).title} in {str(place.folder)!r} has no example of split train.")


# Images


class WildsImages(ImageFiles):
    """Images in the order of WILDS' table; ``metadata`` has numbers for each."""

    def __init__(self, files: pd.DataFrame, *, metadata: Mapping[str, Array], **options: Any) -> None:
        super().__init__(files, **options)
        self.metadata = {name: np.asarray(values) for name, values in metadata.items()}


def _images(
    name: str,
    place: Place,
    folder: str,
    files: Iterable[str],
    metadata: Mapping[str, Array],
    groups: Array,
    splits: Mapping[str, Domains],
    *,
    classes: int,
    options: Mapping[str, Any],
    **about: Any,
) -> DomainData:
    """The ``files`` in ``folder``, each of the class ``metadata["y"]`` and of one of ``groups``."""
    import pandas as pd

    root = place.folder / folder
    if not root.is_dir():
        raise InputError(
            f"{published(name).title} has a table but no images: there is no folder {str(root)!r}. "
            f"It can be obtained {published(name).how}."
        )
    check_splits(name, place, splits)
    prefix = f"{root}/"
    frame = pd.DataFrame(
        {
            "path": [prefix + file for file in files],
            "domain": pd.Categorical(np.asarray(groups)),
            "label": pd.Categorical.from_codes(metadata["y"], list(range(classes))),
        }
    )
    return image_data(
        frame,
        splits,
        examples=WildsImages,
        options={**options, "metadata": metadata},
        notes={"examples": f"version {place.version}"},
        class_names=about.pop("class_names", ()),
        **about,
    )


def load_camelyon17(
    *,
    folder: str | None = None,
    version: str | None = None,
    size: Pixels = 96,
    bad: Literal["stop", "skip"] = "stop",
) -> DomainData:
    """Read the patches; domains and groups are hospitals, of which 0, 3 and 4 are trained on.

    Hospital 1 is the validation split, 2 the test split, and a tenth of the others ``id_validation``.

    Args:
        folder: ``camelyon17_v1.0`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.0.
        size: of the images, in pixels each way: 96 as published; the authors of Fish made them 224.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
    """
    place = find("camelyon17", folder, version)
    path = place.folder / "metadata.csv"
    numbers = ("node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
    table = read_columns(path, {"patient": str} | dict.fromkeys(numbers, int))
    hospital, y = table["center"].to_numpy(), coded(path, table["tumor"], (0, 1))
    trained = ~np.isin(hospital, (1, 2))
    splits = {
        "train": trained & (table["split"] == 0),
        "id_validation": trained & (table["split"] == 1),
        "validation": hospital == 1,
        "test": hospital == 2,
    }
    slides = zip(table["patient"], table["node"], table["x_coord"], table["y_coord"], strict=True)
    return _images(
        "camelyon17",
        place,
        "patches",
        (f"patient_{p}_node_{n}/patch_patient_{p}_node_{n}_x_{x}_y_{y}.png" for p, n, x, y in slides),
        {"hospital": hospital, "slide": table["slide"], "y": y},
        hospital,
        by_groups(hospital, "hospital {}".format, splits),
        classes=2,
        options={"size": size, "bad": bad},
        model="densenet121",
        measures=("accuracy",),
        class_names=("no tumour", "tumour"),
    )


def load_iwildcam(
    *,
    folder: str | None = None,
    version: str | None = None,
    size: Pixels = 448,
    bad: Literal["stop", "skip"] = "stop",
) -> DomainData:
    """Read the photos; domains and groups are the cameras' locations.

    Args:
        folder: ``iwildcam_v2.0`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 2.0.
        size: of the images, in pixels each way: 448 as in WILDS 2.0; the authors of Fish took 224.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
    """
    import pandas as pd

    place = find("iwildcam", folder, version)
    path = place.folder / "metadata.csv"
    numbers = dict.fromkeys(("y", "location_remapped", "sequence_remapped"), int)
    table = read_columns(path, {"filename": str, "datetime": str, "split": str, **numbers})
    if (table["y"] < 0).any():
        raise InputError(f"{str(path)!r}: y is {table['y'].min()}; classes count from 0.")
    times = pd.to_datetime(table["datetime"], format="ISO8601", errors="coerce")
    if times.isna().any():
        raise InputError(
            f"{str(path)!r}: datetime is {table['datetime'][times.isna()].iloc[0]!r}; it must be a time "
            "such as "
            "2013-06-05 05:44:19.000."
        )
    location = table["location_remapped"].to_numpy()
    metadata = {"location": location, "sequence": table["sequence_remapped"], "y": table["y"]}
    parts = ("year", "month", "day", "hour", "minute", "second")
    return _images(
        "iwildcam",
        place,
        "train",
        table["filename"],
        metadata | {part: getattr(times.dt, part) for part in parts},
        location,
        by_groups(location, "location {}".format, by_name(path, table["split"])),
        classes=int(table["y"].max()) + 1,
        options={"size": size, "bad": bad},
        model="resnet50",
        measures=("macro F1", "accuracy", "macro recall"),
    )


def load_fmow(
    *,
    folder: str | None = None,
    version: str | None = None,
    group_by: Literal["year and region", "year"] = "year and region",
    size: Pixels = 224,
    bad: Literal["stop", "skip"] = "stop",
) -> DomainData:
    """Read the images; those before 2013 are trained on, those from 2016 on are the test split.

    Training domains are a year in a region, other splits are scored by region; the region ``Other``, of a
    few dozen images, is never the worst. Rows in no split keep their places, so that indices are WILDS'.

    Args:
        folder: ``fmow_v1.1`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.1.
        group_by: what a training domain is: ``year and region``, or ``year``, as for WILDS' own baselines.
        size: of the images, in pixels each way.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
    """
    import pandas as pd

    place = find("fmow", folder, version)
    path = place.folder / "rgb_metadata.csv"
    table = read_columns(path, dict.fromkeys(("split", "category", "country_code", "timestamp"), str))
    codes = read_columns(place.folder / "country_code_mapping.csv", {"alpha-3": str, "region": str})
    known = dict(zip(codes["alpha-3"], codes["region"], strict=True))
    # Numbered as they appear in the whole table, as WILDS does.
    region, regions = pd.factorize(table["country_code"].map(known).replace("", np.nan).fillna("Other"))
    rows = np.flatnonzero(table["split"] != "seq")
    table, region = table.iloc[rows], region[rows]
    utc = table["timestamp"].str.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9:.]+)?(Z|\+00:?00)?")
    if not len(rows) or not utc.all():
        wrong = f"timestamp is {table['timestamp'][~utc].iloc[0]!r}" if len(rows) else "every split is seq"
        raise InputError(f"{str(path)!r}: {wrong}; it must be a time in UTC such as 2015-07-25T08:45:12Z.")
    year = table["timestamp"].str[:4].to_numpy(np.int64)
    classes = published("fmow").names["classes"]
    early, part = year < 2013, table["split"].to_numpy()
    where = {
        "train": early & (part == "train"),
        "id_validation": early & (part == "val"),
        "validation": ~early & (year < 2016) & (part == "val"),
        "id_test": early & (part == "test"),
        "test": (year >= 2016) & (part == "test"),
    }
    splits = by_groups(region, regions.__getitem__, where)
    both = year * len(regions) + region
    if "train" in splits and group_by == "year":
        splits["train"] = by_group(year, str, where["train"])
    elif "train" in splits:
        count = len(regions)
        splits["train"] = by_group(both, lambda c: f"{c // count}, {regions[c % count]}", where["train"])
    numbered = np.where((year >= 2002) & (year <= 2017), year - 2002, -1)
    return _images(
        "fmow",
        place,
        "images",
        (f"rgb_img_{row}.png" for row in rows.tolist()),
        {"region": region, "year": numbered, "y": coded(path, table["category"], classes)},
        both,
        splits,
        classes=len(classes),
        options={"size": size, "bad": bad},
        model="densenet121",
        measures=("worst-group accuracy", "accuracy"),
        uncounted=frozenset({"Other"}),
        class_names=tuple(classes),
    )


# PovertyMap

BANDS = ("blue", "green", "red", "swir1", "swir2", "temperature", "nir", "nightlights")
FOLDS = {
    "A": ("west", "angola"),
    "B": ("cameroon", "west"),
    "C": ("congo", "cameroon"),
    "D": ("kenya", "congo"),
    "E": ("angola", "kenya"),
}
"""The groups of countries of the validation and the test split."""


def load_poverty(
    *,
    folder: str | None = None,
    version: str | None = None,
    fold: Literal["A", "B", "C", "D", "E"] = "A",
    nightlights: bool = True,
    augment: bool = True,
    size: Pixels = 224,
) -> DomainData:
    """Read the images of eight bands, which come normalised; the label is a village's wealth.

    Training domains are countries, other splits are scored by urban and rural villages. A thousand examples
    of the training countries are ``id_validation``, and a thousand ``id_test``.

    WILDS changes only the three visible bands in training: it mirrors them and shifts their colours, after
    cutting the normalised numbers to bytes. Here the whole image is mirrored and no colour changed.

    Args:
        folder: ``poverty_v1.1`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.1.
        fold: which countries are held out, A to E.
        nightlights: whether the band of nightly light is shown; else it is 0.
        augment: whether training images are mirrored at random, both ways.
        size: of the images, in pixels each way; fewer than the files' 224 are means over them.
    """
    if size > 224:
        raise InputError(f"size={size}; it must be at most 224.")
    place, names = find("poverty", folder, version), published("poverty").names
    path = place.folder / "dhs_metadata.csv"
    table = read_columns(path, {"country": str, "wealthpooled": float, "urban": str})
    urban = coded(path, table["urban"].str.lower().str.removesuffix(".0"), ("false", "true", "0", "1")) % 2
    countries = names["countries"]
    country = coded(path, table["country"], countries)
    validation, test = (np.isin(country, [countries.index(c) for c in names[g]]) for g in FOLDS[fold])
    # Held out of the training countries as WILDS draws them: 1,000 for validation and 1,000 for test.
    order = np.flatnonzero(~(validation | test))
    np.random.default_rng(ord(fold) + 541_433).shuffle(order)
    drawn = {"train": order[2000:], "id_validation": order[:1000], "id_test": order[1000:2000]}
    inside = {name: np.isin(np.arange(len(table)), rows) for name, rows in drawn.items()}
    where = {split: {**inside, "validation": validation, "test": test}[split] for split in SPLITS.values()}
    splits = by_groups(urban, ("rural", "urban").__getitem__, where)
    if "train" in splits:
        splits["train"] = by_group(country, lambda c: countries[c].replace("_", " "), where["train"])
    check_splits("poverty", place, splits)
    metadata = {"urban": urban, "y": table["wealthpooled"].to_numpy(), "country": country}
    return DomainData(
        examples=Villages(place.folder / "images", metadata, nightlights, augment, size).in_splits(splits),
        splits=splits,
        classes=None,
        input_shape=(len(BANDS), size, size),
        model="resnet18",
        measures=("worst-group Pearson r", "Pearson r", "mse"),
        notes={"examples": f"version {place.version}", "test": f"fold {fold}"},
    )


class Villages(Examples):
    """Images as float32 (8, ``size``, ``size``), at 224 as in the files, with the wealth of each."""

    def __init__(
        self, folder: Path, metadata: Mapping[str, Array], nightlights: bool, augment: bool, size: int
    ) -> None:
        if not folder.is_dir():
            raise InputError(
                f"PovertyMap-WILDS has a table but no images: there is no folder {str(folder)!r}."
            )
        self.folder, self.metadata = folder, metadata
        self.nightlights, self.augment, self.size = nightlights, augment, size
        self.labels = metadata["y"].astype(np.float32)
        self.trained = np.zeros(len(self.labels), bool)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            x = torch.from_numpy(self._bands(index))
        except Unreadable as error:
            raise InputError(
                f"the image {self.path(index)!r} cannot be read ({error}). Download it again; "
                "`shoal data check` lists all such files."
            ) from error
        if not self.nightlights:
            x[-1] = 0
        if self.size < x.shape[-1]:
            x = torch.nn.functional.adaptive_avg_pool2d(x, self.size)
        if self.augment and self.trained[index]:
            x = x.flip([axis for axis, u in zip((1, 2), torch.rand(2), strict=True) if u < 0.5])
        return x, torch.tensor(self.labels[index])

    def known_labels(self) -> Array:
        return self.labels

    def path(self, index: int) -> str:
        return str(self.folder / f"landsat_poverty_img_{index}.npz")

    def problem(self, index: int) -> str | None:
        try:
            self._bands(index)
        except Unreadable as error:
            return str(error)
        return None

    def _bands(self, index: int) -> NDArray[np.float32]:
        try:
            with np.load(self.path(index), allow_pickle=False) as file:
                bands: Array = file["x"]
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise Unreadable(why) from error
        if bands.shape != (len(BANDS), 224, 224):
            raise Unreadable(f"its shape is {bands.shape}, not {(len(BANDS), 224, 224)}")
        return bands.astype(np.float32)

    def in_splits(self, splits: Mapping[str, Domains]) -> Self:
        """The same images in other splits: those of ``"train"`` are mirrored."""
        same = copy.copy(self)
        same.trained = np.zeros(len(self), bool)
        same.trained[splits["train"].examples()] = True
        return same

    def evaluation(self) -> Self:
        """The same images, none of them mirrored."""
        same = copy.copy(self)
        same.augment = False
        return same


# Text


def _texts(path: Path, column: str, rows: Array | None = None) -> Any:
    """A column of text, which stays on disk: `datasets` maps it into memory."""
    try:
        import datasets
    except ImportError as error:
        raise InputError("the text of WILDS requires datasets: pip install 'shoal[text]'.") from error
    datasets.disable_progress_bar()
    text = datasets.Features({column: datasets.Value("string")})
    options: dict[str, Any] = {"usecols": [column], "keep_default_na": False, "encoding": "utf-8"}
    table = datasets.Dataset.from_csv(str(path), features=text, **options)
    return (table if rows is None else table.select(rows))[column]


def _text(
    name: str,
    place: Place,
    column: str,
    texts: Any,
    metadata: Mapping[str, Array],
    splits: Mapping[str, Domains],
    *,
    options: Mapping[str, Any],
    **about: Any,
) -> DomainData:
    """Text, each with the label ``metadata["y"]``."""
    check_splits(name, place, splits)
    return DomainData(
        examples=TextExamples(texts, metadata["y"], metadata=metadata, **options),
        splits=splits,
        input_shape=(options["max_tokens"],),
        model=options["tokenizer"],
        inputs=described_text(options["tokenizer"], options["max_tokens"], options["pad_to"], column),
        notes={"examples": f"version {place.version}"},
        **about,
    )


IDENTITIES = ("male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white")
TOXIC = ("not toxic", "toxic")


def load_civilcomments(
    *,
    folder: str | None = None,
    version: str | None = None,
    group_by: Literal["identity", "black"] = "identity",
    tokenizer: str = DISTILBERT,
    max_tokens: MaxTokens = 300,
    pad_to: PadTo = MULTIPLE,
) -> DomainData:
    """Read the comments. Domains and groups are 18: the eight identities and none, each toxic or not.

    A comment that mentions several identities is in several domains. An identity or a label is what at least
    half of those who were asked said. The two groups that mention none are trained on, as the authors of Fish
    do, and are never the worst: WILDS judges by the other 16.

    Args:
        folder: ``civilcomments_v1.0`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.0.
        group_by: what a training domain is: ``identity``, or ``black``, as for WILDS' own baselines: whether
            black people are mentioned, toxic or not.
        tokenizer: the model's whose tokens texts become, by name or by folder.
        max_tokens: what is longer is cut off.
        pad_to: batches are padded to a multiple of this, or with ``max`` all to ``max_tokens``.
    """
    place = find("civilcomments", folder, version)
    path = place.folder / "all_data_with_identities.csv"
    others = (
        "identity_any",
        "severe_toxicity",
        "obscene",
        "threat",
        "insult",
        "identity_attack",
        "sexual_explicit",
    )
    table = read_columns(path, dict.fromkeys(("split", "toxicity", *IDENTITIES, *others), str))
    metadata = {n: (_numbers(path, table[n].replace("", "0"), float) >= 0.5) for n in (*IDENTITIES, *others)}
    metadata["y"] = _numbers(path, table["toxicity"], float) >= 0.5
    metadata = {n: values.to_numpy(np.int64) for n, values in metadata.items()}
    y = metadata["y"]
    mentioned = {n: metadata[n] == 1 for n in IDENTITIES}
    mentioned["none"] = ~np.any(list(mentioned.values()), axis=0)
    black = {"not black": metadata["black"] == 0, "black": metadata["black"] == 1}

    def groups(who: Mapping[str, Array], where: Array) -> Domains:
        found = {
            f"{name}, {TOXIC[label]}": np.flatnonzero(where & is_in & (y == label))
            for (name, is_in), label in product(who.items(), (0, 1))
        }
        return Domains.from_indices({name: rows for name, rows in found.items() if len(rows)})

    splits = {
        split: groups(black if (split, group_by) == ("train", "black") else mentioned, where)
        for split, where in by_name(path, table["split"]).items()
        if where.any()
    }
    return _text(
        "civilcomments",
        place,
        "comment_text",
        _texts(path, "comment_text"),
        metadata,
        splits,
        options={"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to},
        classes=2,
        class_names=TOXIC,
        measures=("worst-group accuracy", "accuracy"),
        uncounted=frozenset(f"none, {toxic}" for toxic in TOXIC),
    )


def load_amazon(
    *,
    folder: str | None = None,
    version: str | None = None,
    tokenizer: str = DISTILBERT,
    max_tokens: MaxTokens = 512,
    pad_to: PadTo = MULTIPLE,
) -> DomainData:
    """Read the reviews of the split by reviewers; domains and groups are the reviewers.

    Reviews that belong to no split are left out: examples are numbered as in WILDS.

    Args:
        folder: ``amazon_v2.1`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 2.1, 2.0, or 1.0, which the paper used; by default the newest that is there.
        tokenizer: the model's whose tokens texts become, by name or by folder.
        max_tokens: what is longer is cut off.
        pad_to: batches are padded to a multiple of this, or with ``max`` all to ``max_tokens``.
    """
    import pandas as pd

    place = find("amazon", folder, version)
    path, split_path = place.folder / "reviews.csv", place.folder / "splits" / "user.csv"
    columns = {"user": "reviewerID", "product": "asin", "category": "category"}
    table = read_columns(path, dict.fromkeys(columns.values(), str) | {"reviewYear": int, "overall": int})
    split = read_columns(split_path, {"split": int})["split"]
    if len(split) != len(table):
        raise InputError(f"{str(split_path)!r} has {len(split):,} rows and reviews.csv has {len(table):,}.")
    numbers = (-1, 0, 1, 2, 3, 4)  # in no split, train, val, id_val, test, id_test
    coded(split_path, split, numbers)
    rows = np.flatnonzero(split != -1)
    table, split = table.iloc[rows], split.iloc[rows].to_numpy()
    metadata: dict[str, Array] = {}
    names: dict[str, Array] = {}
    order = np.argsort(split, kind="stable")  # in which WILDS numbers them
    for name, column in columns.items():
        codes, values = pd.factorize(table[column].iloc[order])
        metadata[name], names[name] = np.empty_like(codes), np.asarray(values)
        metadata[name][order] = codes
    metadata["year"] = (table["reviewYear"] - table["reviewYear"].min()).to_numpy()
    metadata["y"] = coded(path, table["overall"], (1, 2, 3, 4, 5))
    where = {"train": 0, "id_validation": 2, "validation": 1, "id_test": 4, "test": 3}
    inside = {name: split == number for name, number in where.items()}
    return _text(
        "amazon",
        place,
        "reviewText",
        _texts(path, "reviewText", rows),
        metadata,
        by_groups(metadata["user"], names["user"].__getitem__, inside),
        options={"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to},
        classes=5,
        class_names=tuple(f"{n} star{'s' * (n > 1)}" for n in range(1, 6)),
        measures=("10th-percentile accuracy", "accuracy"),
    )


camelyon17 = SimpleNamespace(load=load_camelyon17, PUBLISHED=published("camelyon17"))
fmow = SimpleNamespace(load=load_fmow, PUBLISHED=published("fmow"))
iwildcam = SimpleNamespace(load=load_iwildcam, PUBLISHED=published("iwildcam"))
poverty = SimpleNamespace(load=load_poverty, PUBLISHED=published("poverty"))
civilcomments = SimpleNamespace(load=load_civilcomments, PUBLISHED=published("civilcomments"))
amazon = SimpleNamespace(load=load_amazon, PUBLISHED=published("amazon"))
