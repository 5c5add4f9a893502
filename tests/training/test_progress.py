"""The progress of a training on a terminal and in a log."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.training import progress as module
from shoal.training.evaluate import Scores
from shoal.training.progress import Progress, losses_note, scores_note


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module's own, which a test turns."""
    now = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_log_has_a_line_every_ten_seconds_and_one_at_the_end(clock: Any) -> None:
    log = io.StringIO()
    progress = Progress("fish", 100, stream=log)
    for step in range(1, 101):
        clock.now += 1
        progress.update(step, f"loss {step}")
    lines = log.getvalue().splitlines()
    assert lines[0] == "fish  10/100 steps  1:30 left  loss 10"
    assert lines[-1] == "fish  100/100 steps  done in 1:40  loss 100"
    assert len(lines) == 10
    progress.begin(50)  # resumed
    clock.now += 10
    progress.update(60)
    assert log.getvalue().splitlines()[-1] == "fish  60/100 steps  0:40 left"


def test_a_short_training_prints_nothing_and_one_that_is_not_shown_neither(clock: Any) -> None:
    log = io.StringIO()
    for progress in (Progress("fish", 10, stream=log), Progress("fish", 10, shown=False, stream=log)):
        for step in range(11):
            clock.now += 0.5
            progress.update(step)
    assert log.getvalue() == ""


def test_a_long_call_is_told_of_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.02)
    log = io.StringIO()
    progress = Progress("fish", 10, stream=log)
    with progress.phase("compiling the model"):
        time.sleep(0.3)
    with progress.phase("evaluating") as show:
        time.sleep(0.05)
        show("evaluating test", 5, 1000)
        time.sleep(0.2)
    lines = log.getvalue().splitlines()
    assert [line for line in lines if line.endswith("compiling the model")][1:]
    assert any(line.endswith("evaluating test 5/1,000") for line in lines)


def test_a_terminal_shows_label_bar_steps_and_note_without_control_characters() -> None:
    terminal = Terminal()
    progress = Progress("fish \x1b[31m[red]", 200, stream=terminal)
    progress.update(150, "loss 0.5\x1b[2J [b]x")
    time.sleep(0.3)  # until it is drawn
    with progress.phase("evaluating") as show:
        show("evaluating test", 1, 2)
    progress.close()
    text = terminal.getvalue()
    assert "fish ?[31m[red]" in text
    assert "150/200" in text
    assert "loss 0.5?[2J [b]x" in text
    assert "evaluating test 1/2" in text
    assert "\x1b[2J" not in text


def test_a_terminal_that_went_away_does_not_stop_the_training() -> None:
    progress = Progress("fish", 10, stream=Gone())
    for step in range(1, 11):
        progress.update(step, "note")
    progress.close()


def test_in_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, seen = Terminal(), list[tuple[int, str]]()
    monkeypatch.setattr("sys.stderr", terminal)
    data = {"oslo": (torch.randn(40, 3), torch.randint(2, (40,)))}
    for shown in (True, lambda step, note: seen.append((step, note)), False):
        size = len(terminal.getvalue())
        shoal.fit("erm", nn.Linear(3, 2), data, steps=50, device="cpu", progress=shown)
        assert (len(terminal.getvalue()) > size) is (shown is True)
    assert seen[-1][0] == 50
    assert "train " in seen[-1][1]


def test_notes() -> None:
    losses = {"oslo": 0.314, "lima": 2.0, "\x07": float("nan"), "rome": 0.1}
    assert losses_note(losses) == "? nan lima 2 oslo 0.314 … (1 more)"
    assert losses_note({"oslo": 0.25}) == "oslo 0.25"
    scores = Scores("accuracy", ("a",), (0.5,), (4,), 0.5)
    assert scores_note("test", scores) == "test 50.0%"
    other = Scores("accuracy", ("a",), (0.5,), (4,), 0.5, None, {"AUC": 0.75}, "AUC", True)
    assert scores_note("test", other) == "test AUC 0.75"
