"""Tables and pictures."""

from __future__ import annotations

import csv
import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from shoal.paper import cdsprites, linear
from shoal.paper.published import claims
from shoal.paper.views.figures import demo_figure
from shoal.report import plots, runs
from shoal.report.tables import Table, percent


def test_columns_line_up_on_a_terminal() -> None:
    table = Table(["method", "n"])
    table.add("θ̃ walked", 7)  # the tilde takes no column of its own
    table.add("漢字", 12)
    lines = table.text().splitlines()
    assert lines[0] == "method     n"
    assert lines[2] == "θ̃ walked   7"
    assert lines[3] == "漢字      12"


def test_markdown_escapes_what_would_break_a_row() -> None:
    table = Table(["a"])
    table.add("x|y")
    assert table.markdown().splitlines()[-1] == "| x\\|y |"
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        table.add(1, 2)


def test_percent() -> None:
    assert percent([0.5, 0.7]) == "60.0 ± 14.1"
    assert percent([0.5]) == "50.0"
    assert percent([0.5, math.nan]) == "50.0"
    assert percent([math.nan]) == "–"


def test_judgement() -> None:
    about, least = {"relation": "about", "value": 50}, {"relation": "at least", "value": 90}

    def judged(percents: list[float], claim: dict[str, object], diverged: int = 0) -> str:
        values = [v / 100 for v in percents]
        entry = {"method": "Fish", "test last": values, "diverged": list(range(diverged))}
        return cdsprites.judged(entry, {**claim, "split": "test"})

    assert judged([51.9], about) == "agrees"
    assert judged([52.1], about) == "disagrees"
    assert judged([89.9, 90.1], least) == "agrees"
    assert judged([89.9], least) == "disagrees"
    assert judged([math.nan], least) == "not run"
    assert judged([100.0], least, diverged=1) == "partly"
    assert judged([80.0], least, diverged=1) == "disagrees"
    assert judged([], least, diverged=2) == "disagrees"


def test_claims_are_complete() -> None:
    for claim in claims("cdsprites"):
        assert set(claim) == {"method", "domains", "split", "relation", "value", "words"}
        assert claim["relation"] in ("about", "at least", "below")


def test_pictures_show_every_method_and_domain(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Read back from the SVG, with a domain whose name would be mathematics or markup."""
    curves = {"ERM": [([1, 2], [0.5, 0.6])], "another": [([1, 2], [0.4, 0.5]), ([1, 2], [0.6, 0.9])]}
    samples = {"$x<script>": np.zeros((4, 8, 8, 3)), "unseen": np.ones((5, 8, 8, 3))}
    png, svg = plots.save(demo_figure(samples, curves, curves), tmp_path / "demo")
    assert png.read_bytes()[:4] == b"\x89PNG"
    ElementTree.parse(svg)
    text = svg.read_text()
    for comment in ("ERM", "another", "$x&lt;script&gt;", "unseen"):
        assert f"<!-- {comment} -->" in text


def test_linear_example_says_when_each_method_leaves() -> None:
    """Made-up paths: some leave, some stay, one was never there."""
    idgm, iga = "IDGM, normalised, γ=0.1", ("IGA, λ=1", "IGA, λ=100")
    paths = {"ERM": [0.93, 0.57], "Fish": [0.93, 0.93], idgm: [0.57, 0.57]}
    paths |= {iga[0]: [0.93, 0.57], iga[1]: [0.93, 0.93]}
    left = {"ERM": 4, "Fish": None, idgm: 2, iga[0]: 4, iga[1]: None}
    results = [
        {
            "row": {"label": label},
            "weight_decay": decay,
            "steps": [2, 4],
            "weights": [[0.1, 0, 0, 0, 0], [0.2, 0, 0, 0, -0.1]],
            "train": [0.93, 0.97],
            "test": test,
            "leaves_invariance": left[label],
        }
        for decay in (0.0, 0.1)
        for label, test in paths.items()
    ]
    path, ends = linear.tables(results, early=2)
    assert [row[4] for row in path.rows] == ["2", "the end", "never", "2", "the end"]
    assert [row[-1] for row in ends.rows] == ["+0.100"] * 5
    text = linear.reading(results, {"ERM": (0.93, 0.93)})
    assert "third decimal:\nERM has +0.100." in text
    assert "ERM leaves 93/93 after step 2, Fish after the end" in text
    assert "so with λ=1 (after 2); with λ=100 it also stays longer (after the end)" in text


def scores(**domains: float) -> dict[str, object]:
    return {"test": {"metric": "accuracy", "average": 0.5, "mean": 0.5, "domains": domains}}


def record(seed: int, *points: dict[str, object], selected: int = -1) -> dict[str, object]:
    return {"history": [{"scores": p} for p in points], "selected": selected, "config": {"seed": seed}}


def test_a_run_at_the_selected_step_and_the_last() -> None:
    table = runs.run_table(record(0, scores(oslo=0.75, lima=0.5), scores(oslo=0.25, lima=1.0), selected=0))
    assert table.columns == ["split", "domain", "accuracy", "at the last step"]
    assert table.rows == [["test", "oslo", "0.750", "0.250"], ["test", "lima", "0.500", "1.000"]]
    assert runs.scores_table(scores(oslo=0.25)).rows == [["test", "oslo", "0.250"]]


def test_seeds_are_averaged_and_shown() -> None:
    table = runs.seeds_table([record(3, scores(oslo=0.5)), record(4, scores(oslo=0.7))])
    assert table.columns == ["split", "domain", "accuracy, mean ± sd", "seed 3", "seed 4"]
    assert table.rows == [["test", "oslo", "0.600 ± 0.141", "0.500", "0.700"]]
    assert runs.seeds_table([record(3, scores(oslo=0.5))]).rows == [["test", "oslo", "0.500", "0.500"]]


def test_measures_are_shown_with_their_names() -> None:
    measured = {"test": {**scores(oslo=0.5)["test"], "metrics": {"macro F1": 0.25, "AUC": None}}}  # type: ignore[dict-item]
    other = {"test": {**scores(oslo=0.7)["test"], "metrics": {"macro F1": 0.75, "AUC": 0.5}}}  # type: ignore[dict-item]
    table = runs.scores_table(measured)
    assert table.columns == ["split", "domain", "measure", "value"]
    assert table.rows == [
        ["test", "all", "macro F1", "0.250"],
        ["test", "all", "AUC", "–"],
        ["test", "oslo", "accuracy", "0.500"],
    ]
    table = runs.run_table(record(0, measured, other, selected=0))
    assert table.columns == ["split", "domain", "measure", "value", "at the last step"]
    assert table.rows[1] == ["test", "all", "AUC", "–", "0.500"]
    table = runs.seeds_table([record(3, measured), record(4, other)])
    assert table.columns == ["split", "domain", "measure", "value, mean ± sd", "seed 3", "seed 4"]
    assert table.rows[0] == ["test", "all", "macro F1", "0.500 ± 0.354", "0.250", "0.750"]
    assert table.rows[1] == ["test", "all", "AUC", "–", "–", "0.500"]


def test_of_very_many_domains_the_first_are_shown() -> None:
    many = scores(**{f"d{n}": 0.5 for n in range(1000)})
    rows = runs.scores_table(many).rows
    assert [len(rows), rows[9], rows[10]] == [11, ["test", "d9", "0.500"], ["test", "… 990 more", ""]]
    assert len(runs.scores_table(scores(**{f"d{n}": 0.5 for n in range(50)})).rows) == 50


def test_cells_cannot_move_the_cursor() -> None:
    table = runs.scores_table(scores(**{"\x1b[2J": 0.5, "a\nb": 0.5, "\u202ex": 0.5, "<script>": 0.5}))
    shown = table.text()
    assert len(shown.splitlines()) == 6
    assert not set("\x1b\u202e") & set(shown + table.markdown())
    assert "<script>" in shown
    assert len(table.markdown().splitlines()) == 6


ODD = "a&b_c%d<script>|\"x\", 'y' $1 {z} \\ #"


def odd_table() -> Table:
    table = Table([ODD, "n_1\x1b[2J"])
    table.add(ODD, "1.0 ± 0.5")
    return table


def test_column_names_are_cleaned_too() -> None:
    assert odd_table().columns == [ODD, "n_1?[2J"]


def test_csv_gives_the_cells_back() -> None:
    table = odd_table()
    assert list(csv.reader(io.StringIO(table.csv()))) == [table.columns, *table.rows]
    assert table.csv().count("\n") == 2


def test_html_gives_the_cells_back() -> None:
    tree = ElementTree.fromstring(odd_table().html())
    assert [cell.text for cell in tree.iter("th")] == [ODD, "n_1?[2J"]
    assert [(cell.text, cell.get("class")) for cell in tree.iter("td")] == [
        (ODD, None),
        ("1.0 ± 0.5", "number"),
    ]
    assert "script" not in {element.tag for element in tree.iter()}
    assert '"x"' not in odd_table().html()


def test_markdown_has_no_markup_of_the_cells() -> None:
    head, _, row = odd_table().markdown().splitlines()
    for line in (head, row):
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
        assert not re.search(r"(?<!\\)[<_*`]", line)
    assert re.sub(r"\\(.)", r"\1", row) == f"| {ODD} | 1.0 ± 0.5 |"


def test_latex_escapes_what_would_be_a_command() -> None:
    lines = odd_table().latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lr}"
    assert lines[1:4:2] == [r"\toprule", r"\midrule"]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    odd = (
        r"a\&b\_c\%d\textless{}script\textgreater{}\textbar{}\char34{}x\char34{}, 'y' \$1 \{z\} "
        r"\textbackslash{} \#"
    )
    assert lines[2] == odd + r" & n\_1?[2J \\"
    assert lines[4] == odd + r" & 1.0 $\pm$ 0.5 \\"


def test_the_papers_domainbed_table_is_complete() -> None:
    """Seven datasets and their average by ten methods, and three datasets of random grouping."""
    said = claims("domainbed")
    main = [c for c in said if c["table"] == "DomainBed"]
    assert [c["dataset"] for c in main] == [
        *("CMNIST", "RMNIST", "VLCS", "PACS", "OfficeHome", "TerraInc", "DomainNet", "Average")
    ]
    methods = ["ERM", "IRM", "GroupDRO", "Mixup", "MLDG", "Coral", "MMD", "DANN", "CDANN", "Fish"]
    assert all(list(c["values"]) == methods for c in main)
    for claim in said:
        assert (claim["metric"], claim["rule"]) == ("accuracy", "training")
        average = claim["dataset"] == "Average"
        assert all(len(v) == (1 if average else 2) and 30 < v[0] < 100 for v in claim["values"].values())
        assert bool(claim["names"]) is not average
    *each, average = main
    for method in methods:  # the averages printed are those of the column, to the last digit or one beside
        mean = sum(c["values"][method][0] for c in each) / 7
        assert abs(mean - average["values"][method][0]) <= 0.1, method
    others = [c for c in said if c["table"] == "random grouping"]
    assert [c["dataset"] for c in others] == ["VLCS", "PACS", "OfficeHome"]
    assert all(list(c["values"]) == ["Fish", "Fish, RG", "ERM"] for c in others)
