"""The progress of a training on a terminal and in a log."""

from __future__ import annotations

import io
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


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module's own, which a test turns."""
    now = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from here on; not in a fixture, after which pytest puts its own in place."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_a_log_has_a_line_every_ten_seconds(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    for progress in (Progress("fish", 100), Progress("hidden", 100, shown=False)):
        for step in range(1, 101):
            clock.now += 1
            progress.update(step, f"loss {step}")
    lines = log.getvalue().splitlines()
    assert lines[0] == "fish  10/100 steps  0:01:30 left  loss 10"
    assert len(lines) == 10


def test_a_terminal_shows_a_bar_without_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    progress = Progress("fish \x1b[31m[red]", 200)
    with progress.phase("compiling"):
        progress.update(150, "loss 0.5\x1b[2J [b]x")
        progress.count("evaluating test", 1, 2000)
    progress.close()
    text = terminal.getvalue()
    for part in ("fish ?[31m[red]", "150/200", "evaluating test 1/2,000"):
        assert part in text
    assert "\x1b[2J" not in text


def test_a_closed_terminal_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Closed())
    progress = Progress("fish", 10)
    for step in range(1, 11):
        progress.update(step, "note")
    progress.close()


def test_in_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, seen = on_terminal(monkeypatch), list[tuple[int, str]]()
    data = {name: (torch.randn(40, 3), torch.randint(2, (40,))) for name in ("oslo", "rome")}
    for shown in (True, lambda step, note: seen.append((step, note)), False):
        size = len(terminal.getvalue())
        shoal.fit("fish", nn.Linear(3, 2), data, steps=120, eval_every=60, device="cpu", progress=shown)
        assert (len(terminal.getvalue()) > size) is (shown is True)
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps))
    assert {50, 60, 100, 120} <= set(steps)
    assert seen[0] == (1, "")
    assert "oslo" in dict(seen)[50]
    assert "train " in seen[-1][1]


def test_notes() -> None:
    losses = {"oslo": 0.314, "lima": 2.0, "\x07": float("nan"), "rome": 0.1}
    assert losses_note(losses) == "? nan lima 2 oslo 0.314 … (1 more)"
    scores = Scores("accuracy", ("a",), (0.5,), (4,), 0.5)
    assert scores_note("test", scores) == "test 50.0%"
    other = Scores("accuracy", ("a",), (0.5,), (4,), 0.5, None, {"AUC": 0.75}, "AUC", True)
    assert scores_note("test", other) == "test AUC 0.75"
