"""`execute`: every run is recorded once, as if it had run alone, whatever fails or is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_store import files

from shoal.errors import InputError
from shoal.experiments import execute as module
from shoal.experiments import progress
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import execute
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.experiments.store import Store

TWO: Any = {"device": "cpu", "jobs": 2}
ONE: Any = {"device": "cpu", "jobs": 1}
BAD = RunConfig("linear", "erm", 5, model="sprite-cnn", label="b\x1b[31m")


def configs(count: int, steps: int = 40) -> list[RunConfig]:
    names = ("erm", "fish", "groupdro")
    return [
        RunConfig("linear", names[n % 3], steps, batch_size=8, eval_every=steps // 2, seed=n, label=f"{n}")
        for n in range(count)
    ]


def numbers(record: RunRecord) -> object:
    return record.config, record.status, record.history, record.selected, record.rule


def alone(wanted: list[RunConfig]) -> list[object]:
    return [numbers(run(c, "cpu")) for c in wanted]


def names(wanted: list[RunConfig]) -> set[str]:
    return {f"{c.identity}.json" for c in wanted}


def replace_run(monkeypatch: pytest.MonkeyPatch, act: Callable[[RunConfig], None]) -> None:
    """Before each run in this process, ``act`` is called."""

    def acting(config: RunConfig, *args: Any, **options: Any) -> RunRecord:
        act(config)
        return run(config, *args, **options)

    monkeypatch.setattr(module, "run", acting)


def test_runs_in_parallel_are_recorded_once_and_failures_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, store = configs(3), Store(tmp_path)
    outcome = execute([BAD, *good, good[0]], store, **TWO, progress=True)
    assert [numbers(r) for r in outcome.records] == alone([*good, good[0]])
    shown = capsys.readouterr().err
    assert "4 of 4 runs to do." in shown
    assert "failed: b?[31m on linear, seed 0: InputError: " in shown
    assert "3 of 4 runs done." in shown
    record = store.read(BAD)
    assert record is not None
    assert (record.status, record.error) == ("failed", outcome.failed[BAD.identity])
    assert "Traceback" in record.traceback
    repeated = list[str]()

    replace_run(monkeypatch, lambda config: repeated.append(config.label))
    again = execute([BAD, *good], store, **ONE)
    assert (again.failed.keys(), repeated) == ({BAD.identity}, [BAD.label])
    assert files(tmp_path) == names([BAD, *good])


def test_what_is_refused_or_comes_too_late(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'fish'"):
        execute([*configs(1), RunConfig("linear", "fisch", 4)], Store(tmp_path / "runs"), **ONE)
    assert not files(tmp_path)
    outcome = execute(configs(3), Store(tmp_path), **ONE, until=time.monotonic())
    assert (len(outcome.records), outcome.remaining) == (1, 2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_keeps_what_has_finished(jobs: int, tmp_path: Path) -> None:
    wanted, store = configs(4, 600), Store(tmp_path)

    def stop() -> None:
        while not any(store.path(config).exists() for config in wanted):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="the same command resumes"):
        execute(wanted, store, device="cpu", jobs=jobs)
    assert 1 <= len(store.found(wanted)) < 4
    assert [numbers(r) for r in execute(wanted, store, **ONE).records] == alone(wanted)
    assert files(tmp_path) == names(wanted)


def worker_pids() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "popen_loky" in (path.parent / "cmdline").read_text():
                found.append(int(path.parent.name))
    return found


def test_a_run_whose_process_is_killed_is_tried_three_times(tmp_path: Path) -> None:
    """The other run of the call is not affected; an idle process may be killed too."""
    endless, short = configs(2, 10**7)[0], configs(2)[1]
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.1):
            with contextlib.suppress(OSError):
                if store.progress(endless).read_text() not in ("", "0") and store.find(short):
                    store.progress(endless).unlink()
                    for pid in worker_pids():
                        os.kill(pid, signal.SIGKILL)

    store, killer = Store(tmp_path), threading.Thread(target=kill)
    killer.start()
    try:
        outcome = execute([endless, short], store, **TWO)
    finally:
        stop.set()
        killer.join()
    assert [numbers(r) for r in outcome.records] == alone([short])
    assert "its process ended 3 times" in outcome.failed[endless.identity]


DRIVER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_execute import TWO, Store, configs, execute
execute(configs(3, 600), Store(sys.argv[1]), options={"checkpoint_every": 20}, **TWO)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_driver_that_is_killed(tmp_path: Path, number: int) -> None:
    """A script without a guard for its main module, as users write them."""
    script, wanted, store = tmp_path / "driver.py", configs(3, 600), Store(tmp_path / "runs")
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(store.folder), str(Path(__file__).parent)]
    driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    while not list(store.working.glob("*/checkpoints/step-*")):
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(number)
    _, errors = driver.communicate(timeout=60)
    assert number == signal.SIGKILL or b"the same command resumes" in errors
    assert store.missing(wanted)
    assert subprocess.run(command, timeout=300, check=False).returncode == 0
    assert [numbers(r) for r in store.found(wanted)] == alone(wanted)
    assert files(store.folder) == names(wanted)


def test_progress_on_a_terminal_and_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.05)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.1)
    with progress.Progress("runs", lambda: (0.25, 180.0, "1/4 runs: \x1b[31mred")):
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10
    assert set(lines) == {"runs: 25 % · about 3 min left · 1/4 runs: ?[31mred"}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.Progress("runs", lambda: (0.5, 12.0, "erm")) as shown:
        shown.print("failed: x")
        time.sleep(0.5)
    text = capsys.readouterr().err
    assert "failed: x" in text
    assert "12 s left" in text
