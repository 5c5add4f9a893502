"""Tracking: the paper's two algorithms, written down naively beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paper.conftest import QUICK
from shoal.data.sampler import DomainBatchSampler
from shoal.experiments.run import prepare, run
from shoal.models import build
from shoal.paper import cdsprites, tracking
from shoal.paper.reproduce import Request, reproduce

TINY: dict[str, Any] = {
    "seeds": 1,
    "passes": 60,
    "data": {"size": 32, "per_domain": 40},
    "run": {"model_options": {"width": 2}, "batch_size": 8, "optimizer": "sgd", "lr": 0.5},
    "settings": {"fish": {"meta_lr": 0.3}},
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, in_process: Any) -> None:
    monkeypatch.setitem(cdsprites.preset("sizes"), "tracking-quick", TINY)
    monkeypatch.setattr(tracking, "DOMAINS", 3)


def naive_gip(batches: Sequence[tuple[Tensor, Tensor]], model: nn.Module, normalise: bool) -> float:
    """The paper's function GIP, with two loops."""
    found = []
    for x, y in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))
    total = 0.0
    for i, a in enumerate(found):
        for j, b in enumerate(found):
            if i != j:
                total += float(a @ b / (a.norm() * b.norm())) if normalise else float(a @ b)
    return total / (len(found) * (len(found) - 1))


def naive_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.5 * p.grad


@pytest.mark.parametrize("number", [0, 1], ids=["Fish", "ERM"])
def test_runs_are_those_of_the_papers_algorithms(number: int) -> None:
    config = tracking.plan("cdsprites", Request("tracking", Path("out"), quick=True))[number]
    config = replace(config, steps=5)
    record = run(config, "cpu", options={"track_every": 1, "track_after": True})
    training = prepare(config, "cpu").trainer.setup
    model = build("sprite-cnn", input_shape=(3, 32, 32), classes=2, seed=config.seed, width=2)
    draw: Callable[..., DomainBatchSampler] = DomainBatchSampler
    domains = draw(training.data.splits["train"], 8, 3, seed=config.seed)
    regrouped = draw(training.data.splits["train"], 8, 3, seed=config.seed, draw="regrouped")
    for step, found in enumerate(record.agreement):
        batches, shuffled = (
            [training.data.examples.batch(torch.from_numpy(rows)) for _, rows in sampler.plan(step)]
            for sampler in (domains, regrouped)
        )
        assert {tuple(x.flatten().tolist()) for b in batches for x in b[0]} == {
            tuple(x.flatten().tolist()) for b in shuffled for x in b[0]
        }
        for when in (found, found["after"]):
            for kind in tracking.KINDS:
                naive = naive_gip(batches, model, kind == "mean_cosine")
                assert when[kind] == pytest.approx(naive, abs=1e-5)
            if when is found:
                start = [p.detach().clone() for p in model.parameters()]
                for x, y in batches if config.name == "Fish" else shuffled:
                    naive_step(model, x, y)
                if config.name == "Fish":
                    with torch.no_grad():
                        for p, s in zip(model.parameters(), start, strict=True):
                            p.copy_(s + 0.3 * (p - s))


def test_from_runs_to_a_figure(tmp_path: Path) -> None:
    result = reproduce("tracking", seeds=2, out=tmp_path, **QUICK)
    values = result.data["cdsprites"]
    assert list(values) == ["Fish", "ERM", "constants"]
    assert all(len(v) == 2 for model in ("Fish", "ERM") for v in values[model].values())
    assert list(values["constants"]) == ["constant classifier", "constant and wrong"]
    assert {"tracking-quick.png", "tracking-quick.svg"} <= {path.name for path in result.files}
    assert "nothing can be concluded" in str(result)
    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "tracking-quick").glob("*.json")}
    assert len(records) == 4
    first = [json.loads(path.read_text())["agreement"][0] for path in records]
    assert len({point["mean_cosine"] for point in first}) == 2  # both methods start from the same weights
    assert reproduce("tracking", seeds=2, out=tmp_path, **QUICK).data == result.data
    assert all(path.stat().st_mtime_ns == time for path, time in records.items())
