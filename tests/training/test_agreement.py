"""How well gradients agree: the numbers, and that measuring them changes nothing."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from algorithms.every_algorithm import toy
from shoal.gradients import cosine_matrix, gip, sign_agreement

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
