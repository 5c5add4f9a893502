"""A training that is interrupted and resumed ends as one that is not, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from shoal.algorithms import registry
from shoal.errors import InputError
from shoal.training.stopping import Interrupted

STEPS = 12


class Noisy(Dataset[Any]):
    """Examples with random transforms, from two sources of random numbers."""

    def __init__(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        self.y = torch.arange(24) % 2
        self.x = torch.randn(24, 4, generator=draw) + self.y[:, None] * number

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + torch.rand(4) + float(np.random.rand()), self.y[i]


def domains(*numbers: int) -> dict[str, Any]:
    return {f"d{n}": Noisy(n) for n in numbers}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))


class Stop(shoal.Callback):
    """Sends a signal to its own process after a step."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        self.at, self.number = at, number

    def on_step(self, state: Any) -> None:
        if state.step == self.at:
            os.kill(os.getpid(), self.number)


def train(name: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    given: dict[str, Any] = {"steps": STEPS, "batch_size": 6, "eval_every": 4, "lr": 0.05} | options
    held: dict[str, Any] = {"validation": domains(4), "test": domains(5)}
    quiet: dict[str, Any] = {"device": "cpu", "progress": False, "folder": folder, "resume": True}
    model = network()
    shoal.fit(name, model, domains(1, 2, 3), **held, **quiet, **given)
    return {
        **model.state_dict(),
        "log": torch.tensor(len((folder / "metrics.jsonl").read_text().splitlines())),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def interrupted(name: str, folder: Path, at: int, **options: Any) -> dict[str, Tensor]:
    callbacks = [Stop(at)]
    with pytest.raises(Interrupted, match=f"step {at}"):
        train(name, folder, callbacks=callbacks, **options)
    return train(name, folder, callbacks=[Stop(STEPS + 1)], **options)


@pytest.mark.parametrize("name", registry.names())
def test_every_algorithm(name: str, tmp_path: Path) -> None:
    settings = {"settings": {"start": 2, "length": 4, "trials": 3}} if name == "gga" else {}
    whole = train(name, tmp_path / "whole", callbacks=[Stop(STEPS + 1)], **settings)
    at = 3 + registry.names().index(name) % 8
    assert same(whole, interrupted(name, tmp_path / "broken", at, **settings))


OPTIONS: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": "warmup:3,cosine", "clip": 0.5},
    "averages": {"average": "sma:3", "patience": 5},
    "swad": {"average": "swad", "eval_every": 1},
    "ema and WiSE-FT": {"average": "ema", "wise_ft": 0.5, "warm_start": "head:3"},
    "tracking": {"track_every": 3},
    "worker processes": {"workers": 1},
    "momentum": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "accumulate": 2},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    whole = train("fish", tmp_path / "whole", callbacks=[Stop(STEPS + 1)], **options)
    assert same(whole, interrupted("fish", tmp_path / "broken", 7, **options))


KILLED = """
import sys
sys.path.insert(0, {here!r})
import test_resume as t
from pathlib import Path
t.train("fish", Path({folder!r}), checkpoint_every=2, callbacks=[t.Stop({at}, 9)])
"""


def test_killed_processes(tmp_path: Path) -> None:
    """A kill leaves the newest whole checkpoint; whatever was logged after it is cut."""
    whole = train("fish", tmp_path / "whole", checkpoint_every=2, callbacks=[Stop(99)])
    folder = tmp_path / "broken"
    for at in (3, 8):
        code = KILLED.format(here=str(Path(__file__).parent), folder=str(folder), at=at)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == -9, done.stderr
    (newest,) = sorted((folder / "checkpoints").iterdir())[-1:]
    assert "0006" in newest.name
    assert same(whole, train("fish", folder, checkpoint_every=2, callbacks=[Stop(99)]))


def test_a_damaged_checkpoint_costs_steps_and_no_more(tmp_path: Path) -> None:
    whole = train("fish", tmp_path / "whole", callbacks=[Stop(99)], checkpoint_every=2)
    with pytest.raises(Interrupted):
        train("fish", tmp_path / "broken", callbacks=[Stop(9)], checkpoint_every=2)
    newest = max((tmp_path / "broken" / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=newest.name):
        found = train("fish", tmp_path / "broken", callbacks=[Stop(99)], checkpoint_every=2)
    assert same(whole, found)


@pytest.mark.parametrize("changed", [{"lr": 0.1}, {"steps": 20}, {"seed": 1}, {"batch_size": 4}])
def test_another_training_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train("fish", tmp_path / "run", callbacks=[Stop(5)])
    with pytest.raises(InputError, match=next(iter(changed))):
        train("fish", tmp_path / "run", callbacks=[Stop(99)], **changed)


def test_random_numbers_outside_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    model, before = network(), torch.get_rng_state()
    drawn = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    shoal.fit("fish", model, domains(1, 2), steps=3, batch_size=4, device="cpu", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], drawn)  # type: ignore[index]
