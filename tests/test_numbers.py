"""Numbers in the documentation are those of the results, and the check of it can fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "tools"))
import trace_numbers

RESULTS = """# Accuracy

| method | N | train | test |
|---|---|---|---|
| Fish | 5 | 97.7 ± 4.3 | 49.7 ± 0.9 |
| Fish | 10 | 99.9 ± 0.2 | 96.6 ± 2.9 |
| Fish, random grouping | 10 | 100.0 ± 0.0 | 49.9 ± 0.2 |
| ERM | 5 | 100.0 ± 0.0 | 49.8 ± 1.0 |
| ERM | 10 | 99.0 ± 2.2 | 50.1 ± 0.2 |

Seeds: 97.9, 92.9 and 1,250 others.

# Time

fish     65.6    1.39
"""
LONG = """<!-- from: results.md -->

| | N | trained | held out |
|---|---|---|---|
| **Fish** | 10 | 99.9 ± 0.2 | **96.6 ± 2.9** |
| Fish, random grouping (control) | 10 | 100.0 ± 0.0 | 49.9 ± 0.2 |
"""
WIDE = """<!-- cells from: results.md#Accuracy -->

| N | ERM | Fish |
|---|---|---|
| 5 | 49.8 ± 1.0 | 49.7 ± 0.9 |
| 10 | 50.1 ± 0.2 | 96.6 ± 2.9 |
"""


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace_numbers, "RESULTS", tmp_path)
    (tmp_path / "results.md").write_text(RESULTS, encoding="utf-8")

    def of(text: str) -> list[str]:
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
        return [problem.split("page.md:")[1] for problem in trace_numbers.Page(page).untraced()]

    return of


@pytest.mark.parametrize("page", trace_numbers.PAGES)
def test_every_number_of_a_page_is_in_its_results(page: str) -> None:
    assert "\n".join(trace_numbers.Page(trace_numbers.ROOT / page).untraced()) == ""


def test_what_is_there_is_found_and_any_changed_digit_is_not(problems: Any) -> None:
    for page in (LONG, WIDE):
        assert not problems(page)
        for i in range(page.index("|---|"), len(page)):
            if page[i].isdigit():
                changed = page[:i] + str((int(page[i]) + 1) % 10) + page[i + 1 :]
                assert problems(changed), changed
    assert not problems("<!-- from: results.md -->\nFish 96.6 ± 2.9, ERM 50.1; seeds: 97.9, of 1,250")
    assert not problems("<!-- given: 22 algorithms -->\n22 of `x = 7`, CdSprites-10, 64×64, seeds 0 to 4")
    assert not problems("# 3 ways\n\n```\n1 2 3\n```\n\n[a](b-9.md) ![7 of 8](c.png) torch 2.11.0")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LONG.replace("**Fish**", "Fish, random grouping"), "in a line with fish, random grouping"),
        (LONG.replace("| 99.9 ± 0.2 | **96.6 ± 2.9**", "| 96.6 ± 2.9 | 99.9 ± 0.2"), "5: 10, 96.6"),
        (WIDE.replace("49.8 ± 1.0 | 49.7 ± 0.9", "49.7 ± 0.9 | 49.8 ± 1.0"), "5: 49.7 ± 0.9: not in"),
        (WIDE.replace("#Accuracy", "#Time"), "5: 49.8"),
        (WIDE.replace("results.md", "missing.md"), "1: missing.md#Accuracy: "),
        ("<!-- given: settings -->\n7 of 8\n\n# Next\n\n9", "6: 9: without"),
        ("<!-- from: results.md -->\nFish 97.9, 50.1", "2: 97.9, 50.1: not in"),
        ("<!-- from: results.md -->\n\n# Next\n\n96.6", "5: 96.6: without a source"),
        ("<!-- given: 22 algorithms -->\nAll", "1: 22 is given, but not in this section"),
    ],
)
def test_what_is_not_there_is_named_with_its_line(problems: Any, text: str, found: str) -> None:
    assert found in "\n".join(problems(text))
