"""The progress line on a terminal and in a log, by a clock that the tests turn."""

import io
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.training import progress as progress_module
from shoal.training.evaluate import Evaluator
from shoal.training.progress import Progress, columns


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    # The module's own: whoever waits with a time limit meanwhile needs the true one.
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=clock, time=time.time))
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def drawn(self) -> list[str]:
        """Each line that was drawn over the one before."""
        start, *lines = self.getvalue().split("\r\x1b[K")
        assert start == ""
        return lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


class Old(Terminal):
    encoding = "ascii"


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class TestTerminal:
    def test_what_a_line_says(self, clock: Clock, terminal: Terminal) -> None:
        progress = Progress("train", 2000, stream=terminal)
        clock.now += 10
        progress.update(500, "oslo 0.31")
        progress.close()
        assert terminal.drawn() == ["[█████···············] train  500/2,000 steps  0:30 left  oslo 0.31", ""]

    def test_at_most_ten_times_a_second_and_once_at_the_end(self, clock: Clock, terminal: Terminal) -> None:
        progress = Progress("train", 1000, stream=terminal)
        for step in range(1, 1001):
            clock.now += 1 / 256
            progress.update(step)
        lines = terminal.drawn()
        assert 35 <= len(lines) <= 1000 / 256 * 10 + 1
        assert lines[-1] == f"[{'█' * 20}] train  1,000/1,000 steps  done in 0:04"

    @pytest.mark.parametrize("wide", [200, 80, 60, 40, 30, 20, 10, 3])
    @pytest.mark.parametrize("label", ["train", "東京から大阪まで🐟の領域", "e\u0301" * 100, "❤️" * 30, ""])
    def test_never_wraps(
        self, clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, wide: int, label: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(wide))
        progress = Progress(label, 12345, stream=terminal)
        for step in (1, 6000, 12345):
            clock.now += 3000
            progress.update(step, "東京 0.31 大阪 0.35 " * 10)
        assert len(terminal.drawn()) == 3
        assert max(map(columns, terminal.drawn())) < wide

    def test_control_characters_do_not_reach_the_terminal(self, clock: Clock, terminal: Terminal) -> None:
        progress = Progress("a\x1b[2Jb\r\n", 100, stream=terminal)
        clock.now += 1
        progress.update(1, "c\u202ed\ttab")
        (text,) = terminal.drawn()
        assert "a?[2Jb??" in text
        assert "c?d?tab" in text
        assert text.isprintable()

    def test_a_terminal_without_unicode(self, clock: Clock, terminal: Terminal) -> None:
        old = Old()
        progress = Progress("train", 100, stream=old)
        clock.now += 1
        progress.update(50, "東京 0.31")
        assert old.drawn() == ["[##########----------] train  50/100 steps  0:01 left  ?? 0.31"]

    def test_a_terminal_that_went_away_does_not_stop_the_training(
        self, clock: Clock, terminal: Terminal
    ) -> None:
        gone = Gone()
        closed = Terminal()
        for stream in (gone, closed):
            progress = Progress("train", 100, stream=stream)
            closed.close()
            clock.now += 1
            progress.update(1)
            progress.update(100)
            progress.close()


class TestLog:
    def run(self, clock: Clock, seconds: int, steps: int) -> list[tuple[int, str]]:
        """A step a second for so long: when lines were printed, and what they say."""
        stream = io.StringIO()
        progress = Progress("train", steps, stream=stream)
        start, found, seen = clock.now, [], 0
        for step in range(1, seconds + 1):
            clock.now = start + step
            progress.update(step, "東京 0.31")
            text = stream.getvalue()
            found += [(step, text[seen:])] * (len(text) > seen)
            seen = len(text)
        progress.close()
        assert stream.getvalue() == "".join(text for _, text in found)
        return found

    def test_lines_get_rarer(self, clock: Clock) -> None:
        found = self.run(clock, 400, 1000)
        assert [when for when, _ in found] == [5, 15, 35, 75, 135, 195, 255, 315, 375]
        assert found[1][1] == "train  15/1,000 steps  16:25 left  東京 0.31\n"

    def test_ends_with_a_line_if_there_were_any(self, clock: Clock) -> None:
        found = self.run(clock, 20, 20)
        assert [when for when, _ in found] == [5, 15, 20]
        assert found[-1][1] == "train  20/20 steps  done in 0:20  東京 0.31\n"

    def test_a_short_training_prints_nothing(self, clock: Clock) -> None:
        assert self.run(clock, 4, 4) == []

    def test_not_shown(self, clock: Clock) -> None:
        stream = Terminal()
        progress = Progress("train", 10, False, stream)
        clock.now += 60
        progress.update(10)
        progress.close()
        assert stream.getvalue() == ""


class TestTimeLeft:
    def left(self, clock: Clock, progress: Progress, step: int) -> str:
        clock.now += 60
        stream = progress.stream
        assert isinstance(stream, io.StringIO)
        progress.update(step)
        return stream.getvalue().splitlines()[-1]

    def test_a_resumed_training_counts_from_where_it_began(self, clock: Clock) -> None:
        progress = Progress("train", 1000, stream=io.StringIO(), start=900)
        assert self.left(clock, progress, 910) == "train  910/1,000 steps  9:00 left"

    def test_only_the_recent_pace_counts(self, clock: Clock) -> None:
        progress = Progress("train", 10_000, stream=io.StringIO())
        for step in range(1, 101):
            clock.now += 60.0
            progress.update(step)
        for step in range(101, 1001):
            clock.now += 0.1
            progress.update(step)
        assert progress._left(clock.now, 1000) == pytest.approx(900.0)


class TestPhase:
    """What is done between steps is said while it is done, by a thread."""

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(progress_module, "EVERY", 0.01)
        monkeypatch.setenv("COLUMNS", "120")

    def test_while_one_call_takes_long(self, terminal: Terminal) -> None:
        progress = Progress("train", 100, stream=terminal, start=7)
        with progress.phase("reading data"):
            time.sleep(0.3)
        lines = terminal.drawn()
        assert len(lines) > 1
        assert lines[0].endswith("train  7/100 steps  reading data, 0:00")
        assert lines[-1] == ""  # nothing is left of it

    def test_counts(self, terminal: Terminal) -> None:
        progress = Progress("train", 100, stream=terminal)
        with progress.phase("evaluating") as tell:
            tell("evaluating validation", 3200, 10_000)
            time.sleep(0.3)
        assert "evaluating validation 3,200/10,000" in terminal.drawn()[0]

    def test_in_a_log(self, clock: Clock) -> None:
        stream = io.StringIO()
        progress = Progress("train", 100, stream=stream)
        with progress.phase("reading data"):
            clock.now += 6
            while not stream.getvalue():
                time.sleep(0.01)
        assert stream.getvalue() == "train  0/100 steps  reading data, 0:06\n"

    def test_in_a_training(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reading, training, averages and evaluation."""
        monkeypatch.setattr(sys, "stderr", terminal)
        y = torch.arange(40) % 2
        data = {n: [(torch.randn(3), int(k)) for k in y] for n in "ab"}
        output = Evaluator._output

        def slow(self: Evaluator, model: nn.Module, x: object, count: int) -> object:
            time.sleep(0.15)
            return output(self, model, x, count)

        monkeypatch.setattr(Evaluator, "_output", slow)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        shoal.fit("erm", model, data, steps=2, eval_every=2, eval_batch=30, device="cpu")
        text = terminal.getvalue()
        assert "evaluating train 0/80" in text
        assert "evaluating train 30/80" in text
        assert "2/2 steps" in text
