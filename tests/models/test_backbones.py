"""timm's models as feature extractor and head, and files of weights for them."""

from __future__ import annotations

import copy
import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.data.images import MEAN, STD
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run, start_from
from shoal.models import FeatureModel, build, freeze_batchnorm, options_of
from shoal.models.backbones import Backbone, fitting

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


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What timm is asked for; pretrained weights are random ones here, as there is no network."""
    import timm

    create, found = timm.create_model, list[tuple[str, bool]]()

    def fetched(name: str, pretrained: bool = False, **options: Any) -> Any:
        found.append((name, pretrained))
        model = create(name, pretrained=False, **options)
        for module in batchnorms(model) if pretrained else []:
            module.running_mean.fill_(0.1)
        return model

    monkeypatch.setattr(timm, "create_model", fetched)
    return found


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("resnet18.tv_in1k", {}, "resnet18.tv_in1k of timm "),
        ("resnet18.tv_in1k", {"pretrained": False}, ""),
        ("resnet18", {}, ""),
        ("resnet18", {"pretrained": True}, "resnet18.a1_in1k of timm "),
    ],
)
def test_which_weights_a_name_gives(
    requests: list[tuple[str, bool]],
    name: str,
    options: dict[str, bool],
    weights: str,
) -> None:
    model = made(name, **options)
    assert requests == [(name, bool(weights))]
    assert model.weights.startswith(weights)
    assert bool(model.weights) is bool(weights)
    assert all(not m.training for m in batchnorms(model)) is bool(weights)


def test_the_record_says_which_weights(requests: list[tuple[str, bool]], tmp_path: Path) -> None:
    small = {"domains": 2, "size": 32, "per_domain": 20}
    config = RunConfig("cdsprites", "erm", 1, model="resnet18.tv_in1k", batch_size=4, data_options=small)
    assert str(run(config, "cpu").environment.get("weights")).startswith("resnet18.tv_in1k of timm ")
    path = tmp_path / "own.pt"
    torch.save(made(classes=2).state_dict(), path)
    requests.clear()
    record = run(replace(config, weights=str(path)), "cpu")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record.environment.get("weights") == f"own.pt, sha256 {digest}"
    assert requests == [("resnet18.tv_in1k", False)]  # nothing is fetched that a file takes the place of


def test_images_are_normalized_as_each_model_wants_them() -> None:
    raw = torch.rand(2, 3, 4, 4)
    mean, deviation = (torch.tensor(v).view(-1, 1, 1) for v in (MEAN, STD))
    x = (raw - mean) / deviation
    half = Backbone(nn.Flatten(), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    torch.testing.assert_close(half(x), ((raw - 0.5) / 0.5).flatten(1))
    assert torch.equal(Backbone(nn.Flatten())(x), x.flatten(1))


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


def test_a_transformer_takes_weights_for_images_of_another_size() -> None:
    """Of its position embeddings those that both have are the same."""
    small, large = made("test_vit", (3, 96, 96)), made("test_vit", (3, 160, 160))
    large.load_state_dict(fitting(small.features.body.state_dict(), large))  # type: ignore[union-attr, operator]
    ours, theirs = (model.state_dict() for model in (large, small))
    assert ours["features.body.pos_embed"].shape == (1, 101, 64)
    assert torch.equal(ours["features.body.pos_embed"][:, 0], theirs["features.body.pos_embed"][:, 0])
    assert torch.equal(
        ours["features.body.blocks.0.attn.qkv.weight"], theirs["features.body.blocks.0.attn.qkv.weight"]
    )


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
        ({"name": "resnet18.tv2_in1k"}, r"'resnet18.tv2_in1k' cannot be loaded \(Invalid pretrained tag"),
        ({"shape": (3,)}, r"takes images, input_shape \(c, h, w\); not \(3,\)"),
        ({"name": "inception_v4"}, "cannot take images"),
        ({"droput": 0.1}, "'droput'. Did you mean 'dropout'"),
    ],
)
def test_bad_names_and_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(**changes)
    assert "frozen" in options_of("resnet18")
