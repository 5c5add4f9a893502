"""timm's models as feature extractor and head."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run, start_from
from shoal.experiments.search import weights_of
from shoal.models import FeatureModel, build, options_of
from shoal.models.backbones import DEVIATION, MEAN, PUBLISHED, Backbone
from shoal.models.weights import fitting, other_names, torchvision_name

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
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    assert model.features(x).shape == (2, width)
    assert model(x).shape == (2, 4)


def test_regression_has_one_output_an_example() -> None:
    assert made(classes=None)(torch.randn(3, *SMALL)).shape == (3,)


@pytest.mark.parametrize(
    ("options", "weights", "frozen"),
    [
        ({}, False, False),  # of random weights there are no statistics to keep
        ({}, True, True),
        ({"freeze_batchnorm": False}, True, False),
        ({"freeze_batchnorm": True}, False, True),
    ],
)
def test_batchnorm_is_frozen_with_weights_unless_asked(
    tmp_path: Path, options: dict[str, Any], weights: bool, frozen: bool
) -> None:
    model = made(**options)
    if weights:
        torch.save(made().state_dict(), tmp_path / "weights.pt")
        start_from(model, str(tmp_path / "weights.pt"))
    for _ in range(2):  # also after an evaluation
        before = [m.running_mean.clone() for m in batchnorms(model)]
        model(torch.randn(4, *SMALL) + 3)
        pairs = zip(batchnorms(model), before, strict=True)
        assert all(torch.equal(m.running_mean, b) for m, b in pairs) is frozen
        assert all(m.weight.requires_grad for m in batchnorms(model))
        assert model.training
        model.eval()
        model.train()


def test_frozen_statistics_stay_through_a_training() -> None:
    model = made(freeze_batchnorm=True)
    before = [m.running_mean.clone() for m in batchnorms(model)]
    domains = {n: (torch.randn(12, *SMALL) + i, torch.arange(12) % 4) for i, n in enumerate("ab")}
    start = [p.clone() for p in model.parameters()]
    shoal.fit("coral", model, domains, steps=2, batch_size=4, progress=False, device="cpu")
    assert all(torch.equal(m.running_mean, b) for m, b in zip(batchnorms(model), before, strict=True))
    assert any(not torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What timm is asked for; pretrained weights are random ones here, as there is no network."""
    import timm

    create, found = timm.create_model, list[tuple[str, bool]]()

    def fetched(name: str, pretrained: bool = False, **options: Any) -> Any:
        found.append((name, pretrained))
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", fetched)
    return found


class TestNamesOfWeights:
    @pytest.mark.parametrize("name", ["resnet50", "resnet18", "densenet121"])
    def test_timm_has_those_of_torchvision(self, name: str) -> None:
        """IMAGENET1K_V1 of torchvision, which DomainBed and WILDS began with; not timm's default."""
        import timm
        from torchvision.models import get_model_weights

        theirs, ours = (
            get_model_weights(name)["IMAGENET1K_V1"],
            timm.get_pretrained_cfg(f"{name}.{PUBLISHED}"),
        )
        assert ours.hf_hub_id == f"timm/{name}.{PUBLISHED}"
        assert Path(ours.url or theirs.url).name == Path(theirs.url).name
        assert timm.get_pretrained_cfg(name).tag != PUBLISHED

    @pytest.mark.parametrize(
        ("name", "options", "pretrained", "weights"),
        [
            ("resnet18.tv_in1k", {}, True, "resnet18.tv_in1k of timm "),
            ("resnet18.tv_in1k", {"pretrained": True}, True, "resnet18.tv_in1k of timm "),
            ("resnet18.tv_in1k", {"pretrained": False}, False, ""),
            ("resnet18", {}, False, ""),
            ("resnet18", {"pretrained": True}, True, "resnet18.a1_in1k of timm "),
        ],
    )
    def test_what_a_name_gives(
        self,
        asked: list[tuple[str, bool]],
        recwarn: pytest.WarningsRecorder,
        name: str,
        options: dict[str, bool],
        pretrained: bool,
        weights: str,
    ) -> None:
        model = made(name, **options)
        assert asked == [(name, pretrained)]
        assert model.weights.startswith(weights)
        assert bool(model.weights) is pretrained
        assert all(not m.training for m in batchnorms(model)) is pretrained
        said = [str(w.message) for w in recwarn]
        wrong = "the weights are timm's default, resnet18.a1_in1k; the published results"
        assert any(wrong in words for words in said) is ("a1_in1k" in weights)

    def test_a_model_that_torchvision_has_not(
        self, asked: list[tuple[str, bool]], recwarn: pytest.WarningsRecorder
    ) -> None:
        assert made("resnet50d", pretrained=True).weights.startswith("resnet50d.ra2_in1k of timm ")
        assert not [w for w in recwarn if "published" in str(w.message)]

    def test_weights_that_timm_has_not(self) -> None:
        words = "model 'resnet18' has no weights 'tv2_in1k' in timm; there are a1_in1k,.* tv_in1k"
        for check in (lambda: made("resnet18.tv2_in1k"), lambda: options_of("resnet18.tv2_in1k")):
            with pytest.raises(InputError, match=words):
                check()
        with pytest.raises(InputError, match="'resnet18' has no weights '' in timm"):
            made("resnet18.")

    def test_the_record_says_which(self, asked: list[tuple[str, bool]], tmp_path: Path) -> None:
        def weights(**options: Any) -> str | None:
            config = RunConfig("cdsprites", "erm", 1, model="resnet18.tv_in1k", **options)
            small = {"domains": 2, "size": 32, "per_domain": 20}
            return run(replace(config, batch_size=4, data_options=small), "cpu").environment.get("weights")

        assert str(weights()).startswith("resnet18.tv_in1k of timm ")
        assert weights(model_options={"pretrained": False}) is None
        torch.save(made(classes=2).state_dict(), tmp_path / "own.pt")
        digest = hashlib.sha256((tmp_path / "own.pt").read_bytes()).hexdigest()
        asked.clear()
        assert weights(weights=str(tmp_path / "own.pt")) == f"own.pt, sha256 {digest}"
        assert asked == [("resnet18.tv_in1k", False)]  # nothing is fetched that a file takes the place of

    def test_it_is_known_to_be_pretrained(self) -> None:
        for name, pretrained in (("resnet18.tv_in1k", True), ("resnet18", False)):
            weights = weights_of(RunConfig("pacs", "erm", 1, model=name))
            assert (weights == "pretrained") is pretrained


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


def torchvision_model(name: str) -> nn.Module:
    """With random weights and statistics, under which outputs depend on the image, unlike under its own."""
    from torchvision.models import get_model

    options: Any = {"init_weights": False, "transform_input": True} if name == "inception_v3" else {}
    draw = torch.Generator().manual_seed(0)
    model = get_model(name, weights=None, **options).eval()
    for key, value in model.state_dict().items():
        if key.endswith("running_var") or ("layer_scale" in key):
            value.uniform_(0.5, 1.5, generator=draw)
        elif value.is_floating_point() and value.dim() > 1:
            value.normal_(0, 1.4 / max(1, value[0].numel()) ** 0.5, generator=draw)
        elif value.is_floating_point():
            value.normal_(float(key.endswith("weight")), 0.1, generator=draw)
    return model


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mobilenetv2_100", 64),
        ("mobilenetv3_small_100", 64),
        ("mobilenetv3_large_100", 64),
        ("efficientnet_b0", 64),
        ("mnasnet_050", 64),
        ("resnet18", 64),
        ("densenet121", 64),
        ("convnext_tiny", 64),
        ("regnetx_004_tv", 64),
        ("regnety_004", 64),
        pytest.param("resnext50_32x4d", 64, marks=SLOW),
        pytest.param("wide_resnet50_2", 64, marks=SLOW),
        pytest.param("efficientnetv2_s", 64, marks=SLOW),
        pytest.param("regnety_008_tv", 64, marks=SLOW),
        pytest.param("regnety_080_tv", 64, marks=SLOW),
        pytest.param("vgg11", 224, marks=SLOW),
        pytest.param("vgg11_bn", 224, marks=SLOW),
        pytest.param("inception_v3", 128, marks=SLOW),
        pytest.param("vit_base_patch32_224", 224, marks=SLOW),
        pytest.param("swin_tiny_patch4_window7_224", 224, marks=SLOW),
    ],
)
def test_takes_the_weights_of_torchvision(name: str, size: int) -> None:
    """Of each family: the features that torchvision's own model computes, and a head that stays."""
    theirs = torchvision_model(torchvision_name(name) or "").double()
    model = made(name, (3, size, size)).double()
    head = model.head.weight.clone()
    # In no order, as in a safetensors file, and behind a prefix.
    shuffled = sorted(theirs.state_dict().items(), key=lambda pair: pair[0][::-1])
    model.load_state_dict(fitting({f"module.{k}": v for k, v in shuffled}, model))
    assert torch.equal(model.head.weight, head)
    for last in ("fc", "classifier", "head", "heads"):
        if isinstance(layer := getattr(theirs, last, None), nn.Sequential):
            layer[-1] = nn.Identity()
        elif layer is not None:
            setattr(theirs, last, nn.Identity())
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        ours, wanted = model.eval().features(x), theirs(x)
    scale = wanted.abs().max()
    assert (wanted[0] - wanted[1]).abs().max() > 1e-3 * scale  # else nothing would be shown
    assert (ours - wanted).abs().max() < 1e-6 * scale


def test_every_name_of_torchvision_is_one() -> None:
    from timm import is_model
    from torchvision.models import list_models

    known = list_models()
    same = [name for name in known if torchvision_name(name) == name]
    assert {"resnet50", "convnext_base", "vgg19_bn", "inception_v3", "efficientnet_b7"} <= set(same)
    assert all(is_model(name) for name in (*same, *other_names()))
    assert set(other_names().values()) <= set(known)
    assert torchvision_name("resnet50.tv_in1k") == "resnet50"
    for other in ("resnet50d", "resnet26", "swinv2_tiny_window8_256", "regnety_008", "small-cnn"):
        assert torchvision_name(other) is None


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "backbone.", "encoder.", "model.backbone."])
def test_takes_timms_names_behind_a_prefix(prefix: str) -> None:
    theirs, model = made("mobilenetv2_035", classes=9), made("mobilenetv2_035")
    start = torch.randn_like(theirs.features.body.conv_stem.weight)
    theirs.features.body.conv_stem.weight.data = start
    weights = {f"{prefix}{k}": v for k, v in theirs.features.body.state_dict().items()}
    weights[f"{prefix}classifier.weight"] = torch.zeros(1000, 1280)
    if prefix:
        weights["head.bias"] = torch.zeros(9)  # a model around the backbone
    model.load_state_dict(fitting(weights, model))
    assert torch.equal(model.features.body.conv_stem.weight, start)


@pytest.mark.parametrize("channels", [1, 8])
def test_another_number_of_channels(channels: int) -> None:
    """As timm adapts its own: summed for grey images, else repeated and scaled by 3 / channels."""
    from torchvision.models import resnet18

    theirs, model = resnet18().state_dict(), made(shape=(channels, 32, 32))
    with pytest.warns(UserWarning, match=f"3 channels and the images have {channels}"):
        model.load_state_dict(fitting(theirs, model))
    weight, first = theirs["conv1.weight"], model.features.body.conv1.weight
    wanted = weight.sum(1, keepdim=True) if channels == 1 else weight.repeat(1, 3, 1, 1)[:, :8] * 3 / 8
    torch.testing.assert_close(first.detach(), wanted)


def test_a_file_of_torchvision_is_a_start(tmp_path: Path) -> None:
    import torchvision

    theirs = torchvision.models.mobilenet_v2()
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "mobilenet.pth")
    model = made("mobilenetv2_100")
    start_from(model, str(tmp_path / "mobilenet.pth"))
    assert torch.equal(model.features.body.conv_head.weight, theirs.features[18][0].weight)
    for other in ("densenet121", "resnet50d", "small-cnn"):
        with pytest.raises(InputError, match=f"not those of model '{other}'") as error:
            start_from(made(other), str(tmp_path / "mobilenet.pth"))
        assert "mobilenet.pth" in str(error.value)
        assert len(str(error.value).splitlines()) <= 3
        assert len(str(error.value)) < 600


def test_weights_that_do_not_fit_are_not_bent() -> None:
    model = made()
    weights = dict(model.features.body.state_dict())
    with pytest.raises(InputError, match="the file has 'extra'"):
        fitting({**weights, "extra": torch.zeros(1)}, model)
    with pytest.raises(InputError, match=r"'layer1\.0\.conv1\.weight': \(1,\) in the file, \(64, 64, 3, 3\)"):
        fitting({**weights, "layer1.0.conv1.weight": torch.zeros(1)}, model)
    weights.pop("conv1.weight")
    with pytest.raises(InputError, match=r"it needs 'conv1\.weight'"):
        fitting(weights, model)
    with pytest.raises(InputError, match="not those of model 'Linear'"):
        fitting(weights, nn.Linear(2, 2))


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
