"""Messy tables give the right columns, the same ones from every kind of file, and say what they decided."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nasty import CASES, ROWS, Case

from shoal.data import from_table
from shoal.data.inputs import reader
from shoal.data.tables import Encoder, as_table, check_table
from shoal.data.tables.kinds import infer
from shoal.errors import InputError

OTHER = [f"{(n * 37 % 101) / 7:.3f}" for n in range(ROWS)]
SITE = [("oslo", "lima", "kyoto")[n] for n in np.random.default_rng(1).integers(0, 3, ROWS)]
LABEL = [("ill", "well")[n] for n in np.random.default_rng(2).integers(0, 2, ROWS)]


def table_of(case: Case) -> dict[str, list[Any]]:
    return {case.name: list(case.cells), "other": OTHER, "site": SITE, "label": LABEL}


def fit(source: Any, rows: Any = None, kinds: Any = None) -> Encoder:
    table = as_table(source)
    return Encoder.fit(table, rows, infer(table, list(table), kinds or {}))


def written(case: Case, path: Path) -> Path:
    table = table_of(case)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, delimiter=case.separator)
        lines.writerow(table)
        lines.writerows(zip(*table.values(), strict=True))
    return path


@pytest.mark.parametrize("called", CASES)
@pytest.mark.filterwarnings("ignore")
def test_each_column_is_what_it_is(called: str, tmp_path: Path) -> None:
    """From a file and in memory; and a file predicts what it was trained on, whatever was held out."""
    case = CASES[called]
    path = written(case, tmp_path / "t.csv")
    roles = {"label": "label", "domain": "site", **case.options}
    for source in [path, table_of(case)] if case.separator == "," else [path]:
        table = as_table(source)
        about = next(c for c in check_table(table, **roles)["columns"] if c["column"] == case.name)
        assert about["kind"] == case.kind
        assert case.missing is None or about["missing"] == case.missing
        said = "; ".join(about["warnings"])
        assert re.search(case.warns or "^$", said), said
        steps = Encoder.from_dict(from_table(table, **roles).inputs).steps
        step = next((s for s in steps if s.name == case.name), None)
        assert (step is None) == (case.kind == "dropped")
        assert case.features is None or (step is not None and step.width == case.features)
        for row, value in case.reads.items():
            found = table[case.name].values(case.kind, step.how)[0]  # type: ignore[union-attr]
            assert found[row] == pytest.approx(value, rel=1e-12)
    for held_out in ("oslo", "lima"):
        fold = from_table(path, held_out=held_out, **roles)
        kinds = {column["column"]: column["kind"] for column in fold.inputs["columns_report"]}
        assert kinds[case.name] == case.kind
        batches = reader(fold.inputs, fold.input_shape).batches(path, batch_size=7)
        x = np.concatenate([batch.x.numpy() for batch in batches])
        assert np.array_equal(x, fold.examples.x.numpy())  # type: ignore[attr-defined]


CELLS = {
    "number": st.floats(-1e6, 1e6).map(lambda v: f"{v:.4f}") | st.integers(-5000, 5000).map(str),
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
    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tables(), st.sampled_from(["utf-8", "utf-16", "cp1252"]), st.sampled_from(".,"))
    def test_every_form_of_a_table_gives_the_same_model_inputs(
        self, tmp_path: Path, made: tuple[dict[str, list[str]], str], encoding: str, decimal: str
    ) -> None:
        """CSV with any separator, encoding and decimal mark, Parquet, Excel, and a frame."""
        table, separator = made
        path, frame = tmp_path / "t.csv", pd.DataFrame(table)
        frame.to_csv(path, index=False, sep=separator, encoding=encoding)
        fixed = {"anchor": "numeric"}
        read = as_table(path, encoding=encoding)
        rows = np.arange(0, read.rows, 2)
        try:
            encoder = fit(read, rows, fixed)
        except InputError:  # there is no column, if there are few rows
            return
        wanted = encoder.transform(read)
        assert np.isfinite(wanted).all()
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_excel(tmp_path / "t.xlsx", index=False)
        for source in (frame, table, tmp_path / "t.parquet", tmp_path / "t.xlsx"):
            assert np.array_equal(encoder.transform(source), wanted)
        again = Encoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
        assert np.array_equal(again.transform(read, rows), wanted[rows])
        written_otherwise = frame.assign(anchor=frame["anchor"].str.replace(".", decimal))
        if decimal != separator:
            written_otherwise.to_csv(path, index=False, sep=";")
            assert np.array_equal(
                fit(path, rows, fixed).transform(path), fit(frame, rows, fixed).transform(frame)
            )

    @settings(deadline=None, max_examples=30)
    @given(tables(), st.integers(0, 2**32))
    def test_no_held_out_row_has_a_part_in_a_fitted_value(
        self, made: tuple[dict[str, list[str]], str], seed: int
    ) -> None:
        table = as_table(made[0])
        draw = np.random.default_rng(seed)
        fitted = draw.random(table.rows) < 0.7
        fitted[0] = True
        rows = np.flatnonzero(fitted)
        try:
            types = infer(table, list(table), {"anchor": "numeric"})
            before = Encoder.fit(table, rows, types)
        except InputError:
            return
        other = {name: np.where(fitted, cells, draw.permutation(cells)) for name, cells in made[0].items()}
        after = Encoder.fit(as_table(other), rows, types).to_dict()
        assert after["columns"] == before.to_dict()["columns"]
        assert after["training"] == before.to_dict()["training"]

    def test_pandas_and_csv_agree_on_types(self, tmp_path: Path) -> None:
        moments = pd.to_datetime(["2020-01-01 10:00:00", "2021-05-05 00:00:00", None] * 8)
        frame = pd.DataFrame(
            {
                "flag": [True, False, True] * 8,
                "maybe": pd.array([True, None, False] * 8, dtype="boolean"),
                "whole": pd.array([1, None, 3] * 8, dtype="Int64"),
                "single": np.array([0.1, 0.25, 0.5] * 8, np.float64),
                "when": moments,
                "zone": moments.tz_localize("UTC"),
                "kind": pd.Categorical(["u", "v", None] * 8),
                "word": pd.array(["x", None, "y"] * 8, dtype="string"),
            }
        )
        frame.to_csv(tmp_path / "t.csv", index=False)
        frame.to_parquet(tmp_path / "t.parquet")
        how = Encoder.fit(frame)
        kinds = {step.name: step.kind for step in how.steps}
        assert kinds == {
            **{"flag": "boolean", "maybe": "boolean", "whole": "numeric", "single": "numeric"},
            **{"when": "date", "zone": "date", "kind": "categorical", "word": "categorical"},
        }
        for source in (tmp_path / "t.csv", tmp_path / "t.parquet"):
            assert Encoder.fit(source).to_dict()["columns"] == how.to_dict()["columns"]
            assert np.array_equal(how.transform(source), how.transform(frame))

    def test_dates_in_excel_and_compressed_files(self, tmp_path: Path) -> None:
        days = pd.to_datetime(["2020-01-01", None, "2020-02-03"] * 9)
        frame = pd.DataFrame({"a": [1.5, None, 3.0] * 9, "b": ["x", "y", "x"] * 9, "d": days})
        frame.to_excel(tmp_path / "t.xlsx", index=False)
        frame.to_csv(tmp_path / "t.csv.gz", index=False)
        how = Encoder.fit(frame)
        for name in ("t.xlsx", "t.csv.gz"):
            assert np.array_equal(how.transform(tmp_path / name), how.transform(frame))
