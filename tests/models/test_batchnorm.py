"""``freeze_batchnorm``: statistics that stay, weights that train, and copies that stay frozen."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.models import freeze_batchnorm


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def pretrained() -> nn.Sequential:
    model = network().train()
    for _ in range(5):
        model(3 * torch.randn(16, 3, 8, 8) + 1)
    return model


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if "running" in k or "tracked" in k}


def site(shift: float) -> tuple[Tensor, Tensor]:
    return torch.randn(40, 3, 8, 8) + shift, torch.randint(2, (40,))


def test_statistics_stay_and_weights_train() -> None:
    model = pretrained()
    names, before = list(model.state_dict()), statistics(model)
    weight = model[1].weight.clone()
    assert freeze_batchnorm(model) == ["1"]
    assert list(model.state_dict()) == names
    model.train()
    x = torch.randn(8, 3, 8, 8)
    expected = nn.functional.batch_norm(
        model[0](x), before["1.running_mean"], before["1.running_var"], model[1].weight, model[1].bias
    )
    assert torch.equal(model[1](model[0](x)), expected)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in statistics(model).items())
    assert not torch.equal(model[1].weight, weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_stay_frozen(copied: Any) -> None:
    model = pretrained()
    freeze_batchnorm(model)
    assert not copied(model).train()[1].training


def test_layers_without_statistics_are_left_alone() -> None:
    model = network()
    assert freeze_batchnorm(model) == []
    assert model.train()[1].training
    assert freeze_batchnorm(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))) == []
    once = pretrained()
    assert freeze_batchnorm(once) == ["1"]
    assert freeze_batchnorm(once) == []


@pytest.mark.parametrize(("recipe", "frozen"), [("auto", True), ("erm++", False)])
def test_only_the_default_recipe_freezes_a_model_of_the_users_own(recipe: str, frozen: bool) -> None:
    model = pretrained()
    before = statistics(model)
    shoal.fit(
        recipe,
        model,
        {"a": site(0), "b": site(1)},
        validation={"a": site(0), "b": site(1)},
        test={"c": site(2)},
        steps=10,
        batch_size=8,
        device="cpu",
        progress=False,
    )
    same = all(torch.equal(v, before[k]) for k, v in statistics(model).items())
    assert same is frozen
