"""Tables as people have them, each with what must become of its columns.

A case is a column's cells (as in a CSV file, or as Python values), and what is expected of it: its kind, how
many cells are missing, some numbers it must be read as, and words of a warning.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROWS = 60


@dataclass(frozen=True)
class Case:
    cells: Sequence[Any]
    kind: str
    name: str = "x"
    missing: int | None = None
    reads: dict[int, float] = field(default_factory=dict)
    """Row: the number that its cell must be."""
    warns: str = ""
    """A pattern that a warning must match; empty: there must be none."""
    options: dict[str, Any] = field(default_factory=dict)
    features: int | None = None
    separator: str = ","


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def _floats() -> list[str]:
    return [f"{v:.2f}" for v in _rng().normal(50, 10, ROWS)]


def _mixed(*words: str) -> list[str]:
    return [*words, *_floats()[len(words) :]]


def _cells(make: Callable[[int, np.random.Generator], Any]) -> list[Any]:
    draw = _rng()
    return [make(n, draw) for n in range(ROWS)]


def _repeat(*words: Any) -> list[Any]:
    return [words[n % len(words)] for n in range(ROWS)]


_DAY = datetime.date(2021, 3, 1)
CASES: dict[str, Case] = {
    # Numbers among other things
    "stray dashes": Case(_mixed(*["-"] * 6), "numeric", missing=6),
    "a quarter is missing marks": Case(_mixed(*["-", "--", "?", "n/a", "."] * 3), "numeric", missing=15),
    "one below detection": Case(
        _mixed("<0.1"), "numeric", missing=1, warns=r"1 cell is not a number.*'<0\.1'"
    ),
    "a few words": Case(_mixed("high", "high", "low"), "numeric", missing=3, warns=r"3 cells.*'high' \(2\)"),
    "too many words": Case(
        _mixed(*["high", "low"] * 8), "categorical", warns=r"73% of its cells are numbers.*as numeric"
    ),
    "too many words, said to be numeric": Case(
        _mixed(*["high", "low"] * 8),
        "numeric",
        missing=16,
        warns="16 cells",
        options={"kinds": {"x": "numeric"}},
    ),
    "spreadsheet errors": Case(_mixed("#DIV/0!", "#N/A", "#REF!"), "numeric", missing=3),
    "infinite": Case(_mixed("inf", "-inf"), "numeric", missing=2, warns="2 cells are not a number"),
    "thousands": Case(
        _cells(lambda n, r: f"{1000.25 + 7919 * n:,.2f}"), "numeric", reads={0: 1000.25, 1: 8919.25}
    ),
    "thousands, open": Case(
        _cells(lambda n, r: f"{1000 + 37 * n * n % 8999:,}"),
        "numeric",
        reads={0: 1000.0},
        warns=r"'1,000' is read as 1000 \(1,234 can mean 1234 or 1\.234; set the option decimal",
    ),
    "thousands, said to be decimals": Case(
        _cells(lambda n, r: f"{1000 + 37 * n * n % 8999:,}"),
        "numeric",
        reads={0: 1.0},
        options={"decimal": ","},
    ),
    "decimal commas": Case(
        _cells(lambda n, r: f"{n * 1.37:.2f}".replace(".", ",")), "numeric", reads={1: 1.37}, separator=";"
    ),
    "points for thousands": Case(
        _cells(lambda n, r: f"{1234.5 + n * 1000:,.1f}".translate(str.maketrans(",.", ".,"))),
        "numeric",
        reads={0: 1234.5, 1: 2234.5},
        separator=";",
    ),
    "spaces for thousands": Case(
        _cells(lambda n, r: f"{10_000 + n * n * 131:,}".replace(",", "\u00a0")),
        "numeric",
        reads={0: 10_000.0},
    ),
    "apostrophes for thousands": Case(
        _cells(lambda n, r: f"{10_000 + n * n * 131:,}".replace(",", "'")), "numeric", reads={1: 10_131.0}
    ),
    "dollars": Case(_cells(lambda n, r: f"${r.random() * 9:.2f}"), "numeric"),
    "negative dollars": Case(_repeat("-$3.50", "$4.25", "($1.75)"), "numeric", reads={0: -3.5, 2: -1.75}),
    "euros behind": Case(_repeat("3,50 €", "4,25 €", "1.000,00 €"), "numeric", reads={0: 3.5, 2: 1000.0}),
    "per cent": Case(_cells(lambda n, r: f"{n % 40}%"), "numeric", reads={3: 3.0}),
    "per cent and none": Case(
        _repeat("12%", "13%", "14%", "15%", "0.16"),
        "numeric",
        warns="some cells have the unit % and some have none",
    ),
    "kilograms": Case(_cells(lambda n, r: f"{60 + n % 31 / 2} kg"), "numeric", reads={0: 60.0, 1: 60.5}),
    "two units": Case(
        _repeat("5 kg", "500 g", "7 kg", "650 g"), "categorical", warns="of its cells are numbers"
    ),
    "mm Hg": Case(_repeat("120 mm Hg", "131 mm Hg", "99 mm Hg"), "numeric", reads={1: 131.0}),
    "minus signs of typesetters": Case(_repeat("−3.5", "2.5", "1"), "numeric", reads={0: -3.5}),
    "scientific": Case(_repeat("1e-3", "2.5E4", "3"), "numeric", reads={0: 0.001, 1: 25_000.0}),
    "spaces around": Case(_repeat(" 1.5", "2.5 ", "\t3"), "numeric", reads={0: 1.5}),
    "floats that are years": Case(_repeat("2019.0", "2020.0", "2021.0"), "numeric", reads={0: 2019.0}),
    "years": Case(_repeat(*range(2001, 2021)), "numeric", reads={0: 2001.0}),
    "ages of two digits": Case(_cells(lambda n, r: str(r.integers(10, 99))), "numeric"),
    "blood pressures": Case(_cells(lambda n, r: str(r.integers(100, 190))), "numeric"),
    "salaries": Case(_cells(lambda n, r: str(r.integers(20_000, 99_999))), "numeric"),
    "scores 1 to 5 and nothing": Case(_repeat("1", "5", "3", ""), "numeric", missing=15),
    # Codes and identifiers
    "zip codes with zeros": Case(
        _repeat(*[f"{n * 1111:05d}" for n in range(1, 20)]), "categorical", warns="codes with leading zeros"
    ),
    "zip codes by name": Case(
        _repeat(*range(90210, 90230)), "categorical", name="zip", warns="codes of 5 digits"
    ),
    "codes of fixed width": Case(
        _repeat(*_rng().permutation(np.arange(10_007, 99_999, 4_441)).tolist()[:20]),
        "categorical",
        warns="codes of 5 digits",
    ),
    "PatientID": Case(list(range(901, 901 + ROWS)), "dropped", name="PatientID", warns="not used.*numeric"),
    "record in order": Case(list(range(ROWS)), "dropped", name="record", warns="not used"),
    "an unnamed index": Case(list(range(ROWS)), "dropped", name="Unnamed: 0", warns="not used"),
    "numbers of rows without a name for it": Case(
        _rng().permutation(ROWS).tolist(), "dropped", warns="different in every row"
    ),
    "patients twice each": Case(
        [n // 2 + 1 for n in range(ROWS)], "dropped", name="patient", warns="for a repeated entity"
    ),
    "visits of entities, in order": Case([n // 2 + 1 for n in range(ROWS)], "dropped", warns="set group"),
    "codes of letters and digits": Case(
        _cells(lambda n, r: f"AB-{n * 37 % 101:03d}"), "dropped", warns="not used"
    ),
    "uuids": Case(_cells(lambda n, r: f"{r.integers(2**60):016x}"), "dropped", warns="not used"),
    "names of people": Case(
        _cells(lambda n, r: f"Person {chr(65 + n % 26)}{n}"), "dropped", warns="not used"
    ),
    "an identifier, said to be numeric": Case(
        list(range(ROWS)), "numeric", name="id", options={"kinds": {"id": "numeric"}}
    ),
    "beyond float64": Case(
        [2**53 + n % 3 for n in range(ROWS)],
        "categorical",
        features=3,
        options={"kinds": {"x": "categorical"}},
    ),
    # Dates
    "iso dates": Case(_cells(lambda n, r: str(_DAY + datetime.timedelta(n * 3))), "date", reads={0: 18687.0}),
    "repeated dates": Case(_repeat("2021-03-01", "2021-03-05", "2021-04-01"), "date", reads={2: 18718.0}),
    "days first": Case(_repeat("01.03.2021", "25.12.2020", "07.06.2021"), "date", reads={0: 18687.0}),
    "months first": Case(_repeat("03/01/2021", "12/25/2020", "06/07/2021"), "date", reads={0: 18687.0}),
    "open dates": Case(
        _repeat("03/01/2021", "04/02/2021"), "date", warns="is read month first; set the option"
    ),
    "open dates, said": Case(
        _repeat("01/03/2021", "02/04/2021"), "date", reads={0: 18687.0}, options={"day_first": True}
    ),
    "dates in words": Case(
        _repeat("Mar 1, 2021", "1 March 2021", "Dec 25, 2020"), "date", reads={0: 18687.0, 1: 18687.0}
    ),
    "times too": Case(
        _repeat("2021-03-01 06:00:00", "2021-03-01T18:00:00Z"), "date", reads={0: 18687.25, 1: 18687.75}
    ),
    "eight digits": Case(
        _cells(lambda n, r: f"2021{n % 12 + 1:02d}{n % 28 + 1:02d}"), "date", reads={0: 18628.0}
    ),
    "dates and a word": Case(
        [*_cells(lambda n, r: str(_DAY + datetime.timedelta(n)))[:-2], "soon", "soon"],
        "date",
        missing=2,
        warns="2 cells are not a date",
    ),
    "dates as Python has them": Case(
        _cells(lambda n, r: _DAY + datetime.timedelta(n * 3)), "date", reads={0: 18687.0}
    ),
    "dates, said to be categories": Case(
        _repeat("2021-03-01", "2021-03-05"),
        "categorical",
        options={"kinds": {"x": "categorical"}},
        features=2,
    ),
    # Booleans
    "TRUE and FALSE": Case(_repeat("TRUE", "FALSE"), "boolean", reads={0: 1.0, 1: 0.0}, features=1),
    "true and false": Case(_repeat("true", "false"), "boolean", reads={0: 1.0}),
    "yes, no and nothing": Case(_repeat("Yes", "no", ""), "boolean", reads={0: 1.0}, missing=20, features=2),
    "Y and N": Case(_repeat("Y", "N"), "boolean", reads={1: 0.0}),
    "booleans of Python": Case(_repeat(True, False), "boolean", reads={0: 1.0}),
    "booleans and numbers": Case(_repeat("True", "0", "1", "False"), "boolean", reads={0: 1.0, 1: 0.0}),
    "zeros and ones": Case(_repeat(0, 1), "numeric", reads={1: 1.0}),
    "female and male": Case(_repeat("f", "m"), "categorical", features=2),
    # Categories and text
    "three colours": Case(_repeat("red", "green", "blue"), "categorical", features=3),
    "plus and minus": Case(_repeat("+", "-"), "categorical", missing=0, features=2),
    "none is a grade": Case(_repeat("none", "mild", "severe"), "categorical", missing=20, features=2),
    "colours in two spellings": Case(
        _repeat("Red", "red", "blue"), "categorical", warns="only in case or spaces"
    ),
    "grades": Case(_repeat("1st", "2nd", "3rd"), "categorical", warns="of its cells are numbers|^$"),
    "sizes": Case(_repeat("S", "M", "L", "XL"), "categorical", features=4),
    "rooms": Case(_repeat("5A", "12B", "7C", "3D"), "categorical", warns="."),
    "ranges": Case(_repeat("0-10", "11-20", "21-30"), "categorical", features=3),
    "sentences": Case(
        [f"the patient of bed {n} feels rather well on day {n * 7 % 31}" for n in range(ROWS)],
        "text",
        features=64,
    ),
    "markup": Case(_repeat("<script>alert(1)</script>", "=1+1", "\x1b[31mred"), "categorical", features=3),
    # Nothing
    "empty": Case([""] * ROWS, "dropped"),
    "only marks": Case(_repeat("-", "?", "NA"), "dropped"),
    "constant": Case(["7"] * ROWS, "dropped"),
    "a constant and gaps": Case(_repeat("7", ""), "numeric", missing=30, features=1),
}
