"""Tracking: the paper's two algorithms, written down naively beside ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.data.batch import DomainBatch
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import prepare, run
from shoal.models import build
from shoal.paper import recipes, tracking
from shoal.paper.reproduce import reproduce

TINY: dict[str, Any] = {
    "data_options": {"size": 32, "per_domain": 40, "domains": 3},
    "model_options": {"width": 2},
    "settings": {"meta_lr": 0.1, "inner_state": "reset"},
    "steps": 5,
    "batch_size": 8,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "QUICK", TINY)
    monkeypatch.setattr(tracking, "QUICK_EVERY", 2)


def config(**changes: Any) -> RunConfig:
    (made,) = tracking.plan("cdsprites", 1, "paper", quick=True)
    return replace(made, **changes)


def track(config: RunConfig, every: int = 1) -> RunRecord:
    """As every run is started."""
    return run(config, "cpu", how={"runner": "paper.tracking", "track_every": every})


def naive_gip(batches: Sequence[DomainBatch], model: nn.Module, normalise: bool) -> float:
    """The paper's function GIP, with two loops."""
    found = []
    for x, y, *_ in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        found.append(
            torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])
        )
    total = 0.0
    for i, a in enumerate(found):
        for j, b in enumerate(found):
            if i != j:
                total += float(a @ b / (a.norm() * b.norm())) if normalise else float(a @ b)
    return total / (len(found) * (len(found) - 1))


def naive_step(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= rate * p.grad


def test_iterations_are_those_of_the_papers_algorithm() -> None:
    rate, epsilon = 0.5, 0.3
    given = config(optimizer="sgd", lr=rate, settings={"meta_lr": epsilon, "inner_state": "carry"})
    alone = {"domains_per_step": 1, "settings": {}, "draw": "pooled"}
    fish, erm = prepare(given, "cpu"), prepare(replace(given, algorithm="erm", **alone), "cpu")
    pair = tracking.Pair(fish, erm)
    naive = [
        build("sprite-cnn", input_shape=(3, 32, 32), classes=2, seed=given.seed, width=2) for _ in range(2)
    ]
    theirs: dict[tuple[str, str, str], list[float]] = {}
    for step in range(5):
        plan = fish.sampler.plan(step)
        batches = [DomainBatch(*fish.examples.batch(torch.from_numpy(rows)), d) for d, rows in plan]
        assert sorted(b.domain for b in batches) == [0, 1, 2]  # type: ignore[type-var]

        def keep(when: str, batches: list[DomainBatch] = batches) -> None:
            for name, model in zip(("Fish", "ERM"), naive, strict=True):
                for kind in tracking.KINDS:
                    value = naive_gip(batches, model, kind == "mean_cosine")
                    theirs.setdefault((name, when, kind), []).append(value)

        keep("before")
        start = [p.detach().clone() for p in naive[0].parameters()]
        for x, y, *_ in batches:
            naive_step(naive[0], x, y, rate)
        with torch.no_grad():
            for p, s in zip(naive[0].parameters(), start, strict=True):
                p.copy_(s + epsilon * (p - s))
        whole_x, whole_y = torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])
        split = tracking.rearranged(batches, given.seed, step)
        order = [_place(x, whole_x) for b in split for x in b.x]
        for rows in torch.tensor(order).split(8):
            naive_step(naive[1], whole_x[rows], whole_y[rows], rate)
        keep("after")

        pair.iterate(step, batches)
        for training, model in zip((fish, erm), naive, strict=True):
            for p, q in zip(training.model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert pair.read(4) == ""
    for (name, when, kind), values in theirs.items():
        measured = pair.sides[name].measured
        ours = [measured[step][when][kind] for step in range(5)]
        np.testing.assert_allclose(ours, values, atol=1e-6)
    assert len(theirs) == 8
    assert not np.allclose(
        theirs["Fish", "after", "mean_inner_product"], theirs["ERM", "after", "mean_inner_product"]
    )


def _place(image: Tensor, among: Tensor) -> int:
    (found,) = (among == image).flatten(1).all(1).nonzero()[:1].tolist()
    return int(found[0])


def test_the_examples_are_the_same_and_mixed() -> None:
    x = torch.arange(60)
    batches = [DomainBatch({"a": x[i : i + 20]}, x[i : i + 20], i) for i in (0, 20, 40)]
    split = tracking.rearranged(batches, 3, 7)
    assert sorted(torch.cat([b.y for b in split]).tolist()) == list(range(60))
    assert all(torch.equal(b.x["a"], b.y) and {int(v) // 20 for v in b.y} == {0, 1, 2} for b in split)
    assert not torch.equal(split[0].y, tracking.rearranged(batches, 3, 8)[0].y)


def test_the_constant_classifier() -> None:
    """Only its last layer has a gradient, and it says the same of every image."""
    labels = torch.tensor([0, 0, 0, 1])
    torch.testing.assert_close(tracking.constant_bias(labels, 2).softmax(0), torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(tracking.constant_bias(torch.tensor([1.0, 3.0]), None), torch.tensor([2.0]))
    given = config(model_options={"width": 4}, batch_size=32)
    alone = {"domains_per_step": 1, "settings": {}, "draw": "pooled"}
    fish, erm = prepare(given, "cpu"), prepare(replace(given, algorithm="erm", **alone), "cpu")
    pair = tracking.Pair(fish, erm)
    before = {k: v.clone() for k, v in fish.model.state_dict().items()}
    found = {
        name: {**measured["before"], "score": scores["average"]}
        for name, (measured, scores) in pair.constants().items()
    }
    right, wrong = found["constant classifier"], found["constant and wrong"]
    assert all(torch.equal(before[k], v) for k, v in fish.model.state_dict().items())
    truth = fish.data.examples.batch(torch.from_numpy(fish.data.splits["test"].examples()).long())[1]  # type: ignore[attr-defined]
    shares = [float((truth == c).float().mean()) for c in (0, 1)]
    assert any(right["score"] == pytest.approx(share, abs=1e-6) for share in shares)
    assert -1 <= right["mean_cosine"] <= 1
    assert wrong["mean_cosine"] > 0.9  # wrong everywhere in the same way
    assert wrong["mean_inner_product"] > abs(right["mean_inner_product"])
    assert tracking.last_linear(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None


def test_tracking_more_seldom_trains_the_same() -> None:
    often, seldom = (tracking.frames([track(config(), every)]) for every in (1, 2))
    assert sorted(set(often[0]["iteration"])) == [0, 1, 2, 3, 4]
    assert sorted(set(seldom[0]["iteration"])) == [0, 2, 4]
    both = often[0].merge(seldom[0], on=["seed", "iteration", "model", "when"])
    assert len(both) == len(seldom[0])
    assert (both["mean_inner_product_x"] == both["mean_inner_product_y"]).all()
    assert often[1].equals(seldom[1])
    start = often[0][often[0]["iteration"] == 0].set_index(["model", "when"])["mean_cosine"]
    assert start["Fish", "before"] == start["ERM", "before"]


def test_a_loss_that_is_not_finite_is_said() -> None:
    found = track(config(optimizer="sgd", optimizer_options={"weight_decay": 1e38}))
    assert found.status == "diverged"
    assert "non-finite by iteration" in found.error


def test_from_runs_to_a_figure(tmp_path: Path) -> None:
    options: dict[str, Any] = {"quick": True, "out": tmp_path, "device": "cpu", "jobs": 1, "progress": False}
    result = reproduce("tracking", seeds=2, **options)
    values = result.data["cdsprites"]
    assert list(values) == ["Fish", "ERM", *tracking.CONSTANTS]
    assert all(len(v) == 2 for model in values.values() for v in model.values())
    assert values["constant classifier"]["change"] == [0, 0]
    assert {"tracking-quick.png", "tracking-quick.svg"} <= {path.name for path in result.files}
    assert "nothing can be concluded" in str(result)
    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "tracking-quick").glob("*.json")}
    assert len(records) == 2
    assert reproduce("tracking", seeds=2, **options).data == result.data
    assert all(path.stat().st_mtime_ns == time for path, time in records.items())


def test_on_wilds_with_its_warm_start(wilds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "QUICK", {**recipes.QUICK, "steps": 4, "eval_limit": 30})
    options: dict[str, Any] = {
        "datasets": "camelyon17",
        "data_dir": wilds,
        "device": "cpu",
        "progress": False,
    }
    result = reproduce("tracking", quick=True, seeds=1, out=tmp_path, **options)
    assert not result.problems
    assert set(result.data["camelyon17"]) == {"Fish", "ERM", *tracking.CONSTANTS}
    (path,) = (tmp_path / "tracking-quick").glob("*.json")
    record = json.loads(path.read_text())
    assert record["config"]["warm_start"] == 4
    first = record["agreement"][0]["models"]
    assert first["Fish"]["before"] == first["ERM"]["before"]
