"""Messy tables give the right columns, the same ones from every kind of file, and say what they decided."""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nasty import CASES, ROWS, Case

from shoal.api.data import check
from shoal.data import from_table
from shoal.data.columns import values_of
from shoal.data.inputs import reader
from shoal.data.own import check_table
from shoal.data.reading import CsvRows, as_table, read_table
from shoal.data.table import Preprocessing, Tally
from shoal.errors import InputError

OTHER = [f"{(n * 37 % 101) / 7:.3f}" for n in range(ROWS)]
SITE = [("oslo", "lima", "kyoto")[n] for n in np.random.default_rng(1).integers(0, 3, ROWS)]
LABEL = [("ill", "well")[n] for n in np.random.default_rng(2).integers(0, 2, ROWS)]


def table_of(case: Case) -> dict[str, list[Any]]:
    return {case.name: list(case.cells), "other": OTHER, "site": SITE, "label": LABEL}


def written(case: Case, path: Path) -> Path:
    table = table_of(case)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, delimiter=case.separator)
        lines.writerow(table)
        lines.writerows(zip(*table.values(), strict=True))
    return path


@pytest.mark.parametrize("source", ["csv", "memory"])
@pytest.mark.parametrize("called", CASES)
def test_each_column_is_what_it_is(called: str, source: str, tmp_path: Path) -> None:
    case = CASES[called]
    if source == "memory" and case.separator != ",":
        pytest.skip("what separates cells says nothing in memory")
    table = as_table(table_of(case)) if source == "memory" else read_table(written(case, tmp_path / "t.csv"))
    report = check_table(table, label="label", domain="site", **case.options)
    about = next(c for c in report["columns"] if c["column"] == case.name)
    assert about["kind"] == case.kind
    assert case.missing is None or about["missing"] == case.missing
    said = "; ".join(about["warnings"])
    if case.warns:
        assert re.search(case.warns, said), said
    else:
        assert not said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = from_table(table, label="label", domain="site", **case.options)
    how = Preprocessing.from_dict(data.inputs)
    step = next((s for s in how.steps if s.name == case.name), None)
    assert (step is None) == (case.kind == "dropped")
    if case.features is not None:
        assert step is not None
        assert step.width == case.features
    for row, value in case.reads.items():
        found = values_of(table[case.name], case.kind, step.how)[0]  # type: ignore[union-attr]
        assert found[row] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("called", CASES)
def test_every_fold_and_every_source_see_the_same_columns(called: str, tmp_path: Path) -> None:
    """Kinds do not depend on what is held out, and a file predicts what it was trained on, bit for bit."""
    case = CASES[called]
    path = written(case, tmp_path / "t.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folds = [
            from_table(path, label="label", domain="site", held_out=t, **case.options) for t in set(SITE)
        ]
    kinds = [[(c["column"], c["kind"]) for c in fold.inputs["columns_report"]] for fold in folds]
    assert kinds[0] == kinds[1] == kinds[2]
    for fold in folds:
        took = reader(fold.inputs, fold.input_shape)
        x = np.concatenate([batch.x.numpy() for batch in took.batches(path, batch_size=7)])
        assert np.array_equal(x, fold.examples.x.numpy())  # type: ignore[attr-defined]


def in_parts(how: Preprocessing, path: Path, size: int) -> np.ndarray[Any, Any]:
    return np.concatenate([how.transform(part) for part in CsvRows(path).parts(list(how.names), size)])


CELLS = {
    "number": st.floats(-1e6, 1e6).map(lambda v: f"{v:.3f}") | st.integers(-5000, 5000).map(str),
    "grouped": st.floats(0, 1e6).map(lambda v: f"{v:,.2f}"),
    "money": st.floats(-1e4, 1e4).map(lambda v: f"${v:.2f}".replace("$-", "-$")),
    "percent": st.integers(0, 100).map(lambda v: f"{v}%"),
    "date": st.dates().map(str),
    "boolean": st.sampled_from(["TRUE", "FALSE"]),
    "category": st.sampled_from(["a", "b", "B", "c d", "-", "é"]),
    "code": st.integers(0, 999).map(lambda v: f"{v:04d}"),
    "text": st.text("abc de\"',;\n", max_size=12),
}
GAPS = st.sampled_from(["", "-", "n/a", "?", "<5"])


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, list[str]], str]:
    rows = draw(st.integers(1, 40))
    names = draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=4, unique=True))
    table = {}
    for name in names:
        cell = st.one_of(CELLS[name], GAPS) if draw(st.booleans()) else CELLS[name]
        table[name] = draw(st.lists(cell, min_size=rows, max_size=rows))
    return {"anchor": [str(n % 5 / 2) for n in range(rows)], **table}, draw(st.sampled_from(",;\t"))


class TestOnePath:
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tables(), st.integers(1, 9))
    def test_csv_parquet_and_frames_in_pieces_of_any_size_give_the_same_numbers(
        self, tmp_path: Path, made: tuple[dict[str, list[str]], str], size: int
    ) -> None:
        pandas = pytest.importorskip("pandas")
        table, separator = made
        path = tmp_path / "t.csv"
        frame = pandas.DataFrame(table)
        frame.to_csv(path, index=False, sep=separator)
        read = read_table(path)
        fixed = {"anchor": "numeric"}
        try:
            how = Preprocessing.fit(read, np.arange(0, read.rows, 2), kinds=fixed)
        except InputError:  # there is no column, if there are few rows
            return
        wanted = how.transform(read)
        assert np.isfinite(wanted).all()
        assert np.array_equal(in_parts(how, path, size), wanted)
        assert np.array_equal(how.transform(frame), wanted)
        frame.to_parquet(tmp_path / "t.parquet")
        assert np.array_equal(how.transform(tmp_path / "t.parquet"), wanted)
        again = Preprocessing.from_dict(how.to_dict())
        assert np.array_equal(again.transform(path), wanted)

    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tables())
    def test_the_standard_library_reads_the_same_cells(
        self, tmp_path: Path, made: tuple[dict[str, list[str]], str]
    ) -> None:
        pandas = pytest.importorskip("pandas")
        table, separator = made
        path = tmp_path / "t.csv"
        pandas.DataFrame(table).to_csv(path, index=False, sep=separator)
        rows = CsvRows(path)
        fast = next(iter(rows._fast(rows.names, 10**6)))
        slow = next(iter(rows._slow(rows.names, 10**6)))
        assert [c.texts() for c in fast.values()] == [c.texts() for c in slow.values()]

    def test_two_rows_are_read_as_the_file_was(self, tmp_path: Path) -> None:
        """A small file says nothing of how its numbers are written; training did."""
        train, new = tmp_path / "train.csv", tmp_path / "new.csv"
        train.write_text("a;b\n" + "".join(f"{n},{n % 10}5;x\n" for n in range(30)))
        new.write_text("a;b\n1,5;x\n1.234;x\n")
        how = Preprocessing.fit(read_table(train))
        one, thousand = how.transform(new)[:, 0]
        assert one == how.transform({"a": [1.5], "b": ["x"]})[0, 0]
        assert thousand == how.transform({"a": [1234.0], "b": ["x"]})[0, 0]

    def test_pandas_and_csv_agree_on_types(self, tmp_path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        moments = pandas.to_datetime(["2020-01-01 10:00:00", "2021-05-05 00:00:00", None] * 8)
        frame = pandas.DataFrame(
            {
                "flag": [True, False, True] * 8,
                "maybe": pandas.array([True, None, False] * 8, dtype="boolean"),
                "whole": pandas.array([1, None, 3] * 8, dtype="Int64"),
                "single": np.array([0.1, 0.25, 0.5] * 8, np.float64),
                "when": moments,
                "zone": moments.tz_localize("UTC"),
                "kind": pandas.Categorical(["u", "v", None] * 8),
                "word": pandas.array(["x", None, "y"] * 8, dtype="string"),
            }
        )
        frame.to_csv(tmp_path / "t.csv", index=False)
        frame.to_parquet(tmp_path / "t.parquet")
        how = Preprocessing.fit(frame)
        kinds = {step.name: step.to_dict()["kind"] for step in how.steps}
        assert kinds == {
            **{"flag": "boolean", "maybe": "boolean", "whole": "numeric", "single": "numeric"},
            **{"when": "date", "zone": "date", "kind": "categorical", "word": "categorical"},
        }
        for source in (tmp_path / "t.csv", tmp_path / "t.parquet"):
            assert Preprocessing.fit(source).to_dict()["columns"] == how.to_dict()["columns"]
            assert np.array_equal(how.transform(source), how.transform(frame))

    def test_excel_and_compressed_files(self, tmp_path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("openpyxl")
        frame = pandas.DataFrame(
            {
                "a": [1.5, None, 3.0] * 9,
                "b": ["x", "y", "x"] * 9,
                "d": pandas.to_datetime(["2020-01-01", None, "2020-02-03"] * 9),
            }
        )
        frame.to_excel(tmp_path / "t.xlsx", index=False)
        frame.to_csv(tmp_path / "t.csv.gz", index=False)
        how = Preprocessing.fit(frame)
        for name in ("t.xlsx", "t.csv.gz"):
            assert np.array_equal(how.transform(tmp_path / name), how.transform(frame))


class TestSuspicions:
    def table(self, **columns: Any) -> dict[str, Any]:
        draw = np.random.default_rng(3)
        rows = 120
        site = np.array(["oslo", "lima", "kyoto"])[np.arange(rows) % 3]
        return {
            "age": draw.normal(50, 9, rows),
            "site": site,
            "ill": np.where(draw.random(rows) < 0.4, "yes", "no"),
            **columns,
        }

    def warned(self, table: dict[str, Any], **options: Any) -> str:
        report = check_table(table, label="ill", domain="site", **options)
        lines = [f"{c['column']}: {w}" for c in report["columns"] for w in c["warnings"]]
        return "\n".join([*lines, *report["remarks"]])

    def test_nothing_is_said_of_an_ordinary_table(self) -> None:
        assert not self.warned(self.table())

    @pytest.mark.parametrize("how", ["recoded", "as 0 and 1", "a score", "missing where ill"])
    def test_a_column_that_gives_the_label_away(self, how: str) -> None:
        table = self.table()
        ill = table["ill"] == "yes"
        draw = np.random.default_rng(5)
        leak = {
            "recoded": np.where(ill, "B", "A"),
            "as 0 and 1": ill.astype(int),
            "a score": np.where(ill, 5, 1) + draw.normal(0, 0.2, 120),
            "missing where ill": np.where(ill, np.nan, draw.normal(size=120)),
        }[how]
        assert re.search(
            "leak: possible leakage: this column alone predicts 'ill'", self.warned({**table, "leak": leak})
        )

    def test_an_ordinary_good_feature_is_no_leak(self) -> None:
        table = self.table()
        good = np.where(table["ill"] == "yes", 1.5, 0) + np.random.default_rng(1).normal(size=120)
        assert not self.warned({**table, "good": good})

    def test_regression_leaks(self) -> None:
        table = self.table(dose=np.random.default_rng(2).normal(size=120))
        copy = {
            **table,
            "copy": table["dose"] * 2 + 1,
            "noisy": table["dose"] + np.random.default_rng(4).normal(size=120),
        }
        report = check_table(copy, label="dose", domain="site")
        said = {c["column"]: c["warnings"] for c in report["columns"]}
        assert "possible leakage" in said["copy"][0]
        assert not said["noisy"]

    def test_a_column_that_repeats_the_domain(self) -> None:
        table = self.table()
        country = np.where(table["site"] == "oslo", "NO", "other")
        code = np.select([table["site"] == "oslo", table["site"] == "lima"], [1, 2], 3)
        said = self.warned({**table, "code": code, "country": country})
        assert "code: repeats the domain 'site'" in said
        assert "country: is the same in all rows of a domain of 'site'" in said

    def test_names_that_differ_in_case_or_spaces(self) -> None:
        table = self.table()
        table["site"] = np.where(
            np.arange(120) % 7 == 0, np.char.capitalize(table["site"].astype(str)), table["site"]
        )
        table["ill"] = np.where(
            np.arange(120) % 5 == 0, np.char.upper(table["ill"].astype(str)), table["ill"]
        )
        said = self.warned(table)
        assert "labels 'NO' and 'no' differ only in case or spaces" in said
        assert "domains 'Oslo' and 'oslo' differ only in case or spaces" in said

    def test_rows_that_are_there_twice(self) -> None:
        table = self.table(weight=np.random.default_rng(8).normal(70, 9, 120))
        twice = {name: np.concatenate([values, values[:10], values[:4]]) for name, values in table.items()}
        twice["site"][-4:] = "lima"
        said = self.warned(twice)
        assert "14 rows are duplicates (such as rows 1 and 121)" in said
        assert "are in more than one domain" in said
        few = {"a": ["x", "y"] * 60, "site": table["site"], "ill": table["ill"]}
        assert "repeat" not in self.warned(few)  # by chance alone

    def test_the_check_shows_it(self, tmp_path: Path) -> None:
        path = written(CASES["one below detection"], tmp_path / "t.csv")
        shown = str(check(path, label="label", domain="site"))
        assert re.search(r"x +numeric +1 \(2%\) +\d+ ", shown)
        assert "'<0.1' (1)" in shown
        assert re.search(r"x +categorical", str(check(path, kinds={"x": "categorical"})))


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

    def test_rows_that_are_not_used_are_counted(self) -> None:
        table = self.table()
        there = np.isin(table["who"], table["who"][table["site"] == "a"])
        of = {d: table["site"] == d for d in "bcd"}
        lost = {d: (int((there & mask).sum()), int(mask.sum())) for d, mask in of.items()}
        each = ", ".join(f"{n} of {whole} of '{d}'" for d, (n, whole) in lost.items() if n)
        with pytest.warns(UserWarning, match=f"not used, because the same entity.*: {each}$"):
            from_table(table, label="y", domain="site", group="who", held_out="a")

    def test_without_it_entities_are_split(self) -> None:
        table = self.table()
        with pytest.warns(UserWarning, match="who"):
            data = from_table(table, label="y", domain="site", held_out="b")
        train, validation = (set(table["who"][data.splits[s].examples()]) for s in ("train", "validation"))
        assert train & validation


def test_unseen_categories_and_unread_cells_are_reported(tmp_path: Path) -> None:
    how = Preprocessing.fit({"a": ["1", "2", "3"], "c": ["x", "y", "x"]})
    (tmp_path / "new.csv").write_text("a,c\n1,x\nold,z\n3,z\n")
    took = reader(how.to_dict(), (how.width,))
    list(took.batches(tmp_path / "new.csv"))
    assert any("'old' (1)" in note for note in took.notes)
    assert any("not in the training data: 'z' (2)" in note for note in took.notes)
    tally = Tally()
    how.transform({"a": [1.0], "c": ["x"]}, tally)
    assert not tally.notes()
