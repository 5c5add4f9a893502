"""DANN, CDANN and MLDG against DomainBed's update rules, written naively, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from references import adversarial
from shoal.algorithms import build
from shoal.algorithms.base import trained_parameters
from shoal.data import DomainBatch, Task
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.training.engine import Engine

DOMAINS, WIDTH, CLASSES, SIZE = 3, 4, 5, 6
PRESENT = ([0, 1, 2, 3, 4], [0, 2, 3], [1], [4, 0], [3, 1])
"""Classes in a step's batches: all; some absent in between and above; one alone; some between; …"""
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a penalty": {"gradient_penalty": 0.8, "weight": 0.7},
    "two steps": {"discriminator_steps": 2, "beta1": 0.0, "gradient_penalty": 0.3, "weight": 3.0},
    "three steps": {"discriminator_steps": 3, "discriminator_weight_decay": 0.1, "depth": 4, "width": 5},
}


def network() -> FeatureModel:
    torch.manual_seed(3)
    features = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, WIDTH), nn.Tanh())
    return FeatureModel(features, linear_head(WIDTH, CLASSES)).double()


def batches(step: int, count: int = DOMAINS) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(step)
    classes = torch.tensor(PRESENT[step % len(PRESENT)])
    found = []
    for d in range(count):
        x = torch.randn(SIZE, 4, generator=draw, dtype=torch.float64) * (1 + d) + d
        y = classes[torch.randint(len(classes), (SIZE,), generator=draw)]
        found.append(DomainBatch(x, y, d))
    return found


def plain(given: list[DomainBatch]) -> list[tuple[Tensor, Tensor, int]]:
    return [(b.x, b.y, b.domain) for b in given]  # type: ignore[misc]


class Pair:
    """Our algorithm and the reference, which begin alike."""

    def __init__(self, name: str, *, form: str = "domainbed", lr: float = 1e-2, **given: Any) -> None:
        settings = {"width": 7, "discriminator_lr": 2e-2, **given}
        self.model = network()
        twin = copy.deepcopy(self.model)
        task = Task(DOMAINS, CLASSES, features=WIDTH)
        self.algorithm: Any = build(name, self.model, cross_entropy, task, form=form, **settings)
        beta1 = settings.get("beta1", 0.5)
        auxiliary = self.algorithm.auxiliary_optimizers()
        params = trained_parameters(self.algorithm, auxiliary)
        options = type(self.algorithm).domainbed({"beta1": beta1}).optimizer
        optimizer = torch.optim.Adam(params, lr=lr, weight_decay=0.03, **options)
        self.engine = Engine(optimizer, auxiliary=auxiliary)
        own = self.algorithm.discriminator
        self.reference = adversarial.Adversarial(
            twin,
            copy.deepcopy(own.layers),
            copy.deepcopy(own.classes),
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
        self.engine.step(self.algorithm, batches(step))
        return self.reference.update(plain(batches(step)))

    def differences(self) -> float:
        ours = [self.model, self.algorithm.discriminator]
        theirs = [self.reference.model, self.reference.discriminator, self.reference.classes]
        a, b = ([p for m in modules if m is not None for p in m.parameters()] for modules in (ours, theirs))
        return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_domainbeds(name: str, case: str) -> None:
    """Over eight steps, in which the classes of every batch are others, and mostly some are absent."""
    pair = Pair(name, **CASES[case])
    before, moved = copy.deepcopy(pair.model.state_dict()), []
    for step in range(8):
        moved.append(pair.take(step))
        assert pair.differences() < 1e-10
        now = pair.model.state_dict()
        assert all(torch.equal(now[k], before[k]) for k in now) == (moved[-1] == "discriminator")
        before = copy.deepcopy(now)
    d_steps = CASES[case].get("discriminator_steps", 1)
    expected = (["discriminator"] * (d_steps - 1) + (["generator"] + ["discriminator"] * d_steps) * 8)[:8]
    assert moved == expected


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dann", {"form": "joint"}),
        ("dann", {"beta1": 0.6}),
        ("dann", {"discriminator_steps": 2}),
        ("dann", {"gradient_penalty": 0.5}),
        ("cdann", {"form": "joint"}),
        ("cdann", {"discriminator_weight_decay": 0.01}),
    ],
)
def test_every_part_of_the_rule_counts(name: str, change: dict[str, Any]) -> None:
    """With one of them otherwise, the steps are not the reference's."""
    pair = Pair(name, gradient_penalty=0.8)
    other = Pair(name, **{"gradient_penalty": 0.8, **change})
    for step in range(6):
        pair.take(step)
        other.take(step)
    pair.reference = other.reference if "form" in change else pair.reference
    pair.model, pair.algorithm = other.model, other.algorithm
    assert pair.differences() > 1e-4


def test_absent_classes_make_domainbeds_loss_smaller() -> None:
    """With the labels 0, 2, 3 it is 3/4 of the mean over the classes there are; ours stays that mean."""
    outputs = {}
    for form in ("domainbed", "joint"):
        algorithm = Pair("cdann", form=form).algorithm
        some = batches(1)
        assert {int(c) for b in some for c in b.y} == {0, 2, 3}
        seen = algorithm.forward_batches(some)
        outputs[form] = algorithm.objective(seen)[1]["discriminator"]
    torch.testing.assert_close(outputs["domainbed"], 0.75 * outputs["joint"], **CLOSE)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_processes_agree_on_a_discriminator_with_dropout(dropout: float) -> None:
    """Whose masks differ between them: gradients are averaged, where without dropout they are equal."""
    pair, averaged = Pair("dann", dropout=dropout), []
    average = pair.engine.average
    pair.engine.average = lambda g: averaged.append(len(g)) or average(g)  # type: ignore
    for step in range(2):
        pair.engine.step(pair.algorithm, batches(step))
    assert averaged == ([len(list(pair.algorithm.discriminator.parameters()))] if dropout else [])


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_whole_training_in_turns(name: str, turns: int) -> None:
    """With either side's step first between two evaluations: logs of both are read together."""
    train = {f"d{b.domain}": (b.x, b.y) for b in batches(0)}
    settings = {"form": "domainbed", "discriminator_steps": turns, "dropout": 0.1, "gradient_penalty": 0.5}
    run = shoal.fit(
        name,
        network(),
        train,
        test={"t": train["d0"]},
        steps=9,
        eval_every=3,
        batch_size=3,
        settings=settings,
        progress=False,
    )
    assert run.record["status"] == "finished"


class TestMLDG:
    def gradient(self, given: list[DomainBatch], **settings: Any) -> tuple[FeatureModel, list[Tensor]]:
        model = network()
        algorithm = build("mldg", model, cross_entropy, Task(DOMAINS, CLASSES, features=WIDTH), **settings)
        engine = Engine(torch.optim.SGD(model.parameters(), 0.1))
        return model, algorithm.gradient(given, engine)[0]

    @pytest.mark.parametrize("held_out", [1, 2])
    def test_of_two_domains_it_is_domainbeds_but_for_the_virtual_step(self, held_out: int) -> None:
        """One pair, which DomainBed divides by the two domains. With n_meta_test=2 it would have no pair."""
        model, found = self.gradient(batches(0, 2), beta=0.7, inner_lr=0.2, held_out=held_out)
        expected = adversarial.mldg(
            model, plain(batches(0, 2)), beta=0.7, held_out=1, inner=lambda p: torch.optim.SGD(p, 0.2)
        )
        torch.testing.assert_close([g / 2 for g in found], expected, **CLOSE)
        nothing = adversarial.mldg(
            model, plain(batches(0, 2)), beta=0.7, held_out=2, inner=lambda p: torch.optim.SGD(p, 0.2)
        )
        assert not any(g.any() for g in nothing)

    def test_of_three_domains_each_one_held_out_counts_here(self) -> None:
        """DomainBed's single pair leaves the second one out."""
        changed = batches(0)
        changed[2] = changed[2]._replace(y=(changed[2].y + 1) % CLASSES)
        inner = {"beta": 0.7, "inner_lr": 0.2}
        (model, one), (_, other) = self.gradient(batches(0), **inner), self.gradient(changed, **inner)
        assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) > 1e-3
        how: dict[str, Any] = {"beta": 0.7, "held_out": 2, "inner": lambda p: torch.optim.Adam(p, 1e-2)}
        theirs = [adversarial.mldg(model, plain(each), **how) for each in (batches(0), changed)]
        torch.testing.assert_close(*theirs, rtol=0, atol=0)
