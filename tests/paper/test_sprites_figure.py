"""The runs of the CdSprites figure, and a shorter run read off a longer one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store, execute, make_executor
from shoal.experiments.record import RunRecord
from shoal.paper import cdsprites

FIGURE = cdsprites.figure(cdsprites.NUMBERS, range(2))


def record(config: RunConfig, until: int | None = None, status: str = "finished") -> RunRecord:
    every = config.eval_every or config.steps
    history = tuple(
        {
            "step": step,
            "passes": step * (config.domains_per_step or 1),
            "loss": 1.0,
            "scores": {
                split: {"metric": "accuracy", "average": value, "domains": {}}
                for split, value in (
                    ("train", 1.0),
                    ("validation", (step * 7 % 11) / 11),
                    ("test", step / 1e5),
                )
            },
        }
        for step in range(every, (until or config.steps) + 1, every)
    )
    return RunRecord(config, status, history, 0, "best on validation", 10.0, {"device": "cpu"})


@pytest.mark.parametrize("part", ["Adam", "IDGM", "plain SGD", "random palette", "IDGM as printed"])
def test_every_run_takes_the_same_number_of_minibatches(part: str) -> None:
    assert {c.steps * (c.domains_per_step or 1) for c in FIGURE[part]} == {cdsprites.PASSES}


def test_idgm_with_equal_updates() -> None:
    assert {c.steps for c in FIGURE["IDGM, equal updates"]} == {cdsprites.UPDATES}
    assert {c.data_options["domains"] for c in FIGURE["IDGM, equal updates"]} == set(cdsprites.NUMBERS)


def test_both_rows_of_idgm_come_from_one_run() -> None:
    """Whichever is longer, it is evaluated where the other ends."""
    both = [*FIGURE["IDGM"], *FIGURE["IDGM, equal updates"]]
    runs = cdsprites.longest(both)
    assert len(runs) == len(both) / 2
    found = cdsprites.with_shorter(both, map(record, runs))
    assert [r.config for r in found] == both
    assert [r.history[-1]["step"] for r in found] == [c.steps for c in both]
    assert all(r.score("test", last=True) == c.steps / 1e5 for r, c in zip(found, both, strict=True))
    for r in found:
        best = max(m["scores"]["validation"]["average"] for m in r.history)
        if r.config.steps < max(c.steps for c in runs if c.data_options == r.config.data_options):
            assert r.history[r.selected]["scores"]["validation"]["average"] == best


def test_a_run_that_is_there_itself_comes_before_a_longer_one() -> None:
    short = FIGURE["IDGM"][0]
    longer = replace(short, steps=2 * short.steps)
    own = replace(record(short), seconds=1.0)
    assert cdsprites.with_shorter([short], [record(longer), own]) == [own]


@pytest.mark.parametrize(
    "change",
    [{"seed": 9}, {"batch_size": 32}, {"settings": {"trust": None}}, {"optimizer_options": {"lr": 0.1}}],
    ids=str,
)
def test_another_run_contains_nothing(change: dict[str, Any]) -> None:
    short = FIGURE["IDGM"][0]
    other = replace(short, steps=2 * short.steps, **change)
    assert cdsprites.with_shorter([short], [record(other)]) == []
    assert len(cdsprites.longest([short, other])) == 2


def test_a_longer_run_that_is_not_evaluated_there_contains_nothing() -> None:
    short = FIGURE["IDGM"][0]
    other = replace(short, steps=2 * short.steps, eval_every=2 * short.steps)
    assert cdsprites.with_shorter([short], [record(other)]) == []
    assert len(cdsprites.longest([short, other])) == 2


def test_a_longer_run_that_diverged() -> None:
    """The shorter one finished if it ended before, and diverged too if it did not."""
    short = FIGURE["IDGM"][0]
    longer = replace(short, steps=3 * short.steps)
    (before,) = cdsprites.with_shorter([short], [record(longer, 2 * short.steps, "diverged")])
    (after,) = cdsprites.with_shorter([short], [record(longer, short.eval_every, "diverged")])
    assert (before.status, after.status) == ("finished", "diverged")
    assert cdsprites.with_shorter([short], [record(longer, None, "failed")]) == []


def test_the_shorter_training_is_the_beginning_of_the_longer(tmp_path: Path) -> None:
    common: dict[str, Any] = {"size": 32, "per_domain": 60, "eval_limit": 60, "width": 4}
    longer, short = (
        cdsprites.idgm_configs(cdsprites.IDGM, 2, [0], updates, 2, **common)[0] for updates in (6, 4)
    )
    store = Store(tmp_path)
    execute([longer, short], store, make_executor(device="cpu", jobs=1))
    (cut,) = cdsprites.with_shorter([short], [r for r in store.all() if r.config.steps == 6])
    (own,) = store.found([short])
    scores = [[{k: v for k, v in m.items() if k != "seconds"} for m in r.history] for r in (cut, own)]
    assert scores[0] == scores[1]
    assert (cut.selected, cut.config) == (own.selected, own.config)


def test_settings_stand_with_the_figure() -> None:
    text = cdsprites.setting(cdsprites.PASSES, 64)
    assert all(words in text for words in ("12,000 minibatches", "1,500 updates", "ε = 0.1", "64×64"))
