"""Lines of a training as metrics.jsonl, as a TensorBoard event file and as a Weights & Biases run."""

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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shoal.training.tracking import Metrics, TensorBoard, WeightsAndBiases

ODD_NAMES = ["<script>", "a/b", "", "東京", "step", "two\nlines", "\udcff", "🐟" * 100]


def line(step: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"phase": "train", "step": step, "loss": loss, **more}


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


@contextmanager
def warned() -> Iterator[list[str]]:
    """All that is warned of inside, filled in at the end."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(warning.message) for warning in caught]


class TestMetrics:
    def test_lines_come_back_as_they_were(self, tmp_path: Path) -> None:
        path = tmp_path / "new folder" / "metrics.jsonl"
        metrics = Metrics(path)
        lines = [line(1, losses=dict.fromkeys(ODD_NAMES, 0.25)), line(2, scores={"test": {"metric": "mse"}})]
        for one in lines:
            metrics.write(one)
        assert metrics.lines() == lines
        assert metrics.flush() == path.stat().st_size
        metrics.close()
        metrics.close()
        assert metrics.lines() == [json.loads(text) for text in path.read_text().splitlines()] == lines

    def test_a_line_is_in_the_file_at_once(self, tmp_path: Path) -> None:
        metrics = Metrics(tmp_path / "m")
        metrics.write(line(1))
        assert json.loads((tmp_path / "m").read_text()) == line(1)
        metrics.close()

    def test_numbers_that_json_does_not_have_are_null(self, tmp_path: Path) -> None:
        metrics = Metrics(tmp_path / "m")
        metrics.write({"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": np.float32("nan")})
        assert metrics.lines() == [{"a": None, "b": [None, 1.0], "c": {"d": None}, "e": None}]
        metrics.close()

    def test_resuming_cuts_back_to_the_checkpoint(self, tmp_path: Path) -> None:
        first = Metrics(tmp_path / "m")
        first.write(line(1))
        length = first.flush()
        first.write(line(2, loss=9.0))
        first.close()
        (tmp_path / "m").open("ab").write(b'{"phase": "tr')
        second = Metrics(tmp_path / "m", length)
        assert second.lines() == [line(1)]
        second.write(line(2))
        assert second.lines() == [line(1), line(2)]
        second.close()

    @pytest.mark.parametrize(
        "content", [b'{"step": 1}\n', b'{"step": 1}\n{"step": 2000}\n{"step": 3}\n', b""], ids=repr
    )
    def test_lost_lines_are_said_and_what_is_known_comes_back(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "m"
        path.write_bytes(content)
        known = [{"phase": "train", "step": 1, "scores": {"test": 1}}, {"phase": "train", "step": 2}]
        with pytest.warns(UserWarning, match=r"m has lost or changed lines.* 24 bytes then"):
            metrics = Metrics(path, 24, known)
        metrics.write({"phase": "train", "step": 3})
        metrics.close()
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line for line in found if "phase" in line] == [*known, {"phase": "train", "step": 3}]
        assert {line["step"] for line in found} == {1, 2, 3}
        assert Metrics(path, path.stat().st_size).lines() == found

    def test_a_full_disk_delays_lines_and_loses_none(self, tmp_path: Path) -> None:
        path = tmp_path / "m"
        metrics = Metrics(path)
        metrics.write(line(1))
        length = metrics.flush()
        with disk_full_after(length + 20):
            with warned() as said:
                metrics.write(line(2))
                metrics.write(line(3))
            (once,) = said
            assert once.endswith("its lines are kept in memory.")
            assert path.stat().st_size == length
            with pytest.raises(OSError, match="large"):
                metrics.flush()
            assert path.stat().st_size == length
            assert metrics.lines() == [line(1), line(2), line(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            metrics.write(line(4))
        assert metrics.flush() == path.stat().st_size
        assert [json.loads(text) for text in path.read_text().splitlines()] == [line(i) for i in (1, 2, 3, 4)]
        metrics.close()


def events(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, time and value of every scalar by name, as TensorBoard reads them."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {
        tag: [(e.step, e.wall_time, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]
    }


def values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: [(step, value) for step, _, value in found] for tag, found in events(folder).items()}


class TestTensorBoard:
    def test_every_number_of_a_line_is_an_event(self, tmp_path: Path) -> None:
        board = TensorBoard(tmp_path / "new" / "folder")
        board.write(line(1, losses={"oslo": 0.25}))
        assert values(tmp_path / "new" / "folder") == {"loss": [(1, 0.5)], "losses/oslo": [(1, 0.25)]}
        board.write({"phase": "warm start", "step": 2**40, "loss": 4})
        board.write({"phase": "train", "step": 3, "only": "words"})
        board.close()
        board.close()
        board.write(line(4))
        assert values(tmp_path / "new" / "folder") == {
            "loss": [(1, 0.5)],
            "losses/oslo": [(1, 0.25)],
            "warm start/loss": [(2**40, 4.0)],
        }

    def test_a_resumed_training_begins_the_file_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        theirs = tmp_path / "events.out.tfevents.123.host.1.0"
        theirs.write_bytes(b"of another program")
        first = TensorBoard(tmp_path)
        first.write(line(1))
        first.write(line(2, loss=9.0))
        first.close()
        monkeypatch.setattr("time.time", lambda: 5000.0)
        second = TensorBoard(tmp_path, [line(1, seconds=10.0), line(2, seconds=12.5)])
        second.write(line(3, seconds=13.0))
        second.close()
        assert theirs.read_bytes() == b"of another program"
        theirs.unlink()
        assert [(step, when) for step, when, _ in events(tmp_path)["loss"]] == [
            (1, 4997.5),
            (2, 5000.0),
            (3, 5000.0),
        ]


class FakeRun:
    def __init__(self, step: int) -> None:
        self.step = step
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False
        self.broken = False

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        if self.broken:
            raise RuntimeError("no connection")
        assert commit
        assert step >= self.step, "W&B drops steps that go back"
        self.step = step + 1
        self.logged.append((step, values))

    def finish(self) -> None:
        if self.broken:
            raise RuntimeError("no connection")
        self.finished = True


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.known = 0
        self.inits: list[dict[str, Any]] = []

    def init(self, **options: Any) -> FakeRun:
        self.inits.append(options)
        return FakeRun(self.known)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


class TestWeightsAndBiases:
    def test_one_folder_is_one_run(
        self, tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        WeightsAndBiases("sea", "run 1", {"lr": 0.1}, tmp_path / "a")
        monkeypatch.chdir(tmp_path)
        WeightsAndBiases("sea", "run 1", {"lr": 0.1}, Path("a"))
        WeightsAndBiases("sea", "run 1", {"lr": 0.1}, Path("b"))
        first, again, other = wandb.inits
        assert first == again
        assert first["id"] != other["id"]
        assert int(first.pop("id"), 16) >= 0
        folder = str(tmp_path / "a")
        assert first == {
            "project": "sea",
            "name": "run 1",
            "config": {"lr": 0.1},
            "dir": folder,
            "resume": "allow",
        }
        assert Path(folder).is_dir()

    @pytest.mark.parametrize(
        ("known", "expected"),
        [
            (0, [(0, 1), (1, 2), (2, 3)]),
            (1, [(1, 2), (2, 3)]),
            (2, [(2, 3)]),
            (9, [(9, 3)]),
        ],
    )
    def test_earlier_lines_are_logged_where_they_are_lacking(
        self, tmp_path: Path, wandb: FakeWandb, known: int, expected: list[tuple[int, int]]
    ) -> None:
        wandb.known = known
        tracker = WeightsAndBiases("sea", "run", {}, tmp_path, [line(1), line(2)])
        tracker.write(line(3))
        assert [(at, values["step"]) for at, values in tracker.run.logged] == expected

    def test_its_trouble_is_one_warning(self, tmp_path: Path, wandb: FakeWandb) -> None:
        tracker = WeightsAndBiases("sea", "run", {}, tmp_path)
        tracker.run.broken = True
        with warned() as said:
            tracker.write(line(1))
            tracker.write(line(2))
            tracker.close()
        assert said == ["Weights & Biases: RuntimeError: no connection"]
        tracker.run.broken = False
        tracker.write(line(3))
        assert [at for at, _ in tracker.run.logged] == [2]
