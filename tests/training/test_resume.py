"""A training that is interrupted and resumed ends as one that is not, bit for bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import registry
from shoal.errors import InputError
from shoal.training.stopping import Interrupted
from training.test_fit import Noisy

pytestmark = pytest.mark.filterwarnings("ignore:swad found no start")
STEPS = 12
SETTINGS = {"gga": {"start": 2, "length": 4, "trials": 3}}


def domains(*numbers: int) -> dict[str, Any]:
    return {f"d{n}": Noisy(n) for n in numbers}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))


class Stop(shoal.Callback):
    """Sends a signal to its own process after a step."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        self.at, self.number = at, number

    def on_step(self, state: Any) -> None:
        if state.step == self.at:
            os.kill(os.getpid(), self.number)


def train(
    name: str, folder: Path, stop: int = 99, number: int = signal.SIGTERM, **options: Any
) -> dict[str, Tensor]:
    """The weights, and the number of lines of the log."""
    model = network()
    given: dict[str, Any] = {"steps": STEPS, "batch_size": 6, "eval_every": 4, "lr": 0.05, "device": "cpu"}
    given |= {"validation": domains(4), "test": domains(5), "callbacks": [Stop(stop, number)]}
    shoal.fit(name, model, domains(1, 2, 3), folder=folder, resume=True, progress=False, **given | options)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {**model.state_dict(), "log": torch.tensor(len(lines))}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def interrupted(name: str, folder: Path, at: int, **options: Any) -> dict[str, Tensor]:
    with pytest.raises(Interrupted, match=f"step {at}"):
        train(name, folder, at, **options)
    return train(name, folder, **options)


@pytest.mark.parametrize("name", registry.names())
def test_every_algorithm(name: str, tmp_path: Path) -> None:
    whole = train(name, tmp_path / "whole", settings=SETTINGS.get(name, {}))
    at = 3 + registry.names().index(name) % 8
    assert same(whole, interrupted(name, tmp_path / "broken", at, settings=SETTINGS.get(name, {})))


OPTIONS: dict[str, dict[str, Any]] = {
    "worker processes": {"workers": 1},
    "momentum": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "accumulate": 2},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.filterwarnings("ignore:swad found no start")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    whole = train("fish", tmp_path / "whole", **options)
    assert same(whole, interrupted("fish", tmp_path / "broken", 7, **options))


def test_killed_processes(tmp_path: Path) -> None:
    """A kill leaves the newest whole checkpoint; whatever was logged after it is cut."""
    whole = train("fish", tmp_path / "whole", checkpoint_every=2)
    folder = tmp_path / "broken"
    for at in (3, 8):
        if (child := os.fork()) == 0:
            train("fish", folder, at, signal.SIGKILL, checkpoint_every=2)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-0000000006.pt"
    assert same(whole, train("fish", folder, checkpoint_every=2))


@pytest.mark.parametrize("changed", [{"lr": 0.1}, {"steps": 20}, {"seed": 1}, {"batch_size": 4}])
def test_another_training_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train("fish", tmp_path / "run", 5)
    with pytest.raises(InputError, match=next(iter(changed))):
        train("fish", tmp_path / "run", **changed)
