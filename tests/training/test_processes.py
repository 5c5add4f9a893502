"""Two processes train what one trains; all of it runs in one launch, see together.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import together
from safetensors.torch import load_file

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Outcome]:
    """What each of two processes found."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, together.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(2)]


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Equal but for the last bits of floating-point numbers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k], tolerance) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or abs(a - b) <= tolerance * (1 + abs(b))
    return bool(a == b)


@pytest.mark.parametrize("name", together.SAME)
def test_two_train_what_one_trains(name: str, found: list[Outcome]) -> None:
    if name == "agr-rand":
        assert found[0][name]["weights"] == found[1][name]["weights"]
        return
    alone = json.loads(json.dumps(together.SAME[name]()))
    for outcome in found:
        assert close(outcome[name]["weights"], alone["weights"], 1e-12)
        assert close(outcome[name], alone, 1e-6)  # scores are counted in float32
    assert found[0][name] == found[1][name]


def test_statistics_are_one(found: list[Outcome]) -> None:
    one, other = (outcome["statistics"] for outcome in found)
    assert one == other
    assert any("running_var" in key for key in one["weights"])


def test_what_fails_fails_in_all(found: list[Outcome]) -> None:
    one, other = found
    assert one["not finite"] == other["not finite"]
    assert "nan" in one["not finite"]
    assert "batch_size: 9 cannot be split over 2 processes" in one["one example"]
    assert "accumulate=5" in one["too many parts"]
    assert "rollouts=3" in one["rollouts"]


def test_one_folder(folder: Path, found: list[Outcome]) -> None:
    run = folder / "run"
    assert json.loads((run / "record.json").read_text())["environment"]["processes"] == "2"
    weights = {k: v.double().flatten().tolist() for k, v in load_file(run / "model.safetensors").items()}
    assert weights == found[0]["folder"]["weights"] == found[1]["folder"]["weights"]
