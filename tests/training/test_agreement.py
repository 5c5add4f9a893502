"""How well gradients agree: the numbers, and that measuring them changes nothing."""

from __future__ import annotations

import json
import math
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
from shoal.api.fit import as_domain_data
from shoal.data import DomainData, Domains, TensorData
from shoal.errors import InputError
from shoal.experiments.record import read_record
from shoal.gradients import cosine_matrix, gip, sign_agreement
from shoal.training.agreement import Tracking
from shoal.training.options import complete
from shoal.training.setup import Setup

TEST: Any = toy(20)["domain 1"]


class Noisy(nn.Module):
    """Adds numbers from every generator that a model may draw from."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * (torch.rand(1) + float(np.random.rand()) + random.random()) if self.training else x


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), Noisy(), nn.Linear(8, 2)
    )


def setup(algorithm: str, model: nn.Module, data: Any = None, **options: Any) -> Setup:
    data = data or as_domain_data(toy(), None, {"t": TEST})
    given = {"steps": 6, "batch_size": 8, "progress": False, "track_every": 1, "device": "cpu"} | options
    return Setup(algorithm, model, data, complete(**given))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_measurement_is_that_of_gradients_taken_one_by_one(accumulate: int) -> None:
    """On the batches of Fish's own step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    made = setup("fish", model, accumulate=accumulate)
    tracking, gradients = Tracking(made), []
    plan = made.sampler.plan(2)
    for _, rows in plan:
        x, y = made.examples.batch(torch.from_numpy(rows))
        gradients.append(list(torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))))
    tracking.measure(2)
    (found,) = tracking.read()
    names = made.data.splits["train"].names
    assert (found["step"], found["domains"]) == (2, [names[d] for d, _ in plan if d is not None])
    assert found["mean_cosine"] == pytest.approx(float(gip(gradients, normalize=True)), abs=1e-6)
    assert found["mean_inner_product"] == pytest.approx(float(gip(gradients)), abs=1e-6)
    assert found["sign_agreement"] == pytest.approx(float(sign_agreement(gradients)), abs=1e-6)
    np.testing.assert_allclose(found["matrix"], cosine_matrix(gradients), atol=1e-6)
    assert json.loads(json.dumps(found)) == found


def test_what_is_not_finite_is_none_and_a_large_comparison_has_no_matrix() -> None:
    x, y = torch.randn(240, 4), torch.arange(240) % 2
    domains = Domains.from_sizes({str(n): 4 for n in range(60)})
    data = DomainData(TensorData(x, y), {"train": domains}, 2, (4,), "")
    tracking = Tracking(setup("fish", nn.Linear(4, 2), data, domains_per_step=51, batch_size=4))
    x[0, 0] = math.inf
    assert tracking.count == 50
    for step in range(3):
        tracking.measure(step)
    found = [point for point in tracking.read() if "0" in point["domains"]]
    assert found
    assert all(point["mean_cosine"] is None and len(point["matrix"]) == 50 for point in found)
    tracking.count = 51
    tracking.measure(0)
    assert "matrix" not in tracking.read()[0]


@pytest.mark.parametrize("algorithm", ["fish", "erm", "reptile"])
def test_training_is_the_same_to_the_bit_with_and_without(algorithm: str) -> None:
    """With a model that draws from every generator; the state outside is that of before, too."""

    def fit(**options: Any) -> shoal.Fit:
        given: dict[str, Any] = {"steps": 12, "batch_size": 8, "lr": 0.01, "progress": False, "seed": 3}
        given |= {"device": "cpu", "eval_every": 5, "test": {"t": TEST}}
        return shoal.fit(algorithm, network(), toy(), **given, **options)

    runs = [fit(), fit(track_every=3), fit(track_every=1, track_after=True)]
    for run in runs[1:]:
        assert [p.loss for p in run.history] == [p.loss for p in runs[0].history]
        assert all(torch.equal(v, runs[0].model.state_dict()[k]) for k, v in run.model.state_dict().items())
    assert [[m["step"] for m in run.agreement] for run in runs] == [[], [0, 3, 6, 9], [*range(12)]]
    assert all("after" in m and "matrix" not in m for m in runs[2].agreement[:-1])
    assert "matrix" in runs[2].agreement[-1]


def test_of_thousands_of_domains_a_few_are_measured_that_depend_on_the_step_alone() -> None:
    count, size = 20_000, 4
    x, y = torch.randn(count * size, 4), torch.arange(count * size) % 2
    domains = Domains.from_sizes({f"user {i}": size for i in range(count)})
    data = DomainData(TensorData(x, y), {"train": domains}, 2, (4,), "")
    made = setup("erm", nn.Linear(4, 2), data, eval_limit=10, domains_per_step=10, seed=5)

    def tracked(steps: range) -> list[dict[str, Any]]:
        tracking = Tracking(made)
        for step in steps:
            tracking.measure(step)
        return tracking.read()

    first = tracked(range(0, 100, 5))
    assert all(len(set(m["domains"])) == 10 for m in first)
    assert len({name for m in first for name in m["domains"]}) > 150  # other ones every time
    assert tracked(range(50, 100, 5)) == first[10:]  # as a resumed training, which begins there


def test_one_domain_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="only one to train on"):
        shoal.fit("erm", nn.Linear(4, 2), {"a": TEST}, steps=2, track_every=1, progress=False)


def test_in_the_record_of_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "batch_size": 8, "out": tmp_path / "run", "progress": False}
    shoal.train("fish", "linear", track_every=2, device="cpu", **options)
    record = read_record(tmp_path / "run" / "record.json")
    assert [m["step"] for m in record.agreement] == [0, 2, 4]
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "agreement"] == [0, 2, 4]
    # Tracking does not decide the result: the same run without it is done already.
    again = shoal.train("fish", "linear", device="cpu", **options)
    assert again.records[0] == record
