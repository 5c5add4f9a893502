"""Subsets of the `wilds` package, imitated: which domains they become, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.datasets.from_wilds import from_wilds
from shoal.errors import InputError

TABLE = ((0, 1), (1, 0), (1, 1))


class Subset(torch.utils.data.Dataset[Any]):
    """What `wilds` calls a subset, of a few examples."""

    def __init__(self, table: Any = TABLE, fields: Any = ("year", "region"), **own: Any) -> None:
        self.metadata_array, self.metadata_fields = torch.tensor(table, dtype=torch.float32), list(fields)
        self.y_array, self.n_classes = torch.arange(len(table)) % 2, 2
        self.metadata_map = {"region": ["Asia", "Europe"]}
        for name, value in own.items():
            setattr(self, name, value)

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
    assert from_wilds({"train": Subset()}, ("region",)).splits["train"].sizes.tolist() == [1, 2]


def test_metadata_that_only_some_subsets_have_is_left_out() -> None:
    other = Subset(((1, 7, 0),), ("region", "month", "year"))
    data = from_wilds({"train": Subset(), "test": other}, ["year"], scored_by=["region"])
    examples: Any = data.examples
    assert {name: values.tolist() for name, values in examples.metadata.items()} == {
        "year": [0, 1, 1, 0],
        "region": [1, 0, 1, 1],
    }
    assert data.splits["test"].names == ("region = Europe",)


class Halves:
    """A grouper of the user's own."""

    def __init__(self, groups: Any) -> None:
        self.groups = groups

    def metadata_to_group(self, metadata: Any) -> Any:
        return self.groups

    def group_str(self, group: int) -> str:
        return f"half {group}"


def test_a_grouper_of_ones_own() -> None:
    data = from_wilds({"train": Subset()}, Halves(torch.tensor([1, 0, 1])))
    assert data.splits["train"].names == ("half 0", "half 1")


NAN = float("nan")
WRONG: dict[str, tuple[Any, Any, str]] = {
    "a text": ({}, "year", r"grouper must be "),
    "nothing": ({}, None, "grouper must be "),
    "a number": ({}, 3, "grouper must be "),
    "numbers": ({}, [0, 1], "unknown metadata field"),
    "an empty list": ({}, [], "grouper must be a list of different metadata fields"),
    "the same twice": ({}, ["year", "year"], "a list of different metadata fields"),
    "an unknown field": (
        {},
        ["yeer"],
        "unknown metadata field of subset 'train': 'yeer'. Did you mean 'year'. Known: region, year",
    ),
    "a field that one subset lacks": (
        {"test": Subset(((0,),), ("region",))},
        ["year", "region"],
        "unknown metadata field of subset 'test': 'year'",
    ),
    "NaN": ({"train": Subset(((0, NAN), (1, 1)))}, ["region"], "'train' has 1 .*'region' .*first nan"),
    "negative": ({"val": Subset(((-1, 0), (-2, 1)))}, ["year"], "'val' has 2 examples .*'year' .*first -1"),
    "fractions": ({"train": Subset(((0.5, 0), (1, 1)))}, ["year"], "'year' is no whole number .*first 0.5"),
    "an empty subset": ({"test": Subset(torch.zeros(0, 2).tolist())}, ["year"], "subset 'test' is empty"),
    "no metadata": ({"test": Subset(metadata_array=None)}, ["year"], "metadata of shape \\(\\)"),
    "no fields": ({"test": Subset(metadata_fields=[])}, ["year"], "0 metadata fields"),
    "not a column for each field": ({"test": Subset(metadata_fields=["year"])}, ["year"], "a column"),
    "several targets": ({"test": Subset(y_array=torch.zeros(3, 2))}, ["year"], "one number for each"),
    "another dataset": ({"test": [1, 2]}, ["year"], "subset 'test' is a list without metadata_array"),
    "groups of another shape": ({}, Halves(torch.zeros(2)), "a whole number for each of 3 examples"),
    "groups that are not numbers": ({}, Halves(torch.zeros(3)), "gives float32"),
    "both names": ({"val": Subset(), "validation": Subset()}, ["year"], "split 'validation' twice"),
}


@pytest.mark.parametrize(("subsets", "grouper", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_groupers_and_subsets_are_refused(subsets: Any, grouper: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_wilds({"train": Subset(), **subsets}, grouper)


def test_an_error_of_scored_by_names_it() -> None:
    with pytest.raises(InputError, match="scored_by must be "):
        from_wilds({"train": Subset(), "test": Subset()}, ["year"], scored_by="year")
    with pytest.raises(InputError, match="subsets must be a mapping"):
        from_wilds([Subset()], ["year"])  # type: ignore[arg-type]
