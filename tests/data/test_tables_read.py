"""Files and frames become the same columns; what is damaged is named."""

from __future__ import annotations

import datetime
import decimal
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.data.tables import as_table, read
from shoal.data.tables.cells import Format
from shoal.errors import InputError


def written(path: Path, text: str) -> Path:
    path.write_text(text, newline="", encoding="utf-8")
    return path


def texts(source: Any) -> dict[str, list[str | None]]:
    table = as_table(source)
    return {name: table[name].texts() for name in table}


class TestCsv:
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
        assert texts(written(tmp_path / name, text)) == {"a": ["1", "2"], "b": ["x", "y"]}

    def test_encodings_and_lines_above_the_names(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_bytes("Export, of\n2024\na,b\n1,ü\n".encode("cp1252"))
        with pytest.raises(InputError, match="not utf-8; set encoding"):
            read(path, skip_rows=2)
        found = read(path, skip_rows=2, encoding="cp1252")
        assert found.to_dict("list") == {"a": ["1"], "b": ["ü"]}
        with pytest.raises(InputError, match="encoding: 'cp12' is no encoding"):
            read(path, encoding="cp12")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b\n1,2\n1,2,3\n", "row 2: 3 values, but the first line names 2 columns"),
            ("sep=,\n\na,b\n1,2\n1\n", "row 2: 1 values"),
            ("a,a\n1,2\n", "two columns named 'a'"),
            ("a,b\n", "has no rows"),
            ("", "has no rows"),
        ],
    )
    def test_damage_is_named(self, text: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=message):
            read(written(tmp_path / "t.csv", text))

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=60) | st.text('ab,;|"\n\r\t1.0 \0é', max_size=60).map(str.encode))
    def test_any_file_is_read_or_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / f"{zlib.crc32(content)}.csv"
        path.write_bytes(content)
        try:
            found = read(path)
        except InputError:
            return
        assert all(len(cells) == len(found) for cells in texts(path).values())


class TestFiles:
    def test_a_file_is_read_once_until_it_changes(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.csv", "a,b\n1,x\n")
        first = as_table(path)
        assert as_table(str(path), skip_rows=0) is first
        written(path, "a,b\n1,x\n2,y\n")
        assert as_table(path).rows == 2

    def test_sheets(self, tmp_path: Path) -> None:
        openpyxl = pytest.importorskip("openpyxl")
        path, book = tmp_path / "t.xlsx", openpyxl.Workbook()
        sheets = book.active, book.create_sheet("second")
        for row in (["a", None, "b"], [1, None, "x"], [None, None, None], [2, "left", None]):
            sheets[0].append(row)
        for row in (["Report"], ["c"], [5]):
            sheets[1].append(row)
        book.save(path)
        with pytest.warns(UserWarning, match="'Sheet' is read; not read: 'second'"):
            found = texts(path)
        assert found == {"a": ["1", "2"], "Unnamed: 1": [None, "left"], "b": ["x", None]}
        for sheet in ("second", 1):
            assert read(path, sheet=sheet, skip_rows=1).to_dict("list") == {"c": [5.0]}
        with pytest.raises(InputError, match=r"no sheet 'secnd'\. Did you mean 'second'"):
            read(path, sheet="secnd")

    def test_files_that_are_no_tables(self, tmp_path: Path) -> None:
        (tmp_path / "locked.xlsx").write_bytes(bytes.fromhex("D0CF11E0A1B11AE1") + b"\0" * 600)
        with zipfile.ZipFile(tmp_path / "zip.xlsx", "w") as archive:
            archive.writestr("a", "b")
        (tmp_path / "empty.parquet").touch()
        messages = {"locked.xlsx": "has a password", "u.csv": "No such file", "": "is a folder"}
        messages |= {name: f"{name}' cannot be read" for name in ("zip.xlsx", "empty.parquet")}
        for name, message in messages.items():
            with pytest.raises(InputError, match=message):
                as_table(tmp_path / name)

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ({"a": [1, 2], "b": [1]}, "different lengths: 'a' 2, 'b' 1"),
            ({}, "no rows"),
            ({"a": [[1], [2]]}, "column 'a', row 1: a list"),
            ({"a": np.zeros((2, 2))}, r"shape \(2, 2\)"),
            (7, "got int"),
        ],
    )
    def test_other_things_are_refused(self, table: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read(table)


class TestTypes:
    def test_frames_and_mappings_of_any_library(self) -> None:
        frames = [
            {"a": [1, 2], "b": ("x", None)},
            {"a": torch.tensor([1.0, 2.0]), "b": np.array(["x", None], object)},
            pd.DataFrame({"a": pd.array([1, 2], "Int64"), "b": pd.Categorical(["x", None])}),
            pd.DataFrame({"b": ["x", None]}, index=pd.Index([1, 2], name="a")),
            pa.table({"a": [1, 2], "b": ["x", None]}),
            {"a": [decimal.Decimal("1.0"), decimal.Decimal(2)], "b": [b"x", None]},
        ]
        for frame in frames:
            assert texts(frame) == {"a": ["1", "2"], "b": ["x", None]}

    def test_integers_beyond_float64_stay_themselves(self) -> None:
        assert texts({"a": [2**60, 2**60 + 1]}) == {"a": [str(2**60), str(2**60 + 1)]}

    def test_moments_and_durations_are_the_same_however_they_come(self, tmp_path: Path) -> None:
        """Nanoseconds are cut off, zones become UTC; durations are seconds."""
        moments = pd.Series(pd.date_range("1969-12-30 00:00:00.123456789", periods=9, freq="7h"))
        spans = pd.Series([datetime.timedelta(days=n % 3, seconds=n * 3.5) for n in range(9)])
        frame = pd.DataFrame({"x": moments, "y": spans})
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_csv(tmp_path / "t.csv", index=False)
        there = moments.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
        sources = [
            frame,
            {"x": there, "y": [*spans.dt.to_pytimedelta()]},
            {"x": [*moments.dt.to_pydatetime()], "y": spans.astype(str)},
            *(tmp_path / "t.parquet", tmp_path / "t.csv"),
        ]
        for source in sources:
            table = as_table(source)
            days = table["x"].values("date", Format())[0]
            assert days == pytest.approx(moments.to_numpy("M8[us]").astype(np.int64) / 86_400e6, abs=1e-11)
            assert table["y"].values("numeric", Format(unit="s"))[0].tolist() == [*spans.dt.total_seconds()]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("07:30", 27_000.0),
        ("1 day, 0:00:01", 86_401.0),
        ("-1 days +23:59:59", -1.0),
        ("07:75", math.nan),
    ],
)
def test_times_of_day_and_durations_are_seconds(text: str, seconds: float) -> None:
    (found,) = as_table({"x": [text]})["x"].values("numeric", Format(unit="s"))[0]
    assert found == pytest.approx(seconds, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("0001-03-01", "0001-03-01"),
        ("1/2/69", "2069-01-02"),
        ("12/31/1999 11:59 PM", "1999-12-31T23:59"),
        ("Monday, 1 March 2021", "2021-03-01"),
        ("2021-03-01T10:00:00+05:30", "2021-03-01T04:30"),
        *[(text, "NaT") for text in ("2021-02-30", "0000-01-01", "0000-00-00", "31/12/1999", "1-2/2020")],
    ],
)
def test_dates(text: str, day: str) -> None:
    (found,) = as_table({"x": [text]})["x"].values("date", Format())[0]
    wanted = np.datetime64(day, "us")
    assert found == pytest.approx(
        math.nan if np.isnat(wanted) else wanted.astype(int) / 86_400e6, nan_ok=True
    )


@pytest.mark.parametrize("text", ["1e999", "9" * 400, "9" * 20 + " days 1:00", "1,2,3", "(5", "5.5.5", "$"])
def test_what_is_no_number(text: str) -> None:
    values, wrong = as_table({"x": [text, "1.5"]})["x"].values("numeric", Format())
    assert np.isnan(values).tolist() == [True, False]
    assert wrong == {text: 1}
