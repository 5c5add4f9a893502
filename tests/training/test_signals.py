"""Signals inside evaluation and the reading of data: heeded at the next batch, and nothing is lost."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import assert_same, fit, outcome
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from algorithms.every_algorithm import network, toy
from shoal.cli import main
from shoal.training.stopping import Interrupted

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


class Unheard(BaseException):
    """A signal that the training did not watch for."""


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals end a test, not the tests; the disk is not waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def hear(number: int, frame: object) -> None:
        raise Unheard(signal.Signals(number).name)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Watched(nn.Module):
    """The tests' network; counts the batches that it evaluates, and calls ``act`` at one of them."""

    def __init__(self, at: int = 0, act: Callable[[], None] = lambda: None, seconds: float = 0.0) -> None:
        super().__init__()
        self.inner, self.at, self.act, self.seconds, self.evaluated = network(), at, act, seconds, 0

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            self.evaluated += 1
            time.sleep(self.seconds)
            if self.evaluated == self.at:
                self.act()
        return self.inner(x)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def many_batches(**more: Any) -> dict[str, Any]:
    """Options with which every evaluation takes a batch per two examples."""
    return {"algorithm": "erm", "eval_batch": 2, "steps": 6, "eval_every": 3, "select": "best", **more}


@BOTH
@pytest.mark.parametrize("where", [0.02, 0.3, 0.55, 0.98], ids=["begins", "first", "second", "ends"])
def test_a_signal_inside_an_evaluation_is_heeded_at_the_next_batch(
    tmp_path: Path, number: signal.Signals, where: float
) -> None:
    counting = Watched()
    whole = fit(tmp_path / "whole", model=counting, **many_batches())
    batches = counting.evaluated
    assert batches > 40
    watched = Watched(at=max(5, int(where * batches)), act=send(number))
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path / "stopped", model=watched, **many_batches())
    assert caught.value.signal == number
    assert watched.evaluated <= watched.at + 1
    resumed = fit(tmp_path / "stopped", model=Watched(), resume=True, **many_batches())
    assert_same(resumed, whole)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@BOTH
def test_again_and_again_inside_evaluations(tmp_path: Path, number: signal.Signals) -> None:
    """Whatever was measured so often in part, what is kept is as if it had been measured once."""
    options = many_batches(average="sma", average_start=2, warm_start=2)
    whole = fit(tmp_path / "whole", model=Watched(), **options)
    draw = random.Random(0)
    for _ in range(5):
        watched = Watched(at=draw.randint(5, 60), act=send(number))
        try:
            fit(tmp_path / "stopped", model=watched, resume=True, **options)
        except Interrupted:
            assert watched.evaluated <= watched.at + 1
        else:
            assert watched.evaluated < watched.at
            break
    assert_same(fit(tmp_path / "stopped", model=Watched(), resume=True, **options), whole)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


class Reading(Dataset):
    """Examples that are read one by one; calls ``act`` when so many have been read."""

    read = itertools.count(1)

    def __init__(self, x: Tensor, y: Tensor, at: int, act: Callable[[], None]) -> None:
        self.x, self.y, self.at, self.act = x, y, at, act

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if next(Reading.read) == self.at:
            self.act()
        return self.x[i] + 0.1 * torch.as_tensor(np.random.rand(4)).float(), int(self.y[i])


@BOTH
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_signal_while_examples_are_read(tmp_path: Path, number: signal.Signals, share: float) -> None:
    def parts(at: int, act: Callable[[], None]) -> dict[str, Dataset]:
        Reading.read = itertools.count(1)
        return {name: Reading(x, y, at, act) for name, (x, y) in toy().items()}

    whole = fit(tmp_path / "whole", train=parts(-1, list), **many_batches(classes=2))
    read = next(Reading.read)
    at = int(share * read)
    # Before the first step there is nothing to save, and a signal acts as it does anywhere.
    with pytest.raises(Unheard if share < 0.2 else Interrupted):
        fit(tmp_path / "stopped", train=parts(at, send(number)), **many_batches(classes=2))
    assert next(Reading.read) - at < read / 4
    resumed = fit(tmp_path / "stopped", train=parts(-1, list), resume=True, **many_batches(classes=2))
    assert_same(resumed, whole)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def in_a_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_killed_inside_evaluations(tmp_path: Path) -> None:
    """SIGKILL at any moment of a training that mostly evaluates; the last one is left in peace."""
    options = many_batches(steps=4, eval_every=1, checkpoint_every=1)
    whole = fit(tmp_path / "whole", model=Watched(), **options)
    draw, kills = random.Random(1), 0
    for attempt in range(6):
        child = in_a_child(
            lambda: fit(tmp_path / "killed", model=Watched(seconds=0.003), resume=True, **options)
        )
        time.sleep(draw.uniform(0.1, 0.5) * (attempt < 5))
        if attempt < 5:
            os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert kills >= 2
    assert_same(fit(tmp_path / "killed", model=Watched(), resume=True, **options), whole)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


@BOTH
def test_the_command_ends_soon_inside_a_slow_evaluation(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within two seconds of the signal; it says how to resume, which then ends as one without a stop."""
    from shoal.models.feature_model import FeatureModel

    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    line = [
        "train",
        "erm",
        "linear",
        "--steps",
        "4",
        "--batch-size",
        "8",
        "--eval-every",
        "2",
        "--device",
        "cpu",
    ]
    assert main([*line, "--out", "whole"]) == 0
    forward, calls, sent = FeatureModel.forward, itertools.count(1), []

    def slow(self: FeatureModel, x: Tensor) -> Any:
        if not self.training:
            time.sleep(0.1)
            if next(calls) == 2:
                sent.append(time.monotonic())
                os.kill(os.getpid(), number)
        return forward(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureModel, "forward", slow)
        assert main([*line, "--out", "stopped"]) == 128 + number
    assert time.monotonic() - sent[0] < 2
    assert "resume stopped" in capfd.readouterr().err
    assert main(["resume", "stopped"]) == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@BOTH
def test_the_command_ends_while_images_are_read(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first step there is nothing to save; the same command then starts afresh."""
    image = pytest.importorskip("PIL.Image")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for domain, label, n in itertools.product("ab", "xy", range(3)):
        folder = Path(f"images-{number}", domain, label)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{n}.png")
    line = f"train erm images-{number} --data size=16 --held-out none --steps 1 --batch-size 2".split()
    line += ["--device", "cpu", "--out", "run"]
    opened, calls = image.open, itertools.count(1)

    def interrupted(*given: Any, **more: Any) -> Any:
        if next(calls) == 5:
            os.kill(os.getpid(), number)
        return opened(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(image, "open", interrupted)
        assert main(line) == 128 + number
    assert "Traceback" not in capfd.readouterr().err
    assert main(line) == 0


def test_nothing_is_watched_after_a_run() -> None:
    before = signal.getsignal(signal.SIGTERM)
    shoal.fit("erm", network(), toy(), steps=1, device="cpu", progress=False)
    assert signal.getsignal(signal.SIGTERM) == before
