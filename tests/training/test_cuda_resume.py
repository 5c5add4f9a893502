"""On a CUDA device: a training resumed on another device, or captured where it was not, evaluates alike.

Where there is no pytest: ``PYTHONPATH=src python tests/training/test_cuda_resume.py``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.training import loop
from shoal.training.stopping import Interrupted

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:
    pass

STEPS = [10, 20, 30, 40]


def fit(folder: Path | None = None, **options: Any) -> shoal.Fit:
    torch.manual_seed(0)
    y = torch.arange(60) % 2
    data = {n: (torch.randn(60, 4) + y[:, None], y) for n in ("a", "b", "c")}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    given: dict[str, Any] = {
        **{"steps": 40, "batch_size": 8, "domains_per_step": 2, "eval_every": 10},
        **{"device": "cuda", "progress": False, "validation": {"v": data["a"]}, "deterministic": True},
    }
    return shoal.fit("fish", model, data, folder=folder, **given | options)


def stopped(folder: Path, at: int, **options: Any) -> None:
    """Trains for at least so many steps."""

    def tell(step: int, note: str) -> None:
        if step >= at:
            os.kill(os.getpid(), signal.SIGTERM)

    chunk, loop.CHUNK = loop.CHUNK, 1
    try:
        fit(folder, progress=tell, **options)
    except Interrupted:
        return
    finally:
        loop.CHUNK = chunk
    raise AssertionError("it was not stopped")


def check(first: dict[str, Any], then: dict[str, Any], bits: bool) -> None:
    """Stopped at steps of all kinds and resumed in another way, as a whole run of the latter."""
    whole = fit(**then)
    for at in (1, 7, 10, 13, 34):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            stopped(folder, at, **first)
            found = fit(folder, resume=True, **then)
        assert [p.step for p in found.history] == STEPS, (at, [p.step for p in found.history])
        close = {"rtol": 0.0, "atol": 0.0} if bits else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(found.model.state_dict(), whole.model.state_dict(), **close)


def test_eager_then_captured() -> None:
    check({"capture": False}, {"capture": True}, bits=True)


def test_captured_then_eager() -> None:
    check({"capture": True}, {"capture": False}, bits=True)


def test_other_strides() -> None:
    check({"checkpoint_every": 3}, {}, bits=True)


def test_cpu_then_cuda() -> None:
    check({"device": "cpu"}, {}, bits=False)


def test_cuda_then_cpu() -> None:
    check({}, {"device": "cpu"}, bits=False)


def test_captured_evaluates_where_eager_does() -> None:
    captured, eager = fit(capture=True), fit(capture=False)
    assert captured.captured
    assert not eager.captured
    assert [p.step for p in captured.history] == [p.step for p in eager.history] == STEPS
    torch.testing.assert_close(captured.model.state_dict(), eager.model.state_dict(), rtol=0, atol=0)


if __name__ == "__main__":
    tests: list[Callable[[], None]] = [v for k, v in list(globals().items()) if k.startswith("test_")]
    for test in tests:
        test()
        print(f"{test.__name__}: ok")
