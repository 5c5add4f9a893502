"""What columns of a table are taken for, beside the cases in ``nasty.py``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from shoal.data.tables import as_table
from shoal.data.tables.kinds import infer

ROWS = 120


def kind(cells: Any, name: str = "x") -> tuple[str, str]:
    about = infer(as_table({name: list(cells)}), [name])[name]
    return about.kind, "; ".join(about.warnings)


def draw(make: Any) -> list[Any]:
    random = np.random.default_rng(0)
    return [make(n, random) for n in range(ROWS)]


def test_marks_of_missing_cells() -> None:
    cells = ["1", "", "NA", "NaN", "?", "None", "null", "n/a", "-", "--", ".", "#N/A", "—"]
    about = infer(as_table({"x": [*cells, "2"]}), ["x"])["x"]
    assert (about.kind, about.missing, about.warnings) == ("numeric", 12, ())


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        *[(lambda n, r: str(r.integers(100, 999)), name) for name in ("surface area", "glycemic index")],
        *[(lambda n, r: str(r.integers(100, 999)), name) for name in ("body_mass_index", "HeatIndex")],
        (lambda n, r: 99 if n % 10 == 0 else n % 99, "x"),
        (lambda n, r: f"{n % 24:02d}:{n % 60:02d}", "x"),
    ],
)
def test_measurements_are_numbers(cell: Any, name: str) -> None:
    found, warning = kind(draw(cell), name)
    assert found == "numeric"
    assert not re.search("identif|code|marks missing", warning)


@pytest.mark.parametrize(
    ("cell", "name", "wanted", "says"),
    [
        (lambda n, r: 3 * n, "index", "dropped", "named like an identifier"),
        (lambda n, r: f"user{n}@mail.example.org", "x", "dropped", "different in .almost. every row"),
        (lambda n, r: f"+47 {n:02d} {n * 7 % 90} 15 22", "x", "dropped", "different in .almost. every row"),
        (lambda n, r: f"Number{n}, Mr. Owen Harris", "Name", "text", "the name suggests an identifier"),
        (lambda n, r: 100_000 + 17 * n + int(r.integers(17)), "x", "numeric", "different in every row"),
        (lambda n, r: [501, 2134, 90210, 60601][n % 4], "zip", "categorical", "according to the column name"),
        (lambda n, r: 2**60 + n % 3, "x", "categorical", "too large to be represented exactly"),
        (lambda n, r: -999 if n % 10 == 0 else 20 + n % 7 / 2, "x", "numeric", "if it marks missing values"),
        (lambda n, r: f"{n}k" if n % 5 == 0 else n * 37 % 907, "x", "numeric", "the unit k and some"),
        (lambda n, r: ["NO", "SI"][n % 2], "country", "categorical", "^$"),
        (lambda n, r: ["no", "si"][n % 2], "x", "boolean", "^$"),
    ],
)
def test_what_is_doubtful_is_said(cell: Any, name: str, wanted: str, says: str) -> None:
    found, warning = kind(draw(cell), name)
    assert found == wanted
    assert re.search(says, warning), warning


def test_the_decimal_mark_is_that_of_the_table() -> None:
    """1,200 beside 0,5 is 1.2; beside 0.5 and alone it is 1200, with a warning."""
    for other, value in ((["0,5", "7,25"], 1.2), (["0.5", "7.25"], 1200.0), (["a", "b"], 1200.0)):
        table = as_table({"x": ["1,200", "3,400"], "other": other})
        about = infer(table, ["x"])["x"]
        assert table["x"].values("numeric", about.how)[0][0] == value
        assert "can mean 1234 or 1.234" in about.warnings[0]
