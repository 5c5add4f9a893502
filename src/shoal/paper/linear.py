"""The paper's linear example: which feature does a linear classifier trust, and when?

Logistic loss, exact expectations (each kind of example weighted by its share), float64, zero start, plain
SGD. Every method moves at the same effective rate, 1 a step: ERM and IDGM directly, Fish and its kin with
α = 10, ε = 0.05 over two inner steps (εαS = 1). Weight decay, if any, acts inside the inner steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algorithms import build
from shoal.data.batch import DomainBatch, Task
from shoal.data.sampler import DomainBatchSampler, Draw
from shoal.data.sets import load
from shoal.training.engine import Engine

RATE, ALPHA, EPSILON = 1.0, 10.0, 0.05
STEPS = 1000
EARLY = 100
DECAYS = (0.0, 0.004, 0.008, 0.012)
FISH = {"meta_lr": EPSILON}


@dataclass(frozen=True)
class Row:
    label: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    draw: Draw = "domains"
    rate: float = RATE


ROWS = (
    Row("ERM", "erm", draw="pooled"),
    Row("IDGM, normalised, γ=0.1", "idgm", {"gamma": 0.1, "trust": None}),
    Row("IDGM, raw, γ=2.5", "idgm", {"gamma": 2.5, "normalize": False, "trust": None}),
    Row("IDGM, normalised, trust 0.9", "idgm", {"gamma": 1.0, "trust": 0.9}),
    Row("IGA, λ=1", "iga", {"weight": 1.0}),
    Row("IGA, λ=100", "iga", {"weight": 100.0}),
    Row("Fish", "fish", FISH, rate=ALPHA),
    Row("Fish, random grouping", "fish", FISH, draw="regrouped", rate=ALPHA),
    Row("Reptile", "reptile", FISH, draw="one-domain", rate=ALPHA),
)


@dataclass(frozen=True)
class LinearResult:
    """One method at one weight decay: its path, and what it predicts along it."""

    row: Row
    weight_decay: float
    steps: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    """w1, w2, w3, w4, b at each of ``steps``."""
    train: tuple[float, ...]
    test: tuple[float, ...]

    def at(self, step: int) -> tuple[float, float]:
        i = self.steps.index(step)
        return self.train[i], self.test[i]

    @property
    def leaves_invariance(self) -> int | None:
        """The first recorded step from which on the test accuracy stays below 90 %."""
        below = [t < 0.9 for t in self.test]
        if not below[-1]:
            return None
        last_above = max((i for i, b in enumerate(below) if not b), default=-1)
        return self.steps[last_above + 1]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "leaves_invariance": self.leaves_invariance}


def exact_domains() -> list[tuple[Tensor, Tensor]]:
    """The three domains as distinct examples x and, for each, (label, share of the domain)."""
    data = load("linear", per_domain=100)
    found = []
    for split in ("train", "test"):
        domains = data.splits[split]
        for d in range(len(domains)):
            x, y = data.examples.batch(torch.as_tensor(domains.indices_of(d)).long())  # type: ignore[attr-defined]
            rows, counts = torch.cat([x, y[:, None].to(x)], 1).unique(dim=0, return_counts=True)
            share = counts.double() / counts.sum()
            found.append((rows[:, :-1].double(), torch.stack([rows[:, -1].double(), share], 1)))
    return found


def weighted_logistic(output: Tensor, y: Tensor) -> Tensor:
    losses = nn.functional.binary_cross_entropy_with_logits(output[:, 0], y[:, 0], reduction="none")
    return (losses * y[:, 1]).sum() / y[:, 1].sum()


def accuracy(weights: Tensor, domain: tuple[Tensor, Tensor]) -> float:
    x, y = domain
    predicted = (x @ weights[:-1] + weights[-1] > 0).double()
    return float(((predicted == y[:, 0]) * y[:, 1]).sum())


def follow(row: Row, weight_decay: float, steps: int = STEPS, seed: int = 0, every: int = 2) -> LinearResult:
    """Trains one method from zero and keeps its path."""
    *training, unseen = exact_domains()
    model = nn.Linear(4, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    algorithm = build(row.algorithm, model, weighted_logistic, Task(2, 2), **row.settings)
    optimizer = torch.optim.SGD(model.parameters(), row.rate, weight_decay=weight_decay)
    engine = Engine(algorithm.wrap(optimizer, len(training)))
    batches = _dealt(row.draw, training, seed)
    kept, path = [], []
    for step in range(1, steps + 1):
        algorithm.step(batches(step), engine)
        if step % every == 0 or step == steps or step < every:
            kept.append(step)
            path.append(torch.cat([model.weight[0], model.bias]).detach().clone())
    train = [sum(accuracy(w, d) for d in training) / len(training) for w in path]
    test = [accuracy(w, unseen) for w in path]
    weights = tuple(tuple(round(v, 6) for v in w.tolist()) for w in path)
    return LinearResult(row, weight_decay, tuple(kept), weights, tuple(train), tuple(test))


def _dealt(draw: Draw, domains: list[tuple[Tensor, Tensor]], seed: int) -> Callable[[int], list[DomainBatch]]:
    """Whole domains as batches, in the order in which the sampler deals them."""
    whole = [DomainBatch(x, y, d) for d, (x, y) in enumerate(domains)]
    together = DomainBatch(torch.cat([b.x for b in whole]), torch.cat([b.y for b in whole]), None)
    if draw == "pooled":
        return lambda step: [together]
    if draw == "regrouped":  # in expectation, a batch regrouped at random is a batch of the mixture
        return lambda step: [together] * len(whole)
    sampler = DomainBatchSampler(list(range(len(whole))), 1, len(whole), draw=draw, seed=seed, steps=1)
    return lambda step: [whole[d] for d, _ in sampler.plan(step) if d is not None]


PRINTED = {  # the paper's table of weights: W and b
    "ERM": (2.8, 3.3, 3.3, 0.0, -2.7),
    "IDGM and Fish": (0.4, 0.2, 0.2, 0.0, -0.4),
}


def printed_accuracies() -> dict[str, tuple[float, float]]:
    """Train and test accuracy that the weights printed in the paper give."""
    *training, unseen = exact_domains()
    found = {}
    for name, values in PRINTED.items():
        w = torch.tensor(values, dtype=torch.float64)
        found[name] = (sum(accuracy(w, d) for d in training) / 2, accuracy(w, unseen))
    return found
