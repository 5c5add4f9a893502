"""Cells, columns and types of tables that were once read wrongly or refused, each by what it must become."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.api.data import check
from shoal.data import inputs
from shoal.data.cells import Format, date, number
from shoal.data.columns import Hints, infer
from shoal.data.inputs import Options, Tables
from shoal.data.own import Labels, check_table, from_table
from shoal.data.reading import as_column, as_table, read_table
from shoal.data.table import Preprocessing, Tally
from shoal.errors import InputError

ROWS = 120


def _kind(cells: Any, name: str = "x") -> tuple[str, str]:
    about = infer(as_table({name: cells}), [name])[name]
    return about.kind, "; ".join(about.warnings)


def _draw(make: Any) -> list[Any]:
    random = np.random.default_rng(0)
    return [make(n, random) for n in range(ROWS)]


class TestKinds:
    @pytest.mark.parametrize(
        "name", ["area", "surface area", "glycemic index", "body_mass_index", "HeatIndex"]
    )
    def test_measurements_are_not_taken_for_codes_or_identifiers(self, name: str) -> None:
        assert _kind(_draw(lambda n, r: str(r.integers(100, 999))), name) == ("numeric", "")

    def test_a_measurement_with_decimals_is_no_identifier_by_its_name(self) -> None:
        assert _kind([n * 37 % 101 / 8 for n in range(ROWS)], "key") == ("numeric", "")

    @pytest.mark.parametrize("name", ["index", "row_index", "idx"])
    def test_an_index_still_is_one(self, name: str) -> None:
        assert _kind([3 * n for n in range(ROWS)], name)[0] == "dropped"

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
    def test_addresses_and_telephone_numbers_are_identifiers_not_text(self, cell: Any) -> None:
        kind, warning = _kind(_draw(cell))
        assert kind == "dropped"
        assert "different in (almost) every row" in warning

    def test_names_of_people_as_text_are_said_to_look_like_an_identifier(self) -> None:
        kind, warning = _kind(_draw(lambda n, r: f"Number{n}, Mr. Owen Harris"), "Name")
        assert kind == "text"
        assert "the name suggests an identifier" in warning

    def test_zip_codes_of_other_lengths_are_codes_too(self) -> None:
        kind, warning = _kind([[501, 2134, 90210, 60601][n % 4] for n in range(ROWS)], "zip")
        assert kind == "categorical"
        assert "according to the column name" in warning

    @pytest.mark.parametrize("start", [2**60, -(2**60), 2**63 - 3])
    def test_whole_numbers_that_floats_cannot_tell_apart_are_categories(self, start: int) -> None:
        for cells in ([start + n % 3 for n in range(ROWS)], [str(start + n % 3) for n in range(ROWS)]):
            kind, warning = _kind(cells)
            assert kind == "categorical"
            assert "too large to be represented exactly" in warning
            assert infer(as_table({"x": cells}), ["x"])["x"].distinct == 3

    def test_numbers_of_hundreds_of_digits_do_no_harm(self) -> None:
        assert _kind(["9" * 400 if n < 3 else str(n * 37 % 101) for n in range(ROWS)])[0] == "numeric"

    def test_markers_of_missing_values_that_are_numbers_are_pointed_at(self) -> None:
        for marker in (-999, 9999, -9):
            values = [marker if n % 10 == 0 else 20 + n % 7 / 2 for n in range(ROWS)]
            assert "if it marks missing values" in _kind(values)[1]
        assert _kind([99 if n % 10 == 0 else n % 99 for n in range(ROWS)]) == ("numeric", "")
        assert _kind([9999 if n == 3 else 20 + n % 7 / 2 for n in range(ROWS)]) == ("numeric", "")

    def test_units_in_some_cells_are_pointed_at(self) -> None:
        kind, warning = _kind(_draw(lambda n, r: f"{n}k" if n % 5 == 0 else str(n * 37 % 907)))
        assert kind == "numeric"
        assert "some cells have the unit k and some have none" in warning


class TestTimes:
    def test_times_of_day_and_durations_are_seconds(self) -> None:
        for text, seconds in {
            "07:30": 27_000.0,
            "7:30:15": 27_015.0,
            "0:00:03.5": 3.5,
            "1 day, 0:00:01": 86_401.0,
            "2 days 00:00:00": 172_800.0,
            "-1 days 23:59:59": -1.0,
            "100:00:00": 360_000.0,
        }.items():
            assert number(text, Format(unit="s")) == seconds
        assert number("07:75", Format()) is None
        assert _kind(_draw(lambda n, r: f"{n % 24:02d}:{n % 60:02d}")) == ("numeric", "")

    def test_durations_are_the_same_however_they_come(self) -> None:
        pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
        spans = [datetime.timedelta(days=n % 3, seconds=n * 3.5) for n in range(ROWS)]
        series = pandas.Series(spans)
        wanted = [span.total_seconds() for span in spans]
        for cells in (spans, series, pyarrow.array(spans), series.astype(str), [str(s) for s in spans]):
            table = as_table({"x": cells})
            about = infer(table, ["x"])["x"]
            assert about.kind == "numeric"
            step = Preprocessing.fit(table).steps[0]
            assert step.values(table["x"], Tally()).tolist() == wanted  # type: ignore[attr-defined]

    def test_microseconds_are_exact(self) -> None:
        for micro in (1, 29, 57, 123_457, 999_999):
            moment = datetime.datetime(2020, 1, 1, 0, 0, 0, micro)
            assert date(f"2020-01-01 00:00:00.{micro:06d}", False) == as_column([moment], "x").numbers[0]


class TestTypes:
    def test_nanoseconds_are_cut_off(self, tmp_path: Path) -> None:
        pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
        from pyarrow import parquet

        moments = pandas.Series(
            pandas.date_range("2020-01-01 00:00:00.123456789", periods=9, freq="7h")
        ).astype("datetime64[ns]")
        values = pyarrow.array(moments, type=pyarrow.timestamp("ns"))
        parquet.write_table(pyarrow.table({"x": values}), tmp_path / "t.parquet")
        wanted = as_column(moments, "x").numbers.tolist()
        assert as_column(values, "x").numbers.tolist() == wanted
        assert read_table(tmp_path / "t.parquet")["x"].numbers.tolist() == wanted

    def test_days_of_pyarrow_in_pandas(self) -> None:
        pandas = pytest.importorskip("pandas")
        days = [datetime.date(2020, 1, 1), None, datetime.date(2020, 3, 1)]
        column = as_column(pandas.Series(days, dtype="date32[pyarrow]"), "x")
        assert column.dates
        assert column.texts() == ["2020-01-01", None, "2020-03-01"]

    def test_decimals_are_numbers_whatever_the_decimal_mark_of_training(self) -> None:
        european = {"x": [f"{n},{n % 10}25" for n in range(ROWS)]}
        fitted = Preprocessing.fit(european)
        values = [decimal.Decimal(f"{n}.{n % 10}25") for n in range(ROWS)]
        assert np.array_equal(fitted.transform({"x": values}), fitted.transform(european))

    def test_anything_that_gives_arrow_is_a_table(self) -> None:
        pyarrow = pytest.importorskip("pyarrow")

        class Frame:
            columns = ("a", "b")

            def __arrow_c_stream__(self, schema: Any = None) -> Any:
                return pyarrow.table({"a": [1, 2], "b": ["x", None]}).__arrow_c_stream__(schema)

        assert as_table(Frame())["b"].texts() == ["x", None]

    def test_sixteen_digits_are_the_same_category_from_text_and_numbers(self) -> None:
        cells = [4_000_000_000_000_001 + n % 9 for n in range(ROWS)]
        hints = Hints({"x": "categorical"})
        fitted = Preprocessing.fit({"x": [str(c) for c in cells]}, hints=hints)
        tally = Tally()
        fitted.transform({"x": cells}, tally)
        assert not tally.notes()

    def test_columns_may_be_named_by_numbers_and_domains_by_truth_values(self) -> None:
        table = {0: list(np.arange(40) % 7 / 2), 1: [0, 1] * 20, 2: [n % 3 == 0 for n in range(40)]}
        data = from_table(table, label=1, domain=2, held_out=True)  # type: ignore[arg-type]
        assert data.splits["test"].names == ("True",)
        with pytest.raises(InputError, match="label of from_table must be text"):
            from_table(table, label=["y"], domain=2)  # type: ignore[arg-type]


class TestFiles:
    def test_separators_at_the_end_of_lines(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b,,,\n" + "".join(f"{n}.5,{n % 2},,,\n" for n in range(30)))
        assert list(read_table(tmp_path / "t.csv")) == ["a", "b", "Unnamed: 2", "Unnamed: 3", "Unnamed: 4"]
        kinds = [about["kind"] for about in check_table(tmp_path / "t.csv")["columns"]]
        assert kinds == ["numeric", "numeric", "dropped", "dropped", "dropped"]

    def test_a_workbook_says_which_sheets_are_not_read(self, tmp_path: Path) -> None:
        openpyxl = pytest.importorskip("openpyxl")
        book = openpyxl.Workbook()
        for row in (["a", None, "b"], [1, None, "x"], [2, "left", None]):
            book.active.append(row)
        book.create_sheet("2021")
        book.save(tmp_path / "t.xlsx")
        with pytest.warns(UserWarning, match="'Sheet', is read; not read: '2021'"):
            table = read_table(tmp_path / "t.xlsx")
        assert list(table) == ["a", "Unnamed: 1", "b"]
        assert table["b"].texts() == ["x", None]

    def test_each_column_of_another_file_shows_its_own_decimal_mark(self, tmp_path: Path) -> None:
        rows = [(f"{n * 1.37:.2f}", f"€{n * 2.11:.2f}".replace(".", ",")) for n in range(ROWS)]
        for name, separator in (("a.csv", "\t"), ("b.csv", ";")):
            lines = [separator.join(row) for row in [("x", "price"), *rows]]
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        fitted = Preprocessing.fit(tmp_path / "a.csv")
        assert np.array_equal(fitted.transform(tmp_path / "a.csv"), fitted.transform(tmp_path / "b.csv"))


class TestSigns:
    """Where + is a category, - is one too, whichever rows are looked at."""

    cells = tuple(["+", "-", "++", ""] * 30)

    def test_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fitted = Preprocessing.fit({"x": list(self.cells)})
        whole = fitted.transform({"x": list(self.cells)})
        monkeypatch.setattr(inputs, "ROWS", 1)
        reader = Tables(fitted.to_dict(), (fitted.width,), Options())
        parts = torch.cat([batch.x for batch in reader.batches({"x": list(self.cells)}, 3)])
        assert np.array_equal(parts.numpy(), whole)
        assert whole.sum() == 90

    def test_in_a_fold_without_plus(self) -> None:
        rows = np.flatnonzero(np.array(self.cells) == "-")
        assert Preprocessing.fit({"x": list(self.cells)}, rows).steps[0].values == ("-",)  # type: ignore[attr-defined]

    def test_elsewhere_it_is_missing(self) -> None:
        fitted = Preprocessing.fit({"x": ["a", "b", "-"] * 20})
        assert fitted.transform({"x": ["-"]}).sum() == 0


def test_yes_is_the_second_class_in_every_language() -> None:
    for no, yes in (("nein", "ja"), ("nei", "ja"), ("no", "yes"), ("FALSE", "TRUE"), ("non", "oui")):
        assert Labels.read(as_column([yes, no] * 3, "y"), "y", None).names == (no, yes)
    assert Labels.read(as_column(["yes", "ja", "no"], "y"), "y", None).names == ("ja", "no", "yes")


def test_a_curved_copy_of_a_quantity_is_possible_leakage() -> None:
    random = np.random.default_rng(0)
    y = random.normal(size=400)
    table = {"copy": np.exp(y), "noisy": y + random.normal(size=400), "d": list("abcd") * 100, "y": y}
    found = {c["column"]: c["warnings"] for c in check_table(table, label="y", domain="d")["columns"]}
    assert "possible leakage" in found["copy"][0]
    assert not found["noisy"]


def test_a_second_look_with_another_task_is_a_look_of_its_own() -> None:
    y = np.tile([0, 1, 2], 60)
    table = as_table(
        {"copy": y * y, "z": np.random.default_rng(0).normal(size=180), "d": np.repeat(list("ab"), 90)}
    )
    table["y"] = as_column(y, "y")
    said = []
    for task in ("classification", "regression"):
        columns = check_table(table, label="y", domain="d", task=task)["columns"]
        said.append(next(c for c in columns if c["column"] == "copy")["warnings"][0])
    assert "balanced accuracy" in said[0]
    assert "R²" in said[1]


def test_sheets_that_are_not_read_are_named(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["a", "b"], *([n, n % 2] for n in range(5))):
        book.active.append(row)
    book.create_sheet("2021")
    book.save(tmp_path / "t.xlsx")
    with pytest.warns(UserWarning, match="not read: '2021'"):
        check(tmp_path / "t.xlsx")
