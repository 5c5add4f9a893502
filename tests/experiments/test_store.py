"""A store: one file per run, written whole, with a lock per run that ends with its process; its table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_record import TINY, made

from shoal.errors import InputError
from shoal.experiments.store import Store

CONFIGS = [TINY, replace(TINY, algorithm="fish", label="Fish"), replace(TINY, seed=1)]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_finds_what_was_saved_and_reading_creates_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "runs")
    assert store.missing([*CONFIGS, TINY]) == CONFIGS
    store.clean(CONFIGS)
    assert not files(tmp_path)
    store.save(made())
    assert store.find(TINY) == made()
    assert store.missing(CONFIGS) == CONFIGS[1:]
    named = replace(TINY, label="first")
    assert store.found([named]) == [made(named)]
    assert files(store.folder) == {f"{TINY.identity}.json"}


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
    command = [sys.executable, "-c", HOLDER.format(config=TINY.to_dict()), str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
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


def test_a_row_has_settings_and_scores(tmp_path: Path) -> None:
    Store(tmp_path).save(made(replace(TINY, algorithm="fish", settings={"meta_lr": 0.5}, label="Fish")))
    (row,) = Store(tmp_path).frame().to_dict("records")
    expected = {"dataset": "linear", "algorithm": "fish", "name": "Fish", "seed": 0, "status": "finished"}
    expected |= {"metric": "accuracy", "step": 2, "steps": 4, "lr": 0.5, "settings.meta_lr": 0.5}
    expected |= {"test": 0.8, "test_last": 0.7, "test.D3": 0.8}
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps(made().to_dict() | {"schema": 99})])
def test_files_that_are_no_records_are_named(content: str, tmp_path: Path) -> None:
    """By an error where they are needed, by one warning in a table."""
    Store(tmp_path).save(made(CONFIGS[1]))
    store = Store(tmp_path)
    store.path(TINY).write_text(content)
    with pytest.raises(InputError, match=rf"{TINY.identity}\.json' is not a run record"):
        store.find(TINY)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "record.json").write_text(content)
    with pytest.warns(UserWarning, match="is not a run record") as caught:
        frame = Store(tmp_path).frame()
    assert frame["algorithm"].tolist() == ["fish"]
    (warning,) = caught
    assert all(str(path) in str(warning.message) for path in (store.path(TINY), tmp_path / "a/record.json"))
    with pytest.raises(InputError, match=r"there is no folder '.*nowhere'"):
        Store(tmp_path / "nowhere").frame()
