"""timm's models as feature extractor and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.bench.run import start_from
from shoal.errors import InputError
from shoal.models import FeatureModel, build
from shoal.models.backbones import DEVIATION, MEAN, Backbone, fitting

pytestmark = pytest.mark.usefixtures("timm")
SMALL = (3, 32, 32)


def made(name: str = "resnet18", shape: tuple[int, ...] = SMALL, **options: Any) -> FeatureModel:
    return build(name, input_shape=shape, classes=options.pop("classes", 4), seed=0, **options)


def batchnorms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("resnet18", SMALL, 512),
        ("resnet18", (8, 32, 32), 512),
        ("densenet121", SMALL, 1024),
        ("mobilenetv2_100", SMALL, 1280),
        ("vit_tiny_patch16_224", (3, 224, 224), 192),
    ],
)
def test_any_backbone_by_name(name: str, shape: tuple[int, ...], width: int) -> None:
    model, again = made(name, shape), made(name, shape)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    assert model.features(x).shape == (2, width)
    assert model(x).shape == (2, 4)
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_regression_has_one_output_an_example() -> None:
    assert made(classes=None)(torch.randn(3, *SMALL)).shape == (3,)


def test_batchnorm_is_frozen_unless_asked() -> None:
    frozen, free = made(), made(freeze_batchnorm=False)
    for model in (frozen, free):
        model.train()
        before = [m.running_mean.clone() for m in batchnorms(model)]
        model(torch.randn(4, *SMALL) + 3)
        moved = any(
            not torch.equal(m.running_mean, b) for m, b in zip(batchnorms(model), before, strict=True)
        )
        assert moved is (model is free)
        assert all(m.weight.requires_grad for m in batchnorms(model))
        assert model.training


def test_frozen_statistics_stay_through_a_training() -> None:
    model = made()
    before = [m.running_mean.clone() for m in batchnorms(model)]
    domains = {n: (torch.randn(12, *SMALL) + i, torch.arange(12) % 4) for i, n in enumerate("ab")}
    start = [p.clone() for p in model.parameters()]
    shoal.fit("coral", model, domains, steps=2, batch_size=4, progress=False, device="cpu")
    assert all(torch.equal(m.running_mean, b) for m, b in zip(batchnorms(model), before, strict=True))
    assert any(not torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))


def test_dropout_before_the_head_in_training_only() -> None:
    model = made(dropout=0.5)
    x = torch.randn(2, *SMALL)
    model.train()
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.features(x), model.features(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_images_come_to_each_model_as_it_wants_them() -> None:
    """Images normalised as ImageNet's, for a body that wants another mean and deviation."""
    body = nn.Flatten()
    raw = torch.rand(2, 3, 4, 4)
    mean, deviation = (torch.tensor(v).view(-1, 1, 1) for v in (MEAN, DEVIATION))
    given = (raw - mean) / deviation
    half = Backbone(body, False, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    torch.testing.assert_close(half(given), ((raw - 0.5) / 0.5).flatten(1))
    assert torch.equal(Backbone(body, False, MEAN, DEVIATION)(given), given.flatten(1))


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_takes_the_weights_of_a_bare_backbone(name: str) -> None:
    """Under the names they have in torchvision, whose ResNet and DenseNet timm follows."""
    import torchvision

    theirs = getattr(torchvision.models, name)(num_classes=7)
    model = made(name)
    head = model.head.weight.clone()
    found = fitting(theirs.state_dict(), model)
    assert found is not None
    model.load_state_dict(found)
    assert torch.equal(model.head.weight, head)
    last = "fc" if name == "resnet18" else "classifier"
    setattr(theirs, last, nn.Identity())
    x = torch.randn(2, *SMALL)
    torch.testing.assert_close(model.eval().features(x), theirs.eval()(x))


def test_a_file_of_torchvision_is_a_start(tmp_path: Path) -> None:
    import torchvision

    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    model = made()
    start_from(model, str(tmp_path / "resnet18.pth"))
    assert torch.equal(model.features.body.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    with pytest.raises(InputError, match="do not fit the model"):
        start_from(made("densenet121"), str(tmp_path / "resnet18.pth"))


def test_weights_that_do_not_fit_are_not_bent() -> None:
    model = made()
    weights = dict(model.features.body.state_dict())
    assert fitting({**weights, "extra": torch.zeros(1)}, model) is None
    weights.pop("conv1.weight")
    assert fitting(weights, model) is None
    assert fitting(weights, nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "resnet19"}, "unknown model 'resnet19'"),
        ({"shape": (3,)}, r"takes images, input_shape \(c, h, w\); not \(3,\)"),
        ({"name": "vit_tiny_patch16_224"}, "cannot take images"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"droput": 0.1}, "'droput'. Did you mean 'dropout'"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(**changes)
