"""DANN and CDANN against DomainBed's update rules, written naively, in float64."""

import copy
from typing import Any

import pytest
import torch
from test_formulas import SGD, blocks, equal, meta, network, on

from references import adversarial
from shoal.algorithms.base import trained_parameters
from shoal.training.engine import Engine

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a penalty": {"gradient_penalty": 0.8, "weight": 0.7},
    "two steps": {"discriminator_steps": 2, "beta1": 0.0, "gradient_penalty": 0.3, "weight": 3.0},
    "three steps": {"discriminator_steps": 3, "discriminator_weight_decay": 0.1, "depth": 4, "width": 5},
}


def some(step: int) -> Any:
    """The blocks of a step; in every second one without the class 1, in some with the class 0 alone."""
    absent = {1: 1, 3: 2}.get(step % 4)
    return [(x, y if absent is None else y // absent * absent, d) for x, y, d in blocks(step, size=5)]


class Pair:
    """Our algorithm and the reference, which begin alike."""

    def __init__(self, name: str, *, form: str = "domainbed", lr: float = 1e-2, **given: Any) -> None:
        settings = {"width": 7, "discriminator_lr": 2e-2, **given}
        self.model = network()
        twin, beta1 = copy.deepcopy(self.model), settings.get("beta1", 0.5)
        self.algorithm, _ = on(name, self.model, SGD, form=form, **settings)
        auxiliary = self.algorithm.auxiliary_optimizers()
        options = type(self.algorithm).domainbed({"beta1": beta1}).optimizer
        params = trained_parameters(self.algorithm, auxiliary)
        optimizer = torch.optim.Adam(params, lr=lr, weight_decay=0.03, **options)
        self.engine = Engine(self.algorithm, optimizer, auxiliary=auxiliary)
        self.reference = adversarial.Adversarial(
            twin,
            copy.deepcopy(self.algorithm.discriminator.layers),
            copy.deepcopy(self.algorithm.discriminator.classes),
            weight=settings.get("weight", 1.0),
            d_steps=settings.get("discriminator_steps", 1),
            penalty=settings.get("gradient_penalty", 0.0),
            beta1=beta1,
            lr_g=lr,
            lr_d=settings["discriminator_lr"],
            decay_g=0.03,
            decay_d=settings.get("discriminator_weight_decay", 0.0),
        )

    def take(self, step: int) -> str:
        self.engine.step(meta(some(step)), step)
        return self.reference.update(some(step))

    def difference(self) -> float:
        ours = [self.model, self.algorithm.discriminator]
        theirs = [self.reference.model, self.reference.discriminator, self.reference.classes]
        a, b = ([p for m in modules if m is not None for p in m.parameters()] for modules in (ours, theirs))
        return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_domainbeds(name: str, case: str) -> None:
    """Over eight steps, in some of which classes are absent."""
    pair, moved = Pair(name, **CASES[case]), []
    for step in range(8):
        before = copy.deepcopy(pair.model.state_dict())
        moved.append(pair.take(step))
        assert pair.difference() < 1e-10
        assert equal(pair.model.state_dict(), before) == (moved[-1] == "discriminator")
    d_steps = CASES[case].get("discriminator_steps", 1)
    expected = (["discriminator"] * (d_steps - 1) + (["generator"] + ["discriminator"] * d_steps) * 8)[:8]
    assert moved == expected
