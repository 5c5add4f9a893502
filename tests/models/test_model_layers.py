"""The layers of a model, from its stem to its head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.models.layers import find_layers
from shoal.vision import allow_torchvision, load_timm


class Net(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Linear(4, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
            self.norm = nn.LayerNorm(6)
            self.fc = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu_()
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.fc(self.norm(x))
        return found


class TestLayers:
    def layers(self, model: nn.Module, head: nn.Module) -> list[list[str]]:
        found = find_layers(model, head)
        return [*found.layers, found.top]

    def test_blocks_between_stem_and_norm(self) -> None:
        model = Net()
        assert self.layers(model, model.fc) == [["stem"], ["blocks.0"], ["blocks.1"], ["norm", "fc"][:1]]

    def test_stages_by_number(self) -> None:
        class Stages(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
                self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
                self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
                self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

        model = Stages()
        stages = [["conv1", "bn1", "relu"], ["layer1"], ["layer2", "pool"], []]
        assert self.layers(model, model.fc) == stages
        wrapped = FeatureModel(nn.Sequential(model), model.fc)
        wrapped.features[0].fc = nn.Identity()
        prefixed = [[f"features.0.{name}" for name in layer] for layer in stages]
        prefixed[2].append("features.0.fc")
        assert self.layers(wrapped, wrapped.head) == prefixed

    def test_a_sequential_of_layers(self) -> None:
        model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
        )
        assert self.layers(model, model[5]) == [["0", "1", "2"], ["3", "4"], []]

    def test_nothing_but_a_head(self) -> None:
        model = FeatureModel(nn.Flatten(), nn.Linear(4, 2))
        assert self.layers(model, model.head) == [[]]

    @pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv2_100"])
    def test_of_timm(self, name: str) -> None:
        try:
            load_timm()
        except InputError:
            pytest.skip("there is no timm")
        model = shoal.models.build(name, input_shape=(3, 224, 224), classes=2, seed=0, pretrained=False)
        names = [layer[0].removeprefix("features.body.") for layer in self.layers(model, model.head)[:-1]]
        expected = {
            "resnet18": ["conv1", "layer1", "layer2", "layer3", "layer4"],
            "vit_tiny_patch16_224": ["patch_embed", *(f"blocks.{n}" for n in range(12))],
            "mobilenetv2_100": ["conv_stem", *(f"blocks.{n}" for n in range(7)), "conv_head"],
        }
        assert names == expected[name]

    def test_of_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        allow_torchvision()
        config = transformers.BertConfig(
            hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8
        )
        model = FeatureModel(transformers.BertModel(config), nn.Linear(8, 2))
        blocks = [["features.embeddings"], *([f"features.encoder.layer.{n}"] for n in range(3))]
        assert self.layers(model, model.head) == [*blocks, ["features.pooler"], []]
