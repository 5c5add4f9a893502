"""How well gradients agree: the numbers, and that measuring them leaves no trace."""

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal.training.loop import Training
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from algorithms.every_algorithm import toy
from shoal.algorithms import build
from shoal.data.batch import DomainBatch, Task
from shoal.data.domains import Domains
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.experiments.record import read_record
from shoal.gradients import cosine_matrix, gip, gram_matrix, mean_of_pairs
from shoal.gradients import sign_agreement as agreeing
from shoal.training.agreement import Agreement, Tracking
from shoal.training.engine import Engine
from shoal.training.options import complete


class Noisy(nn.Module):
    """Adds numbers from every generator that a model may draw from."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x + 0.01 * (torch.rand(1) + float(np.random.rand()) + random.random())


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), Noisy(), nn.Linear(8, 2)
    )


def some_gradients(count: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (4,), (2, 3), ()]
    return [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(count)]


def flat(g: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in g])


@pytest.mark.parametrize("count", [2, 3, 7])
def test_matrices_are_those_of_naive_loops(count: int) -> None:
    gradients = some_gradients(count)
    gradients[1] = [torch.zeros_like(x) for x in gradients[1]]
    rows = [flat(g) for g in gradients]
    expected = torch.zeros(count, count, dtype=torch.float64)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            size = float(a.norm() * b.norm())
            expected[i, j] = float(a @ b) / size if size else 0.0
    matrix = cosine_matrix(gradients)
    torch.testing.assert_close(matrix, expected, atol=1e-12, rtol=0)
    pairs = [float(expected[i, j]) for i in range(count) for j in range(count) if i != j]
    assert float(mean_of_pairs(matrix)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert float(mean_of_pairs(matrix)) == pytest.approx(float(gip(gradients, normalize=True)), abs=1e-12)
    assert float(mean_of_pairs(gram_matrix(gradients))) == pytest.approx(float(gip(gradients)), abs=1e-12)


def test_sign_agreement_by_hand() -> None:
    up, down, none = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, -1.0, 0.0]), torch.zeros(3)
    assert float(agreeing([[up], [down]])) == pytest.approx(0.5)  # agree, disagree; the last does not count
    assert float(agreeing([[up], [up], [none]])) == pytest.approx(2 / 3)
    assert float(agreeing([[none], [none]])) == 0.0
    with pytest.raises(InputError, match="at least 2"):
        agreeing([[up]])


def parts(count: int = 3, size: int = 6) -> list[DomainBatch]:
    generator = torch.Generator().manual_seed(3)
    return [
        DomainBatch(
            torch.randn(size, 4, generator=generator), torch.randint(2, (size,), generator=generator), d
        )
        for d in range(count)
    ]


def measuring(model: nn.Module, accumulate: int = 1) -> Agreement:
    algorithm = build("erm", model, nn.functional.cross_entropy, Task(3, 2))
    engine = Engine(torch.optim.SGD(model.parameters(), 0.1), accumulate=accumulate)
    return Agreement(algorithm, engine)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_measurement_is_that_of_gradients_taken_one_by_one(accumulate: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    batches = parts()
    gradients = []
    for batch in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    measure = measuring(model, accumulate)
    found = measure.read(measure(7, ["a", "b", "c"], batches))
    assert found["step"] == 7
    assert found["domains"] == ["a", "b", "c"]
    assert found["mean_cosine"] == pytest.approx(float(gip(gradients, normalize=True)), abs=1e-6)
    assert found["mean_inner_product"] == pytest.approx(float(gip(gradients)), abs=1e-6)
    assert found["sign_agreement"] == pytest.approx(float(agreeing(gradients)), abs=1e-6)
    np.testing.assert_allclose(found["matrix"], cosine_matrix(gradients), atol=1e-6)
    assert json.loads(json.dumps(found)) == found


def test_a_measurement_leaves_no_trace() -> None:
    model = network().train()
    measure = measuring(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index,union-attr]
    measure(0, ["a", "b", "c"], parts())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert states[2] == random.getstate()
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())


def test_what_is_not_finite_is_none() -> None:
    model = nn.Linear(4, 2)
    batches = parts()
    batches[0].x[0, 0] = math.inf
    measure = measuring(model)
    found = measure.read(measure(0, ["a", "b", "c"], batches))
    assert found["mean_cosine"] is None
    assert found["matrix"][1][2] is not None
    json.dumps(found, allow_nan=False)


class Items(Dataset):
    """Examples that are read one by one, with a transform that draws random numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + 0.1 * torch.rand(4), int(self.y[i])


TEST_X, TEST_Y = toy(20)["domain 1"]


def fit(algorithm: str, model: nn.Module, plain: bool = False, **options: Any) -> shoal.Fit:
    train: dict[str, Any] = {k: Items(*v) if plain else v for k, v in toy().items()}
    given = {"steps": 12, "batch_size": 8, "lr": 0.01, "progress": False, "eval_every": 5, "seed": 3}
    test = Items(TEST_X, TEST_Y) if plain else (TEST_X, TEST_Y)
    return shoal.fit(algorithm, model, train, test={"t": test}, **{**given, **options})


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("algorithm", ["fish", "erm", "reptile"])
def test_training_is_the_same_to_the_bit_with_and_without(algorithm: str, plain: bool) -> None:
    weights = []
    for options in ({}, {"track_every": 3}, {"track_every": 1}):
        run = fit(algorithm, network(), plain, **options)
        weights.append((run.model.state_dict(), [p.loss for p in run.history]))
    for other, losses in weights[1:]:
        assert losses == weights[0][1]
        assert all(torch.equal(v, other[k]) for k, v in weights[0][0].items())


def test_fish_is_measured_on_its_own_batches() -> None:
    """The naive version: the same batches from the sampler, gradients one by one at the start."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    training = _training("fish", model, track_every=100)
    plan = training.sampler.plan(0)
    start = [p.detach().clone() for p in model.parameters()]
    training.run()
    found = training.agreement
    gradients = []
    for _, rows in plan:
        x, y = training.examples.batch(torch.from_numpy(rows))
        logits = nn.functional.linear(x, start[0].requires_grad_(), start[1].requires_grad_())
        gradients.append(list(torch.autograd.grad(nn.functional.cross_entropy(logits, y), start)))
    assert [m["step"] for m in found] == [0]
    names = training.data.splits["train"].names
    assert found[0]["domains"] == [names[d] for d, _ in plan if d is not None]
    np.testing.assert_allclose(found[0]["matrix"], cosine_matrix(gradients), atol=1e-6)


def _training(algorithm: str, model: nn.Module, **options: Any) -> Training:
    from shoal.api.fit import as_domain_data

    data = as_domain_data(toy(), None, {"t": (TEST_X, TEST_Y)})
    return Training(algorithm, model, data, complete(steps=6, batch_size=8, progress=False, **options))


def test_thousands_of_domains_cost_no_more_than_a_few() -> None:
    count, size = 20_000, 4
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count * size, 4, generator=generator), torch.arange(count * size) % 2
    data = shoal.data.TensorData(x, y)
    domains = Domains.from_sizes({f"user {i}": size for i in range(count)})

    def tracked() -> list[dict[str, Any]]:
        torch.manual_seed(0)
        measure = measuring(nn.Linear(4, 2))
        sampler = DomainBatchSampler(domains, 8, 1, draw="pooled", seed=5, steps=10)
        tracking = Tracking(measure, domains, sampler, data, every=5, count=10)
        for step in range(100):
            tracking(step)
        return tracking.read()

    began = time.monotonic()
    first = tracked()
    assert time.monotonic() - began < 5
    assert [m["step"] for m in first] == list(range(0, 100, 5))
    assert all(len(set(m["domains"])) == 10 for m in first)
    assert len({name for m in first for name in m["domains"]}) > 150  # other ones every time
    assert tracked() == first
    # A resumed training begins elsewhere and must measure the same domains.
    measure = measuring(nn.Linear(4, 2))
    sampler = DomainBatchSampler(domains, 8, 1, draw="pooled", seed=5, steps=10)
    later = Tracking(measure, domains, sampler, data, every=5, count=10)
    later(50)
    assert later.read()[0]["domains"] == first[10]["domains"]


def test_a_large_comparison_has_no_matrix() -> None:
    measure = measuring(nn.Linear(4, 2))
    found = measure.read(measure(0, [str(i) for i in range(60)], parts(60)))
    assert "matrix" not in found
    assert found["mean_cosine"] is not None


def test_one_domain_cannot_be_compared() -> None:
    one = {"a": toy()["domain 0"]}
    with pytest.raises(InputError, match="only one to train on"):
        shoal.fit("erm", nn.Linear(4, 2), one, steps=2, track_every=1, progress=False)


def test_in_the_record_of_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "batch_size": 8, "out": tmp_path / "run", "progress": False}
    shoal.train("fish", "rotated-digits", track_every=2, **options)
    record = read_record(tmp_path / "run" / "record.json")
    assert [m["step"] for m in record.agreement] == [0, 2, 4]
    assert len(record.agreement[-1]["matrix"]) == len(record.agreement[-1]["domains"])
    shoal.train("fish", "rotated-digits", **options)  # which does not belong to what decides the result
