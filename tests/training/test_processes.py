"""Two processes train what one trains. All of it runs in three launches, see together.py."""

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import together
import torch
from safetensors.torch import load_file

from shoal.training.checkpoint import Checkpoints

SECONDS = 120.0
"""Longer than that, and the processes wait for each other."""
Outcome = dict[str, Any]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def launch(folder: Path, what: str, **environment: str) -> list[Outcome]:
    """What each of two processes found."""
    code = together.end(together.start(folder, what, **environment), SECONDS)
    log = (folder / f"{what}.log").read_text(errors="replace")
    assert code == 0, f"the launch {'hung' if code is None else f'ended with {code}'}:\n{log}"
    return [json.loads((folder / f"{what}-{n}.json").read_text()) for n in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all of pytest's workers."""
    root = tmp_path_factory.getbasetemp()
    there = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "together"
    there.mkdir(exist_ok=True)
    return there


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Outcome]:
    """Launched by the first worker that asks; the others wait for it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "found.json"
        if not done.exists():
            done.write_text(json.dumps(launch(folder, "all")))
        outcomes: list[Outcome] = json.loads(done.read_text())
    return outcomes


def close(a: Any, b: Any, tolerance: float = 1e-10) -> bool:
    """Equal but for the last bits of floating-point numbers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k], tolerance) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or abs(a - b) <= tolerance * (1 + abs(b))
    return bool(a == b)


ALONE = dict(together.same())


@pytest.mark.parametrize("name", ALONE)
def test_two_train_what_one_trains(name: str, found: list[Outcome]) -> None:
    alone = json.loads(json.dumps(ALONE[name]()))
    start = together.state(together.network())
    assert not close(alone["weights"], start, 1e-3)
    if "kept" in name:
        assert found[0][name].keys() >= {"algorithm", "the user's"}
        assert close(found[0][name], alone)
    for outcome in found:
        assert close(outcome[name]["weights"], alone["weights"])
        if "random" not in name:  # evaluation draws anew
            assert close(outcome[name], alone, 1e-6)  # scores are counted in float32
    assert found[0][name] == found[1][name]


@pytest.mark.parametrize("name", together.KINDS)
def test_statistics_are_one(name: str, found: list[Outcome]) -> None:
    one, other = (outcome[f"{name}, statistics"] for outcome in found)
    assert one == other
    assert any("running_var" in key for key in one["weights"])
    assert all(v > 0 for key, values in one["weights"].items() if "running_var" in key for v in values)


def test_masks_differ(found: list[Outcome]) -> None:
    one, other = (outcome["masks"] for outcome in found)
    assert len(one) == len(other) == together.S * together.STEPS
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert one[0] == together.masks()[0]  # the main process draws as if it were alone


BAD = [(n, v) for n in together.KINDS for v in (("nan", "inf") if n in together.FEW else ("nan",))]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_one_that_is_not_finite_stops_all(name: str, value: str, found: list[Outcome]) -> None:
    one, other = (outcome[f"{name}, {value}"] for outcome in found)
    assert one == other
    assert one["step"] == together.BAD_STEP
    assert one["what"] == "loss"
    turned = "nan" if name == "mixup" else value  # which takes a difference of losses
    assert f"became {turned} at step {one['step']}, which was not applied" in one["message"]


def test_what_cannot_be_shared_is_refused_by_all(found: list[Outcome]) -> None:
    assert {o["one example"] for o in found} == {
        "batch_size=1 is split over 2 processes; it must be at least 2."
    }
    (pieces,) = {o["five pieces"] for o in found}
    assert "accumulate=5 pieces of 4 examples" in pieces


def test_one_folder(folder: Path, found: list[Outcome]) -> None:
    whole = folder / "whole"
    assert {p.name for p in whole.iterdir()} >= {"config.yaml", "record.json", "model.safetensors"}
    record = json.loads((whole / "record.json").read_text())
    assert record["environment"]["processes"] == "2"
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lr" in line] == [50]
    weights = {k: v.double().flatten().tolist() for k, v in load_file(whole / "model.safetensors").items()}
    assert weights == found[0]["folder"]["weights"] == found[1]["folder"]["weights"]


def test_interrupted_and_resumed(folder: Path, found: list[Outcome]) -> None:
    broken = folder / "broken"
    process = together.start(folder, "broken", SLOW="yes")
    checkpoints = Checkpoints(broken / "checkpoints")
    deadline = time.monotonic() + SECONDS
    while (checkpoints.latest() or 0) < 15:
        assert process.poll() is None, (folder / "broken.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on
    code = together.end(process, SECONDS)
    log = (folder / "broken.log").read_text()
    assert code not in (0, None), log
    assert "which is saved. Resume with: " in log
    assert not (broken / "record.json").exists()
    assert 15 <= (checkpoints.latest() or 0) < 40
    shutil.copytree(broken, folder / "alone")
    alone = together.in_folder(folder / "alone", resume=True)  # in one process
    assert [point["step"] for point in alone["history"]] == [20, 40, 60]
    resumed = launch(folder, "resumed")
    whole = load_file(folder / "whole" / "model.safetensors")
    torch.testing.assert_close(load_file(broken / "model.safetensors"), whole, rtol=0, atol=0)
    assert resumed[0]["folder"] == resumed[1]["folder"] == found[0]["folder"]
