"""Image models in the environment that is there, whatever torchvision's build is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
needs = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None or importlib.util.find_spec("transformers") is None,
    reason="timm or transformers is not installed",
)


def python(code: str, *paths: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*paths, SOURCE)))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)


@needs
def test_image_models_in_a_fresh_process() -> None:
    """No test has prepared torchvision there: timm's models and transformers' image models can be created."""
    done = python(
        "import torch\n"
        "from shoal.models import build\n"
        "model = build('mobilenetv2_035', input_shape=(3, 32, 32), classes=3, seed=0)\n"
        "assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)\n"
        "from transformers import ViTConfig, ViTModel\n"
        "small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)\n"
        "vit = ViTModel(ViTConfig(**small, image_size=16))\n"
        "assert vit(torch.zeros(1, 3, 16, 16)).last_hidden_state.shape == (1, 2, 8)\n"
        "import torchvision.transforms.v2\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs
def test_text_encoders_need_no_preparation() -> None:
    done = python(
        "from shoal.data.text import need_transformers\n"
        "need_transformers()\n"
        "from transformers import Trainer, BertModel\n"
    )
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize(
    ("found", "operators"),
    [
        ("", "[]"),  # not installed
        ("raise SystemExit('imported')", "['nms', 'qnms']"),  # installed, without its native library
    ],
)
def test_torchvision_is_prepared_without_importing_it(found: str, operators: str, tmp_path: Path) -> None:
    if found:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(found)
    hide = (
        "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda n: None\n" if not found else ""
    )
    done = python(
        f"{hide}import logging, torch\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from shoal.vision import allow_torchvision\n"
        "allow_torchvision()\nallow_torchvision()\n"
        "print([n for n in ('nms', 'qnms') if hasattr(torch.ops.torchvision, n)])",
        tmp_path,
    )
    assert (done.returncode, done.stdout.strip()) == (0, operators), done.stderr
    assert done.stderr.count("torchvision was not built for torch") == bool(found)


@pytest.mark.parametrize(
    ("timm", "cause"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "operator torchvision::nms"),
        pytest.param(
            "raise ModuleNotFoundError(\"No module named 'timm'\", name='timm')",
            "timm is not installed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_cause_comes_before_the_list_of_models(timm: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text(timm)
    done = python(
        "import shoal\ntry:\n    shoal.train('erm', 'linear', model='resnet18')\n"
        "except shoal.InputError as error:\n    print(error)",
        tmp_path,
        cwd=tmp_path,
    )
    text = done.stdout
    assert text.index(cause) < text.index("pip install") < text.index("small-cnn")
