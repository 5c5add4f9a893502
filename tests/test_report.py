"""Tables as text, Markdown, LaTeX, HTML and CSV; tables and text of runs and comparisons."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.report import compare as view
from shoal.report import runs
from shoal.report.tables import Table

ODD = "a&b_c%d<script>|\"x\", 'y' $1 {z} \\ #"


def test_columns_line_up_on_a_terminal() -> None:
    table = Table(["method", "n"])
    table.add("θ̃ walked", 7)  # the tilde takes no column of its own
    table.add("漢字", 12)
    lines = table.text().splitlines()
    assert (lines[0], *lines[2:]) == ("method     n", "θ̃ walked   7", "漢字      12")


def test_cells_are_text_in_every_format() -> None:
    table = Table([ODD, "n_1\x1b[2J"])
    table.add(ODD, "1.0 ± 0.5")
    assert table.columns == [ODD, "n_1?[2J"]
    tree = ElementTree.fromstring(table.html())
    assert [cell.text for cell in (*tree.iter("th"), *tree.iter("td"))] == [*table.columns, *table.rows[0]]
    head, _, row = table.markdown().splitlines()
    for line in (head, row):
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
        assert not re.search(r"(?<!\\)[<_*`]", line)
    assert re.sub(r"\\(.)", r"\1", row) == f"| {ODD} | 1.0 ± 0.5 |"


def test_a_run_at_the_selected_step_and_the_last() -> None:
    def record(*points: dict[str, float]) -> dict[str, Any]:
        scores = [{"scores": {"test": {"metric": "accuracy", "domains": domains}}} for domains in points]
        return {"history": scores, "selected": 0, "config": {"seed": 0}}

    table = runs.run_table([record({"oslo": 0.75, "lima": 0.5}, {"oslo": 0.25, "lima": 1.0})])
    assert table.columns == ["split", "domain", "metric", "value", "at the last step"]
    assert table.rows[0] == ["test", "oslo", "accuracy", "0.750", "0.250"]
    rows = runs.run_table([record({f"d{n}": 0.5 for n in range(1000)})]).rows
    assert (len(rows), rows[10][1]) == (11, "… 990 more")


def compared(domains: list[str], metric: str = "accuracy", gain: float = 0.1, lost: int = 0) -> Any:
    """A comparison of ERM and Fish with two seeds, without the first ``lost`` runs."""
    records = []
    for name, more in (("erm", 0.0), ("fish", gain)):
        for place, domain in enumerate(domains):
            for seed in (0, 1):
                value = 0.5 + more * (1 + 0.1 * place) + 0.01 * seed
                test = {"metric": metric, "average": value, "domains": {domain: value}}
                test["metrics"] = {"AUC": 0.3 + 0.1 * place}
                held = {"metric": metric, "average": 0.5, "domains": {"a": 0.5}}
                split = {"validation": held, "test": test}
                point = {"step": 5, "passes": 5, "loss": 1.0, "scores": split}
                config = RunConfig("table", name, 5, {"held_out": domain}, seed=seed, label=name)
                records.append(RunRecord(config, "finished", (point,), 0, "best", 1.0, {}))
    return compare.results([r.config for r in records], records[lost:])


def test_the_table_of_a_comparison() -> None:
    table = view.table(compared(["a", "b", "c"]))
    fish, erm = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (fish["algorithm"], fish["rank"], fish["a"]) == ("fish", "1", "60.5 ± 0.7")
    assert (fish["average accuracy"], fish["worst domain"]) == ("61.5 ± 0.7", "60.5 (a)")
    assert (fish["difference to erm"], fish["95 % interval"]) == ("+11.0", "+8.5 to +13.5")
    assert (erm["difference to erm"], erm["average AUC"]) == ("–", "0.4000")
    errors = view.table(compared(["a", "b"], "mse", -0.1))
    assert errors.rows[0][1:3] == ["fish", "0.4050 ± 0.0071"]
    missing = compared(["a", "b"], lost=1)
    assert "erm, a held out, seed 0" in view.text(missing)
    assert any("(1 of 2)" in cell for row in view.table(missing).rows for cell in row)


def test_names_cannot_break_a_text() -> None:
    result = compared(["<script>|$\x1b[2J", "b"])
    text = view.files(result)["comparison.md"].decode()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "&lt;script&gt;\\|$?[2J" in lines[0]
    assert "<script>" not in text + view.as_html(result)
    assert "\x1b" not in text + view.text(result)
