"""Nothing that can be resumed or was promised is lost: failures, removed folders, records of other runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_sweep import children, configs, numbers

from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import InProcess, Store, execute, settle
from shoal.experiments.record import read_record
from shoal.experiments.run import of_same_run, run
from shoal.experiments.status import RunStatus
from shoal.training import journal
from shoal.training.folder import RunFolder
from shoal.training.journal import Journal
from shoal.training.processes import Processes

CONFIG = RunConfig("linear", "erm", 60, batch_size=8, eval_every=20)
TRAIN = [
    "train",
    "erm",
    "linear",
    "--steps",
    "12",
    "--batch-size",
    "8",
    "--device",
    "cpu",
    "--out",
    "run",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def at(step: int, act: Any) -> Any:
    """Does so once that step is reached."""
    done = list[int]()

    def tell(now: int, note: str) -> None:
        if now >= step and not done:
            done.append(now)
            act()

    return tell


def failing(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


# A sweep


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        InputError("there is no folder 'data'."),
        RuntimeError("CUDA error"),
        MemoryError(),
    ],
    ids=["full disk", "data away", "device", "memory"],
)
def test_a_run_that_fails_resumes_from_its_checkpoint(error: Exception, tmp_path: Path) -> None:
    store, (config,) = Store(tmp_path / "runs"), configs(1)
    store.name()
    how = {"checkpoint_every": 10, "log_every": 5}
    said = settle(config, store, "cpu", at(45, failing(error)), how)
    assert type(error).__name__ in str(said)
    assert list((store.workplace(config) / "checkpoints").glob("step-0000000040-*"))
    steps = list[int]()
    assert settle(config, store, "cpu", lambda step, note: steps.append(step), how) is None
    assert min(steps) > 40
    assert numbers(store.found([config])[0]) == numbers(run(config, "cpu"))
    assert not store.workplace(config).exists()
    assert [record.status for record in store.all()] == ["finished"]


def test_a_sweep_of_failures_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise InputError("no data.")

    monkeypatch.setattr("shoal.experiments.run.run", fail)
    words = "sweep linear --algorithms erm --seeds 1 --search 1 --steps 2 --out swept --jobs 1 --device cpu"
    assert main(words.split()) == 1
    assert "every run failed, such as: InputError: no data." in capsys.readouterr().err
    assert not list(Path("swept").glob("sweep*"))
    assert {record.status for record in Store("swept/runs").all()} == {"failed"}


@pytest.mark.parametrize("weights", [False, True])
def test_a_full_disk_ends_all(weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would meet it too; what is not their fault is not recorded as a failure of theirs."""
    tried = list[int]()

    def fail(config: RunConfig, *args: Any) -> Any:
        tried.append(config.seed)
        if len(tried) > 1:
            raise InputError("it could not be written (No space left on device). Make room.")
        return run(config, *args)

    monkeypatch.setattr("shoal.experiments.run.run", fail)
    wanted = [replace(CONFIG, seed=seed) for seed in range(3)]
    store = Store("runs", weights=weights)
    with pytest.raises(
        OSError, match=r"No space left on device.*Finished runs are saved; free some disk space"
    ):
        execute(wanted, store, InProcess("cpu"))
    assert tried == [0, 1]
    assert store.missing(wanted) == wanted[1:]
    monkeypatch.undo()
    assert (
        len(execute(wanted, Store(store.folder.absolute(), weights=weights), InProcess("cpu")).records) == 3
    )


@pytest.mark.slow
def test_a_killed_worker_of_several_seeds_costs_one_retry(capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.05):
            if list(Path("run").glob("seed-*/metrics.jsonl")):
                for child in children()[:1]:
                    os.kill(child, signal.SIGKILL)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert main([*TRAIN, "--steps", "3000", "--seeds", "2", "--jobs", "2"]) == 0
    finally:
        stop.set()
        killer.join()
    assert "over 2 seeds" in capsys.readouterr().out
    assert not children()


def test_seeds_of_which_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig, *args: Any) -> Any:
        if config.seed == 1:
            raise RuntimeError("no memory")
        return run(config, *args)

    monkeypatch.setattr("shoal.experiments.run.run", fail)
    several = [*TRAIN, "--seeds", "2", "--jobs", "1"]
    assert main(several) == 1
    shown = capsys.readouterr()
    assert "[2/2] erm, seed 1: failed: RuntimeError: no memory" in shown.err
    assert "seed 1: RuntimeError: no memory" in shown.out
    assert main(["results", "run"]) == 0
    assert "1 run failed and are excluded from the means" in capsys.readouterr().out
    monkeypatch.undo()


# The end of a run


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    whole = run(CONFIG, "cpu", folder=tmp_path / "whole")
    with pytest.warns(UserWarning, match="was removed while the run was using it"):
        again = run(CONFIG, "cpu", at(30, lambda: shutil.rmtree("run")), Path("run"))
    assert numbers(again) == numbers(whole)
    names = {p.name for p in (tmp_path / "whole").iterdir()}
    assert {p.name for p in Path("run").iterdir()} == names
    logs = [(tmp_path / f / "metrics.jsonl").read_text().splitlines() for f in ("whole", "run")]
    assert [json.loads(x)["step"] for x in logs[0]] == [json.loads(x)["step"] for x in logs[1]]
    assert read_record(Path("run/record.json"), CONFIG) == again
    assert not RunFolder("run").held


def test_removed_in_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the last checkpoint, when nothing but the result is still to be written."""
    record = run(CONFIG, "cpu", folder=tmp_path / "whole")
    kept = Journal.finish

    def removed(self: Journal, *given: Any) -> Any:
        shutil.rmtree(self.folder.path)
        return kept(self, *given)

    monkeypatch.setattr(Journal, "finish", removed)
    with pytest.warns(UserWarning, match="was removed"):
        again = run(CONFIG, "cpu", folder=Path("run"))
    assert numbers(again) == numbers(record)
    assert main(["show", "run"]) == 0
    assert "finished: step 60 of 60" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_a_folder_that_another_takes_the_place_of(tmp_path: Path) -> None:
    def replaced() -> None:
        Path("run").rename("moved")
        Path("run").mkdir()
        Path("run/mine.txt").write_text("mine")

    with pytest.raises(InputError, match=r"took the place of run .* are in run-1"):
        run(CONFIG, "cpu", at(30, replaced), Path("run"))
    assert [p.name for p in Path("run").iterdir()] == ["mine.txt"]
    assert numbers(read_record(Path("run-1/record.json"), CONFIG)) == numbers(run(CONFIG, "cpu"))
    assert (Path("run-1") / "model.safetensors").exists()


def test_what_is_not_there_is_not_said_to_be_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file system that takes everything and keeps nothing."""
    write = journal.write_atomically

    def lost(path: Path, content: bytes) -> None:
        write(path, content)
        if path.name == "model.safetensors":
            path.unlink()

    monkeypatch.setattr(journal, "write_atomically", lost)
    assert main(TRAIN) == 2
    shown = capsys.readouterr()
    assert "Saved in" not in shown.out
    assert "does not keep written files" in shown.err


# Litter


def test_what_kills_left_is_cleared_when_the_folder_is_taken(tmp_path: Path) -> None:
    run(replace(CONFIG, steps=4), "cpu", folder=tmp_path / "run")
    place = tmp_path / "run"
    litter = [
        *(place / f".{name}.abcd1234" for name in ("metrics.jsonl", "config.yaml", "record.json", "card.md")),
        place / "checkpoints" / ".step-0000000002-0123456789abcdef.pt.abcd1234",
        place / "checkpoints" / "best-0000000002-0123456789abcdef.pt",
    ]
    mine = [place / ".notes", place / ".hidden.settings", place / "checkpoints" / "notes"]
    for path in (*litter, *mine):
        path.write_text("x")
    before = {p for p in place.rglob("*") if p not in litter}
    with Journal(place, Processes("cpu")):
        pass
    assert set(place.rglob("*")) == before


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError), RunFolder(tmp_path / "run"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


# Records of other runs


def test_a_record_of_another_run_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, other = replace(CONFIG, steps=4), replace(CONFIG, steps=4, seed=7)
    record = run(small, "cpu", folder=tmp_path / "seed-0")
    run(other, "cpu", folder=tmp_path / "seed-7")
    shutil.copy(tmp_path / "seed-7" / "record.json", tmp_path / "seed-0" / "record.json")
    says = r"record of another run \(seed 7, not 0\)"
    with pytest.raises(InputError, match=says):
        of_same_run(tmp_path / "seed-0", small)
    with pytest.raises(InputError, match=says):
        Store(tmp_path, weights=True).missing([small])
    with pytest.raises(InputError, match=says):
        RunStatus.of(tmp_path / "seed-0")
    assert main(["resume", str(tmp_path / "seed-0")]) == 2
    assert "another run" in capsys.readouterr().err
    store = Store(tmp_path / "store")
    store.save(record)
    store.path(small).rename(store.path(other))
    with pytest.raises(InputError, match=r"another run \(seed 0, not 7\)"):
        store.missing([other])
    with pytest.raises(InputError, match="another run"):
        execute([other], store, InProcess("cpu"))


def test_a_record_without_its_config_is_compared_too(tmp_path: Path) -> None:
    small = replace(CONFIG, steps=4)
    run(small, "cpu", folder=tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(InputError, match="steps 4, not 5"):
        run(replace(small, steps=5), "cpu", folder=tmp_path / "run")


# The headline


def test_status_lines_show_what_the_table_and_the_weights_have(capsys: pytest.CaptureFixture[str]) -> None:
    """The selected step's score, also where the selection was left to the default."""
    words = "train erm linear --steps 12 --lr 0.5 --batch-size 4 --eval-every 1 --seeds 2 --device cpu"
    assert main([*words.split(), "--out", "runs", "--jobs", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert len(lines) == 2
    for seed, line in enumerate(lines):
        record = read_record(Path(f"runs/seed-{seed}/record.json"))
        metric, value = record.headline or ("", None)
        assert (metric, value) == ("accuracy", record.score("test"))
        assert f"accuracy {100 * record.score('test'):.1f} %" in line


# Checksums


@pytest.mark.parametrize("name", ["model.safetensors", "inputs.json"])
def test_a_flipped_bit_is_noticed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the last digit of a weight, or in the spaces between two words: anywhere."""
    assert main(TRAIN) == 0
    path = Path("run") / name
    content = bytearray(path.read_bytes())
    content[-1 if name == "model.safetensors" else content.index(b" ")] ^= 1 if name[0] == "m" else 0x29
    path.write_bytes(content)  # a space becomes a tab
    capsys.readouterr()
    Path("x.npy").write_bytes(b"")
    for command in (["predict", "run", "x.npy"], ["export", "run", "--format", "safetensors"]):
        assert main(command) == 2
        assert f"{name}' is damaged: its content has changed" in capsys.readouterr().err
    record = json.loads(Path("run/record.json").read_text())
    del record["files"]  # as older versions wrote it
    Path("run/record.json").write_text(json.dumps(record))
    assert main(["export", "run", "--format", "safetensors"]) == 0


# How far a run is


def test_the_step_is_that_of_the_checkpoint_or_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    config, how = replace(CONFIG, warm_start=5, eval_every=50), {"checkpoint_every": 15, "log_every": 50}
    with pytest.raises(RuntimeError):
        run(config, "cpu", at(16, failing(RuntimeError())), Path("run"), how)
    status = RunStatus.of(Path("run"))
    assert status.step == 15
    assert status.seconds > 0
    assert main(["show", "run"]) == 0
    assert "stopped: step 15 of 60" in capsys.readouterr().out
