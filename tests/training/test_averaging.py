"""Averages against means over a list of all weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from references import swad as naive
from shoal.training.averaging import SWAD
from training import finetuning

SHAPES: list[tuple[int, ...]] = [(3, 2), (), (0, 4), (5,)]
Weights = list[list[Tensor]]


def path(steps: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> Weights:
    """The weights after each step of a pretended training: ``path(9)[0]`` are those after step 1."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(steps)]


def units(count: int) -> Weights:
    """Weights that are the step's unit vector, so that a mean shows how much each step counts in it."""
    return [[row] for row in torch.eye(count, dtype=torch.float64)]


def mean_of(weights: Weights) -> list[Tensor]:
    return [torch.stack([w.double() for w in tensors]).mean(0) for tensors in zip(*weights, strict=True)]


def exponential(weights: Weights, decay: float) -> list[Tensor]:
    mean = [w.double() for w in weights[0]]
    for t, now in enumerate(weights[1:], 2):
        share = min(decay, (1 + t) / (10 + t))
        mean = [share * m + (1 - share) * w.double() for m, w in zip(mean, now, strict=True)]
    return mean


def close(a: Any, b: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


# SWAD


def test_swad_weighs_the_steps_of_many_trainings_as_the_naive_form_does() -> None:
    """At every evaluation, with default and with other settings."""
    kinds = set()
    for number, losses in enumerate(naive.sequences(300)):
        other = 1 + number % 4, 5 + number % 5, (0.5, 1.0, 1.3, 2.0)[number % 4]
        options = other if number // 6 % 2 else (3, 6, 1.3)
        lengths = [1 + (number + i) % 3 for i in range(len(losses))]
        average, weights, step = SWAD(*options), units(sum(lengths)), 0
        for n, (loss, length) in enumerate(zip(losses, lengths, strict=True), 1):
            for _ in range(length):
                step += 1
                average.update(step, weights[step - 1])
            average.evaluated(loss)
            average.evaluated(0.0)  # without a step in between it does not count
            assert average.started == (naive.start_of(losses[:n], options[0], options[2])[0] is not None)
            segments, done = naive.released(losses[:n], *options)
            rest = [0.0] * (len(weights) - step)
            shares = torch.tensor(naive.step_weights(segments, lengths[:n]) + rest, dtype=torch.float64)
            mean: Any = average.mean()
            assert float((mean["tensors"][0] - shares).abs().max()) < 1e-12
            used = shares.nonzero().flatten() + 1
            assert (mean["first"], mean["last"], average.done) == (int(used[0]), int(used[-1]), done)
        assert len(average.state["queue"]) <= options[1]
        kinds.add((average.started, average.done))
    assert kinds == {(True, True), (True, False), (False, False)}


# Whole trainings


def training(average: str | None, batchnorm: bool = False, **options: Any) -> tuple[shoal.Fit, Weights]:
    """A run, and the weights after every step of its main loop."""
    model, seen = finetuning.network(*[nn.BatchNorm1d(6)] * batchnorm), {}

    class Look(shoal.Callback):
        def on_step(self, state: Any) -> None:
            seen[state.step] = [p.detach().clone() for p in model.parameters()]

    turned = finetuning.data(turned=True)  # so that the validation loss rises, for SWAD
    options = {"steps": 24, "eval_every": 1, "select": "last", "callbacks": [Look()]} | options
    run = finetuning.fit(options.pop("algorithm", "erm"), model, turned, average=average, **options)
    return run, list(seen.values())


@pytest.mark.parametrize("algorithm", ["erm", "fish", "idgm"])
@pytest.mark.parametrize("average", ["sma:3", "ema:0.8", "swad"])
def test_the_model_holds_the_mean_and_the_record_says_of_what(algorithm: str, average: str) -> None:
    run, seen = training(average, algorithm=algorithm, batchnorm=True)
    words = run.rule.split()
    first, last = int(words[-3]), int(words[-1])
    assert run.rule == f"last step, {average} of steps {first} to {last}"
    if average == "swad":
        losses = [p.scores["validation"].loss for p in run.history]
        steps = naive.released(losses)[0]
        assert (min(steps) + 1, max(steps) + 1) == (first, last)
        expected = mean_of([seen[step] for step in steps])
    else:
        assert (first, last) == (3 if average == "sma:3" else 1, 24)
        expected = exponential(seen, 0.8) if average == "ema:0.8" else mean_of(seen[2:])
    close(list(run.model.parameters()), expected, 1e-10)
    given = finetuning.data(turned=True)
    model: Any = run.model
    x, _ = given.examples.batch(torch.from_numpy(given.splits["train"].examples()).long())  # type: ignore[attr-defined]
    z = model.features[0](x).detach()
    torch.testing.assert_close(model.features[1].running_mean, z.mean(0), rtol=0, atol=1e-10)
    x, y = given.examples.batch(torch.from_numpy(given.splits["test"].examples()).long())  # type: ignore[attr-defined]
    assert run.scores("test").loss == pytest.approx(cross_entropy(run.model(x), y).item(), rel=1e-6)


def test_swad_without_a_start() -> None:
    slow = partial(torch.optim.SGD, lr=1e-3)
    run = finetuning.fit("erm", average="swad", steps=10, eval_every=1, optimizer=slow)
    assert run.rule == "last step, swad of steps 10 to 10 (swad found no start)"
