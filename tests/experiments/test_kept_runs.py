"""Nothing that can be resumed or was promised is lost: failures, removed folders, records of other runs."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_sweep import configs, numbers

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import InProcess, Store, execute, settle
from shoal.experiments.record import read_record
from shoal.experiments.run import of_same_run, run
from shoal.training.folder import RunFolder

CONFIG = RunConfig("linear", "erm", 60, batch_size=8, eval_every=20)
SHORT: dict[str, Any] = {"steps": 12, "batch_size": 8, "device": "cpu", "out": "run", "progress": False}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def at(step: int, act: Callable[[], Any]) -> Callable[[int, str], None]:
    """Does so once that step is reached."""
    done = list[int]()

    def tell(now: int, note: str) -> None:
        if now >= step and not done:
            done.append(now)
            act()

    return tell


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


# Runs that fail


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        InputError("there is no folder 'data'."),
        MemoryError(),
    ],
)
def test_a_run_that_fails_resumes_from_its_checkpoint(error: Exception, tmp_path: Path) -> None:
    store, (config,) = Store(tmp_path / "runs"), configs(1)
    store.name()
    how = {"checkpoint_every": 10}
    assert type(error).__name__ in str(settle(config, store, "cpu", at(45, failing(error)), how))
    assert list((store.workplace(config) / "checkpoints").glob("step-0000000040-*"))
    steps = list[int]()
    assert settle(config, store, "cpu", lambda step, note: steps.append(step), how) is None
    assert min(steps) > 40
    assert numbers(store.found([config])[0]) == numbers(run(config, "cpu"))
    assert not store.workplace(config).exists()


def test_a_sweep_of_failures_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoal.experiments.run.run", lambda *args, **options: failing(InputError("no data."))()
    )
    short: Any = {"seeds": 1, "search": 1, "steps": 2, "jobs": 1, "device": "cpu", "progress": False}
    with pytest.raises(Exception, match=r"every run failed, such as: InputError: no data\."):
        shoal.sweep("linear", algorithms="erm", out="swept", **short)
    assert not list(Path("swept").glob("sweep*"))
    assert set(shoal.results("swept")["status"]) == {"failed"}


@pytest.mark.parametrize("weights", [False, True])
def test_a_full_disk_ends_all(weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would meet it too; what is not their fault is not recorded as a failure of theirs."""
    tried = list[int]()

    def fail(config: RunConfig, *args: Any) -> Any:
        tried.append(config.seed)
        if len(tried) > 1:
            raise InputError("it could not be written (No space left on device). Make room.")
        return run(config, *args)

    wanted = [replace(CONFIG, seed=seed) for seed in range(3)]
    store = Store("runs", weights=weights)
    with monkeypatch.context() as patch:
        patch.setattr("shoal.experiments.run.run", fail)
        with pytest.raises(OSError, match="No space left"):
            execute(wanted, store, InProcess("cpu"))
    assert tried == [0, 1]
    assert store.missing(wanted) == wanted[1:]
    assert len(execute(wanted, Store("runs", weights=weights), InProcess("cpu")).records) == 3


def test_seeds_of_which_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig, *args: Any) -> Any:
        if config.seed == 1:
            raise RuntimeError("no memory")
        return run(config, *args)

    monkeypatch.setattr("shoal.experiments.run.run", fail)
    result = shoal.train("erm", "linear", **SHORT, seeds=2, jobs=1)
    assert list(result.problems) == ["seed 1: RuntimeError: no memory"]
    assert "seed 1: RuntimeError: no memory" in str(result)
    assert shoal.results("run").set_index("seed")["status"].to_dict() == {0: "finished", 1: "failed"}


# The folder of a run


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    whole = run(CONFIG, "cpu", folder=tmp_path / "whole")
    with pytest.warns(UserWarning, match="was removed"):
        again = run(CONFIG, "cpu", at(30, lambda: shutil.rmtree("run")), Path("run"))
    assert numbers(again) == numbers(whole)
    assert {p.name for p in Path("run").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    logs = [(tmp_path / f / "metrics.jsonl").read_text().splitlines() for f in ("whole", "run")]
    assert [json.loads(x)["step"] for x in logs[0]] == [json.loads(x)["step"] for x in logs[1]]
    assert read_record(Path("run/record.json"), CONFIG) == again
    assert not RunFolder("run").held


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_a_folder_that_another_takes_the_place_of() -> None:
    def replaced() -> None:
        Path("run").rename("moved")
        Path("run").mkdir()
        Path("run/mine.txt").write_text("mine")

    with pytest.raises(InputError, match=r"took the place of run .* are in run-1"):
        run(CONFIG, "cpu", at(30, replaced), Path("run"))
    assert [p.name for p in Path("run").iterdir()] == ["mine.txt"]
    assert numbers(read_record(Path("run-1/record.json"), CONFIG)) == numbers(run(CONFIG, "cpu"))
    assert (Path("run-1") / "model.safetensors").exists()


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError), RunFolder(tmp_path / "run"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "inputs.json"])
def test_a_flipped_bit_is_noticed(name: str) -> None:
    """In the last digit of a weight, or in the spaces between two words: anywhere."""
    shoal.train("erm", "linear", **SHORT)
    path = Path("run") / name
    content = bytearray(path.read_bytes())
    content[-1 if name == "model.safetensors" else content.index(b" ")] ^= 1 if name[0] == "m" else 0x29
    path.write_bytes(content)  # a space becomes a tab
    with pytest.raises(InputError, match=f"{name}' is damaged: its content has changed"):
        shoal.load("run")


# Records of other runs


def test_a_record_of_another_run_is_not_believed(tmp_path: Path) -> None:
    small, other = replace(CONFIG, steps=4), replace(CONFIG, steps=4, seed=7)
    record = run(small, "cpu", folder=tmp_path / "seed-0")
    run(other, "cpu", folder=tmp_path / "seed-7")
    shutil.copy(tmp_path / "seed-7" / "record.json", tmp_path / "seed-0" / "record.json")
    says = r"record of another run \(seed 7, not 0\)"
    with pytest.raises(InputError, match=says):
        of_same_run(tmp_path / "seed-0", small)
    with pytest.raises(InputError, match=says):
        Store(tmp_path, weights=True).missing([small])
    store = Store(tmp_path / "store")
    store.save(record)
    store.path(small).rename(store.path(other))
    with pytest.raises(InputError, match=r"another run \(seed 0, not 7\)"):
        execute([other], store, InProcess("cpu"))
