"""The six datasets of WILDS that Shoal reads, from the files as WILDS published them.

``wilds.yaml`` describes their files; the functions here define the splits and domains of each. Options of all
of them: ``folder`` is the dataset's own (``name_vX.Y``) or the one it is in (default: ``$SHOAL_DATA/wilds``).
Of images, ``size`` in pixels each way, and ``bad``: ``stop`` at an image that cannot be read, or ``skip`` it.
Of text, ``tokenizer``: of which model, by name or folder; ``max_tokens``: longer text is truncated;
``pad_to``: batches are padded to a multiple of this, or with ``max`` to ``max_tokens``.

Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.download import SAY_WHERE, roots
from shoal.data.images import image_data
from shoal.data.splits import natural_key
from shoal.data.text import DISTILBERT, MULTIPLE, MaxTokens, PadTo, TextExamples
from shoal.data.text import described as described_text
from shoal.errors import InputError, shown
from shoal.files import read_yaml
from shoal.settings import Pixels

if TYPE_CHECKING:
    import pandas as pd

SPLITS = {
    "train": "train",
    "id_val": "id_validation",
    "val": "validation",
    "id_test": "id_test",
    "test": "test",
}
"""WILDS' names of splits, and ours."""
Array = NDArray[Any]
Bad = Literal["stop", "skip"]
Fold = Literal["A", "B", "C", "D", "E"]


class Published(SimpleNamespace):
    """A dataset as WILDS published it: its ``name``, and its part of ``wilds.yaml``.

    After :func:`find`, ``place`` is the folder of its files and ``version`` their version.
    """

    @property
    def folder(self) -> str:
        """The name of its folder, of the newest version."""
        return f"{self.name}_v{list(self.counts)[-1]}"

    @property
    def down(self) -> str:
        return (
            "the server of WILDS has been down since August 2026, so only an existing copy will do; "
            f"`shoal data check FOLDER --dataset {self.name}` compares it with the published counts"
        )

    def read(self) -> pd.DataFrame:
        return read_table(self.place / self.table, self.columns)

    def image_paths(self, table: pd.DataFrame) -> list[str]:
        template = f"{self.place}/{self.images}"
        return [template.format(row) for row in table.itertuples()]

    def image_data(
        self, table: pd.DataFrame, labels: pd.Categorical, groups: Array, splits: Any, **options: Any
    ) -> DomainData:
        """The images of a table's rows."""
        import pandas as pd

        domain = pd.Categorical(groups)
        frame = pd.DataFrame({"path": self.image_paths(table), "domain": domain, "label": labels})
        names = {"class_names": tuple(labels.categories) if labels.categories.dtype.kind not in "iu" else ()}
        return image_data(frame, splits, options=options, notes=self.notes, **{**names, **self.about})

    def text_data(self, rows: Any, labels: Any, splits: Mapping[str, Domains], **options: Any) -> DomainData:
        """The text of these rows of the table, which `datasets` maps into memory from disk."""
        try:
            import datasets
        except ImportError as error:
            raise InputError("the text of WILDS requires datasets: pip install 'shoal[text]'.") from error
        datasets.disable_progress_bar()
        kinds = datasets.Features({self.text: datasets.Value("string")})
        reading: dict[str, Any] = {"usecols": [self.text], "keep_default_na": False, "encoding": "utf-8"}
        table = datasets.Dataset.from_csv(str(self.place / self.table), features=kinds, **reading)
        return DomainData(
            examples=TextExamples(table.select(rows)[self.text], np.asarray(labels, np.int64), **options),
            splits=splits,
            classes=len(self.about["class_names"]),
            input_shape=(options["max_tokens"],),
            model=options["tokenizer"],
            inputs=described_text(**options, column=self.text),
            notes=self.notes,
            **self.about,
        )

    @property
    def notes(self) -> dict[str, str]:
        return {"examples": f"version {self.version}"}


@cache
def published(name: str) -> Published:
    """The dataset ``name`` as ``wilds.yaml`` describes it."""
    found = read_yaml(Path(__file__).with_name("wilds.yaml"))[name]
    about = {key: tuple(value) if isinstance(value, list) else value for key, value in found["about"].items()}
    about["uncounted"] = frozenset(about.get("uncounted", ()))
    return Published(**{**found, "name": name, "about": about})


def find(name: str, folder: str | Path | None) -> Published:
    """A dataset with its files, of the newest version that is there.

    ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA/wilds`` and
    ``$SHOAL_DATA``.
    """
    known = published(name)
    top, versions = roots(f"the files of {known.title}", folder, "wilds"), list(reversed(known.counts))
    for version in versions:
        own = f"{name}_v{version}"
        for root in top:
            if (root / own / known.table).is_file():
                return Published(**vars(known), place=root / own, version=version)
            if (root / known.table).is_file() and root.absolute().name in (own, name):
                return Published(**vars(known), place=root, version=version)
    raise InputError(
        f"{known.title} is not in {' or '.join(repr(str(root)) for root in top)}: there is no folder "
        f"{' or '.join(f'{name}_v{version}' for version in versions)} with {known.table}. {SAY_WHERE} to "
        f"look. It can be obtained from https://wilds.stanford.edu/downloads, but {known.down}."
    )


# Tables, splits and domains


def read_table(path: Path, columns: Mapping[str, Any]) -> pd.DataFrame:
    """These columns of a CSV file, each of a type of pandas, or one of a list of values: then categorical."""
    import pandas as pd

    types: Any = {name: kind for name, kind in columns.items() if isinstance(kind, str)}
    try:
        table = pd.read_csv(path, usecols=list(columns), dtype=types, encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # no CSV, not UTF-8, not there, no such column, no number
        raise InputError(f"{str(path)!r} cannot be read ({error}); {SAY_WHERE} to look.") from error
    for name, kind in columns.items():
        if isinstance(kind, list):
            places = pd.Index(kind).get_indexer(table[name])
            if len(wrong := np.flatnonzero(places < 0)):
                value = f"{name} is {table[name][wrong[0]]}; it must be one of {shown(kind)}"
                raise InputError(f"{str(path)!r}, row {wrong[0] + 1:,}: {value}.")
            table[name] = pd.Categorical.from_codes(places, kind)
    return table


def by_group(rows: Array, groups: Array) -> Domains:
    """The domains of these rows, by the group of every row, in natural order."""
    import pandas as pd

    members = pd.Series(rows).groupby(groups[rows]).indices
    return Domains.from_indices({name: rows[members[name]] for name in sorted(members, key=natural_key)})


def splits_of(split: Any, groups: Array, training: Array | None = None) -> dict[str, Domains]:
    """The domains of every split that has examples: those of train are ``training``, else ``groups``."""
    found = {}
    for name in SPLITS.values():
        if len(rows := np.flatnonzero(np.asarray(split) == name)):
            found[name] = by_group(rows, training if name == "train" and training is not None else groups)
    return found


def named(prefix: str, codes: pd.Series[Any]) -> Array:
    """Groups with names."""
    return (prefix + codes.astype(str)).to_numpy(object)


# Images


def load_camelyon17(*, folder: str | None = None, size: Pixels = 96, bad: Bad = "stop") -> DomainData:
    """Read the patches; domains and groups are hospitals, of which 0, 3 and 4 are trained on.

    Hospital 1 is the validation split, 2 the test split, and a tenth of the others ``id_validation``.

    Args:
        size: of the images, in pixels each way: 96 as published; the authors of Fish made them 224.
    """
    files = find("camelyon17", folder)
    table = files.read()
    hospital, groups = table["center"], named("hospital ", table["center"])
    conditions = [hospital == 1, hospital == 2, table["split"] == 1]
    split = np.select(conditions, ["validation", "test", "id_validation"], "train")
    splits = splits_of(split, groups)
    return files.image_data(table, table["tumor"].array, groups, splits, size=size, bad=bad)


def load_iwildcam(*, folder: str | None = None, size: Pixels = 448, bad: Bad = "stop") -> DomainData:
    """Read the photos; domains and groups are the cameras' locations.

    Args:
        size: of the images, in pixels each way: 448 as in WILDS 2.0; the authors of Fish took 224.
    """
    import pandas as pd

    files = find("iwildcam", folder)
    table = files.read()
    labels = pd.Categorical(table["y"], range(table["y"].max() + 1))
    groups = named("location ", table["location_remapped"])
    splits = splits_of(table["split"].map(SPLITS), groups)
    return files.image_data(table, labels, groups, splits, size=size, bad=bad)


def load_fmow(
    *,
    folder: str | None = None,
    group_by: Literal["year and region", "year"] = "year and region",
    size: Pixels = 224,
    bad: Bad = "stop",
) -> DomainData:
    """Read the images; those before 2013 are trained on, those from 2016 on are the test split.

    Training domains are a year in a region, other splits are scored by region; the region ``Other``, of a
    few dozen images, is never the worst. Rows in no split keep their places, so that indices are WILDS'.

    Args:
        group_by: what a training domain is: ``year and region``, or ``year``, as for WILDS' own baselines.
    """
    files = find("fmow", folder)
    table = files.read()
    table = table[table["split"] != "seq"]
    codes = read_table(files.place / "country_code_mapping.csv", {"alpha-3": "str", "region": "str"})
    regions = table["country_code"].map(codes.set_index("alpha-3")["region"]).fillna("Other")
    region, year = regions.to_numpy(object), table["timestamp"].str[:4].to_numpy(np.int64)
    early, late, part = year < 2013, year >= 2016, table["split"].to_numpy()
    conditions = {
        "train": early & (part == "train"),
        "id_validation": early & (part == "val"),
        "validation": ~early & ~late & (part == "val"),
        "id_test": early & (part == "test"),
        "test": late & (part == "test"),
    }
    split = np.select(list(conditions.values()), list(conditions), "none")
    both, years = year.astype(str) + ", " + region, year.astype(str).astype(object)
    splits = splits_of(split, region, years if group_by == "year" else both)
    return files.image_data(table, table["category"].array, both, splits, size=size, bad=bad)


def load_poverty(*, folder: str | None = None, fold: Fold = "A", augment: bool = True) -> DomainData:
    """Read the images of eight bands, which come normalised; the label is a village's wealth.

    Training domains are countries, other splits are scored by urban and rural villages. A thousand examples
    of the training countries are ``id_validation``, and a thousand ``id_test``.

    WILDS changes only the three visible bands in training: it mirrors them and shifts their colours, after
    cutting the normalised numbers to bytes. Here the whole image is mirrored and no colour changed.

    Args:
        fold: which countries are held out, A to E.
        augment: whether training images are mirrored at random, both ways.
    """
    files = find("poverty", folder)
    table = files.read()
    validation, test = (table["country"].isin(files.groups[group]) for group in files.folds[fold])
    split = np.select([validation, test], ["validation", "test"], "train").astype(object)
    # Held out of the training countries as WILDS draws them: 1,000 for validation and 1,000 for test.
    order = np.flatnonzero(split == "train")
    np.random.default_rng(ord(fold) + 541_433).shuffle(order)
    split[order[:1000]], split[order[1000:2000]] = "id_validation", "id_test"
    countries = table["country"].astype(str).str.replace("_", " ").to_numpy(object)
    splits = splits_of(split, np.where(table["urban"].astype(int) == 1, "urban", "rural"), countries)
    villages = Villages(files.image_paths(table), table["wealthpooled"].to_numpy(np.float32), augment)
    return DomainData(
        examples=villages.in_splits(splits),
        splits=splits,
        classes=None,
        input_shape=(8, 224, 224),
        notes={**files.notes, "test": f"fold {fold}"},
        **files.about,
    )


class Villages(Examples):
    """Images as float32 (8, 224, 224), with the wealth of each; with ``augment`` training images mirrored."""

    def __init__(self, paths: Sequence[str], labels: Array, augment: bool) -> None:
        self.paths, self.labels, self.augment = paths, labels, augment
        self.mirrored = np.zeros(len(labels), bool)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            with np.load(self.paths[index], allow_pickle=False) as file:
                x = torch.from_numpy(file["x"].astype(np.float32))
            if x.shape != (8, 224, 224):
                raise ValueError(f"its shape is {tuple(x.shape)}, not (8, 224, 224)")
        except Exception as error:  # whatever NumPy raises of a damaged file
            raise InputError(f"the image {self.paths[index]!r} cannot be read ({error!r}).") from error
        if self.mirrored[index]:
            x = x.flip([axis for axis, u in zip((1, 2), torch.rand(2), strict=True) if u < 0.5])
        return x, torch.tensor(self.labels[index])

    def known_labels(self) -> Array:
        return self.labels

    def path(self, index: int) -> str:
        return self.paths[index]

    def in_splits(self, splits: Mapping[str, Domains]) -> Villages:
        """The same images in other splits: those of ``"train"`` are mirrored."""
        same = Villages(self.paths, self.labels, self.augment)
        if self.augment:
            same.mirrored[splits["train"].examples()] = True
        return same

    def evaluation(self) -> Villages:
        """The same images, none of them mirrored."""
        return Villages(self.paths, self.labels, augment=False)


# Text


def load_civilcomments(
    *,
    folder: str | None = None,
    group_by: Literal["identity", "black"] = "identity",
    tokenizer: str = DISTILBERT,
    max_tokens: MaxTokens = 300,
    pad_to: PadTo = MULTIPLE,
) -> DomainData:
    """Read the comments. Domains and groups are 18: the eight identities and none, each toxic or not.

    A comment that mentions several identities is in several domains. An identity or a label is what at least
    half of those who were asked said. The two groups that mention none are trained on, as the authors of Fish
    do, and are never the worst: WILDS scores the other 16.

    Args:
        group_by: what a training domain is: ``identity``, or ``black``, as for WILDS' own baselines: whether
            black people are mentioned, toxic or not.
    """
    files = find("civilcomments", folder)
    table = files.read()
    toxic, mentioned = table["toxicity"] >= 0.5, table[files.identities] >= 0.5
    mentioned["none"] = ~mentioned.any(axis=1)
    black = mentioned[["black"]].assign(**{"not black": ~mentioned["black"]})
    splits = {}
    for theirs, split in SPLITS.items():
        groups = black if (split, group_by) == ("train", "black") else mentioned
        found = {
            f"{name}, {word}": np.flatnonzero((table["split"] == theirs) & groups[name] & (toxic == label))
            for name in groups
            for label, word in enumerate(files.about["class_names"])
        }
        if members := {name: rows for name, rows in found.items() if len(rows)}:
            splits[split] = Domains.from_indices(members)
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to}
    return files.text_data(range(len(table)), toxic, splits, **options)


def load_amazon(
    *,
    folder: str | None = None,
    tokenizer: str = DISTILBERT,
    max_tokens: MaxTokens = 512,
    pad_to: PadTo = MULTIPLE,
) -> DomainData:
    """Read the reviews of the split by reviewers; domains and groups are the reviewers.

    Reviews that belong to no split are left out: examples are numbered as in WILDS.
    """
    files = find("amazon", folder)
    table, path = files.read(), files.place / "splits" / "user.csv"
    numbers = {0: "train", 1: "validation", 2: "id_validation", 3: "test", 4: "id_test"}
    split = read_table(path, {"split": "int64"})["split"].map(numbers)
    if len(split) != len(table):
        raise InputError(f"{str(path)!r} has {len(split):,} rows and reviews.csv has {len(table):,}.")
    rows = np.flatnonzero(split.notna())
    table, split = table.iloc[rows], split.iloc[rows]
    splits = splits_of(split, table["reviewerID"].to_numpy(object))
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to}
    return files.text_data(rows, table["overall"].cat.codes, splits, **options)


camelyon17 = SimpleNamespace(load=load_camelyon17, PUBLISHED=published("camelyon17"))
fmow = SimpleNamespace(load=load_fmow, PUBLISHED=published("fmow"))
iwildcam = SimpleNamespace(load=load_iwildcam, PUBLISHED=published("iwildcam"))
poverty = SimpleNamespace(load=load_poverty, PUBLISHED=published("poverty"))
civilcomments = SimpleNamespace(load=load_civilcomments, PUBLISHED=published("civilcomments"))
amazon = SimpleNamespace(load=load_amazon, PUBLISHED=published("amazon"))
