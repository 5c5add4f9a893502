"""Evaluation on a sample: which examples, how they are passed, and what is said of it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.api.fit import as_domain_data
from shoal.data import Domains
from shoal.training.evaluate import MOST_DOMAINS, sample
from shoal.training.options import complete
from shoal.training.setup import TRAIN_SAMPLE, Setup


def test_it_is_a_random_sample() -> None:
    domains = Domains.from_sizes({"a": 10_000})
    few = sample(domains, 1000)
    assert len(few.indices) == 1000
    assert abs(few.indices.mean() - 5000) < 300  # the first ones would give 500
    assert np.array_equal(few.indices, sample(domains, 1000).indices)


def test_examples_in_several_domains_and_twice() -> None:
    domains = Domains.from_indices({"a": [5, 5, 1, 2, 3], "b": [1, 2, 3, 4, 5, 6]})
    few = sample(domains, 6)
    assert few.sizes.tolist() == [3, 3]
    # What is chosen depends on the example, so that domains share what they can.
    assert len(few.examples()) < 6


def test_a_million_domains_are_bounded() -> None:
    domains = Domains.from_sizes({str(n): 2 for n in range(MOST_DOMAINS + 1000)})
    assert len(sample(domains, 100).indices) == MOST_DOMAINS
    assert len(sample(Domains.from_sizes({str(n): 2 for n in range(300)}), 100)) == 300


def blobs(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    y = torch.arange(count) % 2
    return {n: (torch.randn(count, 2) + y[:, None], y) for n in "ab"}


def fit(train: Any, **options: Any) -> shoal.Fit:
    base: dict[str, Any] = {"steps": 100, "batch_size": 8, "device": "cpu", "progress": False, "lr": 0.01}
    return shoal.fit("erm", nn.Linear(2, 2), train, **base | options)


@pytest.mark.parametrize(("limit", "sampled"), [(None, (TRAIN_SAMPLE, 8000)), (7000, (7000, 8000))])
def test_training_domains_are_sampled_and_scores_say_so(limit: int | None, sampled: tuple[int, int]) -> None:
    run = fit(blobs(4000), test=blobs(3000), eval_limit=limit, steps=5)
    assert run.scores("train").sampled == sampled
    assert run.scores("test").sampled is None
    assert run.scores("test").sizes == (3000, 3000)


@pytest.mark.parametrize(
    ("steps", "test", "count"),
    [(100, 160, 10), (100, 161, 5), (100, 461, 2), (100, 961, 1), (3, 961, 1), (3, 9, 3)],
)
def test_evaluations_cost_no_more_than_training(steps: int, test: int, count: int) -> None:
    """1,600 examples are trained on; evaluations of 2,000, 40 of them from train, are never too many."""
    run = fit(blobs(20), test={"t": blobs(test)["a"]}, steps=steps)
    assert len(run.history) == count
    assert run.last.step == steps


def test_evaluations_that_were_asked_for_are_done_and_all_seeds_score_the_same_examples() -> None:
    assert len(fit(blobs(20), test=blobs(2000), eval_every=10).history) == 10
    assert len(fit(blobs(20), validation=blobs(2000), patience=100).history) == 10
    data = as_domain_data(blobs(400), None, None)
    first, second = (
        Setup("erm", nn.Linear(2, 2), data, complete(steps=1, eval_limit=50, seed=seed, progress=False))
        for seed in (0, 1)
    )
    assert np.array_equal(first.evaluator.which["train"], second.evaluator.which["train"])
    assert first.evaluator.batch_size == 4 * 2 * 32
