"""The evidence page comes out of the kept records, and its verdicts follow the rules of the plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import evidence
import natural

PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "records.md"


def test_every_number_and_verdict_of_the_page_comes_from_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == evidence.page()


def test_domains_of_a_fold_count_as_one() -> None:
    values = pd.Series([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    found = natural.interval(values, pd.Series(["x", "x", "x", "y", "y", "y"]))
    expected = stats.ttest_1samp([1.0, 3.0], 0).confidence_interval(0.95)
    assert [found["low"], found["high"]] == pytest.approx([expected.low, expected.high])
