"""``shoal.report``: what the page says, that it is safe, and that it works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.api.report import write_report
from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store
from shoal.report import charts

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
    config = RunConfig("digits", algorithm, 200, data_options={"held_out": out}, seed=seed, label=algorithm)
    rest = [d for d in DOMAINS if d != out]

    def point(step: int) -> dict[str, Any]:
        splits = {"train": scores(dict.fromkeys(rest, 0.9)), "validation": scores(dict.fromkeys(rest, 0.8))}
        splits["test"] = scores({out: test * step / 200})
        return {"step": step, "passes": step, "loss": 1.0, "scores": splits}

    history = (point(100), point(200))
    record = RunRecord(config, "finished", history, 1, "best on validation", 1.5, {"device": "cpu"})
    return replace(record, **changes)


def scored(record: RunRecord, **splits: dict[str, Any] | None) -> RunRecord:
    """With other scores in these splits; ``None``: without the split."""

    def new(scores: dict[str, Any]) -> dict[str, Any]:
        return {split: found for split, found in {**scores, **splits}.items() if found}

    return replace(record, history=tuple({**m, "scores": new(m["scores"])} for m in record.history))


def changed(record: RunRecord, **fields: Any) -> RunRecord:
    return replace(record, config=replace(record.config, **fields))


def many(algorithms: int, domains: int, seeds: int = 2) -> list[RunRecord]:
    """Each algorithm a little better than the one before it, and each domain easier; the first is hard."""
    names = ["erm", "fish", *(f"method {n}" for n in range(2, algorithms))][:algorithms]
    places = ["hard", *(f"domain {n:02d}" for n in range(1, domains))]
    return [
        made(name, seed, 0.2 + 0.3 * (d > 0) + 0.01 * d + 0.01 * n + 0.001 * seed * (d % 3), place)
        for n, name in enumerate(names)
        for d, place in enumerate(places)
        for seed in range(seeds)
    ]


def save(folder: Path, *records: RunRecord) -> Path:
    for record in records:
        Store(folder / "runs").save(record)
    return folder


def compared(folder: Path, records: list[RunRecord], **more: Any) -> Path:
    """A folder as ``shoal.compare`` leaves it."""
    save(folder, *records)
    result = compare.results([r.config for r in records], records) | more
    result["identities"] = sorted({r.config.identity for r in records})
    (folder / "comparison.json").write_text(json.dumps(result))
    return folder


class Page(HTMLParser):
    """What a browser would make of a page: tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.tags, self.words = html, list[str](), list[str]()
        self.attributes = list[tuple[str, str]]()
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def said(self, *parts: str) -> bool:
        """Whether the page says all of these, in this order."""
        return re.search(".*".join(map(re.escape, parts)), self.text) is not None


def page_of(folder: Path, *records: RunRecord, **options: Any) -> Page:
    return Page(shoal.report(save(folder, *records), **options).html)


# What a page says


def test_a_comparison(tmp_path: Path) -> None:
    result = shoal.report(compared(tmp_path, many(3, 5), title="my table.csv"))
    assert (result.path, result.runs, result.notes) == (tmp_path / "report.html", 30, 0)
    assert result.path.read_text(encoding="utf-8") == result.html
    first = ("Report on my table.csv", "Which algorithm to use Use method 2", "method 2 − fish", "+1.0 (+1.0")
    then = (
        "has the best average",
        "method 2, fish and erm were compared on",
        "average accuracy (%) worst domain",
    )
    last = (
        "method 2 recommended",
        "Differences to method 2",
        "By domain",
        "All runs",
        "30 runs (30 finished)",
    )
    assert Page(result.html).said(*first, *then, *last)


def test_one_that_is_no_better_than_the_majority_class_is_not_recommended(tmp_path: Path) -> None:
    noise = {"erm": 0.01, "fish": -0.02, "majority": 0.0}
    records = [
        made(name, 0, 0.5 + (-1) ** d * by, place)
        for name, by in noise.items()
        for d, place in enumerate("abcd")
    ]
    page = Page(shoal.report(compared(tmp_path, records)).html)
    assert page.said("Which algorithm to use No recommendation: ", " − majority", "erm baseline")


UNDECIDED = {
    "This is not a comparison: there is only one algorithm.": [made("erm", s) for s in range(2)],
    "there is only one algorithm, with several settings.": [made(), changed(made(), settings={"x": 1})],
    "No recommendation yet: 1 of 4 runs are missing.": [made(), made(out="15°"), made("fish")],
    "This is not a comparison: no run has a score.": [
        made(name, status="diverged", error="NaN", history=(), selected=-1) for name in ("erm", "fish")
    ],
    "This is not a comparison: these runs do not share a validation split and a test split.": [
        scored(made(name), validation=None, train=None) for name in ("erm", "fish")
    ],
}


@pytest.mark.parametrize("message", UNDECIDED)
def test_where_nothing_can_be_recommended(tmp_path: Path, message: str) -> None:
    page = page_of(tmp_path, *UNDECIDED[message])
    assert message in page.text
    assert "Use erm" not in page.text


def test_runs_that_cannot_be_compared_are_shown_apart(tmp_path: Path) -> None:
    longer = changed(made("fish"), steps=400)
    page = page_of(tmp_path, made("erm"), made("fish"), longer)
    assert page.said("digits steps 200", "erm and fish were compared", "digits steps 400", "not a comparison")


def test_the_split_of_a_score_is_named(tmp_path: Path) -> None:
    page = page_of(tmp_path, scored(made(), test=None))
    assert "scored on validation examples of 15° and 30°" in page.text


def test_a_comparison_is_shown_as_it_was_written(tmp_path: Path) -> None:
    records = many(2, 3)
    compared(tmp_path / "one", records, unable={"irm": "too shy"})
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    page = Page(shoal.report(tmp_path).html)
    assert page.text.count("Not compared: irm (too shy).") == 1
    assert "12 runs (12 finished)" in page.text
    next((tmp_path / "one" / "runs").glob("*.json")).unlink()
    assert "refers to 12 runs; 11 records were found" in Page(shoal.report(tmp_path / "one").html).text
    save(tmp_path / "other", *records)
    compared(tmp_path / "other", records, runs=3)
    assert "is older than its runs and not used" in Page(shoal.report(tmp_path / "other").html).text
    (tmp_path / "other" / "comparison.json").write_text("[]")
    assert "is not the result of a comparison" in Page(shoal.report(tmp_path / "other").html).text


def test_only_some_runs(tmp_path: Path) -> None:
    save(compared(tmp_path, many(2, 3)), made("irm", 9))
    only = json.loads((tmp_path / "comparison.json").read_text())["identities"]
    found = write_report(tmp_path, only=only)
    assert found.runs == 12
    assert "irm" not in Page(found.html).text


def test_a_sweep(tmp_path: Path) -> None:
    records = [made(name, seed, 0.5 + 0.1 * n) for n, name in enumerate(("erm", "fish")) for seed in (0, 1)]
    protocols = [{"held_out": ["0°"], "seed": r.config.seed} for r in records]
    pairs = zip(records, protocols, strict=True)
    page = page_of(tmp_path, *(changed(r, data_options={}, protocol=p) for r, p in pairs))
    assert page.said("compared on the held-out domain 0°, with 2 seeds.", "training-domain validation")


def test_what_diverged_failed_or_did_not_finish(tmp_path: Path) -> None:
    lost = made("fish", status="diverged", error="the loss was <nan>", history=(), selected=-1)
    save(tmp_path, made("erm"), lost)
    Store(tmp_path / "runs").fail(made("irm").config, "OSError: <no> space", "Traceback …")
    (tmp_path / "runs" / "0000000000000000.json").write_text("{")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("command: shoal train\n")
    result = shoal.report(tmp_path)
    assert (result.runs, result.notes, result.problems) == (2, 3, ())
    page = Page(result.html)
    assert page.said("the loss was <nan>", "Missing or failed runs", "is not a run record")
    assert "Failed: irm on digits" in page.text
    assert "OSError: <no> space" in page.text
    assert f"Not finished: {tmp_path / 'begun'}" in page.text


def test_every_run_has_its_settings_and_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps(made("fish").to_dict()))
    (folder / "config.yaml").write_text("command: shoal train fish --set 'a b'\n")
    page = page_of(tmp_path, made("erm", 7))
    assert "shoal train fish --set 'a b'" in page.text
    assert "RunConfig(dataset='digits', algorithm='erm', steps=200" in page.text
    assert "data_options.held_out: 0°" in page.text
    many_domains = scores({f"place {n}": n / 16 for n in range(15)})
    page = page_of(tmp_path / "other", scored(made(), test=many_domains))
    assert "test: accuracy 0.4375, place 0 0, place 1 0.0625" in page.text
    assert "place 9 0.5625, … 5 more" in page.text


def test_curves_and_tables_are_of_the_metric_that_selects(tmp_path: Path) -> None:
    def by_auc(record: RunRecord) -> RunRecord:
        auc = {"selects": "AUC", "metrics": {"AUC": 0.9}}
        return scored(record, **{k: v | auc for k, v in record.history[0]["scores"].items()})

    page = page_of(tmp_path, by_auc(made("erm")), by_auc(made("fish")))
    assert page.said("AUC on held-out domains", "AUC by step")
    assert "accuracy (%) by step" not in page.text


def test_gradient_agreement_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    matrix = {"domains": ["15°", "30°"], "values": [[1.0, 0.25], [0.25, 1.0]]}
    points = tuple({"step": s, "mean_cosine": 0.1, "sign_agreement": 0.6, "matrix": matrix} for s in (1, 2))
    page = page_of(tmp_path / "a", made("erm", agreement=points), made("fish", agreement=points))
    assert page.html.count('class="plot"') == 2 + 2 + 2  # curves by algorithm, two measures, two matrices
    assert page.said("Gradient agreement", "0.25")
    assert "Gradient agreement" not in page_of(tmp_path / "b", made()).text


def column(name: str, *warnings: str) -> dict[str, Any]:
    about = {"column": name, "kind": "numeric", "missing": 31, "distinct": 1234, "examples": ["63", "41"]}
    return about | {"becomes": "one number", "warnings": warnings}


def test_columns_are_shown_with_their_warnings_first(tmp_path: Path) -> None:
    assert "Columns" not in page_of(tmp_path, made()).text
    columns = [column("age"), column(NASTY[0], f"possible leakage {NASTY[1]}")]
    content = {"file": NASTY[2], "rows": 1000, "columns": columns, "remarks": ["rows twice"]}
    (tmp_path / "columns.json").write_text(json.dumps(content))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inputs.json").write_text(json.dumps({"columns_report": columns}))  # the same again
    page = Page(shoal.report(tmp_path).html)
    assert page.said("possible leakage", "rows twice", "age numeric 31 (3%) 1,234 63, 41 one number")
    assert page.text.count("possible leakage") == 1
    assert not {"img", "b"} & set(page.tags)
    (tmp_path / "columns.json").write_text("[]")
    assert "columns.json is not a report on columns" in Page(shoal.report(tmp_path).html).text


# Safety


def nasty() -> list[RunRecord]:
    """Everything that comes from outside, as bad as it gets."""
    found = []
    for number, text in enumerate(NASTY):
        record = scored(made("erm", number, 0.5, text), **{text: scores({text: 0.5, "b": None}, text)})
        matrix = {"domains": [text, "b"], "values": [[1, None], [0.25, 1]]}
        point = {"step": 1, "mean_cosine": 0.5, "sign_agreement": None, "matrix": matrix}
        options = {"held_out": text, text: text}
        record = changed(record, dataset=text, label=text, settings={text: text}, data_options=options)
        more: dict[str, Any] = {"environment": {text: text}, "notes": {text: text}, "agreement": (point,)}
        found.append(replace(record, error=text, rule=text, **more))
    return found


def test_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(3)<"
    page = page_of(folder, *nasty(), title=NASTY[0])
    assert (page.tags.count("script"), page.tags.count("style")) == (1, 1)
    assert not {"img", "b"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not {"\u202e", "\x00"} & set(page.html)
    assert NASTY[0] in page.text
    assert NASTY[2] in page.text
    for record in nasty():
        tags = set(Page(record._repr_html_()).tags)
        assert tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(tmp_path, *many(2, 3))
    names = ("src", "href", "action", "data", "xlink:href")
    links = [value for name, value in page.attributes if name in names]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"@import|url\((?!#)", page.html)
    assert "http" not in page.html.replace("http-equiv", "")
    ids = [value for name, value in page.attributes if name == "id"]
    inside = re.findall(r"url\(#([^)]+)\)", page.html) + [x[1:] for x in links if x.startswith("#")]
    assert len(ids) == len(set(ids) | set(inside))


def test_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    full = save(tmp_path / "full", made())
    for folder, message in (("empty", "there is no record of a run in"), ("nowhere", "there is no folder")):
        with pytest.raises(shoal.InputError, match=message):
            shoal.report(tmp_path / folder)
    for out, message in (("nowhere/x.html", "out: there is no folder"), ("empty", "out: .* specify a file")):
        with pytest.raises(shoal.InputError, match=message):
            shoal.report(full, tmp_path / out)


# Charts


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [1.0, 1.0], [-3.0, 12.0], [49.9, 50.1], [1e-9, 3e-9], [1e3, 1e9], [-1.0]]
)
def test_ticks_are_few_distinct_and_inside(values: list[float]) -> None:
    axis = charts.Axis.over(values)
    assert axis.low < min(values) <= max(values) < axis.high
    assert 3 <= len({label for _, label in axis.ticks}) == len(axis.ticks) <= 6
    assert all(0 <= x <= 100 for x, _ in axis.ticks)


# In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 --enable-logging=stderr --dump-dom"
)
CLICKS = """<script>
const table = document.querySelector("table.runs"), heads = [...table.tHead.rows[0].cells];
const column = heads.findIndex(h => h.textContent.startsWith("seconds"));
const order = () => [...table.tBodies].map(b => Number(b.rows[0].cells[column].dataset.v));
const said = {};
heads[column].firstElementChild.click();
said.up = order();
heads[column].firstElementChild.click();
said.down = order();
const box = document.getElementById("filter");
box.value = "fish";
box.dispatchEvent(new Event("input"));
said.fish = [...table.tBodies].filter(b => !b.hidden).length;
const drawn = [...document.querySelectorAll("svg.plot")].map(p => p.getBoundingClientRect());
said.drawn = drawn.every(b => b.width > 100 && b.height > 50);
said.fits = document.documentElement.scrollWidth <= innerWidth;
document.body.dataset.said = JSON.stringify(said);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [500, 1280])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    """Tables sort and filter, figures show, nothing is wider than the window, and nothing complains."""
    records = [replace(r, seconds=float(n)) for n, r in enumerate(many(3, 4))]
    html = shoal.report(save(tmp_path, *records, *nasty())).html
    path = tmp_path / "clicked.html"
    path.write_text(html.replace("</body>", CLICKS), encoding="utf-8")
    flags = [*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    command = [str(CHROMIUM), *flags, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    said = json.loads(re.search(r'data-said="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert said["up"] == sorted(said["up"])
    assert said["down"] == sorted(said["up"], reverse=True)
    assert said["fish"] == 8
    assert said["drawn"]
    assert said["fits"]
