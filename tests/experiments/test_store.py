"""A store: one file per run, written whole, with a lock per run that ends with its process; its table."""

from __future__ import annotations

import json
import math
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
from shoal.experiments.config import RunConfig
from shoal.experiments.record import PYTHON, RunRecord
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


def test_a_failed_run_is_missing_and_keeps_its_working_files(tmp_path: Path) -> None:
    store, other = Store(tmp_path), CONFIGS[2]
    log = store.workplace(TINY) / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("")
    store.fail(TINY, "OSError: no")
    assert store.missing([TINY]) == [TINY]
    record = store.read(TINY)
    assert record is not None
    assert (record.status, record.error, log.exists()) == ("failed", "OSError: no", True)
    store.save(made())
    assert files(tmp_path) == {f"{TINY.identity}.json"}
    for config in (TINY, other):  # as a killed process leaves them
        (store.workplace(config) / "checkpoints").mkdir(parents=True)
        store.progress(config).write_text("2")
    store.clean([TINY, other])
    assert not store.workplace(TINY).exists()
    assert not store.progress(TINY).exists()
    assert store.workplace(other).exists()  # it can be resumed


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


ERM = RunConfig("digits", "erm", 100, data_options={"held_out": "15°"})
FISH = RunConfig("digits", "fish", 200, settings={"meta_lr": 0.5}, lr=0.01, label="Fish")


def measured(config: RunConfig = ERM, test: float = 0.5, **changes: Any) -> RunRecord:
    def point(step: int, test: float) -> dict[str, Any]:
        values = {"train": (0.9, "ab"), "validation": (0.8, "ab"), "test": (test, ["15°"])}
        scores = {
            split: {"metric": "accuracy", "average": 0.1, "domains": dict.fromkeys(names, value)}
            for split, (value, names) in values.items()
        }
        return {"step": step, "passes": step, "loss": 1.0, "scores": scores}

    history = (point(50, test), point(100, test / 2))
    record = RunRecord(config, "finished", history, 0, "best on validation", 1.5, {"device": "cpu"})
    return replace(record, **changes)


def save(folder: Path, *records: RunRecord) -> None:
    for record in records:
        Store(folder).save(record)


def test_a_row_has_settings_and_scores(tmp_path: Path) -> None:
    save(tmp_path, measured(FISH))
    (row,) = Store(tmp_path).frame().to_dict("records")
    expected = {
        **{"dataset": "digits", "algorithm": "fish", "name": "Fish", "held_out": "15°", "seed": 0},
        **{"status": "finished", "metric": "accuracy", "step": 50, "steps": 200, "lr": 0.01},
        **{"test": 0.5, "test_last": 0.25, "validation": 0.8, "train": 0.9, "test.15°": 0.5, "train.b": 0.9},
        **{"settings.meta_lr": 0.5, "identity": FISH.identity, "path": f"{FISH.identity}.json"},
    }
    assert {name: row[name] for name in expected} == expected


def test_stores_and_run_folders_at_any_depth_in_a_fixed_order(tmp_path: Path) -> None:
    """Of several records of a run the newest counts; runs that diverged or failed have no scores.

    The data of `fit` are not recorded, so that equal options do not make two of its runs the same.
    """
    save(tmp_path / "compare" / "runs", measured(replace(ERM, seed=1)))
    labelled = replace(ERM, label="plain")  # a label makes no other run
    for name, config, test, at in (("old", ERM, 0.1, 1), ("new", labelled, 0.3, 3), ("mid", ERM, 0.2, 2)):
        save(tmp_path / name, measured(config, test))
        os.utime(Store(tmp_path / name).path(ERM), (at, at))
        save(tmp_path / name, measured(RunConfig(PYTHON, "z", 4), test))
    save(tmp_path / "a", measured(replace(FISH, seed=1), status="diverged", error="the loss is nan"))
    save(tmp_path / "a", measured(replace(FISH, seed=3), test=math.nan))
    Store(tmp_path / "a").fail(replace(FISH, seed=2), "RuntimeError: no memory")
    path = tmp_path / "seeds" / "seed-2" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(measured(replace(ERM, seed=2)).to_dict()))
    for other in ("seeds.json", "compare-x.json"):
        (tmp_path / other).write_text("[]")
    frame = Store(str(tmp_path)).frame()
    names = [["Fish", 1], ["Fish", 3], ["Fish", 2], ["erm", 1], ["erm", 2], ["plain", 0], *[["z", 0]] * 3]
    assert frame[["name", "seed"]].values.tolist() == names
    assert frame["path"].iloc[4] == "seeds/seed-2/record.json"
    assert frame["status"].tolist()[:4] == ["diverged", "finished", "failed", "finished"]
    assert frame["test"].isna().tolist() == [True] * 3 + [False] * 6
    assert frame["validation"].isna().tolist() == [True, False, True] + [False] * 6
    assert (frame["error"][2], frame["test"].iloc[5]) == ("RuntimeError: no memory", 0.3)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps(measured().to_dict() | {"schema": 99})])
def test_files_that_are_no_records_are_named(content: str, tmp_path: Path) -> None:
    """By an error where they are needed, by one warning in a table."""
    save(tmp_path, measured(FISH))
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
