"""Tables as domains: labels, splits, and what has no part in the encoding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import datasets as sets
from shoal import models
from shoal.data import DomainData, from_table
from shoal.data.tables import Encoder, Labels, TableRows, as_table
from shoal.errors import InputError


def patients(rows: int = 120, seed: int = 0) -> dict[str, Any]:
    """Three sites of which one is much smaller; the label depends on age and colour."""
    draw = np.random.default_rng(seed)
    site = np.where(np.arange(rows) < 6, "lima", np.where(np.arange(rows) % 2, "oslo", "kyoto"))
    age = draw.normal(50, 10, rows)
    colour = draw.choice(["red", "green", "blue"], rows)
    ill = np.where(age + 10 * (colour == "red") + draw.normal(0, 4, rows) > 52, "yes", "no")
    age[::7] = np.nan
    return {"age": age, "colour": colour, "site": site, "ill": ill}


class TestLabels:
    def read(self, *values: Any, task: str | None = None) -> Labels:
        return Labels.read(as_table({"y": list(values)})["y"], "y", task)

    def test_classes_of_any_type(self) -> None:
        assert self.read("b", "a", "b").names == ("a", "b")
        ones = self.read(10, 1, 2)
        assert (ones.names, ones.values.tolist()) == (("1", "2", "10"), [2, 0, 1])
        assert self.read(True, False).names == ("False", "True")
        assert self.read(0.5, 1.5).names == ("0.5", "1.5")

    def test_quantities(self) -> None:
        found = self.read(*np.linspace(0, 1, 30).tolist())
        assert (found.task, found.classes) == ("regression", None)
        assert "30 different numbers, so the task is regression" in found.note
        assert self.read(1, 2, 3, task="regression").task == "regression"
        assert self.read(*range(30), task="classification").classes == 30
        with pytest.raises(InputError, match="30 different values in 30 rows; set task"):
            self.read(*range(30))
        with pytest.raises(InputError, match="60 different values in 60 rows; set task"):
            self.read(*(f"n{n}" for n in range(60)))

    def test_what_is_none(self) -> None:
        with pytest.raises(InputError, match=r"missing in rows 2, 3, 4, 5, 6 and 1 more"):
            self.read("a", None, "?", "NA", "", "nan", "null", "b")
        with pytest.raises(InputError, match=r"missing in row 2 \('NA' is read as missing\)"):
            self.read("some", "NA", "many")
        found = self.read("some", "none", "many", "-", "none")
        assert (found.names, found.values.tolist()) == (("-", "many", "none", "some"), [3, 2, 1, 0, 2])
        with pytest.raises(InputError, match="'a' in every row; at least two classes are needed"):
            self.read("a", "a")
        with pytest.raises(InputError, match=r"contains 'x' \(1\); for regression"):
            self.read(1, "x", task="regression")

    def test_yes_is_the_second_class_in_every_language(self) -> None:
        for no, yes in (("nein", "ja"), ("nei", "ja"), ("no", "yes"), ("FALSE", "TRUE"), ("non", "oui")):
            assert self.read(*[yes, no] * 3).names == (no, yes)
        assert self.read("yes", "ja", "no").names == ("ja", "no", "yes")

    def test_the_decimal_mark_of_a_label_is_that_of_the_table(self) -> None:
        cells = [f"1,{n:03}" for n in range(100, 900, 10)]
        table = {"y": cells, "x": [f"{n},5" for n in range(80)], "d": ["a", "b"] * 40}
        data = from_table(table, label="y", domain="d", task="regression")
        values = data.examples.y.numpy() * data.label_scale[1] + data.label_scale[0]
        assert values == pytest.approx([1 + n / 1000 for n in range(100, 900, 10)])


def from_patients(**changes: Any) -> DomainData:
    given: dict[str, Any] = {"label": "ill", "domain": "site", "held_out": "kyoto"}
    return from_table(patients(), **{**given, **changes})


class TestFromTable:
    def test_it_is_ready_to_train(self) -> None:
        data = from_patients()
        assert data.class_names == ("no", "yes")
        assert data.input_shape == (5,)
        assert data.splits["test"].names == ("kyoto",)
        assert data.splits["train"].names == ("lima", "oslo")
        assert data.metrics == ("accuracy", "AUC")
        model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        run = shoal.fit("fish", model, data, steps=30, lr=0.01, progress=False)  # lima has 5 of 16 in a batch
        assert run.accuracy("kyoto") > 0.6

    @pytest.mark.parametrize("split", ["test", "validation"])
    def test_rows_that_are_not_trained_on_have_no_part_in_it(self, split: str) -> None:
        table = patients()
        before = from_table(table, label="ill", domain="site", held_out="kyoto")
        rows = before.splits[split].examples()
        train = before.splits["train"].examples()
        table["age"][rows] = np.random.default_rng(1).normal(1e6, 1e6, len(rows))
        table["colour"] = table["colour"].astype(object)
        table["colour"][rows] = [f"shade {n}" for n in range(len(rows))]
        after = from_table(table, label="ill", domain="site", held_out="kyoto")
        for part in ("columns", "training", "label"):
            assert after.inputs[part] == before.inputs[part]
        for name in before.splits:
            assert np.array_equal(after.splits[name].indices, before.splits[name].indices)
        old, new = before.examples, after.examples
        assert isinstance(old, TableRows)
        assert isinstance(new, TableRows)
        assert torch.equal(new.x[train], old.x[train])
        assert not torch.equal(new.x[rows], old.x[rows])

    def test_other_splits_of_fitted_rows_are_refused(self) -> None:
        data = from_patients()
        assert data.split_as(data.splits, {}).examples is data.examples
        swapped = {"train": data.splits["test"], "test": data.splits["train"]}
        with pytest.raises(InputError, match="split 'test' would hold rows"):
            data.split_as(swapped, {})

    def test_the_label_of_a_regression_is_standardized(self) -> None:
        table = patients()
        table["age"] = np.nan_to_num(table["age"], nan=50.0)
        data = from_table(table, label="age", domain="site", held_out="kyoto")
        assert (data.classes, data.class_names, data.metrics) == (None, (), ("mse", "R²"))
        examples = data.examples
        assert isinstance(examples, TableRows)
        y = examples.y[data.splits["train"].examples()]
        assert (float(y.mean()), float(y.std(correction=0))) == pytest.approx((0, 1), abs=1e-5)
        encoder = Encoder.from_dict(data.inputs)
        assert data.label_scale == (encoder.label["mean"], encoder.label["scale"])
        assert encoder.predictions(examples.y.numpy()) == pytest.approx(table["age"], rel=1e-5)
        assert "different numbers" in data.notes["label"]

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"label": "il"}, r"no column 'il' for the label. Did you mean 'ill'"),
            ({"label": "site"}, "cannot be both the label and the domain"),
            ({"columns": ["age", "ill"]}, "column 'ill' is the label; it cannot be a feature"),
            ({"drop": ["age", "colour"]}, "there is no column"),
            ({"held_out": "paris"}, "held_out: unknown domain 'paris'.*Known: kyoto, lima, oslo"),
            ({"held_out": ["lima", "oslo", "kyoto"]}, "all 3 domains are held out"),
            ({"kinds": {"age": "number"}}, "kinds must be .* got {'age': 'number'}"),
            ({"drop": 3}, "no column '3' for the list"),
            ({"task": "regresion"}, "task must be .*Did you mean 'regression'"),
            ({"validation": 1.5}, "share must be .* got 1.5"),
        ],
    )
    def test_wrong_arguments(self, changes: dict[str, Any], says: str) -> None:
        with pytest.raises(InputError, match=says):
            from_patients(**changes)

    def test_wrong_tables(self) -> None:
        table = patients()
        with pytest.raises(InputError, match="column 'twin' is a copy of the label 'ill'"):
            from_table({**table, "twin": table["ill"]}, label="ill", domain="site")
        with pytest.raises(InputError, match="only one domain, 'x'"):
            from_table({**table, "site": ["x"] * 120}, label="ill", domain="site", held_out="x")
        with pytest.raises(InputError, match="domain 'site' is missing in row 1;"):
            from_table({**table, "site": ["", *["x"] * 119]}, label="ill", domain="site")
        with pytest.raises(InputError, match=r"domain 'site' is 0\.5 in row 2"):
            from_table({**table, "site": np.arange(120) / 2}, label="ill", domain="site")
        large = from_table(
            {**table, "site": [10**17 + n % 3 for n in range(120)]}, label="ill", domain="site"
        )
        assert large.splits["train"].names == tuple(str(10**17 + n) for n in range(3))

    def test_names_of_domains(self) -> None:
        odd = ["<script>", "NA", "$x"] * 40
        data = from_table({**patients(), "site": odd}, label="ill", domain="site", held_out="<script>")
        assert data.splits["test"].names == ("<script>",)
        assert data.splits["train"].names == ("$x", "NA")
        numbers = from_table({**patients(), "site": [10.0, 9.0, 1.0] * 40}, label="ill", domain="site")
        assert numbers.splits["train"].names == ("1", "9", "10")
        by_number = from_table(
            {**patients(), "site": [10.0, 9.0, 1.0] * 40}, label="ill", domain="site", held_out=9
        )
        assert by_number.splits["test"].names == ("9",)
        assert "test" not in numbers.splits


class TestGroups:
    def table(self) -> dict[str, Any]:
        draw = np.random.default_rng(0)
        patient = np.arange(240) // 3
        site = np.array(["a", "b", "c", "d"])[patient % 4]
        site[::50] = "a"  # some patients were in two places
        return {"x": draw.normal(size=240), "who": patient, "site": site, "y": draw.integers(0, 2, 240)}

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("held_out", [None, "a", "b"])
    def test_an_entity_is_on_one_side_of_every_split(self, held_out: str | None, seed: int) -> None:
        table = self.table()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = from_table(table, label="y", domain="site", group="who", held_out=held_out, seed=seed)
        assert len(caught) == (held_out is not None)
        sides = [set(table["who"][d.examples()].tolist()) for d in data.splits.values()]
        for n, one in enumerate(sides):
            for other in sides[n + 1 :]:
                assert not one & other
        held = len(data.splits["validation"].examples())
        rest = held + len(data.splits["train"].examples())
        assert 0.1 < held / rest < 0.3
        assert [s["name"] for s in data.inputs["columns"]] == ["x"]


class TestDataset:
    def file(self, tmp_path: Path) -> str:
        table = patients()
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
        (tmp_path / "t.csv").write_text("\n".join(lines))
        return str(tmp_path / "t.csv")

    def test_it_holds_the_last_domain_out(self, tmp_path: Path) -> None:
        options = {"file": self.file(tmp_path), "label": "ill", "domain": "site"}
        data = sets.load("table", **options)
        assert data.splits["test"].names == ("oslo",)
        assert sets.registry.module("table").domains(**options) == ("kyoto", "lima", "oslo")
        assert sets.load("table", **options, held_out="lima").splits["test"].names == ("lima",)
        assert "test" not in sets.load("table", **options, held_out=[]).splits
        assert sets.load("table", **options, drop="age").input_shape == (3,)
        assert sets.load("table", **options, columns=["age"], seed=3).input_shape == (2,)
        assert sets.load("table", **options, kinds={"age": "categorical"}).input_shape[0] > 10

    def test_a_changed_file_is_another(self, tmp_path: Path) -> None:
        options = {"file": self.file(tmp_path), "label": "ill", "domain": "site"}
        digest = sets.registry.module("table").digest_of(options["file"])
        assert sets.load("table", **options, digest=digest)
        with Path(options["file"]).open("a") as file:
            file.write("\n41.5,red,oslo,no")
        with pytest.raises(InputError, match="has changed: its digest"):
            sets.load("table", **options, digest=digest)
