"""The progress of a training on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import shoal
from shoal.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stream", [Terminal(), Closed()])
def test_a_terminal_shows_one_line_without_control_characters_of_others(
    stream: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is closed does not stop the training."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "60")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress("fish \x1b[31m[red]", 200)
    with progress.phase("compiling"):
        progress.update(150, "loss 0.5\x1b[2J" + "x" * 80)
    lines = [line.removeprefix("\x1b[K") for line in stream.getvalue().split("\r")]
    assert all(line.isprintable() and len(line) < 60 for line in lines)
    assert any("fish ?[31m[red]  150/200" in line for line in lines) or isinstance(stream, Closed)
    assert lines[-1] == ""


def test_in_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, seen = Terminal(), list[tuple[int, str]]()
    monkeypatch.setattr("sys.stderr", terminal)
    data = {name: (torch.randn(40, 3), torch.randint(2, (40,))) for name in ("oslo", "rome")}
    for shown in (True, lambda step, note: seen.append((step, note)), False):
        size = len(terminal.getvalue())
        shoal.fit("fish", nn.Linear(3, 2), data, steps=120, eval_every=60, device="cpu", progress=shown)
        assert (len(terminal.getvalue()) > size) is (shown is True)
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps))
    assert {50, 60, 100, 120} <= set(steps)
    assert "loss" in dict(seen)[50]
    assert "train accuracy" in seen[-1][1]
