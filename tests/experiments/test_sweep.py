"""`execute` with runs that fail and processes that are killed: every run is recorded once, as if alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store, Streams, Workers, execute
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run

ONE, TWO = Workers("cpu", 1), Workers("cpu", 2)
QUICK = {"checkpoint_every": 20}


def configs(count: int, steps: int = 60, **more: object) -> list[RunConfig]:
    names = ("erm", "fish", "dann", "groupdro")
    common = {"batch_size": 8, "eval_every": steps // 2, **more}
    return [
        RunConfig("linear", names[n % 4], steps, seed=n // 4, label=f"{n}", **common)  # type: ignore[arg-type]
        for n in range(count)
    ]


def numbers(record: RunRecord) -> object:
    return record.config, record.status, record.history, record.selected


def children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and "spawn_main" in words:
            found.append(int(stat.parent.name))
    return found


def newest_checkpoint(folder: Path) -> float:
    """When a run in the store last saved where it is; 0 if none has."""
    times = [0.0]
    for path in folder.glob("working/*/checkpoints/step-*"):
        with contextlib.suppress(OSError):  # it is replaced by the next
            times.append(path.stat().st_mtime)
    return max(times)


def test_every_run_is_recorded_as_if_it_ran_alone(tmp_path: Path) -> None:
    wanted, seen = configs(4), list[str]()
    outcome = execute(wanted, Store(tmp_path), TWO, done=lambda r: seen.append(r.config.identity))
    assert [numbers(r) for r in outcome.records] == [numbers(run(c, "cpu")) for c in wanted]
    assert sorted(seen) == sorted(c.identity for c in wanted)
    assert not outcome.failed
    assert not any((tmp_path / "working").iterdir())
    again = execute(wanted, Store(tmp_path), TWO, done=lambda r: seen.append("again"))
    assert len(again.records) == 4
    assert "again" not in seen
    assert not children()


class Stream:
    """Stands for a CUDA stream where there is no CUDA."""

    def __init__(self, device: object) -> None:
        self.entered = 0

    def synchronize(self) -> None:
        self.entered += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
    monkeypatch.setattr("shoal.experiments.execute._small", lambda turns: True)
    return Streams("cpu", 3)


def test_runs_that_take_turns_are_what_they_are_alone(streams: Streams, tmp_path: Path) -> None:
    wanted, seen, told = configs(5), list[str](), list[str]()
    bad = RunConfig("linear", "erm", 5, model="sprite-cnn", label="bad")
    store = Store(tmp_path)
    outcome = execute(
        [*wanted[:1], bad, *wanted[1:]],
        store,
        streams,
        tell=lambda config, step, note: told.append(config.label),
        done=lambda record: seen.append(record.config.label),
    )
    assert [numbers(r) for r in outcome.records] == [numbers(run(c, "cpu")) for c in wanted]
    assert outcome.failed.keys() == {bad.identity}
    assert sorted(seen) == ["0", "1", "2", "3", "4", "bad"]
    assert set(told[: told.index("2")]) == {"0", "1"}  # in parallel
    assert not any((tmp_path / "working").glob("*/config.yaml"))


def test_runs_that_take_turns_are_stopped_together(streams: Streams, tmp_path: Path) -> None:
    wanted, store = configs(4, 80), Store(tmp_path)

    def stop(config: RunConfig, step: int, note: str) -> None:
        if config.label == "1":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        execute(wanted, store, streams, tell=stop)
    assert len(list((tmp_path / "working").glob("*/checkpoints/step-*"))) >= 2
    assert store.missing(wanted) == wanted
    outcome = execute(wanted, store, streams)
    assert [numbers(r) for r in outcome.records] == [numbers(run(c, "cpu")) for c in wanted]


def test_a_run_that_fails_is_written_down_and_tried_again(tmp_path: Path) -> None:
    good = configs(3)
    bad = RunConfig("linear", "erm", 5, model="sprite-cnn", label="bad")
    store = Store(tmp_path)
    outcome = execute([bad, *good], store, TWO)
    assert [r.config.label for r in outcome.records] == ["0", "1", "2"]
    assert outcome.failed.keys() == {bad.identity}
    assert "sprite-cnn" in outcome.failed[bad.identity]
    record = store.look(bad)
    assert record is not None
    assert (record.status, record.error) == ("failed", outcome.failed[bad.identity])
    assert "Traceback" in record.traceback
    assert store.find(bad) is None
    assert store.missing([bad, *good]) == [bad]
    store.fail(bad, "before")
    seen = list[str]()
    again = execute([bad, *good], store, ONE, done=lambda r: seen.append(r.status))
    assert again.failed.keys() == {bad.identity}
    assert seen == ["failed"]
    record = store.look(bad)
    assert record is not None
    assert record.error != "before"


def test_workers_that_are_killed(tmp_path: Path) -> None:
    """Twice, at random instants after a checkpoint; runs go on from there and end the same."""
    wanted, kills, stop = configs(2, 600), list[int](), threading.Event()

    def kill() -> None:
        chance, last = random.Random(3), 0.0
        while not stop.wait(0.02) and len(kills) < 2:
            if newest_checkpoint(tmp_path) <= last:
                continue  # a worker that is killed while it starts has nothing to go on from
            stop.wait(0.2 * chance.random())
            if found := children():
                kills.append(chance.choice(found))
                last = time.time()
                try:
                    os.kill(kills[-1], signal.SIGKILL)
                except ProcessLookupError:
                    kills.pop()

    store = Store(tmp_path)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while len(store.found(wanted)) < len(wanted):  # a run may have run out of attempts
            outcome = execute(wanted, store, TWO, how=QUICK)
            assert all("its process ended" in why for why in outcome.failed.values())
    finally:
        stop.set()
        killer.join()
    assert len(kills) == 2
    assert [numbers(r) for r in store.found(wanted)] == [numbers(run(c, "cpu")) for c in wanted]
    assert len(list(tmp_path.glob("*.json"))) == len(wanted)


@contextlib.contextmanager
def claimed_elsewhere(store: Store, config: RunConfig) -> Iterator[int]:
    """By a process that does nothing else until it is killed."""
    there, here = os.pipe(), os.fork()
    if here == 0:
        try:
            with store.claimed(config, lambda: None):
                os.write(there[1], b"claimed")
                time.sleep(600)
        finally:
            os._exit(1)
    try:
        assert os.read(there[0], 7) == b"claimed"
        yield here
    finally:
        os.kill(here, signal.SIGKILL)
        os.waitpid(here, 0)
        for end in there:
            os.close(end)


def test_a_run_that_another_process_has_is_waited_for(tmp_path: Path) -> None:
    """Such as a worker that a killed sweep has left; the claim ends with the process, whatever ends it."""
    store, (config, other) = Store(tmp_path / "runs"), configs(2)
    store.name()
    told = list[tuple[str, str]]()

    def tell(run: RunConfig, step: int, note: str) -> None:
        told.append((run.label, note))
        if store.find(other) and note.startswith("waiting"):  # the others go on meanwhile
            os.kill(other_process, signal.SIGKILL)

    with claimed_elsewhere(store, config) as other_process:
        outcome = execute([config, other], store, TWO, tell=tell)
    assert [numbers(r) for r in outcome.records] == [numbers(run(c, "cpu")) for c in (config, other)]
    assert not outcome.failed
    assert {label for label, note in told if note.startswith("waiting")} == {config.label}


def test_a_sweep_that_is_stopped_when_a_run_ends_is_over(tmp_path: Path) -> None:
    """The signal comes too late to stop the run; its worker must not wait for another one."""
    wanted, store = configs(1), Store(tmp_path)

    def stop(config: RunConfig, step: int, note: str) -> None:
        if step == config.steps:
            raise KeyboardInterrupt

    def swept() -> None:
        with pytest.raises(KeyboardInterrupt):
            execute(wanted, store, ONE, tell=stop)

    thread = threading.Thread(target=swept, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not children()


DRIVER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_sweep import QUICK, TWO, Store, configs, execute
if __name__ == "__main__":
    execute(configs(2, 600), Store(Path(sys.argv[1])), TWO, how=QUICK)
    print("finished")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_killed(tmp_path: Path, number: int) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(tmp_path / "runs"), str(Path(__file__).parent)]
    wanted, store = configs(2, 600), Store(tmp_path / "runs")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    driver = subprocess.Popen(command, start_new_session=True, **pipes)
    while not newest_checkpoint(store.folder):
        assert driver.poll() is None
        time.sleep(0.02)
    os.kill(driver.pid, number)
    out, _ = driver.communicate(timeout=60)
    assert b"finished" not in out
    assert len(store.found(wanted)) < len(wanted)
    again = subprocess.run(command, **pipes, timeout=120)
    assert b"finished" in again.stdout
    assert {record.status for record in store.all()} == {"finished"}
    assert [numbers(r) for r in store.found(wanted)] == [numbers(run(c, "cpu")) for c in wanted]
