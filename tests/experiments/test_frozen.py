"""Features of frozen backbones, and models that begin with weights from a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import shoal
from shoal.errors import InputError
from shoal.experiments import frozen
from shoal.experiments.config import read_config
from shoal.experiments.run import prepare

BACKBONE = "mobilenetv2_035"
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    for d, domain in enumerate(("lima", "oslo", "rome")):
        for c, label in enumerate(("dark", "light")):
            (tmp_path / "pics" / domain / label).mkdir(parents=True)
            for i in range(10):
                colour = (60 * d + i, 40 + 150 * c, 9 * i)
                Image.new("RGB", (40, 40), colour).save(tmp_path / "pics" / domain / label / f"{i}.png")
    return tmp_path


GIVEN: dict[str, Any] = {"data_options": {"size": 32}, "batch_size": 4, "device": "cpu", "steps": 6}
GIVEN |= {"model": BACKBONE, "progress": False}


@needs_timm
def test_a_head_is_trained_on_features_that_are_kept(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed once, for all algorithms and held-out domains; the run then predicts from image files."""
    computed: list[int] = []
    plain = frozen._computed
    monkeypatch.setattr(frozen, "_computed", lambda *a: computed.append(1) or plain(*a))
    for algorithm, out in (("erm", ["oslo", "rome"]), ("coral", ["lima"])):
        shoal.train(algorithm, "pics", held_out=out, out=f"r-{algorithm}", freeze_backbone=True, **GIVEN)
    assert len(computed) == 1
    config = read_config(images / "r-erm")
    assert (config.model_options, config.lr) == ({"frozen": True}, 1e-3)
    training = prepare(config, "cpu").setup
    trained = load_file(images / "r-erm" / "model.safetensors")
    moved = {n for n, v in training.model.state_dict().items() if not torch.equal(trained[n], v)}
    assert moved == {"head.weight", "head.bias"}
    assert len(shoal.load("r-erm").predict("pics/lima/dark")) == 10
    # The features of the cache are those of the images.
    again: Any = training.data.examples
    raw: Any = shoal.datasets.load("image-folder", folder="pics", size=32, augment=False).examples
    x = torch.stack([raw[i][0] for i in range(3)])
    torch.testing.assert_close(training.model.eval().features(x), again.x[:3], rtol=1e-4, atol=1e-5)
    # A changed image has other features.
    Image.new("RGB", (40, 40), (200, 0, 0)).save(images / "pics/lima/dark/0.png")
    prepare(config, "cpu")
    assert len(computed) == 2


@pytest.mark.parametrize("model", [None, "small-cnn"])
def test_what_cannot_be_frozen_is_said(model: str | None, images: Path) -> None:
    with pytest.raises(InputError, match=r"frozen|freeze"):
        shoal.train("erm", "pics", freeze_backbone=True, model=model, out="x", progress=False)
    assert not Path("x").exists()
