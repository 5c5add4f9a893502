"""MIRO, beside any algorithm, against loops written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import shoal
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.penalties import miro

LR, WEIGHT, STEPS = 0.05, 0.3, 4


def model(batchnorm: bool = False) -> FeatureModel:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4) if batchnorm else nn.GroupNorm(2, 4)
    convolutions = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Tanh())
    features = nn.Sequential(convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureModel(features, nn.Linear(6, 3)).double()


def domains() -> dict[str, tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(24, 2, 8, 8, generator=made).double(), torch.randint(3, (24,), generator=made))
        for name in "ab"
    }


def fit(algorithm: str, network: nn.Module, **options: Any) -> Any:
    usual: dict[str, Any] = {"steps": STEPS, "batch_size": 6, "miro": WEIGHT, "progress": False}
    usual |= {"optimizer": torch.optim.SGD, "lr": LR}
    return shoal.fit(algorithm, network, domains(), **{**usual, **options})


class Naive:
    """The same network, with its features at the two convolutional stages."""

    def __init__(self) -> None:
        self.net = model()
        self.frozen = copy.deepcopy(self.net).requires_grad_(False).eval()
        begin = torch.tensor(0.1 - 1e-5, dtype=torch.float64).expm1().log()
        self.spreads = [begin.repeat(1, c, 1, 1).requires_grad_() for c in (4, 6)]
        self.params: list[Tensor] = [*self.net.parameters(), *self.spreads]
        self.rates = [LR] * len([*self.net.parameters()]) + [10 * LR] * 2

    def stages(self, net: FeatureModel, x: Tensor) -> list[Tensor]:
        layers = net.features[0]  # type: ignore[index]
        first = layers[2](layers[1](layers[0](x)))
        return [first, layers[4](layers[3](first))]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found, known = self.stages(self.net, x), self.stages(self.frozen, x)
        total = cross_entropy(self.net(x), y)
        for z, z0, b in zip(found, known, self.spreads, strict=True):
            variance = softplus(b) + 1e-5
            total = total + WEIGHT * 0.5 * ((z - z0) ** 2 / variance + variance.log()).mean()
        return total

    def gradient(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(x, y), self.params))

    @torch.no_grad()
    def apply(self, gradients: list[Tensor]) -> None:
        for p, g, rate in zip(self.params, gradients, self.rates, strict=True):
            p -= rate * g


def batches(draw: str) -> list[list[tuple[Tensor, Tensor]]]:
    """What the sampler draws, step by step."""
    data = list(domains().values())
    x, y = torch.cat([d[0] for d in data]), torch.cat([d[1] for d in data])
    labels = [0] * 24 + [1] * 24
    sampler = DomainBatchSampler(labels, 6, 2, draw=draw, seed=0, steps=STEPS)
    _, rows = sampler.plans(0, STEPS)
    return [[(x[i], y[i]) for i in torch.from_numpy(step)] for step in rows]


def equal(network: nn.Module, naive: Naive) -> None:
    for ours, theirs in zip(network.parameters(), naive.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_the_formula() -> None:
    z, z0 = torch.randn(3, 4, 5, 5).double(), torch.randn(3, 4, 5, 5).double()
    variance = torch.rand(1, 4, 1, 1).double() + 0.1
    total = 0.0
    for n in range(3):
        for c in range(4):
            v = variance[0, c, 0, 0]
            total += (((z[n, c] - z0[n, c]) ** 2 / v).sum() + 25 * v.log()).item()
    assert miro(z, z0, variance).item() == pytest.approx(total / (2 * z.numel()), rel=1e-12)
    with pytest.raises(InputError, match="same shape"):
        miro(z, z0[:1], variance)


def test_erm() -> None:
    network, naive = model(), Naive()
    fit("erm", network, draw="domains")
    for step in batches("domains"):
        naive.apply(naive.gradient(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])))
    equal(network, naive)


def test_fish() -> None:
    network, naive = model(), Naive()
    fit("fish", network, settings={"meta_lr": 0.5})
    for step in batches("domains"):
        before = [p.detach().clone() for p in naive.params]
        for x, y in step:
            naive.apply(naive.gradient(x, y))
        with torch.no_grad():
            for p, b in zip(naive.params, before, strict=True):
                p.copy_(b + 0.5 * (p - b))
    equal(network, naive)


@pytest.mark.parametrize("algorithm", ["erm", "fish", "sam"])
def test_in_pieces(algorithm: str) -> None:
    weights = []
    for accumulate in (1, 3):
        network = model()
        fit(algorithm, network, accumulate=accumulate)
        weights.append(network.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-10)


def test_nothing_of_it_is_left_and_it_acts() -> None:
    network, plain = model(), model()
    run = fit("erm", network)
    fit("erm", plain, miro=None)
    assert network.state_dict().keys() == plain.state_dict().keys()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    start = model()
    moved = [sum(((a - b) ** 2).sum() for a, b in zip(m.features.parameters(), start.features.parameters(),
             strict=True)).item() for m in (network, plain)]  # fmt: skip
    assert moved[0] < moved[1]
    assert run.record["config"]["miro"] == WEIGHT


@pytest.mark.parametrize("algorithm", ["idgm", "iga"])
def test_refused(algorithm: str) -> None:
    with pytest.raises(InputError, match=r"miro=0.3 cannot be added"):
        fit(algorithm, model())


def test_no_layers_below_the_head() -> None:
    with pytest.raises(InputError, match=r"miro=0\.3"):
        fit("erm", nn.Sequential(nn.Flatten(), nn.Linear(128, 3)).double())
