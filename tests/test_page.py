"""The page of a report: what it says, that it is safe, and that it works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.api.report import collect
from shoal.cli import main
from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store
from shoal.report import charts, figures, page
from shoal.report import compare as view
from shoal.report.groups import Group, Run, grouped

DOMAINS = ("0°", "15°", "30°")
NASTY = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(2)>",
    "\"'><b>$x_1$ &amp; </script>",
    "long " * 60,
    "שלום \u202e漢字\x00",
)


def scores(values: dict[str, float | None], metric: str = "accuracy") -> dict[str, Any]:
    known = [v for v in values.values() if v is not None]
    mean = sum(known) / len(known)
    return {"metric": metric, "average": mean, "mean": mean, "domains": values, "sizes": [9] * len(values)}


def made(
    algorithm: str = "erm", seed: int = 0, test: float = 0.5, out: str = "0°", **changes: Any
) -> RunRecord:
    config = RunConfig("digits", algorithm, 200, data_options={"test": out}, seed=seed, label=algorithm)
    rest = [d for d in DOMAINS if d != out]
    history = tuple(
        {
            "step": step,
            "passes": step,
            "loss": 1.0,
            "scores": {
                "train": scores(dict.fromkeys(rest, 0.9)),
                "validation": scores(dict.fromkeys(rest, 0.8)),
                "test": scores({out: test * step / 200}),
            },
        }
        for step in (100, 200)
    )
    usual = RunRecord(config, "finished", history, 1, "best on validation", 1.5, {"device": "cpu"})
    return replace(usual, **changes)


def comparison(better: float = 0.1) -> list[RunRecord]:
    """Fish is better than ERM by ``better``, give or take a little; in seconds that differ."""
    noise = (0.0, 0.01, 0.02)
    gain = {"erm": 0.0, "fish": better}
    return [
        made(name, seed, 0.5 + gain[name] + noise[seed] * (1 + gain[name]), out, seconds=10.0 * seed + n)
        for n, (name, out) in enumerate((name, out) for name in gain for out in DOMAINS[:2])
        for seed in range(3)
    ]


def judged_by_auc(record: RunRecord, value: float) -> RunRecord:
    auc = {"selects": "AUC", "metrics": {"AUC": value}}
    splits = [{k: v | auc for k, v in m["scores"].items()} for m in record.history]
    points = zip(record.history, splits, strict=True)
    return replace(record, history=tuple({**m, "scores": s} for m, s in points))


def save(folder: Path, *records: RunRecord) -> Path:
    store = Store(folder / "runs")
    for record in records:
        store.save(record)
    return folder


def written(folder: Path, *arguments: str) -> str:
    out = folder / "report.html"
    assert main(["report", str(folder), "-o", str(out), *arguments]) == 0
    return out.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """What a browser would make of a page: tags, addresses and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.events: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name.startswith("on"):
                self.events.append(name)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def groups(*records: RunRecord) -> list[Group]:
    return grouped([Run(r, f"{r.config.identity}.json") for r in records], [], [])


def test_a_comparison_in_plain_words(tmp_path: Path) -> None:
    text = Reader(written(save(tmp_path, *comparison()))).text
    assert "fish and erm were compared on the held-out domains 0° and 15°, with 3 seeds." in text
    assert "12 runs (12 finished)" in text
    for word in ("luck", "unseen"):
        assert word not in text


def many(algorithms: int, domains: int, seeds: int = 2, **changes: Any) -> list[RunRecord]:
    """Each algorithm a little better than the one before it, and each domain easier; the first is hard."""
    names = ["erm", "fish", *(f"method {n}" for n in range(2, algorithms))][:algorithms]
    places = ["hard", *(f"domain {n:02d}" for n in range(1, domains))]
    return [
        made(name, seed, 0.2 + 0.3 * (d > 0) + 0.01 * d + 0.01 * n + 0.001 * seed * (d % 3), place, **changes)
        for n, name in enumerate(names)
        for d, place in enumerate(places)
        for seed in range(seeds)
    ]


def kept(folder: Path, records: list[RunRecord], **more: Any) -> dict[str, Any]:
    """A folder as `shoal compare` leaves it."""
    save(folder, *records)
    result = compare.results([r.config for r in records], records) | more
    result["identities"] = sorted({r.config.identity for r in records})
    (folder / "compare-digits.json").write_text(json.dumps(result))
    return result


@pytest.mark.parametrize(
    ("algorithms", "domains"), [(2, 1), (2, 2), (3, 5), (6, 12), pytest.param(12, 30, marks=pytest.mark.slow)]
)
def test_the_recommendation_comes_first_and_is_the_terminals(
    tmp_path: Path, algorithms: int, domains: int
) -> None:
    result = kept(tmp_path, many(algorithms, domains), title="table.csv")
    said = view.recommended(result)
    assert said
    terminal, text = view.text(result), Reader(written(tmp_path)).text
    body = text[text.index("Which algorithm to use") :]
    assert body.startswith(f"Which algorithm to use {' '.join(said[:2])}")
    assert all(line in terminal for line in said)
    assert all(text.index(line) < text.index("were compared on") for line in said)
    (group,) = grouped(*collect([tmp_path]))
    assert page.lead(group) == said


def test_a_result_of_an_earlier_version_is_judged_by_the_rule_of_this_one(tmp_path: Path) -> None:
    now = kept(tmp_path, many(3, 5))
    rows = [{k: v for k, v in row.items() if k not in ("worst", "control")} for row in now["rows"]]
    old = {**now, "rows": rows, "recommendation": {"take": "erm", "reference": "erm", "interval": None}}
    del old["criterion"]
    (tmp_path / "compare-digits.json").write_text(json.dumps(old))
    (group,) = grouped(*collect([tmp_path]))
    assert group.planned
    assert page.lead(group) == view.recommended(now)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([made("erm", s, 0.5) for s in range(2)], "not a comparison: there is only one algorithm"),
        (
            [made(n, 0, 0.5, out) for n, out in (("erm", "0°"), ("erm", "15°"), ("fish", "0°"))],
            "No recommendation yet: 1 of 4 runs are missing.",
        ),
        (
            [made(n, status="diverged", error="NaN", history=(), selected=-1) for n in ("erm", "fish")],
            "This is not a comparison: no run has a score.",
        ),
    ],
)
def test_where_nothing_can_be_recommended(records: list[RunRecord], said: str) -> None:
    (group,) = groups(*records)
    assert said in " ".join(page.lead(group))
    assert "Recommendation" not in " ".join(page.lead(group))


def test_the_interval_that_decides_is_drawn(tmp_path: Path) -> None:
    records = comparison() + [made(n, s, 0.5, "30°") for n in ("erm", "fish") for s in range(3)]
    result = kept(tmp_path, records)
    (group,) = page.context(page.Content(grouped(*collect([tmp_path]))))["groups"]
    (line,) = group["decision"]["rows"]
    bar, error = [m for m in line["marks"] if "to" in m]
    dots = [m for m in line["marks"] if m["look"].startswith("other")]
    assert len(dots) == 3
    fish, erm = ({r["algorithm"]: r for r in result["rows"]}[n] for n in ("fish", "erm"))
    about = compare.over_domains(fish, erm)
    assert about is not None
    assert line["text"] == f"+6.7 ({100 * about['low']:+.1f} to {100 * about['high']:+.1f})".replace("-", "−")
    zero = group["decision"]["zero"]
    assert bar["x"] < zero < error["x"] < error["to"] < bar["to"]
    assert (
        about["low"] < 0 < about["mean"] - (about["high"] - about["mean"]) / 4.303
    )  # Student's t, 2 degrees


def test_what_no_better_than_the_majority_class_is_not_marked_as_recommended(tmp_path: Path) -> None:
    noise = {"erm": 0.01, "fish": -0.02, "majority": 0.0}
    records = [
        made(name, 0, 0.5 + (-1) ** d * by, place)
        for name, by in noise.items()
        for d, place in enumerate(("a", "b", "c", "d"))
    ]
    kept(tmp_path, records)
    (group,) = page.context(page.Content(grouped(*collect([tmp_path]))))["groups"]
    assert group["lead"][0].startswith("No recommendation: ")
    assert group["decision"]["rows"][0]["name"].endswith(" − majority")
    marks = {row["algorithm"]: row["mark"] for row in group["table"]["rows"]}
    assert marks == {"erm": "baseline", "fish": "", "majority": "control"}


def test_the_worst_domains_decide_where_they_were_to(tmp_path: Path) -> None:
    records = many(3, 5)
    save(tmp_path, *records)
    result = compare.results([r.config for r in records], records, criterion="worst")
    (tmp_path / "compare-digits.json").write_text(json.dumps(result))
    (group,) = page.context(page.Content(grouped(*collect([tmp_path]))))["groups"]
    assert group["lead"] == view.recommended(result)
    (line,) = group["decision"]["rows"]
    assert not [m for m in line["marks"] if m["look"].startswith("other")]
    assert "worst domains" in group["decision"]["text"]


@cache
def crowded() -> dict[str, Any]:
    (group,) = page.context(page.Content(groups(*many(12, 30))))["groups"]
    return group


def test_all_domains_share_one_scale() -> None:
    group = crowded()
    chart = group["by_domain"]
    assert [row["name"] for row in chart["rows"][:4]] == ["average", "worst domain", "hard", "domain 01"]
    assert [row["strong"] for row in chart["rows"]] == [True, True] + [False] * 30
    assert all(len(row["marks"]) == 12 for row in chart["rows"])
    at = {mark["title"]: mark["x"] for row in chart["rows"] for mark in row["marks"]}
    for title, x in at.items():  # the same score is at the same place in every line
        assert all(m["x"] == x for row in chart["rows"] for m in row["marks"] if m["title"] == title)
    values = sorted((float(title.rpartition(": ")[2]), x) for title, x in at.items())
    assert [x for _, x in values] == sorted(x for _, x in values)
    assert len(chart["legend"]) <= 4
    assert chart["legend"][-1][0].endswith("others")


def test_the_average_and_the_worst_domain_lead_every_table() -> None:
    group = crowded()
    assert [name for name, _ in group["table"]["columns"]] == ["average", "worst domain"]
    assert [cell["n"] for cell in group["table"]["rows"][0]["cells"]] == ["", "hard"]
    assert group["table"]["rows"][0]["cells"][1]["text"].startswith("31.0")
    assert [name for name, _ in group["each"]["top"]] == ["average", "worst domain"]
    assert len(group["each"]["rows"]) == 30


def test_a_deterministic_row_has_no_spread() -> None:
    (group,) = groups(*[made(n, s, 0.5 + 0.1 * s * (n == "fish")) for n in ("erm", "fish") for s in (0, 1)])
    rows = page.context(page.Content([group]))["groups"][0]["table"]["rows"]
    assert {row["algorithm"]: row["cells"][0]["text"] for row in rows} == {
        "fish": "55.0 ± 7.1",
        "erm": "50.0",
    }


def test_an_enormous_error_does_not_squeeze_the_others() -> None:
    axis = charts.Axis.over([1.0, 2.0, 1e9], [1.0, 2.0])
    assert 2 < axis.high < 6
    assert axis.at(1e9) == 100
    assert "beyond" in axis.dot(1e9, "other", "x")["look"]
    assert "beyond" not in axis.dot(2.0, "other", "x")["look"]


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [1.0, 1.0], [-3.0, 12.0], [49.9, 50.1], [1e-9, 3e-9], [1e3, 1e9], [-1.0]]
)
def test_ticks_are_few_distinct_and_inside(values: list[float]) -> None:
    axis = charts.Axis.over(values)
    assert axis.low < min(values) <= max(values) < axis.high
    assert 3 <= len(axis.ticks) <= 6
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)
    assert all(0 <= x <= 100 for x, _ in axis.ticks)


COLUMNS = [
    {"column": "age", "kind": "numeric", "missing": 31, "distinct": 1234, "examples": ["63", "41"]}
    | {"becomes": "one number", "warnings": []},
    {"column": NASTY[0], "kind": NASTY[1], "missing": 0, "distinct": 3, "examples": [NASTY[2]]}
    | {"becomes": "dropped", "warnings": [f"possible leakage {NASTY[0]}"]},
]


def test_columns_are_shown_with_their_warnings_first(tmp_path: Path) -> None:
    save(tmp_path, made())
    assert "Columns" not in Reader(written(tmp_path)).text
    content = {"file": NASTY[2], "rows": 1000, "columns": COLUMNS, "remarks": [f"rows twice {NASTY[0]}"]}
    (tmp_path / "columns.json").write_text(json.dumps(content))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inputs.json").write_text(json.dumps({"columns_report": COLUMNS}))  # the same again
    found = Reader(written(tmp_path))
    assert found.tags.count("script") == 1
    assert not {"img", "b"} & set(found.tags)
    assert found.text.count("possible leakage") == 1
    assert found.text.index("possible leakage") < found.text.index("rows twice") < found.text.index("becomes")
    assert "age numeric 31 (3%) 1,234 63, 41 one number" in found.text
    assert found.text.index("possible leakage") < found.text.index("age numeric")
    (tmp_path / "columns.json").write_text("[]")
    assert "columns.json is not a report on columns" in Reader(written(tmp_path)).text


def test_runs_without_validation_are_no_comparison() -> None:
    records = [made("erm"), made("fish")]
    bare = [
        replace(r, history=tuple({**m, "scores": {"test": m["scores"]["test"]}} for m in r.history))
        for r in records
    ]
    (group,) = groups(*bare)
    assert group.kind == "runs"
    assert "This is not a comparison" in page.lead(group)[1]
    assert [row["average"]["mean"] for row in group.result["rows"]] == [0.5, 0.5]


def test_runs_with_other_steps_are_not_mixed() -> None:
    longer = made("fish", config=replace(made("fish").config, steps=400))
    found = groups(made("erm"), made("fish"), longer)
    assert [(g.kind, len(g.runs)) for g in found] == [("comparison", 2), ("runs", 1)]
    assert [g.apart for g in found] == ["steps 200", "steps 400"]
    assert [g.apart for g in groups(made("erm"), made("fish"))] == [""]


def test_methods_that_see_as_much_in_other_steps_are_one_comparison() -> None:
    def of(algorithm: str, number: int, seed: int, each: int, palette: str = "adjacent") -> RunRecord:
        options = {"domains": number, "palette": palette, "seed": seed}
        config = replace(
            made(algorithm).config,
            data_options=options, seed=seed, steps=600 // each, domains_per_step=each, eval_every=60 // each,
            label=algorithm.upper(),
        )  # fmt: skip
        return made(algorithm, config=config)

    runs = [
        of(name, number, seed, 1 if name == "erm" else number)
        for number in (10, 5)
        for seed in (0, 1)
        for name in ("fish", "erm")
    ]
    runs.append(of("fish", 10, 0, 10, "random"))
    found = groups(*runs)
    assert [(g.kind, len(g.runs)) for g in found] == [("comparison", 4), ("comparison", 4), ("runs", 1)]
    assert [g.apart for g in found] == [
        *("domains 5, palette adjacent", "domains 10, palette adjacent", "domains 10, palette random"),
    ]
    assert found[0].result["baseline"] == "ERM"
    assert found[0].result["seeds"] == [0, 1]


def test_baselines_of_an_unfinished_comparison_are_shown_with_it() -> None:
    trained = [made(name, config=replace(made(name).config, eval_every=20)) for name in ("erm", "fish")]
    (group,) = groups(*trained, made("gradient-boosting"))
    assert len(group.result["rows"]) == 3
    other = [made(name, config=replace(made(name).config, eval_every=10)) for name in ("erm", "fish")]
    found = groups(*trained, *other, made("gradient-boosting"))
    assert [(len(g.runs), g.apart) for g in found] == [
        (2, "eval_every 10"),
        (2, "eval_every 20"),
        (1, "eval_every null"),
    ]


def test_settings_of_one_algorithm_are_rows_of_their_own() -> None:
    fast = made("erm", test=0.7, config=replace(made("erm").config, optimizer_options={"lr": 0.3}))
    (group,) = groups(made("erm", test=0.5), fast)
    assert [row["algorithm"] for row in group.result["rows"]] == ["erm, lr 0.001", "erm, lr 0.3"]
    assert [row["average"]["mean"] for row in group.result["rows"]] == [0.5, 0.7]
    assert page.lead(group)[1].endswith("there is only one algorithm, with several settings.")


def test_scores_of_validation_are_not_passed_off_as_unseen() -> None:
    def without(*gone: str) -> RunRecord:
        record = made("erm")
        left = [{k: v for k, v in m["scores"].items() if k not in gone} for m in record.history]
        return replace(
            record, history=tuple({**m, "scores": s} for m, s in zip(record.history, left, strict=True))
        )

    (group,) = groups(without("test"))
    assert "scored on validation examples of 15° and 30°" in page.lead(group)[0]
    assert group.result["rows"][0]["average"]["mean"] == 0.8
    (group,) = groups(without("test", "validation"))
    assert "scored on the training examples of 15° and 30°" in page.lead(group)[0]


def test_domains_left_out_together_are_named() -> None:
    def of(algorithm: str) -> RunRecord:
        config = replace(made(algorithm).config, data_options={"test": ["0°", "15°"]})
        both = {"test": scores({"0°": 0.4, "15°": 0.6})}
        record = made(algorithm, config=config)
        return replace(
            record, history=tuple({**m, "scores": {**m["scores"], **both}} for m in record.history)
        )

    (group,) = groups(of("erm"), of("fish"))
    assert "compared on the held-out domains 0° and 15°, with" in page.compared(group)
    assert len(group.chosen) == 2
    own = [replace(r, config=replace(r.config, data_options={})) for r in (of("erm"), of("fish"))]
    (group,) = groups(*own)  # a dataset's own test split
    assert "compared on the held-out domains 0° and 15°, with" in page.compared(group)


def test_curves_are_named_by_what_they_show(tmp_path: Path) -> None:
    def of(algorithm: str) -> RunRecord:
        return judged_by_auc(made(algorithm), 0.9)

    text = Reader(written(save(tmp_path, of("erm"), of("fish")))).text
    assert "AUC by step" in text
    assert "AUC on held-out domains" in text
    assert "AUC 0.9" in text  # in the list of runs
    assert "accuracy (%) by step" not in text
    axes = page.learning_curves([of("erm")]).axes[0]
    assert axes.get_ylabel() == "AUC"
    assert {v for line in axes.lines for v in line.get_ydata()} == {0.9}
    (group,) = groups(of("erm"))
    assert (group.result["metric"], group.result["rows"][0]["average"]["mean"]) == ("AUC", 0.9)


def test_a_comparison_given_twice_is_shown_once_and_runs_may_be_in_two(tmp_path: Path) -> None:
    records = comparison()
    for name, mine in (
        ("one", records),
        ("copy", records),
        ("part", [r for r in records if r.config.seed < 2]),
    ):
        (tmp_path / name).mkdir()
        save(tmp_path / name, *mine)
        result = compare.results([r.config for r in mine], mine)
        result["identities"] = [r.config.identity for r in mine]
        (tmp_path / name / "compare-digits.json").write_text(json.dumps(result))
    found = grouped(*collect([tmp_path / "one", tmp_path / "copy", tmp_path / "part", tmp_path / "one"]))
    assert [len(g.runs) for g in found] == [12, 8]
    assert all(g.planned for g in found)
    path = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "part"), "-o", str(path)]) == 0
    assert "12 runs (12 finished)" in Reader(path.read_text()).text
    for file in sorted((tmp_path / "part" / "runs").glob("*.json"))[:2]:
        file.unlink()
    runs, kept, troubles = collect([tmp_path / "part"])
    assert grouped(runs, kept, troubles)[0].planned
    assert "refers to 8 runs; 6 records were found" in troubles[0].words


def test_a_baseline_is_run_again_by_its_own_call() -> None:
    assert page.python(made("gradient-boosting").config).startswith(
        "shoal.experiments.baselines.run(RunConfig("
    )
    assert page.python(made("erm").config).startswith("shoal.experiments.run.run(RunConfig(")


def test_validation_on_other_domains_is_said_and_drawn_apart() -> None:
    def of(algorithm: str) -> RunRecord:
        record = made(algorithm)
        elsewhere = {"validation": scores({"far away": 0.7})}
        return replace(
            record, history=tuple({**m, "scores": {**m["scores"], **elsewhere}} for m in record.history)
        )

    (group,) = groups(of("erm"), of("fish"))
    assert group.rule.endswith("Validation domains that were not trained on: far away.")
    labels = [t.get_text() for t in page.learning_curves([of("erm")]).legends[0].get_texts()]
    assert labels == ["0°", "15° (train)", "30° (train)"]
    usual = [t.get_text() for t in page.learning_curves([made("erm")]).legends[0].get_texts()]
    assert usual == ["0°", "15° (validation)", "30° (validation)"]
    (group,) = groups(made("erm"), made("fish"))
    assert "not trained on" not in group.rule


def test_many_training_domains_are_one_curve() -> None:
    record = made("erm")
    nine = {
        "validation": scores({f"d{n}": 0.7 for n in range(9)}),
        "train": scores({f"d{n}": 0.9 for n in range(9)}),
    }
    record = replace(record, history=tuple({**m, "scores": {**m["scores"], **nine}} for m in record.history))
    labels = [t.get_text() for t in page.learning_curves([record]).legends[0].get_texts()]
    assert labels == ["0°", "validation, all domains"]
    curves = page.learning_curves(many(1, 30))
    assert [t.get_text() for t in curves.legends[0].get_texts()] == [
        "held-out domains",
        "validation, all domains",
    ]


def test_a_comparison_is_shown_as_it_was_written(tmp_path: Path) -> None:
    records = comparison()
    save(tmp_path, *records)
    result = compare.results([r.config for r in records], records) | {"unable": {"irm": "too shy"}}
    path = tmp_path / "compare-digits.json"
    path.write_text(json.dumps(result))
    runs, kept, troubles = collect([tmp_path])
    (group,) = grouped(runs, kept, troubles)
    assert group.planned
    assert len(group.chosen) == 12
    assert "Not compared: irm (too shy)." in Reader(written(tmp_path)).text
    path.write_text(json.dumps(result | {"runs": 3}))
    runs, kept, troubles = collect([tmp_path])
    assert not grouped(runs, kept, troubles)[0].planned
    assert "older than its runs" in troubles[0].words
    path.write_text("[]")
    assert "not the result of a comparison" in Reader(written(tmp_path)).text


def test_the_best_settings_of_a_seed_are_marked(tmp_path: Path) -> None:
    weak, strong = made("fish"), made("fish", test=0.9)
    good = tuple(
        {**m, "scores": {**m["scores"], "validation": scores({"15°": 0.99})}} for m in strong.history
    )
    strong = replace(strong, history=good, config=replace(strong.config, settings={"meta_lr": 0.1}))
    (group,) = groups(made("erm"), weak, strong)
    assert group.chosen == {made("erm").config.identity, strong.config.identity}
    assert group.result["rows"][0]["average"]["mean"] == pytest.approx(0.9)


def test_a_sweep(tmp_path: Path) -> None:
    def run(algorithm: str, trial: int, test: float) -> RunRecord:
        one = made(algorithm, trial, test)
        protocol = {"leave_out": ["0°"], "trial": trial}
        return replace(one, config=replace(one.config, data_options={}, protocol=protocol))

    records = [
        run(a, t, 0.5 + 0.1 * (a == "fish") + 0.01 * t * (1 + (a == "erm")))
        for a in ("erm", "fish")
        for t in (0, 1)
    ]
    save(tmp_path, *records)
    failed = tmp_path / "runs" / "failed"
    failed.mkdir()
    (failed / "0123456789abcdef.txt").write_text("{}\n\nRuntimeError: <b>out of memory</b>\n")
    text = Reader(written(tmp_path)).text
    assert "were compared on the held-out domain 0°, with 2 seeds." in text
    assert "training-domain validation" in text
    assert "RuntimeError: <b>out of memory</b>" in text


def test_what_diverged_or_failed_is_there(tmp_path: Path) -> None:
    lost = made("fish", status="diverged", error="the loss was <nan>", history=(), selected=-1)
    save(tmp_path, made("erm"), lost)
    (tmp_path / "runs" / "0000000000000000.json").write_text("{")
    text = Reader(written(tmp_path)).text
    assert "2 runs (1 finished, 1 diverged)" in text or "2 runs (1 diverged, 1 finished)" in text
    assert "the loss was <nan>" in text
    assert "is not a run record" in text


def nasty() -> list[RunRecord]:
    """Everything that comes from outside, as bad as it gets."""
    found = []
    for number, text in enumerate(NASTY):
        record = made("erm", number, 0.5, text)
        config = replace(
            record.config,
            dataset=text,
            label=text,
            settings={text: text},
            data_options={"test": text, text: text},
        )
        point = record.history[0]
        point = {**point, "scores": {**point["scores"], text: scores({text: 0.5, "b": None}, text)}}
        matrix = {"domains": [text, "b"], "values": [[1, None], [0.25, 1]]}
        found.append(
            replace(
                record,
                config=config,
                history=(point,),
                selected=0,
                error=text,
                rule=text,
                environment={text: text},
                notes={text: text},
                agreement=({"step": 1, "mean_cosine": 0.5, "sign_agreement": None, "matrix": matrix},),
            )
        )
    return found


def test_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(3)<"
    folder.mkdir()
    save(folder, *nasty())
    html = written(folder, "--title", NASTY[0])
    found = Reader(html)
    assert found.tags.count("script") == 1
    assert found.tags.count("style") == 1
    assert not {"img", "b"} & set(found.tags)
    assert not found.events
    assert "\u202e" not in html
    assert "\x00" not in html
    assert NASTY[0] in found.text
    assert "\"'><b>$x_1$ &amp; </script>" in found.text


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    html = written(save(tmp_path, *comparison()))
    assert all(link.startswith(("#", "data:")) for link in Reader(html).links)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert "http" not in html.replace("http-equiv", "")


def test_pictures_have_names_of_their_own_and_text_as_text(tmp_path: Path) -> None:
    html = written(save(tmp_path, *comparison()))
    found = Reader(html)
    assert len(found.ids) == len(set(found.ids))
    assert html.count('class="plot"') == 2  # the curves of two algorithms
    for link in re.findall(r"url\(#([^)]+)\)", html) + [x[1:] for x in found.links if x.startswith("#")]:
        assert link in found.ids
    drawing = html[html.index("<svg", html.index("Learning curves")) : html.rindex("</svg>")]
    assert "<text" in drawing
    assert "fish" in drawing
    assert "currentColor" in drawing
    assert not re.search("|".join(figures.ON_PAGE), drawing)


def test_agreement_is_drawn_where_it_was_measured() -> None:
    def point(step: int) -> dict[str, Any]:
        matrix = {"domains": ["15°", "30°"], "values": [[1.0, 0.25], [0.25, 1.0]]}
        return {"step": step, "mean_cosine": 0.1, "sign_agreement": 0.6, "matrix": matrix}

    tracked = [made(name, agreement=(point(1), point(2))) for name in ("erm", "fish")]
    content = page.context(page.Content(groups(*tracked)))
    assert len(content["groups"][0]["agreement"]) == 2
    assert len(content["groups"][0]["matrices"]) == 2
    assert "0.25" in content["groups"][0]["matrices"][0]
    walked = {"step": 1, "domains": ["30°", "15°"], "matrix": [[1.0, 0.5], [0.25, 1.0]]}
    assert page.cosines_of(made(), walked) == (["15°", "30°"], [[1.0, 0.25], [0.5, 1.0]])
    assert page.cosines_of(made(), {"step": 1, "domains": ["30°"]}) is None
    content = page.context(page.Content(groups(made())))
    assert content["groups"][0]["agreement"] == content["groups"][0]["matrices"] == []


def test_many_curves_and_domains_are_counted() -> None:
    lines = {f"domain {n}": [([1, 2], [0.5, None])] for n in range(12)}
    assert "… 4 more" in figures.svg(figures.curves(lines, "accuracy"), "t", "p")
    assert page.listed(range(10)) == "0, 1, 2, 3, 4, 5 and 4 more"
    assert page.listed(["a", "b", "c"]) == "a, b and c"


def test_a_large_matrix_stays_small() -> None:
    size = 50
    values = [[1.0 if i == j else 0.1 for j in range(size)] for i in range(size)]
    made = figures.svg(figures.matrix([f"domain {i}" for i in range(size)], values, "cosines"), "t", "p")
    assert len(made) < 40_000
    assert 'href="data:image/png;base64,' in made


def test_a_mean_goes_as_far_as_every_run() -> None:
    assert figures._mean([([1, 2], [0.0, 1.0]), ([1], [1.0])]) == ([1], [0.5])
    assert figures._mean([]) == ([], [])


def test_every_run_has_its_settings_and_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps(made("fish").to_dict()))
    (folder / "config.yaml").write_text("command: shoal train fish --set 'a b'\n")
    save(tmp_path, made("erm", 7))
    text = Reader(written(tmp_path)).text
    assert "shoal train fish --set 'a b'" in text
    assert "shoal.experiments.run.run(RunConfig(dataset='digits', algorithm='erm', steps=200" in text
    assert "data_options.test: 0°" in text
    out = tmp_path / "one.html"
    assert main(["report", str(folder / "record.json"), "-o", str(out)]) == 0
    assert "1 run (1 finished)" in Reader(out.read_text()).text


def test_python_says_the_same_run() -> None:
    config = made("fish", 3).config
    assert eval(page.python(config).removeprefix("shoal.experiments.run.run")).identity == config.identity


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/empty"], "there is no record of a run in"),
        (["{}/nowhere"], "there is no folder"),
        (["{}/a.json"], "is not a record of a run; specify a folder or a record.json"),
        (["{}/full", "-o", "{}/nowhere/x.html"], "there is no folder"),
        (["{}/full", "-o", "{}/empty"], "is a folder; specify a file, such as"),
    ],
)
def test_wrong_input(tmp_path: Path, capsys: Any, arguments: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.json").write_text("{}")
    save(tmp_path / "full", made())
    assert main(["report", *(a.format(tmp_path) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_without_jinja2_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    save(tmp_path, made())
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 2
    assert "pip install 'shoal[report]'" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_a_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path, made())
    (tmp_path / "report.html").write_text("old")
    assert written(tmp_path).startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob(".report*"))


def test_a_record_shows_itself_in_a_notebook() -> None:
    shown = made()._repr_html_()
    assert "erm on digits, seed 0: finished" in shown
    assert "<td>test</td><td>0°</td><td>accuracy</td><td>0.5</td>" in shown
    for record in nasty():
        tags = set(Reader(record._repr_html_()).tags)
        assert tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert "diverged" in made(status="diverged", history=(), selected=-1)._repr_html_()


def test_images_with_the_models_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    train = ["train", "erm", "rotated-digits", "--steps", "3", "--out", str(tmp_path / "run")]
    assert main([*train, "--data", "test=75°"]) == 0
    found = Reader(written(tmp_path, "--samples", "4"))
    assert found.tags.count("img") % 4 == 0
    assert found.tags.count("img") >= 8
    assert "held-out domain" in found.text
    assert "predicted " in found.text
    assert "shoal train erm rotated-digits" in found.text or "pytest" in found.text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 --enable-logging=stderr --dump-dom"
)
CLICKS = """<script>
const table = document.querySelector("table.runs"), heads = [...table.tHead.rows[0].cells];
const column = heads.findIndex(h => h.textContent.startsWith("seconds"));
const order = () => [...table.tBodies].map(b => b.rows[0].cells[column].dataset.v).join(",");
const said = [];
for (const _ of [1, 2]) {
  heads[column].firstElementChild.click();
  said.push(order(), heads[column].getAttribute("aria-sort"));
}
const scores = document.querySelector("table.scores");
scores.tHead.rows[0].cells[1].firstElementChild.click();
said.push([...scores.tBodies[0].rows].map(r => r.cells[0].firstChild.data.trim()).join(","));
const box = document.getElementById("filter");
box.value = "fish";
box.dispatchEvent(new Event("input"));
said.push([...table.tBodies].filter(b => !b.hidden).length);
const drawn = [...document.querySelectorAll("svg.plot")].map(p => p.getBoundingClientRect());
said.push(drawn.filter(b => b.width > 100 && b.height > 50).length + " of " + drawn.length);
said.push(document.documentElement.scrollWidth <= innerWidth);
document.body.dataset.said = JSON.stringify(said);
</script></body>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    profile = tmp_path_factory.mktemp("profile")

    def dump(path: Path, width: int) -> tuple[str, list[str]]:
        flags = [*FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={width},900"]
        done = subprocess.run(
            [CHROMIUM, *flags, path.as_uri()], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return dump


MEASURE = """<body><iframe style="border:0" width="WIDTH" height="900"></iframe><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, box = e => e.getBoundingClientRect();
  const table = page.querySelector("table.scores"), edge = box(table.parentElement).right + 1;
  const seen = [...table.tHead.rows[0].cells].slice(0, 3).filter(c => box(c).right <= edge);
  const lines = c => [...c.querySelectorAll(".track, .scale")].map(box);
  const charts = [...page.querySelectorAll(".chart")].map(lines);
  const same = (a, b) => Math.abs(a.left - b.left) < 1 && Math.abs(a.width - b.width) < 1;
  const values = [...page.querySelectorAll(".line .value")];
  document.body.dataset.said = JSON.stringify({
    fits: page.documentElement.scrollWidth <= WIDTH,
    seen: seen.map(c => c.textContent.trim().split(" ")[0]),
    aligned: charts.every(c => c.every(b => same(b, c[0]))),
    narrowest: Math.min(...charts.map(c => c[0].width)),
    overlapping: values.filter(v => v.scrollWidth > v.clientWidth + 1).length,
  });
});
frame.srcdoc = PAGE;
</script></body>"""


@pytest.mark.parametrize(
    ("algorithms", "domains", "width"),
    [
        (4, 4, 390),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((4, 4, 1200), (12, 30, 390))),
        pytest.param(12, 30, 1200, marks=pytest.mark.slow),
    ],
)
def test_in_a_browser_the_average_is_always_there(
    browse: Any, tmp_path: Path, algorithms: int, domains: int, width: int
) -> None:
    records = many(algorithms, domains)
    if algorithms == 4:  # numbers that are longer, and of different lengths
        records = [judged_by_auc(r, 0.1 + 0.0123 * n) for n, r in enumerate(records)]
    html = written(save(tmp_path, *records))
    outer = MEASURE.replace("WIDTH", str(width)).replace("PAGE", json.dumps(html).replace("</", "<\\/"))
    path = tmp_path / "outer.html"
    path.write_text(outer, encoding="utf-8")
    dom, console = browse(path, max(width, 500))
    assert not console
    said = json.loads(re.search(r'<body data-said="([^"]*)"', dom)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert said["fits"]
    assert said["seen"] == ["algorithm", "average", "worst"]
    assert said["aligned"]
    assert said["narrowest"] > 150
    assert not said["overlapping"]


@pytest.mark.parametrize("width", [pytest.param(500, marks=pytest.mark.slow), 1280])
def test_in_a_browser_tables_sort_and_pictures_show(browse: Any, tmp_path: Path, width: int) -> None:
    html = written(save(tmp_path, *comparison(), made("fish", 9, status="diverged")))
    clicked = tmp_path / "clicked.html"
    clicked.write_text(html.replace("</body>", CLICKS), encoding="utf-8")
    dom, console = browse(clicked, width)
    assert not console
    said = json.loads(re.search(r'data-said="([^"]*)"', dom)[1].replace("&quot;", '"'))  # type: ignore[index]
    up, first, down, second, algorithms, fish, drawn, fits = said
    seconds = [float(v) for v in up.split(",")]
    assert seconds == sorted(seconds)
    assert (first, second) == ("ascending", "descending")
    assert [float(v) for v in down.split(",")] == sorted(seconds, reverse=True)
    assert algorithms == "erm,fish"
    assert fish == 7
    assert drawn.split(" of ")[0] == drawn.split(" of ")[1] != "0"
    assert fits


def test_in_a_browser_names_are_harmless(browse: Any, tmp_path: Path) -> None:
    written(save(tmp_path, *nasty()))
    dom, console = browse(tmp_path / "report.html", 500)
    assert not console
    assert dom.count("<script") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in dom


def test_of_many_domains_of_a_run_the_first_are_named(tmp_path: Path) -> None:
    record = made()
    many = {"test": scores({f"place {n}": n / 16 for n in range(15)})}
    save(tmp_path, replace(record, history=tuple({**m, "scores": many} for m in record.history)))
    text = Reader(written(tmp_path)).text
    assert "test: accuracy 0.4375, place 0 0, place 1 0.0625" in text
    assert "place 9 0.5625, … 5 more" in text
