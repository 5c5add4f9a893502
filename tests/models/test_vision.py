"""Image models in the environment that is there, whatever torchvision's build is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*paths, SOURCE)))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(
    importlib.util.find_spec("timm") is None or importlib.util.find_spec("transformers") is None,
    reason="timm or transformers is not installed",
)
def test_image_models_in_a_fresh_process() -> None:
    """No test has prepared torchvision there: timm's models and transformers' image models can be created."""
    done = python(
        "import torch\n"
        "from shoal.models import build\n"
        "model = build('mobilenetv2_035', input_shape=(3, 32, 32), classes=3, seed=0)\n"
        "assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)\n"
        "from transformers import ViTConfig, ViTModel, Trainer\n"
        "small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)\n"
        "vit = ViTModel(ViTConfig(**small, image_size=16))\n"
        "assert vit(torch.zeros(1, 3, 16, 16)).last_hidden_state.shape == (1, 2, 8)\n"
        "import torchvision.transforms.v2\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_its_native_library_and_without_timm(tmp_path: Path) -> None:
    """Operators are declared without importing torchvision; the cause comes before the list of models."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    done = python(
        "import logging, torch, importlib.util\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from shoal.vision import allow_torchvision\n"
        "allow_torchvision()\nallow_torchvision()\n"
        "print([n for n in ('nms', 'qnms') if hasattr(torch.ops.torchvision, n)])\n"
        "import shoal.models\n"
        "try:\n    shoal.models.build('resnet18', input_shape=(3, 32, 32), classes=2, seed=0)\n"
        "except shoal.InputError as error:\n    print(error)",
        tmp_path,
    )
    assert done.stdout.startswith("['nms', 'qnms']\n"), done.stderr
    assert done.stderr.count("torchvision was not built for torch") == 1
    assert done.stdout.index("operator torchvision::nms") < done.stdout.index("small-cnn")
