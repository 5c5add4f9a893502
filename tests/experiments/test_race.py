"""The race of a comparison: its stages, which rows leave it, and what ends it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_baselines import write_table as table
from test_recommend import rows_of

import shoal
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments.compare import LeaveDomainsOut
from shoal.experiments.config import RunConfig
from shoal.experiments.race import Race, Times, sized
from shoal.experiments.recommend import leaving
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run

DOMAINS = ["a", "b", "c", "d", "e"]
BASE = RunConfig("table", "erm", 300, {"file": "a.csv"}, batch_size=32)
ROWS = ("majority", "logistic-regression", "gradient-boosting", "erm", "fish", "fish:regrouped", "coral")


def race(seeds: int = 3, search: int = 2, rows: Sequence[str] = ROWS, **options: Any) -> Race:
    return Race(LeaveDomainsOut(BASE, rows, DOMAINS, seeds, search), **options)


def found(score: Callable[[RunConfig], float | None]) -> Callable[[Sequence[RunConfig]], list[RunRecord]]:
    """Records with these scores; ``None``: the run diverged."""

    def record(config: RunConfig) -> RunRecord:
        value = score(config)
        if value is None:
            return RunRecord(config, "diverged", (), -1, "best", 1.0, {"device": "cpu"})
        test = {"metric": "accuracy", "average": value, "domains": {config.held_out: value}}
        held = {"metric": "accuracy", "average": value, "domains": {"v": value}}
        point = {"step": 5, "passes": 5, "loss": 1.0, "scores": {"validation": held, "test": test}}
        return RunRecord(config, "finished", (point,), 0, "best", 1.0, {"device": "cpu"})

    return lambda configs: [record(config) for config in configs]


def scores(**gains: float) -> Callable[[RunConfig], float]:
    """Of 0.6 with some noise; ``_`` in a name stands for ``-``."""
    known = {name.replace("_", "-"): gain for name, gain in gains.items()}

    def score(config: RunConfig) -> float:
        place = DOMAINS.index(config.held_out)
        rng = np.random.default_rng([place, config.seed, ROWS.index(config.name)])
        return 0.6 + known.get(config.name, 0.0) + 0.05 * place + rng.normal(0, 0.002)

    return score


def test_stages_add_runs_and_the_last_of_an_exhaustive_one_has_all() -> None:
    whole = race(exhaustive=True)
    assert [s.name for s in whole.stages] == ["baselines", "algorithms", "hyperparameters", "seeds"]
    runs = [{c.identity for c in whole.plan(stage)} for stage in whole.stages]
    assert all(before < after for before, after in itertools.pairwise(runs))
    assert runs[-1] == {c.identity for c in whole.protocol.plan()}
    assert [s.name for s in race(2, 1).stages] == ["baselines", "algorithms", "seeds"]
    assert [s.name for s in race(1, 1, ROWS[3:]).stages] == ["algorithms"]


def test_rows_leave_that_cannot_be_recommended() -> None:
    """Boosting wins; ERM and Fish are clearly worse, CORAL a little better, the linear model diverges."""
    worse = {"erm": -0.1, "fish": -0.1, "fish_regrouped": -0.1, "majority": -0.3}
    score = scores(gradient_boosting=0.1, coral=0.101, **worse)
    records = found(lambda c: None if c.name == "logistic-regression" else score(c))
    contest = race()
    results = [contest.close(stage, records) for stage in contest.stages]
    assert not results[1]["race"]["left"]
    left = results[-1]["race"]["left"]
    assert {name: (about["stage"], about["how"]) for name, about in left.items()} == {
        "logistic-regression": (2, "incomplete"),
        "erm": (2, "chance"),
        "fish": (2, "chance"),
        "fish:regrouped": (2, "control"),
    }
    seeds = {row["algorithm"]: len(row["average"]["values"]) for row in results[-1]["rows"]}
    stay = dict.fromkeys(("gradient-boosting", "coral", "majority"), 3)
    assert seeds == {**stay, **dict.fromkeys(left, 1)}
    ranks = [row["rank"] for row in results[-1]["rows"]]
    assert ranks == [1, 2, 3, None, None, None, None]  # scores of fewer seeds are not comparable
    about = results[-1]["recommendation"]
    assert (about["row"], about["tied"], about["rows"]) == ("gradient-boosting", ("coral",), 5)
    planned = {(c.name, c.seed) for c in contest.configs}
    assert ("erm", 1) not in planned
    assert ("coral", 2) in planned


def test_replayed_on_exhaustive_records_it_recommends_the_same() -> None:
    for number in range(3):
        gains = {name: 0.01 * ((number * k) % 5) for k, name in enumerate(["erm", "fish", "coral"])}
        score = scores(majority=-0.1, **gains)
        both = [race(), race(exhaustive=True)]
        ends = [[c.close(stage, found(score)) for stage in c.stages][-1]["recommendation"] for c in both]
        assert ends[0]["row"] == ends[1]["row"]
        assert ends[0]["row"] is not None


def test_why_rows_leave() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, (4, 6))
    means = {"logistic-regression": 0.7, "gradient-boosting": 0.699, "erm": 0.6, "majority": 0.55}
    values = {name: mean + e for (name, mean), e in zip(means.items(), noise, strict=True)}
    wanted = {"gradient-boosting": ("logistic-regression", "average")}
    assert leaving(rows_of(values), False) == wanted | {"erm": ("logistic-regression", "chance")}
    assert leaving(rows_of({n: -v for n, v in values.items()}), True) == leaving(rows_of(values), False)
    worse = values | {"erm": values["majority"] - 0.1}
    assert leaving(rows_of(worse), False)["erm"] == ("majority", "majority")
    assert leaving(rows_of({n: v[:2] for n, v in values.items()}), False) == {}


def test_the_size_depends_on_the_time_of_a_run() -> None:
    def size(each: float | None, *given: Any, **options: Any) -> tuple[int, int]:
        times = None if each is None else Times(each, 0.1)
        protocol = sized(race(1, 1, **options), times, *given).protocol
        return protocol.seeds, protocol.search

    sizes = [size(seconds, None, None, None) for seconds in (0.5, 10.0, 15.0, 30.0, 1000.0)]
    assert (sizes[0], sizes[-1]) == ((3, 3), (1, 1))
    assert sizes == sorted(sizes, reverse=True)
    assert size(1000.0, 2, 3, None) == (2, 3)
    assert size(1000.0, None, None, None, exhaustive=True) == size(None, None, None, None) == (3, 3)
    assert size(30.0, None, None, 60.0) > size(30.0, None, None, 10.0)


FEW: dict[str, Any] = {
    "algorithms": ["erm", "fish"],
    "steps": 20,
    "batch_size": 8,
    "device": "cpu",
    "jobs": 1,
}
FEW |= {"label": "ill", "domain": "site", "seeds": 2, "search": 1, "out": "o"}


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any) -> str:
    monkeypatch.chdir(tmp_path)
    return str(table(Path("patients.csv")))


def test_a_race_that_is_interrupted_and_resumed_and_exhaustive_runs(
    patients: str, in_process: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_in_fish(config: RunConfig, *args: Any) -> RunRecord:
        if config.algorithm == "fish":
            raise KeyboardInterrupt
        return run(config, *args)

    in_process(stop_in_fish)
    with pytest.raises(KeyboardInterrupt, match=r"after stage 1 of 3 are in o"):
        shoal.compare(patients, **FEW)
    shown = capsys.readouterr().err
    assert "3 stages: baselines" in shown
    assert shown.index("1 of 3") < shown.index("logistic-regression") < shown.index("Stage 2 of 3")
    result = json.loads((Path("o") / "comparison.json").read_text())
    assert (result["race"]["ended"], len(result["rows"])) == ("interrupted", 3)
    assert result["recommendation"]["row"] == result["recommendation"]["nearest"]
    assert "it was interrupted" in (Path("o") / "report.html").read_text()
    in_process(run)
    again = shoal.compare(patients, **FEW, progress=False)
    assert again.result["race"]["ended"] is None
    assert again.result["race"]["stages"] == ["baselines", "algorithms", "seeds"]
    whole = shoal.compare(patients, **FEW, exhaustive=True, progress=False)
    assert {*again.result["identities"]} <= {*whole.result["identities"]}
    assert whole.result["race"]["left"] == {}
    assert {len(row["average"]["values"]) for row in whole.result["rows"]} == {2}
    assert {r.config.patience for r in whole.records if r.config.algorithm == "fish"} == {3}


def test_the_end_of_a_budget_and_one_that_is_too_small(
    patients: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"0.001 minutes is too small: the first stage"):
        shoal.compare(patients, **FEW, budget=0.001)
    monkeypatch.setattr("shoal.api.compare.time.monotonic", iter(range(0, 10**6, 100)).__next__)
    command = f"compare {patients} --label ill --domain site --algorithms erm --out o --steps 20"
    assert main(f"{command} --budget 3 --jobs 1 --json".split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["race"]["done"], result["race"]["ended"]) == (1, "budget")
    assert [row["rank"] for row in result["rows"]] == [1, 2, 3]
    text = (Path("o") / "comparison.md").read_text()
    assert "ended after stage 1 (baselines) of 4: the time budget was used up" in text
