"""What is suspicious in a table is found, and an ordinary table raises no alarm."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from shoal.data import from_table
from shoal.data.tables import check_table

ROWS = 120
RANDOM = np.random.default_rng(3)
SITES = np.array(["oslo", "lima", "kyoto"])
TABLE: dict[str, Any] = {
    "age": RANDOM.normal(50, 9, ROWS),
    "site": SITES[np.arange(ROWS) % 3],
    "ill": np.where(RANDOM.random(ROWS) < 0.4, "yes", "no"),
}
NOISE = np.random.default_rng(5).normal(size=(4, ROWS))


def warned(table: dict[str, Any], label: str = "ill", **options: Any) -> str:
    report = check_table(table, label=label, domain="site", **options)
    lines = [f"{c['column']}: {w}" for c in report["columns"] for w in c["warnings"]]
    return "\n".join([*lines, *report["remarks"], *report["problems"]])


def test_nothing_is_said_of_an_ordinary_table() -> None:
    good = np.where(TABLE["ill"] == "yes", 1.5, 0) + NOISE[0]
    assert not warned({**TABLE, "good": good})


class TestLeaks:
    @pytest.mark.parametrize("how", ["recoded", "as 0 and 1", "a score", "missing where ill"])
    def test_a_column_that_gives_the_label_away(self, how: str) -> None:
        ill = TABLE["ill"] == "yes"
        leak = {
            "recoded": np.where(ill, "B", "A"),
            "as 0 and 1": ill.astype(int),
            "a score": np.where(ill, 5, 1) + 0.2 * NOISE[0],
            "missing where ill": np.where(ill, np.nan, NOISE[0]),
        }[how]
        found = warned({**TABLE, "leak": leak})
        assert "leak: possible leakage: this column alone predicts 'ill'" in found

    def test_a_number_that_finds_one_of_three_classes(self) -> None:
        grade = np.array(["a", "b", "c"])[np.random.default_rng(1).integers(0, 3, ROWS)]
        find = np.where(grade == "b", 9 + NOISE[0] / 9, NOISE[1])
        found = warned({**TABLE, "ill": grade, "find": find, "some": (grade == "b") + NOISE[2]})
        assert re.search(
            r"^find: possible leakage: this column alone identifies 'ill' 'b' \(\d+ of \d+", found
        )
        assert "some:" not in found

    def test_quantities(self) -> None:
        dose = NOISE[0]
        table = {
            **TABLE,
            "dose": dose,
            "copy": dose * 2 + 1,
            "curved": np.exp(dose),
            "related": dose + 0.2 * NOISE[1],
            "noisy": dose + NOISE[2],
        }
        found = warned(table, "dose")
        for name in ("copy", "curved", "related"):
            assert f"{name}: possible leakage: this column alone predicts 'dose' (R²" in found
        assert "noisy:" not in found

    def test_two_columns_that_sum_to_the_label(self) -> None:
        parts = {"first": NOISE[0], "second": NOISE[1], "third": NOISE[2]}
        table = {**TABLE, **parts, "total": NOISE[0] + NOISE[1]}
        found = warned(table, "total")
        assert "first: possible leakage: with 'second' it gives 'total' exactly" in found
        assert "second: possible leakage: with 'first'" in found
        assert "third:" not in found
        assert not warned({**table, "total": NOISE[0] + NOISE[1] + NOISE[3] / 3}, "total")


class TestDomains:
    def test_columns_that_identify_the_domain(self) -> None:
        number = (TABLE["site"] == "oslo") + 2 * (TABLE["site"] == "lima")
        country = np.char.upper(TABLE["site"].astype(str))
        found = warned({**TABLE, "number": number, "country": country})
        for name in ("number", "country"):
            assert f"{name}: repeats the domain 'site'" in found

    def test_covariates_that_are_constant_within_a_domain_are_usable(self) -> None:
        income = np.select([TABLE["site"] == "oslo", TABLE["site"] == "lima"], [61_250.5, 20_811.0], 44_010.0)
        school = np.where(TABLE["site"] == "oslo", "public", "private")
        assert not warned({**TABLE, "income": income, "school": school})

    def test_classes_that_occur_in_one_domain(self) -> None:
        species = np.where(TABLE["site"] == "lima", np.where(NOISE[0] > 0, "chinstrap", "adelie"), "adelie")
        species = np.where((TABLE["site"] == "oslo") & (NOISE[1] > 0.5), "gentoo", species)
        table = {**TABLE, "ill": species}
        share = 1 - float((species == "chinstrap").sum() / 40)
        wanted = f"class 'chinstrap' only in domain 'lima'.*accuracy is at most {share:.1%}"
        assert re.search(wanted, warned(table))
        report = check_table(table, label="ill", domain="site")
        assert [each["domain"] for each in report["classes_of_one_domain"]] == ["lima", "oslo"]
        with pytest.warns(UserWarning, match=wanted):
            data = from_table(table, label="ill", domain="site")
        assert re.search(wanted, data.notes["classes"])

    def test_names_that_differ_in_case_or_spaces(self) -> None:
        odd = np.arange(ROWS) % 7 == 0
        site = np.where(odd, np.char.capitalize(TABLE["site"].astype(str)), TABLE["site"])
        found = warned(
            {**TABLE, "site": site, "ill": np.where(odd, np.char.upper(TABLE["ill"]), TABLE["ill"])}
        )
        assert "labels 'NO' and 'no' differ only in case or spaces" in found
        assert "domains 'Oslo' and 'oslo' differ only in case or spaces" in found


class TestRows:
    def table(self, last: dict[str, Any], **columns: Any) -> dict[str, Any]:
        """The table, more columns, and one more row."""
        table = {**TABLE, "dose": NOISE[0] + 20, "note": np.array(["x", "y"])[np.arange(ROWS) % 2], **columns}
        return {name: [*values, last.get(name)] for name, values in table.items()}

    @pytest.mark.parametrize(
        ("last", "drop", "message"),
        [
            ({"site": "Total", "ill": "yes"}, ["mostly-empty"], r"row 121: mostly empty.*mostly-empty"),
            (
                {"site": "Total", "ill": "no", "age": 6e3, "dose": 2e3, "note": "x"},
                ["single"],
                "row 121: alone in the domain.*drop_rows to single",
            ),
            (
                {"age": 50, "dose": 20, "note": "x", "ill": "no"},
                ["missing"],
                "missing in row 121.*set drop_rows",
            ),
            (
                {"age": 50, "dose": 20, "note": "x", "site": "oslo"},
                ["missing"],
                "missing in row 121.*set drop_rows",
            ),
        ],
    )
    def test_rows_that_are_no_examples(self, last: dict[str, Any], drop: list[str], message: str) -> None:
        table = self.table(last)
        assert re.search(message, warned(table))
        options: Any = {"label": "ill", "domain": "site", "drop_rows": drop}
        with pytest.warns(UserWarning, match=r"left out .*row 121"):
            data = from_table(table, **options)
        assert len(data.examples) == ROWS  # type: ignore[arg-type]
        assert data.splits["train"].names == ("kyoto", "lima", "oslo")
        assert data.notes["rows"] == f"rows left out: 1 {drop[0]}"

    def test_labels_in_another_unit(self) -> None:
        table = self.table({"age": 50, "dose": 22_000.0, "note": "x", "site": "oslo", "ill": "no"})
        assert "row 121: labelled far from all others" in warned(table, "dose")
        assert "far from all" not in warned(table, "dose", drop_rows=["outliers"])
        heavy = np.exp(np.random.default_rng(0).normal(size=ROWS))
        assert "far from" not in warned({**TABLE, "cost": heavy}, "cost")

    def test_rows_that_are_there_twice(self) -> None:
        twice = {
            name: np.concatenate([values, values[:10], values[:4]])
            for name, values in {**TABLE, "weight": NOISE[0]}.items()
        }
        twice["site"][-4:] = "lima"
        found = warned(twice)
        assert "14 rows are duplicates (such as rows 1 and 121)" in found
        assert "are in more than one domain" in found
        few = {"a": ["x", "y"] * 60, "site": TABLE["site"], "ill": TABLE["ill"]}
        assert "duplicates" not in warned(few)  # by chance alone


def test_an_ordinal_label_is_named_as_such() -> None:
    grade = np.random.default_rng(0).integers(3, 10, ROWS)
    found = warned({**TABLE, "grade": grade}, "grade")
    assert "label 'grade' is ordinal (3 to 9)" in found


def test_all_problems_are_shown_with_the_table() -> None:
    table = {**TABLE, "twin": TABLE["ill"], "site": [None, *TABLE["site"][1:]]}
    report = check_table(
        table, label="ill", domain="site", drop=["aeg"], kinds={"age": "boolean", "egg": "text"}
    )
    assert [c["column"] for c in report["columns"]] == ["age", "site", "ill", "twin"]
    for words in (
        "no column 'aeg'",
        "no column 'egg'",
        "'age' cannot be read as boolean",
        "site' is missing in row 1",
        "a copy",
    ):
        assert sum(words in problem for problem in report["problems"]) == 1, words
    assert report["task"] == "classification"
