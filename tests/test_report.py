"""Tables as text, Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import csv
import io
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.report import runs
from shoal.report.tables import Table

ODD = "a&b_c%d<script>|\"x\", 'y' $1 {z} \\ #"


@pytest.fixture
def odd() -> Table:
    table = Table([ODD, "n_1\x1b[2J"])
    table.add(ODD, "1.0 ± 0.5")
    return table


def test_columns_line_up_on_a_terminal() -> None:
    table = Table(["method", "n"])
    table.add("θ̃ walked", 7)  # the tilde takes no column of its own
    table.add("漢字", 12)
    lines = table.text().splitlines()
    assert lines[0] == "method     n"
    assert lines[2] == "θ̃ walked   7"
    assert lines[3] == "漢字      12"
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table.add(1)


def test_csv_and_html_give_the_cells_back(odd: Table) -> None:
    assert odd.columns == [ODD, "n_1?[2J"]
    assert list(csv.reader(io.StringIO(odd.csv()))) == [odd.columns, *odd.rows]
    tree = ElementTree.fromstring(odd.html())
    assert [cell.text for cell in tree.iter("th")] == odd.columns
    assert [(cell.text, cell.get("class")) for cell in tree.iter("td")] == [
        (ODD, None),
        ("1.0 ± 0.5", "number"),
    ]


def test_markdown_has_no_markup_of_the_cells(odd: Table) -> None:
    head, _, row = odd.markdown().splitlines()
    for line in (head, row):
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
        assert not re.search(r"(?<!\\)[<_*`]", line)
    assert re.sub(r"\\(.)", r"\1", row) == f"| {ODD} | 1.0 ± 0.5 |"


def test_latex_escapes_what_would_be_a_command(odd: Table) -> None:
    lines = odd.latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lr}"
    assert lines[1:4:2] == [r"\toprule", r"\midrule"]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    escaped = (
        r"a\&b\_c\%d\textless{}script\textgreater{}\textbar{}\char34{}x\char34{}, 'y' \$1 \{z\} "
        r"\textbackslash{} \#"
    )
    assert lines[2] == escaped + r" & n\_1?[2J \\"
    assert lines[4] == escaped + r" & 1.0 $\pm$ 0.5 \\"


# Scores of runs


def scores(metrics: dict[str, Any] | None = None, **domains: float) -> dict[str, Any]:
    found = {"metric": "accuracy", "average": 0.5, "mean": 0.5, "domains": domains}
    return {"test": found | ({"metrics": metrics} if metrics else {})}


def record(seed: int, *points: dict[str, Any], selected: int = -1) -> dict[str, Any]:
    return {"history": [{"scores": p} for p in points], "selected": selected, "config": {"seed": seed}}


def test_a_run_at_the_selected_step_and_the_last() -> None:
    table = runs.run_table(record(0, scores(oslo=0.75, lima=0.5), scores(oslo=0.25, lima=1.0), selected=0))
    assert table.columns == ["split", "domain", "accuracy", "at the last step"]
    assert table.rows == [["test", "oslo", "0.750", "0.250"], ["test", "lima", "0.500", "1.000"]]


def test_seeds_are_averaged_and_shown() -> None:
    table = runs.seeds_table([record(3, scores(oslo=0.5)), record(4, scores(oslo=0.7))])
    assert table.columns == ["split", "domain", "accuracy, mean ± sd", "seed 3", "seed 4"]
    assert table.rows == [["test", "oslo", "0.600 ± 0.141", "0.500", "0.700"]]


def test_metrics_are_shown_with_their_names() -> None:
    one, other = scores({"F1": 0.25, "AUC": None}, oslo=0.5), scores({"F1": 0.75, "AUC": 0.5}, oslo=0.7)
    table = runs.run_table(record(0, one, other, selected=0))
    assert table.columns == ["split", "domain", "measure", "value", "at the last step"]
    assert table.rows[1] == ["test", "all", "AUC", "–", "0.500"]
    table = runs.seeds_table([record(3, one), record(4, other)])
    assert table.rows[0] == ["test", "all", "F1", "0.500 ± 0.354", "0.250", "0.750"]
    assert table.rows[1] == ["test", "all", "AUC", "–", "–", "0.500"]


def test_of_very_many_domains_the_first_are_shown() -> None:
    rows = runs.run_table(record(0, scores(**{f"d{n}": 0.5 for n in range(1000)}))).rows
    assert len(rows) == 11
    assert rows[10][1] == "… 990 more"
