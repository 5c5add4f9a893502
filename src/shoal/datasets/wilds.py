"""The six datasets of WILDS that Shoal reads, from the files as WILDS published them.

``wilds.yaml`` describes their files; the functions here define the splits and domains of each. Options of all
of them: ``folder`` is the dataset's own (``name_vX.Y``) or the one it is in (default: ``$SHOAL_DATA/wilds``).
Of images, ``size`` in pixels each way. Of text, ``tokenizer``: of which model, by name or folder;
``max_tokens``: longer text is truncated.

Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
from shoal.data.text import DISTILBERT, MaxTokens, TextExamples
from shoal.errors import InputError, shown
from shoal.files import read_yaml
from shoal.settings import Pixels
from shoal.vision import load

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

    @property
    def notes(self) -> dict[str, str]:
        return {"examples": f"version {self.version}"}

    def read(self) -> pd.DataFrame:
        return read_table(self.place / self.table, self.columns)

    def image_paths(self, table: pd.DataFrame) -> list[str]:
        template = f"{self.place}/{self.images}"
        return [template.format(row) for row in table.itertuples()]

    def image_data(
        self, table: pd.DataFrame, labels: Any, splits: Mapping[str, Domains], size: int
    ) -> DomainData:
        """The images of a table's rows."""
        import pandas as pd

        one = pd.Categorical(["all"] * len(table))
        frame = pd.DataFrame({"path": self.image_paths(table), "domain": one, "label": labels})
        return image_data(frame, splits, options={"size": size}, notes=self.notes, **self.about)

    def text_data(
        self, rows: Any, labels: Any, splits: Mapping[str, Domains], tokenizer: str, max_tokens: int
    ) -> DomainData:
        """The text of these rows of the table, which `datasets` maps into memory from disk."""
        datasets: Any = load("datasets", "text")
        datasets.disable_progress_bar()
        kinds = datasets.Features({self.text: datasets.Value("string")})
        file, column = str(self.place / self.table), [self.text]
        table = datasets.Dataset.from_csv(file, features=kinds, usecols=column, keep_default_na=False)
        words = table.select(rows)[self.text]
        examples = TextExamples(words, np.array(labels), tokenizer=tokenizer, max_tokens=max_tokens)
        return DomainData(
            examples=examples,
            splits=splits,
            classes=len(self.about["class_names"]),
            input_shape=(max_tokens,),
            model=tokenizer,
            inputs=examples.description(self.text),
            notes=self.notes,
            **self.about,
        )


@cache
def published(name: str) -> Published:
    """The dataset ``name`` as ``wilds.yaml`` describes it."""
    found = read_yaml(Path(__file__).with_name("wilds.yaml"))[name]
    about = {key: tuple(value) if isinstance(value, list) else value for key, value in found["about"].items()}
    about["excluded_groups"] = frozenset(about.get("excluded_groups", ()))
    return Published(**{**found, "name": name, "about": about})


def find(name: str, folder: str | Path | None) -> Published:
    """A dataset with its files, of the newest version that is there.

    ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA/wilds`` and
    ``$SHOAL_DATA``.
    """
    known = published(name)
    top = roots(f"the files of {known.title}", folder, "wilds")
    versions = {version: f"{name}_v{version}" for version in reversed(known.counts)}
    for version, own in versions.items():
        here = [root for root in top if root.absolute().name in (own, name)]
        for place in [*(root / own for root in top), *here]:
            if (place / known.table).is_file():
                return Published(**vars(known), place=place, version=version)
    raise InputError(
        f"{known.title} is not in {' or '.join(repr(str(root)) for root in top)}: there is no folder "
        f"{' or '.join(versions.values())} with {known.table}. {SAY_WHERE} to look. It can be obtained from "
        f"https://wilds.stanford.edu/downloads, but {known.down}."
    )


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
            codes = pd.Index(kind).get_indexer(table[name])
            if len(wrong := np.flatnonzero(codes < 0)):
                value = f"{name} is {table[name][wrong[0]]}; it must be one of {shown(kind)}"
                raise InputError(f"{str(path)!r}, row {wrong[0] + 1:,}: {value}.")
            table[name] = pd.Categorical.from_codes(codes, kind)
    return table


def splits_of(split: Any, groups: Any, training: Any = None) -> dict[str, Domains]:
    """The domains of every split: the ``groups`` of its rows, or in ``"train"`` those of ``training``."""
    import pandas as pd

    frame, found = pd.DataFrame({"split": np.asarray(split), "group": np.asarray(groups)}), {}
    if training is not None:
        frame["group"] = frame["group"].mask(frame["split"] == "train", np.asarray(training))
    for name, part in frame.groupby("split")["group"]:
        rows = part.groupby(part).groups
        found[name] = Domains.from_indices({group: rows[group] for group in sorted(rows, key=natural_key)})
    return {name: found[name] for name in SPLITS.values() if name in found}


# Images


def load_camelyon17(*, folder: str | None = None, size: Pixels = 96) -> DomainData:
    """Read the patches; domains and groups are hospitals, of which 0, 3 and 4 are trained on.

    Hospital 1 is the validation split, 2 the test split, and a tenth of the others ``id_validation``. The
    authors of Fish made the images of 96 pixels 224.
    """
    files = find("camelyon17", folder)
    table = files.read()
    hospital, groups = table["center"], "hospital " + table["center"].astype(str)
    conditions = [hospital == 1, hospital == 2, table["split"] == 1]
    split = np.select(conditions, ["validation", "test", "id_validation"], "train")
    return files.image_data(table, table["tumor"], splits_of(split, groups), size)


def load_iwildcam(*, folder: str | None = None, size: Pixels = 448) -> DomainData:
    """Read the photos; domains and groups are the cameras' locations. The authors of Fish took 224 pixels."""
    import pandas as pd

    files = find("iwildcam", folder)
    table = files.read()
    labels = pd.Categorical(table["y"], range(table["y"].max() + 1))
    groups = "location " + table["location_remapped"].astype(str)
    splits = splits_of(table["split"].map(SPLITS), groups)
    return files.image_data(table, labels, splits, size)


def load_fmow(
    *,
    folder: str | None = None,
    group_by: Literal["year and region", "year"] = "year and region",
    size: Pixels = 224,
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
    region = table["country_code"].map(codes.set_index("alpha-3")["region"]).fillna("Other")
    year = table["timestamp"].str[:4]
    both = year + ", " + region
    period = np.select([year < "2013", year < "2016"], ["early ", "middle "], "late ")
    names = {"early train": "train", "early val": "id_validation", "early test": "id_test"}
    names |= {"middle val": "validation", "late test": "test"}
    split = (period + table["split"]).map(names)
    domains = splits_of(split, region, year if group_by == "year" else both)
    return files.image_data(table, table["category"].array, domains, size)


def load_poverty(
    *, folder: str | None = None, fold: Literal["A", "B", "C", "D", "E"] = "A", augment: bool = True
) -> DomainData:
    """Read the images of eight bands, which come normalised; the label is a village's wealth.

    Training domains are countries, other splits are scored by urban and rural villages. A thousand examples
    of the training countries are ``id_validation``, and a thousand ``id_test``.

    Unlike WILDS, which mirrors and recolours the three visible bands alone, this mirrors whole images.

    Args:
        fold: which countries are held out, A to E.
        augment: whether training images are mirrored at random, both ways.
    """
    files = find("poverty", folder)
    table = files.read()
    held_out = [table["country"].isin(files.groups[group]) for group in files.folds[fold]]
    split = np.select(held_out, ["validation", "test"], "train").astype(object)
    # Held out of the training countries as WILDS draws them: 1,000 for validation and 1,000 for test.
    order = np.flatnonzero(split == "train")
    np.random.default_rng(ord(fold) + 541_433).shuffle(order)
    split[order[:1000]], split[order[1000:2000]] = "id_validation", "id_test"
    countries = table["country"].astype(str).str.replace("_", " ")
    splits = splits_of(split, table["urban"].astype(bool).map({True: "urban", False: "rural"}), countries)
    villages = Villages(files.image_paths(table), table["wealthpooled"].to_numpy(np.float32), augment)
    return DomainData(
        examples=villages.with_splits(splits),
        splits=splits,
        classes=None,
        input_shape=(8, 224, 224),
        notes={**files.notes, "test": f"fold {fold}"},
        **files.about,
    )


class Villages(Examples):
    """Images as float32 (8, 224, 224), with the wealth of each; with ``augment`` training images mirrored."""

    def __init__(self, paths: list[str], labels: Array, augment: bool) -> None:
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

    def with_splits(self, splits: Mapping[str, Domains]) -> Villages:
        same = copy.copy(self)
        same.mirrored = np.isin(np.arange(len(self)), splits["train"].indices) & self.augment
        return same

    def evaluation(self) -> Villages:
        return Villages(self.paths, self.labels, augment=False)


# Text


def load_civilcomments(
    *,
    folder: str | None = None,
    group_by: Literal["identity", "black"] = "identity",
    tokenizer: str = DISTILBERT,
    max_tokens: MaxTokens = 300,
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
    return files.text_data(range(len(table)), toxic.astype(int), splits, tokenizer, max_tokens)


def load_amazon(
    *,
    folder: str | None = None,
    tokenizer: str = DISTILBERT,
    max_tokens: MaxTokens = 512,
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
    splits = splits_of(split.iloc[rows], table["reviewerID"].iloc[rows])
    labels = table["overall"].cat.codes.iloc[rows].astype(int)
    return files.text_data(rows, labels, splits, tokenizer, max_tokens)


def _dataset(load: Callable[..., DomainData]) -> SimpleNamespace:
    return SimpleNamespace(load=load, PUBLISHED=published(load.__name__.removeprefix("load_")))


camelyon17 = _dataset(load_camelyon17)
fmow = _dataset(load_fmow)
iwildcam = _dataset(load_iwildcam)
poverty = _dataset(load_poverty)
civilcomments = _dataset(load_civilcomments)
amazon = _dataset(load_amazon)
