"""Tables of the user's own: how they are read, what becomes of columns, and what has no part in it."""

from __future__ import annotations

import csv
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import shoal
from imitations.wilds_text import fake_tokenizer
from shoal import datasets as sets
from shoal import models
from shoal.data import DomainData, from_arrays, from_dataset, from_hf, from_table
from shoal.data.cells import Format
from shoal.data.columns import CATEGORIES, infer, values_of
from shoal.data.own import Labels, TableRows
from shoal.data.reading import Column, as_column, as_table, read_table
from shoal.data.table import CLIP, WORDS, Preprocessing, Tally
from shoal.errors import InputError


def numbers(column: Column) -> list[float]:
    return values_of(column, "numeric", Format())[0].tolist()


def kind_of(*values: Any, name: str = "a") -> str:
    return infer(as_table({name: list(values)}), [name])[name].kind


def written(path: Path, text: str, **options: Any) -> Path:
    path.write_text(text, newline="", **options)
    return path


def patients(rows: int = 120, seed: int = 0) -> dict[str, Any]:
    """Three sites of which one is much smaller; the label depends on age and colour."""
    draw = np.random.default_rng(seed)
    site = np.where(np.arange(rows) < 6, "lima", np.where(np.arange(rows) % 2, "oslo", "kyoto"))
    age = draw.normal(50, 10, rows)
    colour = draw.choice(["red", "green", "blue"], rows)
    ill = np.where(age + 10 * (colour == "red") + draw.normal(0, 4, rows) > 52, "yes", "no")
    age[::7] = np.nan
    return {"age": age, "colour": colour, "site": site, "ill": ill}


class TestReading:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("a,b\n1,x\n2,y\n", "t.csv"),
            ("\ufeffa,b\r\n1,x\r\n2,y\r\n", "t.csv"),
            ('a;b\n"1";x\n2;"y"\n', "t.csv"),
            ("a\tb\n1\tx\n\n2\ty\n", "t.tsv"),
            ("a|b\n 1 | x\n2|y ", "t.txt"),
            ("\ufeffsep=;\r\na;b\r\n1;x\r\n2;y\r\n", "t.csv"),
            ("\n \na,b\n1,x\n2,y\n", "t.csv"),
        ],
    )
    def test_separators_quotes_and_marks(self, text: str, name: str, tmp_path: Path) -> None:
        found = read_table(written(tmp_path / name, text, encoding="utf-8"))
        assert list(found) == ["a", "b"]
        assert numbers(found["a"]) == [1.0, 2.0]
        assert found["b"].texts() == ["x", "y"]

    def test_a_quoted_cell_may_hold_anything(self, tmp_path: Path) -> None:
        found = read_table(written(tmp_path / "t.csv", 'a,b\n1,"x, ""y""\nand z"\n2,w\n'))
        assert found["b"].texts() == ['x, "y"\nand z', "w"]

    def test_a_cell_may_be_long(self, tmp_path: Path) -> None:
        """Longer than the csv module takes unless it is told; what it is told elsewhere stays."""
        before = csv.field_size_limit()
        found = read_table(written(tmp_path / "t.csv", f"a,b\n1,{'word ' * 30_000}\n2,w\n"))
        assert len(found["b"].texts()[0] or "") == 149_999
        assert csv.field_size_limit() == before

    def test_decimal_commas_beside_semicolons(self, tmp_path: Path) -> None:
        found = read_table(written(tmp_path / "t.csv", "a;b\n1,5;x,y\n-2;z\nNA;w\n"))
        about = infer(found, ["a", "b"])
        assert values_of(found["a"], "numeric", about["a"].how)[0].tolist()[:2] == [1.5, -2.0]
        assert (about["a"].kind, about["b"].kind) == ("numeric", "categorical")
        assert found["b"].texts()[0] == "x,y"

    def test_what_is_missing(self, tmp_path: Path) -> None:
        values = ["1", "", "NA", "NaN", "?", "None", "null", "n/a", "-", "--", ".", "#N/A", "—"]
        found = read_table(written(tmp_path / "t.csv", "\n".join(["a,b", *(f"{v},x" for v in values)])))
        assert np.isnan(numbers(found["a"])).tolist() == [False, *[True] * 12]

    def test_codes_are_no_numbers(self, tmp_path: Path) -> None:
        found = read_table(written(tmp_path / "t.csv", "zip,b,c\n01234,1_000,0.5\n99999,2,-.5\n"))
        about = infer(found, list(found))
        assert [about[name].kind for name in found] == ["categorical", "categorical", "numeric"]
        assert found["zip"].texts() == ["01234", "99999"]
        assert numbers(found["c"]) == [0.5, -0.5]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("a,b\n1,2\n1,2,3\n", "line 3: 3 values, but the first line names 2 columns"),
            ("sep=,\n\na,b\n1,2\n1,2,3\n", "line 5: 3 values"),
            ("a,a\n1,2\n", "two columns named 'a'"),
            ("a,b\n", "has no rows"),
            ("", "has no rows"),
        ],
    )
    def test_damage_is_named(self, text: str, says: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=says):
            read_table(written(tmp_path / "t.csv", text))

    def test_other_encodings_and_places(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_bytes("a,b\n1,ü\n".encode("latin-1"))
        with pytest.raises(InputError, match="not UTF-8"):
            read_table(tmp_path / "t.csv")
        with pytest.raises(InputError, match="No such file"):
            read_table(tmp_path / "u.csv")
        with pytest.raises(InputError, match="is a folder"):
            read_table(tmp_path)

    def test_a_file_is_read_once_until_it_changes(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.csv", "a,b\n1,x\n")
        first = read_table(path)
        assert read_table(str(path)) is first
        with pytest.raises(ValueError, match="read-only"):
            as_table({"a": np.arange(3)})["a"].numbers[0] = 5  # type: ignore[index]
        written(path, "a,b\n1,x\n2,y\n")
        assert len(read_table(path)["a"]) == 2

    def test_frames_parquet_and_mappings_say_the_same(self, tmp_path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        frame = pandas.DataFrame(
            {
                "n": pandas.array([1, None, 3], dtype="Int64"),
                "f": [0.5, math.nan, 2.0],
                "s": ["x", None, "z"],
                "c": pandas.Categorical(["u", "v", "u"]),
                "t": [True, False, True],
            }
        )
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_csv(tmp_path / "t.csv", index=False)
        kinds = {"c": "categorical", "s": "categorical"}
        how = Preprocessing.fit(as_table(frame), kinds=kinds)
        wanted = how.transform(frame)
        mapping = {"n": [1, None, 3], "f": np.array([0.5, math.nan, 2]), "s": ("x", None, "z")}
        mapping |= {"c": ["u", "v", "u"], "t": torch.tensor([True, False, True]).numpy()}
        for other in (tmp_path / "t.parquet", str(tmp_path / "t.csv"), mapping):
            assert np.array_equal(how.transform(other), wanted)

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ({"a": [1, 2], "b": [1]}, "different lengths: 'a' 2, 'b' 1"),
            ({}, "no rows"),
            ({"a": []}, "no rows"),
            ({"a": [[1], [2]]}, "column 'a', row 1: a list"),
            ({"a": np.zeros((2, 2))}, r"shape \(2, 2\)"),
            (7, "got int"),
        ],
    )
    def test_other_things_are_refused(self, table: Any, says: str) -> None:
        with pytest.raises(InputError, match=says):
            as_table(table)

    @settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=60) | st.text('ab,;|"\n\r\t1.0 \0é', max_size=60).map(str.encode))
    def test_any_file_is_read_or_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / f"{zlib.crc32(content)}.csv"
        path.write_bytes(content)
        try:
            found = read_table(path)
        except InputError:
            return
        assert len({len(values) for values in found.values()}) == 1
        assert all(len(column.texts()) == found.rows for column in found.values())

    @settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.tuples(st.floats(allow_nan=False), st.text('xyz,;"\n é', min_size=1)), min_size=1, max_size=9
        ),
        st.sampled_from(",;\t|"),
    )
    def test_what_was_written_is_read(self, tmp_path: Path, rows: Any, separator: str) -> None:
        path = tmp_path / f"{zlib.crc32(repr((rows, separator)).encode())}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
        found = read_table(path)
        assert [float(t or "nan") for t in found["a"].texts()] == [a for a, _ in rows]
        assert [b or "" for b in found["b"].texts()] == [b.strip() for _, b in rows]


class TestColumns:
    def test_kinds(self) -> None:
        words = [f"the patient number {n} feels {n % 7}" for n in range(200)]
        assert kind_of(1.0, np.nan, 2.0) == "numeric"
        assert kind_of("1", "?", "2.5e3") == "numeric"
        assert kind_of("a", None, "b") == "categorical"
        assert kind_of(*words) == "text"
        assert kind_of(*["quite a few words", "quite many words"] * 200) == "categorical"

    def test_numbers_by_hand(self) -> None:
        values = np.array([1.0, 2.0, 4.0, 9.0, np.nan])
        how = Preprocessing.fit(as_table({"a": values}))
        found = how.transform({"a": [4.0, None, 1e9]})
        mean, scale = np.mean(values[:4]), np.std(values[:4])
        assert found.dtype == np.float32
        assert found == pytest.approx(np.array([[(4 - mean) / scale, 0], [0, 1], [CLIP, 0]]))

    def test_no_indicator_where_nothing_was_missing(self) -> None:
        how = Preprocessing.fit(as_table({"a": [1.0, 2.0, 3.0]}))
        assert how.transform({"a": [None, 2.0]}).tolist() == [[0.0], [0.0]]

    def test_one_wild_value_does_not_squeeze_the_others(self) -> None:
        values = np.concatenate([np.arange(100.0) + 0.5, [1e12]])
        spread = Preprocessing.fit(as_table({"a": values})).transform({"a": values})[:100].std()
        assert 0.3 < spread < 3

    def test_categories(self) -> None:
        how = Preprocessing.fit(as_table({"c": ["b", "a", "b", None]}))
        assert how.transform({"c": ["a", "b", "z", None]}).tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
        numbers = Preprocessing.fit(as_table({"c": [1.0, 2.0, 1.0]}), kinds={"c": "categorical"})
        assert numbers.transform({"c": ["1", "2.0", "3"]}).tolist() == [[1, 0], [0, 1], [0, 0]]

    def test_of_too_many_categories_the_frequent_ones_stay(self) -> None:
        values = [f"c{n}" for n in range(CATEGORIES + 20) for _ in range(3 if n < CATEGORIES else 1)]
        found = Preprocessing.fit(as_table({"c": values})).transform({"c": ["c0", "c69", "new", None]})
        assert found.shape == (4, CATEGORIES + 1)
        assert found.sum(1).tolist() == [1, 1, 1, 0]
        assert found[:, -1].tolist() == [0, 1, 1, 0]

    def test_text_by_hand(self) -> None:
        how = Preprocessing.fit(as_table({"t": ["Fever fever cough", "cough"]}), kinds={"t": "text"})
        (row,) = how.transform({"t": ["fever, FEVER; cough"]})
        fever, cough = (zlib.crc32(w) % WORDS for w in (b"fever", b"cough"))
        wanted = np.zeros(WORDS)
        wanted[fever], wanted[cough] = (1 + math.log(2)) * (1 + math.log(3 / 2)), 1
        assert row == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-6)
        assert not how.transform({"t": [None]}).any()

    def test_columns_of_no_use_are_dropped_with_a_reason(self) -> None:
        names = {"name": [f"patient {n}" for n in range(30)], "patient_id": np.arange(30.0)}
        others = {"same": ["x"] * 30, "one": np.ones(30), "none": [None] * 30, "age": np.arange(30.0) % 7}
        how = Preprocessing.fit(as_table({**names, **others}))
        assert how.names == ("age",)
        assert how.dropped == {
            "name": "is different in (almost) every row, like an identifier",
            "patient_id": "is different in every row and is named like an identifier",
            "same": "has the same value in every row",
            "one": "has the same value in every row",
            "none": "is empty",
        }
        kept = Preprocessing.fit(as_table(names), kinds={"patient_id": "numeric"})
        assert kept.names == ("patient_id",)
        with pytest.raises(InputError, match=r"there is no column to learn from: 'same' has the same value"):
            Preprocessing.fit(as_table({"same": ["x"] * 3}))

    def test_plain_data_and_back(self) -> None:
        table = {"a": [1, None, 3.5], "c": ["x", "y", None], "t": ["one two", "three", ""]}
        how = Preprocessing.fit(as_table(table), kinds={"t": "text"}, label={"mean": 2.0, "scale": 3.0})
        text = json.dumps(how.to_dict(), allow_nan=False)
        again = Preprocessing.from_dict(json.loads(text))
        assert again.to_dict() == how.to_dict()
        assert json.loads(text)["kind"] == "table"
        assert np.array_equal(again.transform(table), how.transform(table))
        assert again.predictions(np.array([1.0])).tolist() == [5.0]
        with pytest.raises(InputError, match="kind 'image'"):
            Preprocessing.from_dict({"kind": "image"})

    def test_a_new_table_must_fit(self) -> None:
        how = Preprocessing.fit(as_table({"age": [1.0, 2.0], "c": ["x", "y"]}))
        with pytest.raises(InputError, match=r"no column 'age' for the model. Did you mean 'Age'"):
            how.transform({"Age": [1.0], "c": ["x"]})

    def test_what_a_new_table_has_that_cannot_be_used_is_counted(self) -> None:
        how = Preprocessing.fit(as_table({"age": [1.0, 2.0], "c": ["x", "y"]}))
        tally = Tally()
        found = how.transform({"age": ["1", "old", "inf"], "c": ["x", "new", "new"]}, tally)
        assert found[1:].tolist() == [[0, 0, 0], [0, 0, 0]]
        how.transform({"age": [1.0, math.inf], "c": ["x", "y"]}, tally)
        assert tally.notes() == [
            "column 'age': 3 of 5 cells could not be read and are treated as missing: 'inf' (2), 'old' (1)",
            "column 'c': 2 of 5 cells contain categories that are not in the training data: 'new' (2)",
        ]

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.none() | st.floats(allow_nan=True, allow_infinity=False),
                st.none() | st.text(max_size=8),
                st.none() | st.text(max_size=20),
            ),
            min_size=1,
            max_size=30,
        ),
        st.floats(allow_nan=True, allow_infinity=False),
        st.text(max_size=8),
    )
    def test_whatever_is_in_it_the_numbers_are_finite(self, rows: Any, number: float, text: str) -> None:
        a, b, c = (list(values) for values in zip(*rows, strict=True))
        table = {"a": [*a, 1.0], "b": [*b, "x"], "c": [*c, "y"], "d": [*range(len(a)), -1]}
        kinds = {"a": "numeric", "b": "categorical", "c": "text", "d": "numeric"}
        how = Preprocessing.fit(as_table(table), kinds=kinds)
        for some in (table, {"a": [number], "b": [text], "c": [text], "d": [1]}):
            found = how.transform(some)
            assert found.shape == (len(some["a"]), how.width)
            assert np.isfinite(found).all()
            assert np.abs(found).max() <= CLIP
        again = Preprocessing.from_dict(json.loads(json.dumps(how.to_dict(), allow_nan=False)))
        assert np.array_equal(again.transform(table), how.transform(table))


class TestLabels:
    def read(self, *values: Any, task: str | None = None) -> Labels:
        return Labels.read(as_column(list(values), "y"), "y", task)

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
        with pytest.raises(InputError, match="unknown task 'regresion'"):
            self.read(1, 2, task="regresion")


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
        assert data.measures == ("accuracy", "AUC")
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

    @pytest.mark.parametrize("held_out", ["kyoto", "oslo"])
    def test_kinds_are_the_same_whatever_is_held_out(self, held_out: str) -> None:
        table = patients()
        table["age"] = table["age"].astype(object)
        table["age"][from_patients().splits["test"].examples()[0]] = "unknown to us"
        with pytest.warns(UserWarning, match=r"column 'age': 1 cell is not a number.*'unknown to us'"):
            data = from_table(table, label="ill", domain="site", held_out=held_out)
        assert [c["kind"] for c in data.inputs["columns"]] == ["numeric", "categorical"]

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
        assert (data.classes, data.class_names, data.measures) == (None, (), ("mse", "R²"))
        examples = data.examples
        assert isinstance(examples, TableRows)
        y = examples.y[data.splits["train"].examples()]
        assert (float(y.mean()), float(y.std(correction=0))) == pytest.approx((0, 1), abs=1e-5)
        how = Preprocessing.from_dict(data.inputs)
        assert data.label_scale == (how.label["mean"], how.label["scale"])
        assert how.predictions(examples.y.numpy()) == pytest.approx(table["age"], rel=1e-5)
        assert "different numbers" in data.notes["label"]

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"label": "il"}, r"no column 'il' for the label. Did you mean 'ill'"),
            ({"domain": "Site"}, r"no column 'Site' for the domain. Did you mean 'site'"),
            ({"label": "site"}, "cannot be both the label and the domain"),
            ({"columns": ["age", "ill"]}, "column 'ill' is the label; it cannot be a feature"),
            ({"columns": ["site"]}, "column 'site' is the domain"),
            ({"columns": ["aeg"]}, "no column 'aeg' for the features. Did you mean 'age'"),
            ({"drop": ["aeg"]}, "no column 'aeg' for the list"),
            ({"drop": ["age", "colour"]}, "there is no column"),
            ({"held_out": "paris"}, "held_out: unknown domain 'paris'.*Known: kyoto, lima, oslo"),
            ({"held_out": ["lima", "oslo", "kyoto"]}, "all 3 domains are held out"),
            ({"kinds": {"age": "number"}}, "unknown kind of a column: 'number'"),
            ({"held_out": 7}, "unknown domain '7'"),
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

    def test_what_a_reader_must_know(self) -> None:
        table = {**patients(), "constant": np.ones(120)}
        table["ill"] = np.where(table["site"] == "kyoto", "perhaps", table["ill"])
        tiny = np.where(np.arange(120) == 0, "single", table["site"])
        data = from_table({**table, "site": tiny}, label="ill", domain="site", held_out="kyoto")
        assert data.notes["columns"] == "'constant' has the same value in every row"
        assert data.notes["test"] == "it has classes without training examples: 'perhaps'"
        assert "none of them of kyoto" in data.notes["examples"]
        assert "'single'" in data.notes["domains"]
        assert "single" in data.splits["train"].names

    def test_an_identifier_is_said(self) -> None:
        table = {**patients(), "name": [f"p{n}" for n in range(120)]}
        with pytest.warns(UserWarning, match="column 'name': not used, because it is different in"):
            from_table(table, label="ill", domain="site")


class TestOtherSources:
    def fitted(self, data: DomainData) -> Any:
        model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        return shoal.fit("fish", model, data, steps=3, progress=False)

    @pytest.mark.parametrize("tensors", [True, False])
    def test_arrays(self, tensors: bool) -> None:
        x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3 + 1
        site = ["a", "b", "c"] * 20
        given = (torch.tensor(x), torch.tensor(y), site) if tensors else (x, y, np.array(site))
        data = from_arrays(*given, held_out="c")
        assert (data.class_names, data.classes, data.input_shape) == (("1", "2", "3"), 3, (4,))
        assert self.fitted(data).scores("test").names == ("c",)

    def test_arrays_of_pictures_and_of_quantities(self) -> None:
        data = from_arrays(np.zeros((12, 3, 16, 16), np.uint8), ["x", "y"] * 6, [0, 0, 1] * 4, held_out="1")
        assert (data.model, data.input_shape) == ("small-cnn", (3, 16, 16))
        quantity = from_arrays(np.zeros((40, 2)), np.linspace(0, 5, 40), [0, 1] * 20)
        assert isinstance(quantity.examples, torch.utils.data.Dataset)
        assert quantity.classes is None
        assert "test" not in quantity.splits

    @pytest.mark.parametrize(
        ("x", "says"),
        [
            (np.zeros((3, 2)), "x has 3 examples and y has 2"),
            (np.array([["a"], ["b"]]), "must be numbers"),
            (np.zeros(2), r"shape \(2,\)"),
        ],
    )
    def test_arrays_that_do_not_fit(self, x: Any, says: str) -> None:
        with pytest.raises(InputError, match=says):
            from_arrays(x, [0, 1], ["a", "b"])

    def test_a_dataset_of_torch(self) -> None:
        pairs = TensorDataset(torch.randn(30, 4), torch.arange(30) % 3)
        data = from_dataset(pairs, ["a", "b", "c"] * 10, held_out="a")
        assert (data.classes, data.input_shape, data.model) == (3, (4,), "tabular")
        assert self.fitted(data).scores("test").names == ("a",)
        with pytest.raises(InputError, match="30 examples and 3 domains"):
            from_dataset(pairs, ["a", "b", "c"])
        with pytest.raises(InputError, match=r"pair \(x, y\)"):
            from_dataset(TensorDataset(torch.randn(2, 4)), ["a", "b"])

    def test_hugging_face_tables(self) -> None:
        hub = pytest.importorskip("datasets")
        table = patients()
        numbered = hub.Features(
            {
                "age": hub.Value("float64"),
                "colour": hub.Value("string"),
                "site": hub.Value("string"),
                "ill": hub.ClassLabel(names=["well", "ill"]),
            }
        )
        content = {**table, "ill": (table["ill"] == "yes").astype(int)}
        whole = hub.Dataset.from_dict(content, features=numbered)
        data = from_hf(whole, label="ill", domain="site", held_out="oslo", drop=["colour"])
        assert data.class_names == ("ill", "well")
        assert data.input_shape == (2,)
        with pytest.raises(InputError, match=r"splits train; select one, such as dataset\['train'\]"):
            from_hf(hub.DatasetDict({"train": whole}), label="ill", domain="site")
        with pytest.raises(InputError, match="got ndarray"):
            from_hf(np.zeros(3), label="ill", domain="site")

    def test_hugging_face_pictures(self) -> None:
        hub, pil = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
        pictures = [
            pil.new("RGB" if n % 2 else "L", (12, 9), 40 if n % 2 == 0 else (n, 0, 0)) for n in range(12)
        ]
        content = {"image": pictures, "label": ["cat", "dog"] * 6, "place": ["in", "out", "sea"] * 4}
        whole = hub.Dataset.from_dict(content).cast_column("image", hub.Image())
        data = from_hf(whole, label="label", domain="place", held_out="out", size=16)
        assert (data.input_shape, data.class_names) == ((3, 16, 16), ("cat", "dog"))
        assert data.inputs["kind"] == "image"
        x, y = data.examples[1]
        assert (x.shape, x.dtype, int(y)) == ((3, 16, 16), torch.float32, 1)
        assert self.fitted(data).scores("test").names == ("out",)

    def test_hugging_face_text(self, tmp_path: Path) -> None:
        hub = pytest.importorskip("datasets")
        pytest.importorskip("transformers")
        fake_tokenizer(tmp_path)
        tiny = str(tmp_path / "tiny-bert")
        content = {
            "text": ["the good film", "it"] * 6,
            "label": ["up", "down"] * 6,
            "place": ["a", "b", "c"] * 4,
        }
        given = {"label": "label", "domain": "place", "held_out": "b", "text": "text", "tokenizer": tiny}
        data = from_hf(hub.Dataset.from_dict(content), **given, max_tokens=8)
        assert (data.model, data.input_shape, data.class_names) == (tiny, (8,), ("down", "up"))
        assert data.inputs["kind"] == "text"
        collate = data.examples.collate  # type: ignore[attr-defined]
        x, y = collate([data.examples[0], data.examples[1]])
        long, short = x["attention_mask"].sum(1).tolist()
        assert long > short
        assert y.tolist() == [1, 0]
        assert self.fitted(data).scores("test").names == ("b",)


class TestDataset:
    def file(self, tmp_path: Path) -> str:
        table = patients()
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
        return str(written(tmp_path / "t.csv", "\n".join(lines)))

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

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({}, r"file"),
            ({"file": "t.csv"}, r"requires the column to predict: `label=COLUMN`"),
            ({"file": "t.csv", "label": "ill"}, r"requires the column with the domains"),
            ({"file": "t.csv", "label": "ill", "domain": "site"}, "No such file"),
            ({"fle": "t.csv"}, "Did you mean 'file'"),
        ],
    )
    def test_what_is_lacking(self, options: dict[str, Any], says: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=says):
            sets.load("table", **options)

    @pytest.mark.parametrize("held_out", [False, ["lima", None], {"lima": 1}])
    def test_what_is_no_name_of_a_domain(self, held_out: Any, tmp_path: Path) -> None:
        options = {"file": self.file(tmp_path), "label": "ill", "domain": "site"}
        with pytest.raises(InputError, match=r"held_out of dataset"):
            sets.load("table", **options, held_out=held_out)
        with pytest.raises(InputError, match="no column '3' for the features"):
            sets.load("table", **options, columns=3)

    def test_trainings_go_by_the_size_of_the_table(self) -> None:
        suggest = sets.registry.module("table").comparison
        small = suggest(from_patients())
        assert (small["steps"], small["batch"]) == (300, 32)
        rows = 60_000
        large = suggest(from_arrays(np.zeros((rows, 1)), np.arange(rows) % 2, np.arange(rows) % 3))
        assert (large["steps"], large["batch"]) == (3000, 256)
