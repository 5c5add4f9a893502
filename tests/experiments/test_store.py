"""A store: one file per run, written whole, with a lock per run that ends with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_record import TINY, made

from shoal.errors import InputError
from shoal.experiments.store import Store

CONFIGS = [TINY, replace(TINY, algorithm="fish", label="Fish"), replace(TINY, seed=1)]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_finds_what_was_saved_and_looking_creates_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "runs")
    assert store.all() == []
    assert store.missing(CONFIGS) == CONFIGS
    store.clean(CONFIGS)
    assert not files(tmp_path)
    store.save(made())
    assert store.find(TINY) == made()
    assert store.missing(CONFIGS) == CONFIGS[1:]
    assert store.all() == [made()]
    named = replace(TINY, label="first")
    assert store.found([named]) == [made(named)]
    assert files(store.folder) == {f"{TINY.identity}.json"}


def test_a_failed_run_is_missing_and_keeps_its_working_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    log = store.workplace(TINY) / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("")
    store.fail(TINY, "OSError: no")
    assert store.missing([TINY]) == [TINY]
    record = store.look(TINY)
    assert record is not None
    assert (record.status, record.error, log.exists()) == ("failed", "OSError: no", True)
    store.save(made())
    assert files(tmp_path) == {f"{TINY.identity}.json"}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failure_leaves_the_old_record(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.save(made())

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(OSError, match="no space"):
            store.save(made(seconds=99.0))
    assert store.find(TINY) == made()
    store.clean([TINY])
    assert files(tmp_path) == {f"{TINY.identity}.json"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', '{"config": {}, "history": []}'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.path(TINY).write_text(text)
    for look in (lambda: store.find(TINY), store.all):
        with pytest.raises(InputError, match=rf"{TINY.identity}\.json' is not a run record"):
            look()


HOLDER = """
import os, sys, time
from shoal.experiments.config import RunConfig
from shoal.experiments.store import Store
with Store(sys.argv[1]).lock(RunConfig.from_dict({config!r}), lambda: None):
    if os.fork() == 0:  # as a worker of a DataLoader
        time.sleep(30)
        os._exit(0)
    print("locked", flush=True)
    time.sleep(30)
"""


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    """Although a process that it forked lives on."""
    store, waits = Store(tmp_path), list[float]()
    code = HOLDER.format(config=TINY.to_dict())
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "start_new_session": True}
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"

        def wait() -> None:
            waits.append(time.monotonic())
            if len(waits) == 2:
                holder.kill()
                holder.wait()
            assert len(waits) < 4

        with store.lock(TINY, wait):
            assert len(waits) == 2
        assert not files(tmp_path)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_what_a_killed_process_left_of_a_finished_run_is_removed(tmp_path: Path) -> None:
    store, other = Store(tmp_path), CONFIGS[2]
    store.save(made())
    for config in (TINY, other):
        (store.workplace(config) / "checkpoints").mkdir(parents=True)
        store.progress(config).write_text("2")
    store.clean([TINY, other])
    assert not store.workplace(TINY).exists()
    assert not store.progress(TINY).exists()
    assert store.workplace(other).exists()  # it can be resumed
