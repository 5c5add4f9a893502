"""``shoal.report``: what a page shows, that it is safe, and that it works in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.experiments import compare, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store
from shoal.report import compare as view
from shoal.report import page

NASTY = ("<script>alert(1)</script>", "</style><img src=x onerror=alert(2)>", "\"'><b>$x_1$ &amp; \u202e\x00")


def made(name: str = "erm", seed: int = 0, test: float = 0.5, out: str = "a", **changes: Any) -> RunRecord:
    """A run with two evaluations."""

    def scores(domain: str, value: float) -> dict[str, Any]:
        return {"metric": "accuracy", "average": value, "mean": value, "domains": {domain: value}}

    def point(step: int) -> dict[str, Any]:
        found = {"validation": scores("rest", 0.8), "test": scores(out, test * step / 200)}
        return {"step": step, "passes": step, "loss": 1.0, "scores": found}

    config = RunConfig("digits", name, 200, data_options={"held_out": out}, seed=seed, label=name)
    history = (point(100), point(200))
    record = RunRecord(config, "finished", history, 1, "best on validation", 1.5, {"device": "cpu"})
    return replace(record, **changes)


def several(names: Sequence[str] = ("erm", "fish", "coral"), domains: str = "abcde") -> list[RunRecord]:
    """Each algorithm a little better than the one before it, and each domain easier."""
    return [
        made(name, seed, 0.3 + 0.05 * d + 0.02 * n + 0.001 * seed * (d % 3), place)
        for n, name in enumerate(names)
        for d, place in enumerate(domains)
        for seed in (0, 1)
    ]


def compared(folder: Path, records: Sequence[RunRecord], lost: int = 0, **more: Any) -> Path:
    """A folder as ``shoal.compare`` leaves it, without the first ``lost`` runs."""
    for record in records[lost:]:
        Store(folder / "runs").save(record)
    result = compare.results([r.config for r in records], records[lost:]) | more
    result["identities"] = [r.config.identity for r in records]
    (folder / "comparison.json").write_text(json.dumps(result))
    return folder


class Page(HTMLParser):
    """What a browser reads in a page: tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.parts = list[str](), list[tuple[str, str]](), list[str]()
        self.feed(html)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def shows(self, *parts: str) -> bool:
        """Whether the page has all of these, in this order."""
        return re.search(".*".join(map(re.escape, parts)), self.text) is not None


def test_a_comparison_with_its_columns(tmp_path: Path) -> None:
    about: dict[str, Any] = {"kind": "numeric", "missing": 31, "distinct": 1234, "examples": ["63", "41"]}
    columns = [about | {"column": "age", "warnings": [], "becomes": "a number"}]
    columns.append(columns[0] | {"column": NASTY[0], "warnings": [f"possible leakage {NASTY[1]}"]})
    content = {"file": NASTY[2], "rows": 1000, "columns": columns, "remarks": ["rows twice"]}
    folder = compared(tmp_path, several(), title="my table.csv", unable={"irm": "needs classes"})
    (folder / "columns.json").write_text(json.dumps(content))
    Store(folder / "runs").save(made("mixup"))  # another comparison's
    report = shoal.report(folder)
    assert (report.path, report.runs, report.notes) == (tmp_path / "report.html", 30, ())
    assert report.path.read_text(encoding="utf-8") == report.html
    found = Page(report.html)
    assert found.shows("Report on my table.csv", "Use coral", "Expect accuracy", "Compared with", "+2.0")
    assert found.shows("average accuracy", "worst domain", "coral recommended", "erm baseline")
    assert found.shows("Differences to coral", "By domain", "Protocol", "Not compared: irm (needs classes)")
    assert found.shows("Learning curves", "All runs", "30 runs")
    assert found.shows("possible leakage", "rows twice", NASTY[0], "age numeric 31 (3%) 1,234 63, 41")
    assert not {"img", "b"} & set(found.tags)
    assert "mixup" not in found.text
    (folder / "columns.json").write_text("{")
    assert "columns.json cannot be read" in shoal.report(folder).notes[0]


def test_missing_failed_and_diverged_runs_and_damaged_files(tmp_path: Path) -> None:
    records = several(("erm", "fish"), "abc")
    records[-1] = replace(records[-1], status="diverged", error="the loss was <nan>", history=(), selected=-1)
    compared(tmp_path, records, lost=2)
    Store(tmp_path / "runs").fail(records[0].config, "OSError: <no> space", "Traceback …")
    (tmp_path / "runs" / f"{records[1].config.identity}.json").write_text("{")
    report = shoal.report(tmp_path)
    assert (report.runs, len(report.notes), report.problems) == (11, 2, ())
    found = Page(report.html)
    assert found.shows("No recommendation yet: 2 of 12 runs are missing.", "Diverged runs", "fish 1")
    assert found.shows("Failed: erm on digits", "OSError: <no> space", "is not a run record", "Traceback …")
    assert found.shows("All runs", "the loss was <nan>")


def test_a_sweep(tmp_path: Path) -> None:
    records = []
    for record in several(("erm", "fish"), "ab"):
        protocol = {"held_out": [record.config.held_out], "seed": record.config.seed}
        config = replace(record.config, data_options={}, protocol=protocol)
        history = []
        for point in record.history:
            scores = point["scores"]
            both = {"train": scores["validation"], "oracle": scores["test"]}
            history.append({**point, "scores": scores | both})
        records.append(replace(record, config=config, history=tuple(history)))
        Store(tmp_path / "runs").save(records[-1])
    configs = [record.config for record in records]
    results = {rule: selection.sweep_results(configs, records, rule) for rule in ("training", "oracle")}
    (tmp_path / "sweep.json").write_text(json.dumps(results))
    report = shoal.report(tmp_path, tmp_path / "page.html")
    assert report.runs == 8
    found = Page(report.html)
    assert found.shows("Sweep of digits", "digits, training-domain validation", "average", "erm", "32.5")
    assert found.shows("test-domain validation (oracle)", "Learning curves", "fish on digits", "8 runs")


def nasty(text: str) -> RunRecord:
    """Everything that comes from outside, as bad as it gets."""
    point = {"step": 1, "mean_cosine": 0.5, "matrix": [[1, None], [0.25, 1]], "domains": [text, "b"]}
    record = made("erm", 0, 0.5, text, environment={text: text}, notes={text: text}, agreement=(point,))
    options = {"held_out": text, text: text}
    config = replace(record.config, dataset=text, settings={text: text}, data_options=options)
    return replace(record, config=config, error=text, rule=text)


def test_a_page_is_safe_and_needs_nothing_else(tmp_path: Path) -> None:
    domains = [*NASTY, "long " * 60]
    records = [made(name, 0, 0.5, domain) for name in ("erm", "fish") for domain in domains]
    compared(tmp_path / "<script>alert(3)<", records, title=NASTY[0])
    comparison = shoal.report(tmp_path / "<script>alert(3)<").html
    for html in (comparison, page.runs_page([*map(nasty, NASTY)], notes=NASTY)):
        found = Page(html)
        assert (found.tags.count("script"), found.tags.count("style")) == (1, 1)
        assert not {"img", "b"} & set(found.tags)
        assert not [name for name, _ in found.attributes if name.startswith("on")]
        assert not {"\u202e", "\x00"} & set(html)
        assert NASTY[0] in found.text
        (script,) = re.findall("<script>(.*?)</script>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = (v for n, v in found.attributes if n == "content" and "default-src" in v)
        assert policy.startswith("default-src 'none';")
        assert policy.endswith(f"script-src 'sha256-{digest}'")
        links = [v for n, v in found.attributes if n in ("src", "href", "action", "data")]
        assert all(link.startswith(("#", "data:")) for link in links)
        assert not re.search(r"@import|url\(|http(?!-equiv)", html)


def test_names_cannot_break_a_text() -> None:
    records = [made(name, 0, 0.5, d) for name in ("erm", "fish") for d in ("<script>|$\x1b[2J", "b")]
    result = compare.results([r.config for r in records], records)
    text = view.files(result)["comparison.md"].decode()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "&lt;script&gt;\\|$?[2J" in lines[0]
    assert "<script>" not in text + view.as_html(result)
    assert "\x1b" not in text + view.text(result)


def test_wrong_input(tmp_path: Path) -> None:
    """A file that is no result is named, and stays as it is."""
    for name in ("comparison.json", "sweep.json", "diagnosis.json", "record.json"):
        for content in ("[]", "{", '{"identities": [], "rows": 3}', '{"identities": {}}'):
            (tmp_path / name).write_text(content)
            with pytest.raises(shoal.InputError, match=f"{name}' is not a"):
                shoal.report(tmp_path)
            assert [p.name for p in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    (tmp_path / "empty").mkdir()
    for name in ("one", "two"):
        compared(tmp_path / name, several(("erm",), "ab"))
    for folder, message in (("empty", "there is no result"), ("x", "there is no folder"), (".", "one, two")):
        with pytest.raises(shoal.InputError, match=message):
            shoal.report(tmp_path / folder)
    with pytest.raises(shoal.InputError, match=r"out: .* specify a file"):
        shoal.report(tmp_path / "one", tmp_path / "empty")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 --enable-logging=stderr --dump-dom "
    "--window-size=500,900"
)
CLICKS = """
const table = document.querySelector("table.runs"), heads = [...table.tHead.rows[0].cells];
const order = () => [...table.tBodies].map(b => Number(b.rows[0].cells[6].textContent));
const seen = {};
heads[6].firstElementChild.click();
seen.up = order();
heads[6].firstElementChild.click();
seen.down = order();
const box = document.getElementById("filter");
box.value = "fish";
box.dispatchEvent(new Event("input"));
seen.fish = [...table.tBodies].filter(b => !b.hidden).length;
const drawn = [...document.querySelectorAll(".plot svg")].map(p => p.getBoundingClientRect());
seen.drawn = drawn.length === 2 && drawn.every(b => b.width > 100 && b.height > 50);
seen.fits = document.documentElement.scrollWidth <= innerWidth;
document.body.dataset.seen = JSON.stringify(seen);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_in_a_browser(tmp_path: Path) -> None:
    """Tables sort and filter, figures show, nothing is wider than the window, and nothing complains."""
    records = [replace(r, seconds=float(n)) for n, r in enumerate(several(("erm", "fish"), "abc"))]
    html = shoal.report(compared(tmp_path, records, title="long " * 60)).html
    digest = base64.b64encode(hashlib.sha256(CLICKS.encode()).digest()).decode()
    html = html.replace("script-src '", f"script-src 'sha256-{digest}' '")
    path = tmp_path / "clicked.html"
    path.write_text(html.replace("</body>", f"<script>{CLICKS}</script></body>"), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["up"] == sorted(seen["up"]) == seen["down"][::-1]
    assert (seen["fish"], seen["drawn"], seen["fits"]) == (6, True, True)
