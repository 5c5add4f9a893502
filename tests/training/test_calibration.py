"""Temperature and reliability against naive versions."""

import math

import numpy as np
import pytest

from shoal.training.calibration import fit_temperature, reliability


def sampled(temperature, count=400, classes=3):
    """Logits that are ``temperature`` times too large, and labels drawn from the probabilities."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(count, classes)) * 2
    return z * temperature, np.array([rng.choice(classes, p=softmax(row, 1)) for row in z])


def softmax(row, temperature):
    exps = [math.exp(v / temperature) for v in row]
    return [e / sum(exps) for e in exps]


def nll(z, y, temperature):
    return -sum(math.log(softmax(row, temperature)[c]) for row, c in zip(z, y, strict=True)) / len(y)


def test_the_temperature_has_the_lowest_loss_and_is_the_one_that_was_applied():
    z, y = sampled(3.0)
    found = fit_temperature(z, y)
    assert all(nll(z, y, found) < nll(z, y, found * f) for f in (0.8, 0.99, 1.01, 1.25))
    assert found == pytest.approx(3.0, rel=0.2)
    assert fit_temperature(z / 7 + 5, y) == pytest.approx(found / 7)  # scaled alike; a shift changes nothing


def test_bounds_and_a_prior_that_keeps_few_examples_from_deciding() -> None:
    assert (fit_temperature(np.eye(3), [0, 1, 2]), fit_temperature(np.eye(3), [1, 2, 0])) == (0.01, 100.0)
    right = np.eye(2)[[0, 1, 0, 1]] * 2.0
    assert 0.3 < fit_temperature(right, [0, 1, 0, 1], prior=1.0) < 1
    assert fit_temperature(np.tile(right, (5000, 1)), [0, 1, 0, 1] * 5000, prior=1.0) < 0.2


@pytest.mark.parametrize("bins", [1, 4, 10])
def test_reliability_equals_a_loop_over_examples(bins):
    z, y = sampled(2.0, count=60)
    p = np.array([softmax(row, 1) for row in z])
    found, ece = reliability(p, y, bins), 0.0
    for b in range(bins):
        inside = [i for i in range(60) if b / bins < max(p[i]) <= (b + 1) / bins]
        assert found["counts"][b] == len(inside)
        if not inside:
            assert found["accuracy"][b] is found["confidence"][b] is None
            continue
        accuracy = sum(p[i].argmax() == y[i] for i in inside) / len(inside)
        confidence = sum(max(p[i]) for i in inside) / len(inside)
        assert (found["accuracy"][b], found["confidence"][b]) == pytest.approx((accuracy, confidence))
        ece += len(inside) / 60 * abs(accuracy - confidence)
    assert found["ece"] == pytest.approx(ece)
    assert len(found["edges"]) == bins + 1
