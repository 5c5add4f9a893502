"""The head of any model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.models.head import find_head

X = torch.randn(2, 3, 8, 8)


def test_of_a_feature_model() -> None:
    model = FeatureModel(nn.Flatten(), nn.Sequential(nn.Dropout(0.1), nn.Linear(192, 4)))
    assert find_head(model, X) is model.head


def test_the_last_linear_layer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Linear(5, 4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert find_head(model, X) is model[3]
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 4)),
    ],
)
def test_none(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"no head.*FeatureModel"):
        find_head(model, X)
