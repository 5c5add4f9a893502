"""Image models beside a torchvision that was not built for this torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = """
import logging, sys
import shoal.models
print([n for n in ("transformers", "timm", "torchvision", "torch._dynamo", "peft") if n in sys.modules])
logging.basicConfig(level=logging.INFO)
import torch
from shoal.vision import allow_torchvision
allow_torchvision()
allow_torchvision()
print([n for n in ("nms", "qnms") if hasattr(torch.ops.torchvision, n)])
try:
    shoal.models.build("resnet18", input_shape=(3, 32, 32), classes=2, seed=0)
except shoal.InputError as error:
    print(error)
"""


def test_without_its_native_library_and_without_timm(tmp_path: Path) -> None:
    """Operators are declared without importing it, and nothing heavy before it is needed."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, SOURCE))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    heavy, operators, error = done.stdout.splitlines()
    assert (heavy, operators) == ("[]", "['nms', 'qnms']"), done.stderr
    assert done.stderr.count("torchvision was not built for torch") == 1
    assert error.startswith("timm cannot be imported (operator torchvision::nms does not exist)")
