"""How well gradients agree: the numbers, and that measuring them changes nothing."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from algorithms.every_algorithm import toy
from shoal.data import DomainData, Domains, TensorData
from shoal.errors import InputError
from shoal.experiments.record import read_record
from shoal.gradients import cosine_matrix, gip, sign_agreement
from shoal.training.stopping import Diverged

TEST: Any = toy(20)["domain 1"]


class Noisy(nn.Module):
    """Adds numbers from every generator that a model may draw from."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * (torch.rand(1) + float(np.random.rand()) + random.random()) if self.training else x


def fit(algorithm: str, model: nn.Module, data: Any = None, **options: Any) -> shoal.Fit:
    given: dict[str, Any] = {"steps": 6, "batch_size": 8, "lr": 0.01, "progress": False, "device": "cpu"}
    return shoal.fit(algorithm, model, data or toy(), **given | options)


class Batches(shoal.Callback):
    """Keeps what Fish's own steps take, and the weights before them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_step(self, state: Any) -> None:
        self.seen.append((state.batch, copy.deepcopy(state.model)))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_measurement_is_that_of_gradients_taken_one_by_one(accumulate: int) -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), Batches()
    run = fit("fish", model, track_every=5, accumulate=accumulate, callbacks=[batches])
    found, (batch, before) = run.agreement[-1], batches.seen[5]
    gradients = []
    for block in batch.split():
        loss = cross_entropy(before(block.x), block.y)
        gradients.append(list(torch.autograd.grad(loss, list(before.parameters()))))
    assert (found["step"], found["domains"]) == (5, [f"domain {n}" for n in batch.ids.tolist()])
    assert found["mean_cosine"] == pytest.approx(float(gip(gradients, normalize=True)), abs=1e-6)
    assert found["mean_inner_product"] == pytest.approx(float(gip(gradients)), abs=1e-6)
    assert found["sign_agreement"] == pytest.approx(float(sign_agreement(gradients)), abs=1e-6)
    np.testing.assert_allclose(found["matrix"], cosine_matrix(gradients), atol=1e-6)
    assert json.loads(json.dumps(found)) == found


def users(count: int, size: int = 4) -> Any:
    x, y = torch.randn(count * size, 4), torch.arange(count * size) % 2
    domains = Domains.from_sizes({str(n): size for n in range(count)})
    return DomainData(TensorData(x, y), {"train": domains}, 2, (4,), "")


def test_of_many_domains_a_few_are_measured_that_depend_on_the_step_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 12, "eval_limit": 10, "batch_size": 4, "domains_per_step": 51}
    for every in (2, 4):
        fit("erm", nn.Linear(4, 2), users(500), track_every=every, folder=tmp_path / str(every), **options)
    lines = [(tmp_path / folder / "metrics.jsonl").read_text().splitlines() for folder in "24"]
    found, some = ([x for x in map(json.loads, each) if x["phase"] == "agreement"] for each in lines)
    assert all(len(set(m["domains"])) == len(m["matrix"]) == 50 for m in found)
    assert len({name for m in found for name in m["domains"]}) > 150  # other ones every time
    assert [m["domains"] for m in some] == [m["domains"] for m in found[::2]]


def test_what_is_not_finite_is_null_and_one_domain_cannot_be_compared(tmp_path: Path) -> None:
    data = users(4)
    data.examples.x[:] = 1e25
    with pytest.raises(Diverged):
        fit("fish", nn.Linear(4, 2), data, batch_size=4, steps=1, track_every=1, folder=tmp_path)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["mean_inner_product"] is None
    with pytest.raises(InputError, match="only one to train on"):
        fit("erm", nn.Linear(4, 2), {"a": TEST}, track_every=1)


@pytest.mark.parametrize("algorithm", ["fish", "erm", "reptile"])
def test_training_is_the_same_to_the_bit_with_and_without(algorithm: str) -> None:
    """With a model that draws from every generator; the state outside is that of before, too."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), Noisy(), nn.Linear(8, 2)
    network = nn.Sequential(*layers)
    given: dict[str, Any] = {"steps": 12, "eval_every": 5, "test": {"t": TEST}}
    tracked: list[dict[str, Any]] = [{}, {"track_every": 3}, {"track_every": 1, "track_after": True}]
    runs = [fit(algorithm, copy.deepcopy(network), **given, **options) for options in tracked]
    for run in runs[1:]:
        assert [p.loss for p in run.history] == [p.loss for p in runs[0].history]
        assert all(torch.equal(v, runs[0].model.state_dict()[k]) for k, v in run.model.state_dict().items())
    assert [[m["step"] for m in run.agreement] for run in runs] == [[], [0, 3, 6, 9], [*range(12)]]
    assert all("after" in m and "matrix" not in m for m in runs[2].agreement[:-1])
    assert "matrix" in runs[2].agreement[-1]


def test_in_the_record_of_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "batch_size": 8, "out": tmp_path / "run", "progress": False}
    shoal.train("fish", "linear", track_every=2, device="cpu", **options)
    record = read_record(tmp_path / "run" / "record.json")
    assert [m["step"] for m in record.agreement] == [0, 2, 4]
    # Tracking does not decide the result: the same run without it is done already.
    assert shoal.train("fish", "linear", device="cpu", **options).records[0] == record
