"""What every registered algorithm is tried on: a toy it must learn, and a loop in which it is watched."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import Algorithm, build
from shoal.algorithms.base import trained_parameters
from shoal.data import DomainBatchSampler, MetaBatch, MetaBatchLoader, Task
from shoal.data.arrays import read_examples
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.training.engine import Engine

S, B, WIDTH = 3, 8, 16
TASK = Task(S, 2, features=WIDTH)
OUTPUTS = {"classification": 3, "ordinal": 3, "multilabel": 3, "regression": 2}
"""Outputs of a network, for each task."""


def toy(examples: int = 48) -> dict[str, tuple[Tensor, Tensor]]:
    """Three gaussian domains: two features tell the class, two others the domain."""
    draw = torch.Generator().manual_seed(1)
    domains = {}
    for d in range(S):
        y = torch.arange(examples) % 2
        middle = torch.stack([4.0 * y - 2, 2.0 - 4 * y, torch.full_like(y, d), -torch.full_like(y, d)], 1)
        domains[f"domain {d}"] = middle + torch.randn(examples, 4, generator=draw), y
    return domains


def toy_of(kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The toy's inputs with targets of a task, which are linear in them."""
    targets = {
        "multilabel": lambda x: (x[:, :3] > 0).float(),
        "regression": lambda x: x[:, :2] - x[:, 2:],
    }
    return {name: (x, targets.get(kind, lambda x: x[:, :3].argmax(1))(x)) for name, (x, _) in toy().items()}


def network(
    outputs: int | None = 2, *, norm: bool = True, seed: int = 0, joined: bool = False
) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        between = [nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)] if norm else [nn.Tanh()]
        features = nn.Sequential(nn.Linear(4, WIDTH), *between)
        return FeatureModel(Joined(features) if joined else features, linear_head(WIDTH, outputs))


def network_of(kind: str) -> FeatureModel:
    """One hidden layer and a linear head, whose outputs have the shape of the task."""
    return network(OUTPUTS[kind], norm=False)


class Joined(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.net(torch.cat([x["left"], x["right"]], 1))
        return found


class Counted(nn.BatchNorm1d):
    """Also counts the examples that pass in training mode, in a buffer."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x) if self.training else 0
        return super().forward(x)


class ByHand:
    """An algorithm in a loop of our own: random numbers depend on the step alone."""

    def __init__(self, name: str, model: nn.Module, **settings: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss = nn.functional.cross_entropy
            self.algorithm: Algorithm = build(name, model, loss, TASK, **settings).train()
        auxiliary = self.algorithm.auxiliary_optimizers()
        optimizer = torch.optim.Adam(trained_parameters(self.algorithm, auxiliary), 0.01)
        self.algorithm.prepare(optimizer, 0.01)
        self.engine = Engine(self.algorithm, optimizer, auxiliary=auxiliary)
        data = read_examples(toy())
        self.examples = data.examples
        self.sampler = DomainBatchSampler(data.splits["train"], B, S, draw=self.algorithm.draw)

    def batch(self, step: int) -> MetaBatch:
        return next(iter(MetaBatchLoader(self.examples, self.sampler, start=step, stop=step + 1)))

    def take(self, *steps: int) -> "ByHand":
        for step in steps:
            torch.manual_seed(step)
            log = self.engine.step(self.batch(step), step)
            assert torch.isfinite(log["losses"]).all()
            assert not log["losses"].requires_grad
        return self

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.algorithm, self.engine.optimizer, *self.engine.auxiliary.values()

    def state(self) -> list[dict[str, Any]]:
        return copy.deepcopy([part.state_dict() for part in self._parts])

    def load(self, state: list[dict[str, Any]]) -> None:
        for part, content in zip(self._parts, state, strict=True):
            part.load_state_dict(content)

    def plain_state(self) -> list[dict[str, Any]]:
        """What modules hold besides parameters, buffers and submodules: settings, which must not change."""
        kinds = (bool, int, float, str, list, tuple, dict, type(None))
        own = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in self.algorithm.modules()]
        return [{k: copy.copy(v) if isinstance(v, kinds) else "kept" for k, v in m.items()} for m in own]


def fit(name: str, model: nn.Module, train: dict[str, Any] | None = None, **options: Any) -> shoal.Fit:
    defaults = {"steps": 3, "batch_size": B, "progress": False}
    return shoal.fit(name, model, train or toy(), **defaults | options)


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
