"""What columns of a table are taken for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.data.tables import as_table
from shoal.data.tables.kinds import Hints, infer

ROWS = 120


def kind(cells: Any, name: str = "x", **hints: Any) -> tuple[str, str]:
    about = infer(as_table({name: list(cells)}), [name], Hints(**hints))[name]
    return about.kind, "; ".join(about.warnings)


def draw(make: Any) -> list[Any]:
    random = np.random.default_rng(0)
    return [make(n, random) for n in range(ROWS)]


def test_kinds() -> None:
    words = [f"the patient number {n} feels {n % 7}" for n in range(200)]
    assert kind([1.0, np.nan, 2.0]) == ("numeric", "")
    assert kind(["1", "?", "2.5e3"]) == ("numeric", "")
    assert kind(["a", None, "b"]) == ("categorical", "")
    assert kind(words)[0] == "text"
    assert kind(["quite a few words", "quite many words"] * 200)[0] == "categorical"


def test_marks_of_missing_cells() -> None:
    cells = ["1", "", "NA", "NaN", "?", "None", "null", "n/a", "-", "--", ".", "#N/A", "—"]
    about = infer(as_table({"x": [*cells, "2"]}), ["x"])["x"]
    assert (about.kind, about.missing, about.warnings) == ("numeric", 12, ())


@pytest.mark.parametrize("name", ["area", "surface area", "glycemic index", "body_mass_index", "HeatIndex"])
def test_measurements_are_not_taken_for_codes_or_identifiers(name: str) -> None:
    assert kind(draw(lambda n, r: str(r.integers(100, 999))), name) == ("numeric", "")


def test_a_measurement_with_decimals_is_no_identifier_by_its_name() -> None:
    assert kind([n * 37 % 101 / 8 for n in range(ROWS)], "key") == ("numeric", "")


@pytest.mark.parametrize("name", ["index", "row_index", "idx"])
def test_an_index_is_one(name: str) -> None:
    assert kind([3 * n for n in range(ROWS)], name)[0] == "dropped"


@pytest.mark.parametrize(
    "cell",
    [
        lambda n, r: f"user{n}@mail.example.org",
        lambda n, r: f"https://example.org/{n}/a/b",
        lambda n, r: f"+47 {n:02d} {n * 7 % 90} 15 22",
        lambda n, r: f"({n + 200}) 555-{n * 7:04d}",
        lambda n, r: f"{n:08x}-32d3-4fce-b40a-15a7c0ffee00",
    ],
)
def test_addresses_and_telephone_numbers_are_identifiers_not_text(cell: Any) -> None:
    found, warning = kind(draw(cell))
    assert found == "dropped"
    assert "different in (almost) every row" in warning


def test_names_of_people_as_text_look_like_an_identifier() -> None:
    found, warning = kind(draw(lambda n, r: f"Number{n}, Mr. Owen Harris"), "Name")
    assert found == "text"
    assert "the name suggests an identifier" in warning


@pytest.mark.parametrize(
    "cell",
    [
        lambda n, r: 100_000 + 17 * n + int(r.integers(17)),  # ordered, with gaps
        lambda n, r: (n * 7919) % 1009,  # without repetition where chance would repeat
        lambda n, r: int(r.integers(10**9, 10**10)),
    ],
)
def test_an_identifier_in_numbers_is_pointed_at(cell: Any) -> None:
    found, warning = kind(draw(cell))
    assert found == "numeric"
    assert "different in every row" in warning


def test_zip_codes_of_other_lengths_are_codes_too() -> None:
    found, warning = kind([[501, 2134, 90210, 60601][n % 4] for n in range(ROWS)], "zip")
    assert found == "categorical"
    assert "according to the column name" in warning


@pytest.mark.parametrize("start", [2**60, -(2**60), 2**63 - 3])
def test_integers_that_floats_cannot_tell_apart_are_categories(start: int) -> None:
    for cells in ([start + n % 3 for n in range(ROWS)], [str(start + n % 3) for n in range(ROWS)]):
        found, warning = kind(cells)
        assert found == "categorical"
        assert "too large to be represented exactly" in warning


def test_numbers_of_hundreds_of_digits_do_no_harm() -> None:
    assert kind(["9" * 400 if n < 3 else str(n * 37 % 101) for n in range(ROWS)])[0] == "numeric"


@pytest.mark.parametrize("marker", [-999, 9999, -9])
def test_numbers_that_mark_missing_values_are_pointed_at(marker: int) -> None:
    values = [marker if n % 10 == 0 else 20 + n % 7 / 2 for n in range(ROWS)]
    assert "if it marks missing values" in kind(values)[1]
    assert kind([99 if n % 10 == 0 else n % 99 for n in range(ROWS)]) == ("numeric", "")
    assert kind([9999 if n == 3 else 20 + n % 7 / 2 for n in range(ROWS)]) == ("numeric", "")


def test_units_in_some_cells_are_pointed_at() -> None:
    found, warning = kind(draw(lambda n, r: f"{n}k" if n % 5 == 0 else str(n * 37 % 907)))
    assert found == "numeric"
    assert "some cells have the unit k and some have none" in warning


def test_norway_and_slovenia_are_countries() -> None:
    assert kind(["NO", "SI"] * 20)[0] == "categorical"
    assert kind(["no", "si"] * 20)[0] == "boolean"


def test_times_of_day_are_numbers() -> None:
    assert kind(draw(lambda n, r: f"{n % 24:02d}:{n % 60:02d}")) == ("numeric", "")


def test_the_decimal_mark_is_that_of_the_table() -> None:
    """1,200 beside 0,5 is 1.2; beside 0.5 and alone it is 1200, with a warning."""
    for other, value in ((["0,5", "7,25"], 1.2), (["0.5", "7.25"], 1200.0), (["a", "b"], 1200.0)):
        table = as_table({"x": ["1,200", "3,400"], "other": other})
        about = infer(table, ["x"])["x"]
        assert table["x"].values("numeric", about.how)[0][0] == value
        assert "can mean 1234 or 1.234" in about.warnings[0]
