"""The layers of a model, from its stem to its head."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shoal.models import FeatureModel, build
from shoal.models.layers import find_layers


class Net(nn.Module):
    """A stem, two blocks, a normalisation and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 2)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)


def layers(model: nn.Module, head: nn.Module) -> list[list[str]]:
    """Those of the model, then its top."""
    found = find_layers(model, head)
    return [*found.layers, found.top]


def test_stems_blocks_stages_and_tops() -> None:
    model: Any = Net()
    assert layers(model, model.fc) == [["stem"], ["blocks.0"], ["blocks.1"], ["norm"]]
    model = Stages()
    stages = [["conv1", "bn1", "relu"], ["layer1"], ["layer2", "pool"], []]
    assert layers(model, model.fc) == stages
    wrapped: Any = FeatureModel(nn.Sequential(model), model.fc)
    wrapped.features[0].fc = nn.Identity()
    prefixed = [[f"features.0.{name}" for name in layer] for layer in stages]
    prefixed[2].append("features.0.fc")
    assert layers(wrapped, wrapped.head) == prefixed
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert layers(model, model[5]) == [["0", "1", "2"], ["3", "4"], []]
    model = FeatureModel(nn.Flatten(), nn.Linear(4, 2))
    assert layers(model, model.head) == [[]]  # nothing but a head


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", ["conv1", "layer1", "layer2", "layer3", "layer4"]),
        ("vit_tiny_patch16_224", ["patch_embed", *(f"blocks.{n}" for n in range(12))]),
        ("mobilenetv2_100", ["conv_stem", *(f"blocks.{n}" for n in range(7)), "conv_head"]),
    ],
)
def test_models_of_timm(name: str, expected: list[str]) -> None:
    model = build(name, input_shape=(3, 224, 224), classes=2, seed=0, pretrained=False)
    found = find_layers(model, model.head).layers
    assert [layer[0].removeprefix("features.body.") for layer in found] == expected


@pytest.mark.usefixtures("timm")
def test_models_of_transformers() -> None:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    model = FeatureModel(transformers.BertModel(transformers.BertConfig(**sizes)), nn.Linear(8, 2))
    blocks = [["features.embeddings"], *([f"features.encoder.layer.{n}"] for n in range(3))]
    assert layers(model, model.head) == [*blocks, ["features.pooler"], []]
