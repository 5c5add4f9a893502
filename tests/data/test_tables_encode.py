"""The encoder by hand, as plain data, and on tables that it has not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.tables import Encoder, as_table
from shoal.data.tables.encode import CLIP
from shoal.data.tables.kinds import CATEGORIES, infer
from shoal.errors import InputError


def fit(source: Any, rows: Any = None, **kinds: str) -> Encoder:
    table = as_table(source)
    return Encoder.fit(table, rows, infer(table, list(table), kinds))


def test_numbers_by_hand() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0, np.nan])
    found = fit({"a": values}).transform({"a": [4.0, None, 1e9]})
    mean, scale = np.mean(values[:4]), np.std(values[:4])
    assert found.dtype == np.float32
    assert found == pytest.approx(np.array([[(4 - mean) / scale, 0], [0, 1], [CLIP, 0]]))
    assert fit({"a": [1.0, 2.0, 3.0]}).transform({"a": [None, 2.0]}).tolist() == [[0.0], [0.0]]
    wild = np.concatenate([np.arange(100.0) + 0.5, [1e12]])  # does not squeeze the others
    assert 0.3 < fit({"a": wild}).transform({"a": wild})[:100].std() < 3


def test_categories() -> None:
    encoder = fit({"c": ["b", "a", "b", None]})
    assert encoder.transform({"c": ["a", "b", "z", None]}).tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    numbers = fit({"c": [1.0, 2.0, 1.0]}, c="categorical")
    assert numbers.transform({"c": ["1", "2.0", "3"]}).tolist() == [[1, 0], [0, 1], [0, 0]]
    long = [4_000_000_000_000_001 + n % 9 for n in range(120)]
    assert not fit({"x": [str(c) for c in long]}, x="categorical").unknown({"x": long}).notes()


def test_of_too_many_categories_the_frequent_ones_stay() -> None:
    values = [f"c{n}" for n in range(CATEGORIES + 20) for _ in range(3 if n < CATEGORIES else 1)]
    found = fit({"c": values}).transform({"c": ["c0", "c69", "new", None]})
    assert found.shape == (4, CATEGORIES + 1)
    assert found.sum(1).tolist() == [1, 1, 1, 0]
    assert found[:, -1].tolist() == [0, 1, 1, 0]


def test_few_words_by_hand() -> None:
    encoder = fit({"t": ["Fever fever cough", "cough"]}, t="text")
    (row,) = encoder.transform({"t": ["fever, FEVER; cough unknown"]})
    wanted = np.array([1, (1 + math.log(2)) * (1 + math.log(3 / 2))])
    assert row == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-6)
    assert not encoder.transform({"t": [None]}).any()


def test_columns_of_no_use_are_dropped_with_a_reason() -> None:
    names = {"name": [f"patient {n}" for n in range(30)], "patient_id": np.arange(30.0)}
    others = {"same": ["x"] * 30, "one": np.ones(30), "none": [None] * 30, "age": np.arange(30.0) % 7}
    encoder = fit({**names, **others})
    assert encoder.names == ("age",)
    assert encoder.dropped == {
        "name": "is different in (almost) every row, like an identifier",
        "patient_id": "is different in every row and is named like an identifier",
        "same": "has the same value in every row",
        "one": "has the same value in every row",
        "none": "is empty",
    }
    assert fit(names, patient_id="numeric").names == ("patient_id",)
    with pytest.raises(InputError, match=r"there is no column to learn from: 'same' has the same value"):
        fit({"same": ["x"] * 3})


def test_a_new_table_must_fit() -> None:
    encoder = fit({"age": [1.0, 2.0], "c": ["x", "y"]})
    with pytest.raises(InputError, match=r"no column 'age' for the model. Did you mean 'Age'"):
        encoder.transform({"Age": [1.0], "c": ["x"]})
    with pytest.raises(InputError, match="kind 'image'"):
        Encoder.from_dict({"kind": "image"})


def test_what_a_new_table_has_that_cannot_be_used_is_counted() -> None:
    encoder = fit({"age": [1.0, 2.0], "c": ["x", "y"]})
    new = {"age": ["1", "old", "inf"], "c": ["x", "new", "new"]}
    assert encoder.transform(new)[1:].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert encoder.unknown(new).notes() == [
        "column 'age': 2 of 3 cells could not be read and are treated as missing: 'inf' (1), 'old' (1)",
        "column 'c': 2 of 3 cells contain categories that are not in the training data: 'new' (2)",
    ]
    assert not encoder.unknown({"age": [1.0], "c": ["x"]}).notes()


class TestSigns:
    """Where + is a category, - is one too, whichever rows are looked at."""

    cells = ("+", "-", "++", "") * 30

    def test_in_a_fold_without_plus(self) -> None:
        rows = np.flatnonzero(np.array(self.cells) == "-")
        encoder = fit({"x": self.cells}, rows)
        assert encoder.to_dict()["columns"][0]["values"] == ["-"]
        assert encoder.transform({"x": ["-", "", "+"]}).tolist() == [[1], [0], [0]]


class TestOtherFiles:
    def test_a_short_file_is_read_as_the_training_file(self, tmp_path: Path) -> None:
        """Two rows leave open how their numbers are written; training showed it."""
        train, new = tmp_path / "train.csv", tmp_path / "new.csv"
        train.write_text("a;b\n" + "".join(f"{n},{n % 10}5;x\n1.{n + 100},5;y\n" for n in range(30)))
        new.write_text("a;b\n1,5;x\n1.234;x\n")
        encoder = fit(train)
        assert np.array_equal(
            encoder.transform(new), encoder.transform({"a": [1.5, 1234.0], "b": ["x", "x"]})
        )

    def test_a_file_with_another_separator_shows_its_own_decimal_mark(self, tmp_path: Path) -> None:
        rows = [(f"{n * 1.37:.2f}", f"€{n * 2.11:.2f}".replace(".", ",")) for n in range(120)]
        for name, separator in (("a.csv", "\t"), ("b.csv", ";")):
            lines = [separator.join(row) for row in [("x", "price"), *rows]]
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        (tmp_path / "c.csv").write_text((tmp_path / "b.csv").read_text().replace(".", ":").replace(":", ","))
        encoder = fit(tmp_path / "a.csv")
        for name in ("b.csv", "c.csv"):
            assert np.array_equal(encoder.transform(tmp_path / "a.csv"), encoder.transform(tmp_path / name))


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
def test_whatever_is_in_it_the_numbers_are_finite(rows: Any, number: float, text: str) -> None:
    a, b, c = (list(values) for values in zip(*rows, strict=True))
    table = {"a": [*a, 1.0], "b": [*b, "x"], "c": [*c, "y"], "d": [*range(len(a)), -1]}
    encoder = fit(table, a="numeric", b="categorical", c="text", d="numeric")
    for some in (table, {"a": [number], "b": [text], "c": [text], "d": [1]}):
        found = encoder.transform(some)
        assert found.shape == (len(some["a"]), encoder.width)
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= CLIP
    again = Encoder.from_dict(json.loads(json.dumps(encoder.to_dict(), allow_nan=False)))
    assert np.array_equal(again.transform(table), encoder.transform(table))
