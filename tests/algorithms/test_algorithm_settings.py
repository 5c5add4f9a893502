"""Every setting of every algorithm with values that it was not made for: an InputError, or a working one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_algorithm import S, network, toy

from nasty_values import NASTY
from shoal.algorithms import algorithm_class, build, registry, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data import DomainBatch, Task
from shoal.errors import InputError
from shoal.training.engine import Engine

BATCHES = [DomainBatch(x[:4], y[:4], d) for d, (x, y) in enumerate(toy().values())]


def one_step(name: str, **given: Any) -> None:
    """Makes the algorithm and takes a step; nothing but InputError may come out of it."""
    with torch.random.fork_rng(devices=[]):
        model = network()
        algorithm = build(name, model, torch.nn.functional.cross_entropy, Task(S, 2, features=16), **given)
        auxiliary = algorithm.auxiliary_optimizers()
        optimizer = torch.optim.Adam(trained_parameters(algorithm, auxiliary), 0.01)
        engine = Engine(algorithm.wrap(optimizer, S), auxiliary=auxiliary)
        assert "losses" in algorithm.step(BATCHES, engine)


@pytest.mark.parametrize(
    ("name", "setting"), [(n, s) for n in registry.names() for s in settings_of(algorithm_class(n))]
)
def test_no_value_of_a_setting_ends_in_a_traceback(name: str, setting: str) -> None:
    refused: dict[str, str] = {}
    every = {**NASTY, "default": settings_of(algorithm_class(name))[setting]}
    for label, value in every.items():
        try:
            one_step(name, **{setting: value})
        except InputError as error:
            refused[label] = str(error)
    for message in refused.values():
        assert message.startswith(setting)
        assert len(message) < 300
        assert "\n" not in message
    assert "odd" in refused
    assert {"nan", "inf", "-inf", "[]", "'0,5'"} <= set(refused)
    assert "default" not in refused


def test_a_comma_is_named() -> None:
    with pytest.raises(InputError) as refused:
        one_step("fish", meta_lr="0,5")
    assert str(refused.value) == (
        "meta_lr of Fish must be a number above 0 and at most 1, got '0,5'. Did you mean 0.5?"
    )


def test_a_share_is_not_taken_for_steps() -> None:
    with pytest.raises(
        InputError, match=r"a fraction of the training from 0 to 2, got 500\.0\. Did you mean 500\?"
    ):
        one_step("irm", start=500.0)
