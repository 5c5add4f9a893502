"""The progress line on a terminal and in a log, by a clock that the tests turn."""

import io
import math
import os
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.training import progress as progress_module
from shoal.training.evaluate import Evaluator
from shoal.training.progress import Progress, columns, cut, losses_note


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

    def test_numbers_stay_where_it_is_narrow(
        self, clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        progress = Progress("fishr on camelyon17, seed 3", 2000, stream=terminal)
        clock.now += 10
        progress.update(500, "oslo 0.31")
        assert terminal.drawn() == ["fishr on c…  500/2,000 steps  0:30 left"]

    def test_follows_the_size_of_the_window(
        self, clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COLUMNS")
        sizes = iter([(100, 24), (70, 24)])
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size(next(sizes)))
        progress = Progress("train", 100, stream=terminal)
        for step in (1, 2):
            clock.now += 1
            progress.update(step, "x" * 200)
        assert [columns(text) for text in terminal.drawn()] == [99, 69]

    def test_asks_the_terminal_that_it_draws_on(self, clock: Clock, terminal: Terminal) -> None:
        pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
        near, far = pty.openpty()
        termios.tcsetwinsize(far, (24, 70))
        with os.fdopen(near, "rb", buffering=0) as reader, os.fdopen(far, "w", encoding="utf-8") as stream:
            progress = Progress("train", 100, stream=stream)
            clock.now += 1
            progress.update(1, "x" * 200)
            drawn = reader.read(1000).decode()
        assert columns(drawn.removeprefix("\r\x1b[K")) == 69

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

    def test_a_terminal_that_cannot_redraw_gets_plain_lines(
        self, clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TERM", "dumb")
        progress = Progress("train", 100, stream=terminal)
        clock.now += 5
        progress.update(50)
        progress.close()
        assert terminal.getvalue() == "train  50/100 steps  0:05 left\n"

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

    def test_nothing_drawn_nothing_cleared(self, clock: Clock, terminal: Terminal) -> None:
        Progress("train", 100, stream=terminal).close()
        assert terminal.getvalue() == ""


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

    def test_lines_have_no_control_characters(self, clock: Clock) -> None:
        stream = io.StringIO()
        progress = Progress("a\x1b[1m", 10, stream=stream)
        clock.now += 6
        progress.update(1, "b\nc\u2028")
        assert stream.getvalue() == "a?[1m  1/10 steps  0:54 left  b?c?\n"

    def test_not_shown(self, clock: Clock) -> None:
        stream = Terminal()
        progress = Progress("train", 10, False, stream)
        clock.now += 60
        progress.update(10)
        progress.close()
        assert stream.getvalue() == ""

    def test_no_standard_error(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stderr", None)
        progress = Progress("train", 10)
        clock.now += 60
        progress.update(5)
        progress.close()


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

    def test_unknown_until_a_step_is_done(self, clock: Clock) -> None:
        progress = Progress("train", 1000, stream=io.StringIO(), start=5)
        assert self.left(clock, progress, 5) == "train  5/1,000 steps"
        assert self.left(clock, progress, 6) == "train  6/1,000 steps  33:08:00 left"

    @pytest.mark.parametrize("steps", [0, 5])
    def test_no_steps_or_too_many(self, clock: Clock, terminal: Terminal, steps: int) -> None:
        progress = Progress("train", steps, stream=terminal)
        clock.now += 1
        progress.update(7)
        assert "done in 0:01" in terminal.getvalue()


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

    def test_the_last_evaluation_is_not_the_end(self, terminal: Terminal) -> None:
        progress = Progress("train", 100, stream=terminal, start=100)
        with progress.phase("evaluating"):
            time.sleep(0.2)
        assert "done in" not in terminal.getvalue()
        progress.update(100)
        time.sleep(0.11)
        progress.update(100)
        assert "done in" in terminal.getvalue()

    def test_what_is_short_is_not_said(self, terminal: Terminal) -> None:
        progress = Progress("train", 100, stream=terminal)
        for _ in range(5):
            with progress.phase("evaluating"):
                pass
        assert terminal.getvalue() == ""

    def test_in_a_log(self, clock: Clock) -> None:
        stream = io.StringIO()
        progress = Progress("train", 100, stream=stream)
        with progress.phase("reading data"):
            clock.now += 6
            while not stream.getvalue():
                time.sleep(0.01)
        assert stream.getvalue() == "train  0/100 steps  reading data, 0:06\n"

    def test_no_thread_where_nothing_is_shown(self) -> None:
        threads = threading.active_count()
        with Progress("train", 100, False).phase("evaluating") as tell:
            tell("evaluating", 1, 2)
            assert threading.active_count() == threads

    def test_an_error_ends_it(self, terminal: Terminal) -> None:
        threads = threading.active_count()
        with pytest.raises(KeyError), Progress("train", 100, stream=terminal).phase("evaluating"):
            raise KeyError
        assert threading.active_count() == threads

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


class TestLossesNote:
    def test_all_in_order_if_they_fit(self) -> None:
        assert losses_note({"oslo": 0.31, "lima": 0.349}, 40) == "oslo 0.31 lima 0.35"
        assert losses_note({}, 40) == ""

    def test_the_worst_if_not(self) -> None:
        losses = {f"d{i}": i / 10 for i in range(14)} | {"nan": math.nan}
        assert losses_note(losses, 32) == "nan nan d13 1.30 … (13 more)"

    def test_numbers(self) -> None:
        losses = {"a": 0.0, "b": 0.00123, "c": 999.0, "d": 123456.0, "e": -0.5, "f": math.inf, "g": math.nan}
        assert losses_note(losses, 100) == "a 0.00 b 0.0012 c 999.00 d 1.2e+05 e -0.50 f inf g nan"

    def test_a_name_too_long_is_cut_and_its_number_kept(self) -> None:
        assert losses_note({"hospital in oslo": 0.3}, 12) == "hospit… 0.30"
        assert losses_note({"hospital in oslo": 0.3, "b": 0.1}, 24) == "hospita… 0.30 … (1 more)"

    @pytest.mark.parametrize("width", range(45))
    def test_never_wider(self, width: int) -> None:
        for names in (["東京", "大阪", "🐟🐟🐟"], ["a" * 30], [""], [str(i) for i in range(2000)]):
            assert columns(losses_note(dict.fromkeys(names, 0.5), width)) <= width

    def test_control_characters_are_replaced(self) -> None:
        assert losses_note({"a\x1b\n": 0.5, "": 1.0, "\udcff": 2.0}, 80) == "a?? 0.50 (no name) 1.00 ? 2.00"


def test_cut() -> None:
    assert cut("東京", 4) == "東京"
    assert cut("東京", 3) == "東…"
    assert cut("東京", 2) == cut("東京", 1) == "…"
    assert cut("東京", 0) == ""
