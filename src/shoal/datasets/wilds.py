"""The six datasets of WILDS that Shoal reads, from the files as WILDS published them.

``wilds.yaml`` describes their files; the functions here say what is a split and a domain in each. Options of
all of them: ``folder`` is the dataset's own (``name_vX.Y``) or the one it is in, by default
``$SHOAL_DATA/wilds``. Of images, ``size`` in pixels each way, and ``bad``: ``stop`` at an image that cannot
be read, or ``skip`` it. Of text, ``tokenizer``: of which model, by name or folder; ``max_tokens``: what is
longer is cut off; ``pad_to``: batches are padded to a multiple of this, or with ``max`` to ``max_tokens``.

Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.download import SAY_WHERE, roots
from shoal.data.images import image_data
from shoal.data.text import DISTILBERT, MULTIPLE, MaxTokens, PadTo, TextExamples
from shoal.data.text import described as described_text
from shoal.errors import InputError, shown
from shoal.files import read_yaml
from shoal.settings import Pixels

if TYPE_CHECKING:
    import pandas as pd

PAGE = "https://wilds.stanford.edu/downloads"
SPLITS = {
    **{"train": "train", "id_val": "id_validation", "val": "validation"},
    **{"id_test": "id_test", "test": "test"},
}
"""What WILDS calls a split, and what we do."""
Array = NDArray[Any]
Kinds = Mapping[str, str | Sequence[Any]]
Bad = Literal["stop", "skip"]
Fold = Literal["A", "B", "C", "D", "E"]


class Published(SimpleNamespace):
    """A dataset of WILDS as it was published: its ``name``, and its part of ``wilds.yaml``.

    Where :func:`find` found its files, ``place`` is their folder and ``version`` that of the files.
    """

    @property
    def folder(self) -> str:
        """The name of its folder, of the newest version."""
        return f"{self.name}_v{list(self.counts)[-1]}"

    @property
    def down(self) -> str:
        return (
            "the server of WILDS has been down since August 2026, so only a copy that somebody has will do; "
            f"`shoal data check FOLDER --dataset {self.name}` compares it with the published counts"
        )

    def read(self) -> pd.DataFrame:
        """Its table."""
        return read_columns(self.place / self.table, self.columns)

    def image_data(
        self, table: pd.DataFrame, label: str, groups: Any, splits: Mapping[str, Domains], **options: Any
    ) -> DomainData:
        """The images of a table's rows, whose classes are in column ``label``."""
        import pandas as pd

        columns, path = re.findall(r"{(\w+)}", self.images), self.path_of_images()
        rows = table.assign(row=table.index)[columns].itertuples(index=False, name=None)
        classes = self.columns[label]
        if isinstance(classes, str):  # numbers
            classes = range(int(table[label].max()) + 1)
        frame = pd.DataFrame(
            {
                "path": [path.format(**dict(zip(columns, row, strict=True))) for row in rows],
                "domain": pd.Categorical(np.asarray(groups)),
                "label": pd.Categorical.from_codes(table[label], list(classes)),
            }
        )
        named = {"class_names": tuple(classes) if isinstance(classes[0], str) else ()}
        notes = self.checked(splits)
        return image_data(frame, splits, options=options, notes=notes, **{**named, **self.about})

    def path_of_images(self) -> str:
        """The path of an image, with the names of columns in it."""
        root = self.place / self.images.partition("/")[0]
        if not root.is_dir():
            lacking = f"a table but no images: there is no folder {str(root)!r}"
            raise InputError(f"{self.title} has {lacking}. It can be obtained from {PAGE}, but {self.down}.")
        return f"{self.place}/{self.images}"

    def text_data(self, rows: Any, labels: Any, splits: Mapping[str, Domains], **options: Any) -> DomainData:
        """The text of these rows, which stays on disk: `datasets` maps it into memory."""
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
            notes=self.checked(splits),
            **self.about,
        )

    def checked(self, splits: Mapping[str, Domains]) -> dict[str, str]:
        """Notes on the splits; an error where there is nothing to learn from."""
        if "train" not in splits:
            raise InputError(f"{self.title} in {str(self.place)!r} has no example of split train.")
        return {"examples": f"version {self.version}"}


@cache
def published(name: str) -> Published:
    """The dataset ``name`` as ``wilds.yaml`` describes it."""
    found = read_yaml(Path(__file__).with_name("wilds.yaml"))[name]
    counts = {v: found["counts"][own] if isinstance(own, str) else own for v, own in found["counts"].items()}
    counts = {v: SimpleNamespace(**{"domains": {}, **own}) for v, own in counts.items()}
    about = {key: tuple(own) if isinstance(own, list) else own for key, own in found["about"].items()}
    about["uncounted"] = frozenset(about.get("uncounted", ()))
    return Published(**{**found, "name": name, "counts": counts, "about": about})


def find(name: str, folder: str | Path | None) -> Published:
    """A dataset with its files, of the newest version that is there.

    ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA/wilds`` and
    ``$SHOAL_DATA``.
    """
    known, there = published(name), dict[str, Path]()
    top = roots(f"the files of {known.title}", folder, "wilds")
    for place in (p for root in reversed(top) for p in (root, *root.glob(f"{name}_v*"))):
        called, _, version = place.absolute().name.partition("_v")
        if (place / known.table).is_file() and (called == name or not version):
            there[version or list(known.counts)[-1]] = place
    for version in reversed(known.counts):
        if version in there:
            return Published(**vars(known), place=there[version], version=version)
    where = f"{known.title} is not in {' or '.join(repr(str(root)) for root in top)}"
    if there:
        raise InputError(f"{where} in a version that can be read ({', '.join(known.counts)}).")
    lacking = f"there is no folder {known.folder} with {known.table}. {SAY_WHERE} to look"
    raise InputError(f"{where}: {lacking}. It can be obtained from {PAGE}, but {known.down}.")


# Tables, splits and domains


def read_columns(path: Path, kinds: Kinds) -> pd.DataFrame:
    """Columns of a CSV file.

    They are ``text``, numbers (``whole``, ``number``, or ``share``: 0 where it is missing), or one of a list
    of values, of which the result has the places in the list.
    """
    import pandas as pd

    first = {name: kind if isinstance(kind, str) else kind[0] for name, kind in kinds.items()}
    numbers = {name for name, kind in first.items() if kind in ("whole", "number", "share", 0, 1)}
    types: Any = {name: float if name in numbers else str for name in kinds}
    try:
        table = pd.read_csv(path, usecols=list(kinds), dtype=types, encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # no CSV, not UTF-8, not there, no such column, no number
        raise InputError(f"{str(path)!r} cannot be read ({error}); {SAY_WHERE} to look.") from error
    for name, kind in kinds.items():
        values, right = table[name].fillna({"text": "", "share": 0}.get(first[name])), "a number"
        if not isinstance(kind, str):
            places, right = pd.Index(kind).get_indexer(values), f"one of {shown(kind)}"
            values = pd.Series(places).where(places >= 0)
        if (wrong := values.isna()).any():
            raise InputError(f"{str(path)!r}, row {wrong.argmax() + 1:,}: {name} must be {right}.")
        table[name] = values if kind in ("text", "number", "share") else values.astype(np.int64)
    return table


def named(codes: Any, name: Callable[[int], str]) -> pd.Categorical:
    """Groups with names, in the order of their codes."""
    import pandas as pd

    values, places = np.unique(codes, return_inverse=True)
    return pd.Categorical.from_codes(places, [name(int(value)) for value in values])


def splits_of(
    split: Any, groups: pd.Categorical, training: pd.Categorical | None = None
) -> dict[str, Domains]:
    """The domains of every split that has examples, given the split of each; of train by ``training``."""
    import pandas as pd

    found = {}
    for name in SPLITS.values():
        rows = np.flatnonzero(np.asarray(split) == name)
        of = training if name == "train" and training is not None else groups
        if len(rows):
            members = pd.Series(rows).groupby(of[rows], observed=True)
            found[name] = Domains.from_indices({str(group): own.to_numpy() for group, own in members})
    return found


# Images


def load_camelyon17(*, folder: str | None = None, size: Pixels = 96, bad: Bad = "stop") -> DomainData:
    """Read the patches; domains and groups are hospitals, of which 0, 3 and 4 are trained on.

    Hospital 1 is the validation split, 2 the test split, and a tenth of the others ``id_validation``.

    Args:
        size: of the images, in pixels each way: 96 as published; the authors of Fish made them 224.
    """
    files = find("camelyon17", folder)
    table = files.read()
    hospital, held = table["center"], table["split"] == 1
    names = ["validation", "test", "id_validation"]
    split = np.select([hospital == 1, hospital == 2, held], names, "train")
    splits = splits_of(split, named(hospital, "hospital {}".format))
    return files.image_data(table, "tumor", hospital, splits, size=size, bad=bad)


def load_iwildcam(*, folder: str | None = None, size: Pixels = 448, bad: Bad = "stop") -> DomainData:
    """Read the photos; domains and groups are the cameras' locations.

    Args:
        size: of the images, in pixels each way: 448 as in WILDS 2.0; the authors of Fish took 224.
    """
    files = find("iwildcam", folder)
    table = files.read()
    location, split = table["location_remapped"], np.array(list(SPLITS.values()))[table["split"]]
    splits = splits_of(split, named(location, "location {}".format))
    return files.image_data(table, "y", location, splits, size=size, bad=bad)


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
    import pandas as pd

    files = find("fmow", folder)
    table = files.read()
    codes = read_columns(files.place / "country_code_mapping.csv", {"alpha-3": "text", "region": "text"})
    region_of = dict(zip(codes["alpha-3"], codes["region"], strict=True))
    # Numbered as they appear in the whole table, as WILDS does.
    region, regions = pd.factorize(table["country_code"].map(region_of).replace("", np.nan).fillna("Other"))
    used = (table["split"] != "seq").to_numpy()
    table, region = table[used], region[used]
    utc = table["timestamp"].str.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9:.]+)?(Z|\+00:?00)?")
    if not utc.all():
        wrong, right = table["timestamp"][~utc].iloc[0], "a time in UTC such as 2015-07-25T08:45:12Z"
        raise InputError(f"{str(files.place / files.table)!r}: timestamp is {wrong!r}; it must be {right}.")
    year, part = table["timestamp"].str[:4].to_numpy(np.int64), table["split"].to_numpy()
    early, late = year < 2013, year >= 2016
    where = {
        "train": early & (part == "train"),
        "id_validation": early & (part == "val"),
        "validation": ~early & ~late & (part == "val"),
        "id_test": early & (part == "test"),
        "test": late & (part == "test"),
    }
    split = np.select(list(where.values()), list(where), "none")
    count, both = len(regions), year * len(regions) + region
    training = named(both, lambda code: f"{code // count}, {regions[code % count]}")
    if group_by == "year":
        training = named(year, str)
    splits = splits_of(split, named(region, regions.__getitem__), training)
    return files.image_data(table, "category", both, splits, size=size, bad=bad)


def load_poverty(
    *, folder: str | None = None, fold: Fold = "A", augment: bool = True, size: Pixels = 224
) -> DomainData:
    """Read the images of eight bands, which come normalised; the label is a village's wealth.

    Training domains are countries, other splits are scored by urban and rural villages. A thousand examples
    of the training countries are ``id_validation``, and a thousand ``id_test``.

    WILDS changes only the three visible bands in training: it mirrors them and shifts their colours, after
    cutting the normalised numbers to bytes. Here the whole image is mirrored and no colour changed.

    Args:
        fold: which countries are held out, A to E.
        augment: whether training images are mirrored at random, both ways.
        size: of the images, in pixels each way; fewer than the files' 224 are means over them.
    """
    if size > 224:
        raise InputError(f"size={size}; it must be at most 224.")
    files = find("poverty", folder)
    table = files.read()
    countries = list(files.columns["country"])
    country = table["country"].map(dict(enumerate(countries)))
    split = np.full(len(table), "train", object)
    for name, group in zip(("validation", "test"), files.folds[fold], strict=True):
        split[country.isin(files.groups[group])] = name
    # Held out of the training countries as WILDS draws them: 1,000 for validation and 1,000 for test.
    order = np.flatnonzero(split == "train")
    np.random.default_rng(ord(fold) + 541_433).shuffle(order)
    split[order[:1000]], split[order[1000:2000]] = "id_validation", "id_test"
    by_country = named(table["country"], lambda code: countries[code].replace("_", " "))
    splits = splits_of(split, named(table["urban"] % 2, ("rural", "urban").__getitem__), by_country)
    labels = table["wealthpooled"].to_numpy(np.float32)
    return DomainData(
        examples=Villages(files.path_of_images(), labels, augment, size).in_splits(splits),
        splits=splits,
        classes=None,
        input_shape=(8, size, size),
        notes={**files.checked(splits), "test": f"fold {fold}"},
        **files.about,
    )


class Villages(Examples):
    """Images as float32 (8, ``size``, ``size``), at 224 as in the files, with the wealth of each."""

    def __init__(self, path: str, labels: Array, augment: bool, size: int) -> None:
        self.path_of, self.labels, self.augment, self.size = path, labels, augment, size
        self.trained = np.zeros(len(labels), bool)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            with np.load(self.path(index), allow_pickle=False) as file:
                x = torch.from_numpy(file["x"].astype(np.float32))
            if x.shape != (8, 224, 224):
                raise ValueError(f"its shape is {tuple(x.shape)}, not (8, 224, 224)")
        except Exception as error:  # whatever NumPy raises of a damaged file
            raise InputError(f"the image {self.path(index)!r} cannot be read ({error!r}).") from error
        if self.size < x.shape[-1]:
            x = torch.nn.functional.adaptive_avg_pool2d(x, self.size)
        if self.augment and self.trained[index]:
            x = x.flip([axis for axis, u in zip((1, 2), torch.rand(2), strict=True) if u < 0.5])
        return x, torch.tensor(self.labels[index])

    def known_labels(self) -> Array:
        return self.labels

    def path(self, index: int) -> str:
        return self.path_of.format(row=index)

    def in_splits(self, splits: Mapping[str, Domains]) -> Self:
        """The same images in other splits: those of ``"train"`` are mirrored."""
        same = copy.copy(self)
        same.trained = np.isin(np.arange(len(self)), splits["train"].examples())
        return same

    def evaluation(self) -> Self:
        """The same images, none of them mirrored."""
        same = copy.copy(self)
        same.augment = False
        return same


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
    toxic = table["toxicity"] >= 0.5
    mentioned = table[[name for name, kind in files.columns.items() if kind == "share"]] >= 0.5
    mentioned["none"] = ~mentioned.any(axis=1)
    black = mentioned[["black"]].assign(**{"not black": ~mentioned["black"]})[["not black", "black"]]
    splits = {}
    for code, split in enumerate(SPLITS.values()):
        groups = black if (split, group_by) == ("train", "black") else mentioned
        inside = table["split"] == code
        found = {
            f"{name}, {word}": np.flatnonzero(inside & groups[name] & (toxic == (word == "toxic")))
            for name in groups
            for word in files.about["class_names"]
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
    import pandas as pd

    files = find("amazon", folder)
    table, path = files.read(), files.place / "splits" / "user.csv"
    numbers = {0: "train", 1: "validation", 2: "id_validation", 3: "test", 4: "id_test"}
    split = read_columns(path, {"split": [*numbers, -1]})["split"]
    if len(split) != len(table):
        raise InputError(f"{str(path)!r} has {len(split):,} rows and reviews.csv has {len(table):,}.")
    rows = np.flatnonzero(split < len(numbers))
    table, split = table.iloc[rows], split.iloc[rows]
    in_order = table["reviewerID"].iloc[np.argsort(split, kind="stable")]  # of their splits
    reviewers = pd.Categorical(table["reviewerID"], in_order.unique())
    splits = splits_of(split.map(numbers), reviewers)
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to}
    return files.text_data(rows, table["overall"], splits, **options)


camelyon17 = SimpleNamespace(load=load_camelyon17, PUBLISHED=published("camelyon17"))
fmow = SimpleNamespace(load=load_fmow, PUBLISHED=published("fmow"))
iwildcam = SimpleNamespace(load=load_iwildcam, PUBLISHED=published("iwildcam"))
poverty = SimpleNamespace(load=load_poverty, PUBLISHED=published("poverty"))
civilcomments = SimpleNamespace(load=load_civilcomments, PUBLISHED=published("civilcomments"))
amazon = SimpleNamespace(load=load_amazon, PUBLISHED=published("amazon"))
