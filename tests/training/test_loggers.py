"""Lines of a training as metrics.jsonl, as a TensorBoard event file and as a Weights & Biases run."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shoal.training.loggers import Metrics, TensorBoard, WeightsAndBiases


def line(step: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"phase": "train", "step": step, "loss": loss, **more}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """No file may grow past ``size`` bytes: a write that would is cut short, and the next one fails."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_in_the_file_at_once_and_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    first = Metrics(tmp_path / "m")
    whole = line(1, losses=dict.fromkeys(["<script>", "", "東京", "two\nlines", "🐟" * 100], 0.25))
    first.log(whole)
    assert lines(tmp_path / "m") == [whole]
    length = first.flush()
    first.log({"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": np.float32("nan")})
    assert lines(tmp_path / "m")[1] == {"a": None, "b": [None, 1.0], "c": {"d": None}, "e": None}
    first.close()
    (tmp_path / "m").open("ab").write(b'{"phase": "tr')
    second = Metrics(tmp_path / "m", length)
    second.log(line(2))
    second.close()
    assert lines(tmp_path / "m") == [whole, line(2)]


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m")
    metrics.log(line(1))
    with disk_full_after(metrics.flush() + 20):
        with pytest.warns(UserWarning, match="Metrics: a line was not written"):
            metrics.log(line(2))
        metrics.log(line(3))  # warned of once
        with pytest.raises(OSError, match="large"):
            metrics.flush()
    metrics.log(line(4))
    assert metrics.flush() == (tmp_path / "m").stat().st_size
    assert lines(tmp_path / "m") == [line(i) for i in (1, 2, 3, 4)]
    metrics.close()


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar by name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_every_number_of_a_line_is_an_event_of_tensorboard(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.log(line(1, losses={"oslo": 0.25}, domains=dict.fromkeys(map(str, range(51)), 0.0)))
    board.log({"phase": "warm start", "step": 2, "loss": 4})
    board.log({"phase": "train", "step": 3, "only": "words", "none": None})
    board.close()
    found = events(tmp_path)
    assert math.isnan(found.pop("none")[0][1])
    assert found == {"loss": [(1, 0.5)], "losses/oslo": [(1, 0.25)], "warm start/loss": [(2, 4.0)]}
    resumed = TensorBoard(tmp_path, 1)
    resumed.log(line(2, 0.25))
    resumed.close()
    assert sorted(events(tmp_path)["loss"]) == [(1, 0.5), (2, 0.25)]


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.broken = False

    def log(self, values: dict[str, Any]) -> None:
        if self.broken:
            raise RuntimeError("no connection")
        self.logged.append(values)


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is one run; trouble is one warning."""
    module, inits = ModuleType("wandb"), list[dict[str, Any]]()
    module.init = lambda **options: inits.append(options) or FakeRun()  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker = WeightsAndBiases("sea", "run 1", {"lr": 0.1}, tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        WeightsAndBiases("sea", "run 1", {"lr": 0.1}, Path(folder))
    ids = [options.pop("id") for options in inits]
    assert ids[0] == ids[1] != ids[2]
    same = {"project": "sea", "name": "run 1", "config": {"lr": 0.1}, "dir": str(tmp_path / "a")}
    assert inits[0] == {**same, "resume": "allow"}
    tracker.log(line(3, losses={"oslo": 0.25}))
    tracker.log({"phase": "retrain", "step": 4, "loss": 1.0})
    tracker.run.broken = True
    with pytest.warns(UserWarning, match="a line was not written .no connection"):
        tracker.log(line(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is one warning
        tracker.log(line(6))
    first = {"step": 3, "loss": 0.5, "losses/oslo": 0.25}
    assert tracker.run.logged == [first, {"retrain/step": 4, "retrain/loss": 1.0}]
