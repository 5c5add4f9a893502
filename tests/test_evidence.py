"""The evidence page comes out of the kept records, and its verdicts follow the rules of the plan."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import claims
import evidence
import natural

PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "records.md"


def test_every_number_and_verdict_of_the_page_comes_from_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == evidence.page()


@pytest.mark.parametrize(
    ("holds", "premises", "verdict"),
    [
        ([True, True], [True], "agrees"),
        ([True], [False], "partly"),
        ([True, False], [True], "partly"),
        ([False, False], [True], "disagrees"),
        ([None], [True], "not run"),
    ],
)
def test_verdict_of_a_claim(holds: list[bool | None], premises: list[bool | None], verdict: str) -> None:
    checks = [claims.Check("", h) for h in holds] + [claims.Check("", p, premise=True) for p in premises]
    assert claims.verdict(checks) == verdict


def sprites(folder: Path, accuracy: dict[str, list[float]]) -> None:
    """Records of CdSprites-10, one per method and seed."""
    folder.mkdir()
    for method, values in accuracy.items():
        for seed, value in enumerate(values):
            algorithm, _, draw = method.partition(":")
            scores = {"train": {"average": 1.0}, "test": {"average": value}}
            steps = 1200 if algorithm == "fish" else 12_000
            config = {"dataset": "cdsprites", "data_options": {"domains": 10}, "algorithm": algorithm}
            config |= {"draw": draw or None, "settings": {}, "batch_size": 64, "steps": steps, "seed": seed}
            config |= {"domains_per_step": 10 if algorithm == "fish" else None, "eval_every": steps}
            record = {"config": config, "status": "finished", "agreement": None}
            record["history"] = [{"step": steps, "scores": scores}]
            (folder / f"{algorithm}{draw}{seed}.json").write_text(json.dumps(record))


def test_claims_depend_on_the_records(tmp_path: Path) -> None:
    title = "Random grouping undoes Fish on CdSprites-10"
    paper = {"fish": [0.995, 1.0], "fish:regrouped": [0.5, 0.51], "erm": [0.5, 0.49]}
    sprites(tmp_path / "paper", paper)
    sprites(tmp_path / "lower", {**paper, "fish": [0.9, 0.9]})
    sprites(tmp_path / "equal", {**paper, "fish:regrouped": [0.995, 1.0]})
    sprites(tmp_path / "part", {"fish": [0.99]})
    for folder, verdict in zip(
        ("paper", "lower", "equal", "part"), ("agrees", "partly", "disagrees", "not run"), strict=True
    ):
        rows = claims.table([tmp_path / folder]).splitlines()
        assert next(row for row in rows if title in row).endswith(f"| {verdict} |")
    assert "| 10 | 49.5 ± 0.7 (2) | 99.8 ± 0.4 (2) |" in claims.accuracies([tmp_path / "paper"])


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Records of heart: four domains, three rows, and a second trial with lower validation."""
    values = {
        "erm": [0.70, 0.74, 0.69, 0.73],
        "fish": [0.80, 0.85, 0.79, 0.84],
        "fish:regrouped": [0.71, 0.72, 0.70, 0.73],
    }
    path = tmp_path / "records.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for row, accuracies in values.items():
            algorithm, _, draw = row.partition(":")
            for domain, value in zip("abcd", accuracies, strict=True):
                for trial, validation in enumerate((0.9, 0.8)):
                    test = {"metric": "accuracy", "domains": {domain: value - trial}, "mean": value - trial}
                    scores = {"validation": {"metric": "accuracy", "mean": validation}, "test": test}
                    config = {"algorithm": algorithm, "draw": draw, "seed": 0}
                    config["data_options"] = {"held_out": domain}
                    content = {"status": "finished", "selected": 0, "history": [{"scores": scores}]}
                    content["config"] = config
                    data = json.dumps(content).encode()
                    info = tarfile.TarInfo(f"heart/runs/{row}-{domain}-{trial}.json")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return path


def test_differences_on_natural_shifts_are_paired_t_tests(archive: Path) -> None:
    tables, ranks, about = natural.summary(archive)
    heart = tables["heart"]
    assert ranks["heart"].to_dict() == {"fish": 1, "erm": 2.5, "fish:regrouped": 2.5}
    assert heart["mean"].to_dict() == pytest.approx({"fish": 82.0, "erm": 71.5, "fish:regrouped": 71.5})
    gap = np.array([10, 11, 10, 11])
    test = stats.ttest_1samp(gap, 0)
    interval = test.confidence_interval(0.95)
    assert heart.loc["fish", ["difference", "low", "high"]].tolist() == pytest.approx(
        [gap.mean(), interval.low, interval.high]
    )
    assert heart.loc["fish", "adjusted"] == pytest.approx(2 * test.pvalue)  # the smaller of two p-values
    power = stats.t(3).ppf(0.975) + stats.t(3).ppf(0.8)
    assert heart.loc["fish", "detectable"] == pytest.approx(power * stats.sem(gap))
    assert heart["verdict"].dropna().to_dict() == {"fish": "better", "fish:regrouped": "no difference seen"}
    regrouped = np.array([9, 13, 9, 11])
    assert about["fish - fish:regrouped"]["heart"]["p"] == pytest.approx(
        stats.ttest_1samp(regrouped, 0).pvalue
    )


def test_domains_of_a_fold_count_as_one() -> None:
    values = pd.Series([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    found = natural.interval(values, pd.Series(["x", "x", "x", "y", "y", "y"]))
    expected = stats.ttest_1samp([1.0, 3.0], 0).confidence_interval(0.95)
    assert [found["low"], found["high"]] == pytest.approx([expected.low, expected.high])
