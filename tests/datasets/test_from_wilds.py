"""Subsets of the `wilds` package, imitated: which domains they become, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from shoal.datasets.from_wilds import from_wilds
from shoal.errors import InputError

TABLE = ((0, 1), (1, 0), (1, 1))


class Subset(torch.utils.data.Dataset[Any]):
    """What `wilds` calls a subset, of a few examples."""

    def __init__(self, table: Any = TABLE, fields: Any = ("year", "region")) -> None:
        self.metadata_array, self.metadata_fields = torch.tensor(table, dtype=torch.float32), list(fields)
        self.y_array, self.n_classes = torch.arange(len(table)) % 2, 2
        self.metadata_map = {"region": ["Asia", "Europe"]}

    def __len__(self) -> int:
        return len(self.y_array)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), self.y_array[index], self.metadata_array[index]


def test_combined_fields_by_hand() -> None:
    data = from_wilds({"train": Subset(), "test": Subset(((5, 2), (5, 2)))}, ["year", "region"])
    train, test = data.splits["train"], data.splits["test"]
    names = ["year = 0, region = Europe", "year = 1, region = Asia", "year = 1, region = Europe"]
    assert list(train.names) == names
    assert [train.indices_of(d).tolist() for d in range(3)] == [[0], [1], [2]]
    assert (test.names, test.indices.tolist()) == (("year = 5, region = 2",), [3, 4])  # 2 has no name
    scored = from_wilds({"train": Subset(), "val": Subset()}, ["year"], scored_by=["region"])
    assert scored.splits["validation"].names == ("region = Asia", "region = Europe")


def test_groupers_of_the_package(wilds_root: Path, wilds_package: Any) -> None:
    """Each domain is one of the package's groups; images and labels are those of its subsets."""
    from torchvision import transforms
    from wilds.common.grouper import CombinatorialGrouper  # type: ignore[import-not-found]

    with pd.option_context("future.infer_string", False):
        theirs = wilds_package.get_dataset("fmow", root_dir=str(wilds_root), download=False)
    grouper = CombinatorialGrouper(theirs, ["region", "year"])
    part = theirs.get_subset("train", transform=transforms.ToTensor())
    data = from_wilds({"train": part}, grouper)
    groups = np.asarray(grouper.metadata_to_group(part.metadata_array))
    train = data.splits["train"]
    found = {tuple(train.indices_of(d).tolist()) for d in range(len(train))}
    assert found == {tuple(np.flatnonzero(groups == group).tolist()) for group in np.unique(groups)}
    assert "region = Asia, year = 2005" in train.names
    assert (data.classes, data.input_shape) == (62, (3, 224, 224))
    assert data.examples[5][1] == part.y_array[5]
    assert torch.equal(data.examples[5][0], part[5][0])


NAN = float("nan")
WRONG: dict[str, tuple[Any, Any, str]] = {
    "a text": ({}, "year", r"grouper must be "),
    "nothing": ({}, None, "grouper must be "),
    "an empty list": ({}, [], "grouper must be a list of metadata fields"),
    "an unknown field": (
        {},
        ["yeer"],
        "metadata field of subset 'train': 'yeer'. Did you mean 'year'",
    ),
    "NaN": ({"train": Subset(((0, NAN), (1, 1)))}, ["region"], "region of subset 'train' must be whole"),
    "negative": ({"val": Subset(((-1, 0), (-2, 1)))}, ["year"], "year of subset 'val' must be whole"),
    "an empty subset": ({"test": Subset(torch.zeros(0, 2).tolist())}, ["year"], "subset 'test' must be"),
    "not a column for each field": ({"test": Subset(fields=["year"])}, ["year"], "subset 'test' must be"),
    "another dataset": ({"test": [1, 2]}, ["year"], "subset 'test' must be a subset of the wilds package"),
    "both names": ({"val": Subset(), "validation": Subset()}, ["year"], "split 'validation' twice"),
}


@pytest.mark.parametrize(("subsets", "grouper", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_groupers_and_subsets_are_refused(subsets: Any, grouper: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_wilds({"train": Subset(), **subsets}, grouper)
