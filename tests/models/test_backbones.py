"""timm's models as feature extractor and head, and files of weights for them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import InputError
from shoal.experiments.run import start_from
from shoal.models import FeatureModel, build, freeze_batchnorm, options_of
from shoal.models.backbones import fitting

pytestmark = pytest.mark.usefixtures("timm")
SMALL = (3, 32, 32)


def made(name: str = "resnet18", shape: tuple[int, ...] = SMALL, **options: Any) -> FeatureModel:
    return build(name, input_shape=shape, classes=options.pop("classes", 4), seed=0, **options)


def batchnorms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("name", "shape", "width"), [("resnet18", (8, 32, 32), 512), ("test_vit", (3, 96, 96), 64)]
)
def test_any_backbone_by_name(name: str, shape: tuple[int, ...], width: int) -> None:
    model = made(name, shape, dropout=0.5)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    assert model.eval().features(x).shape == (2, width)
    assert model(x).shape == (2, 4)
    assert torch.equal(model(x), made(name, shape).eval()(x))  # the same weights
    assert not torch.equal(model.train()(x), model(x))  # dropout before the head
    assert made(name, shape, classes=None)(x).shape == (2,)


@pytest.mark.parametrize("frozen", [True, False])
def test_batchnorm_is_frozen_with_weights_unless_asked(tmp_path: Path, frozen: bool) -> None:
    """Of random weights there are no statistics to keep."""
    model, path = made(freeze_batchnorm=frozen), tmp_path / "weights.pt"
    model(torch.randn(4, *SMALL))
    assert all(m.training for m in batchnorms(model))
    torch.save(model.state_dict(), path)
    start_from(model, str(path))
    for _ in range(2):  # also after an evaluation
        before = [m.running_mean.clone() for m in batchnorms(model)]
        model(torch.randn(4, *SMALL) + 3)
        pairs = zip(batchnorms(model), before, strict=True)
        assert all(torch.equal(m.running_mean, b) for m, b in pairs) is frozen
        assert all(m.weight.requires_grad for m in batchnorms(model))
        model.eval()
        model.train()


def test_freeze_batchnorm_of_any_model() -> None:
    """Statistics stay, scale and shift train; layers whose statistics were never updated are left alone."""
    from timm.layers import BatchNormAct2d

    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.Flatten(), nn.Linear(144, 2))
    x = torch.randn(8, 3, 8, 8)
    assert freeze_batchnorm(model) == []
    model(3 * x + 1)
    names, before = list(model.state_dict()), model[1].running_mean.clone()
    assert (freeze_batchnorm(model), freeze_batchnorm(model)) == (["1"], [])
    assert list(model.state_dict()) == names
    model.train()
    model(x).square().mean().backward()
    assert torch.equal(model[1].running_mean, before)
    assert model[1].weight.grad.abs().sum() > 0
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not copied.train()[1].training


@pytest.mark.parametrize(("source", "prefix"), [("timm", "model.backbone."), ("torchvision", "")])
def test_weights_behind_a_prefix(prefix: str, source: str) -> None:
    """Those of timm, and where its names are the same those of torchvision; the model keeps its own head."""
    from torchvision.models import resnet18

    model: Any = made("resnet18").double()
    theirs: Any = made("resnet18", classes=9).features.body if source == "timm" else resnet18(weights=None)
    start = nn.init.normal_(theirs.double().conv1.weight, std=0.1)
    weights = {f"{prefix}{k}": v for k, v in theirs.state_dict().items()}
    weights |= {f"{prefix}fc.weight": torch.zeros(1000, 512)}
    weights |= {"head.bias": torch.zeros(9)} if prefix else {}
    head = model.head.weight.clone()
    model.load_state_dict(fitting(weights, model))
    theirs.fc = nn.Identity()
    x = torch.randn(2, *SMALL, dtype=torch.float64)
    torch.testing.assert_close(model.eval().features(x), theirs.eval()(x))
    assert torch.equal(model.features.body.conv1.weight, start)
    assert torch.equal(model.head.weight, head)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    model, path = made(), tmp_path / "resnet.pth"
    weights = dict(model.features.body.state_dict())  # type: ignore[union-attr, operator]
    for wrong, message in (
        ({**weights, "extra": torch.zeros(1)}, 'Unexpected.*"extra"'),
        (
            {**weights, "layer1.0.conv1.weight": torch.zeros(1)},
            "size mismatch for features.body.layer1.0.conv1",
        ),
    ):
        torch.save(wrong, path)
        with pytest.raises(InputError, match=f"resnet.pth' do not fit the model: .*{message}"):
            start_from(model, str(path))
    torch.save(weights, path)
    for other in ("resnet50d", "small-cnn"):
        with pytest.raises(InputError, match=r"resnet.pth' do not fit the model: Missing"):
            start_from(made(other), str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "resnet19"}, "unknown model 'resnet19'"),
        ({"shape": (3,)}, r"takes images, input_shape \(c, h, w\); not \(3,\)"),
        ({"droput": 0.1}, "'droput'. Did you mean 'dropout'"),
    ],
)
def test_bad_names_and_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(**changes)
    assert "frozen" in options_of("resnet18")
