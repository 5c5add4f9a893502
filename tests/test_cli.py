"""The commands as a user types them, in this process unless a fresh one matters."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.bench.experiments import cdsprites
from shoal.bench.record import RunRecord, Store
from shoal.cli import main


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "train", "list", "reproduce"):
        assert command in shown


@pytest.mark.parametrize("what", ["algorithms", "datasets"])
def test_list_names_what_there_is(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    text = capsys.readouterr().out
    assert main(["list", what, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)[what]
    assert len(entries) >= 4
    for entry in entries:
        assert entry["name"] in text
        assert entry["summary"]
        assert entry["paper"]


def test_train_saves_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "fish", "--dataset", "rotated-digits", "--steps", "4", "--batch", "8"]
    arguments += ["--set", "meta_lr=5e-1", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path / "run"), "--warm-start", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    saved = json.loads((tmp_path / "run" / "record.json").read_text())
    assert shown == saved
    assert saved["config"]["settings"] == {"meta_lr": 0.5}
    assert saved["config"]["warm_start"] == 3
    assert len(saved["warm_up"]) == 1
    assert RunRecord.from_dict(saved).score("test") >= 0
    assert all(torch.isfinite(w).all() for w in load_file(tmp_path / "run" / "model.safetensors").values())
    assert main([*arguments, "--out", str(tmp_path / "again")]) == 0
    table = capsys.readouterr().out
    assert "75°" in table
    assert "best on validation" in table


REFUSED = {
    "algorithm": (["train", "fush", "--dataset", "linear"], "Did you mean 'fish'"),
    "dataset": (["train", "fish", "--dataset", "cdsprite"], "Did you mean 'cdsprites'"),
    "setting": (["train", "fish", "--dataset", "linear", "--set", "meta_l=1"], "Did you mean 'meta_lr'"),
    "option": (["train", "fish", "--dataset", "linear", "--data", "domain=3"], "option of dataset 'linear'"),
    "pair": (["train", "fish", "--dataset", "linear", "--set", "meta_lr"], "NAME=VALUE pairs, got 'meta_lr'"),
    "value": (["train", "fish", "--dataset", "linear", "--set", "meta_lr=0"], "meta_lr must be above 0"),
    "rate": (["train", "fish", "--dataset", "linear", "--lr", "0"], "learning rate must be positive"),
    "optimizer": (["train", "fish", "--dataset", "linear", "--optimizer", "adm"], "Did you mean 'adam'"),
    "domains": (["train", "fish", "--dataset", "linear", "--domains", "3"], "domains_per_step=3"),
    "draw": (["train", "fish", "--dataset", "linear", "--draw", "pool"], "Did you mean 'pooled'"),
    "warm start": (["train", "erm", "--dataset", "linear", "--warm-start", "-1"], "warm_start must be"),
    "seed": (["train", "erm", "--dataset", "linear", "--seed", "-1"], "seed must be"),
    "passes": (["reproduce", "cdsprites", "--passes", "7"], "multiple of"),
    "part": (["reproduce", "cdsprites", "--parts", "Adm"], "Did you mean 'Adam'"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_input_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("shoal: ")
    assert len(shown.err.strip().splitlines()) <= 2
    assert not shown.out


def test_results_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("here already")
    for arguments in (["train", "erm", "--dataset", "linear"], ["demo"], ["reproduce", "theorem"]):
        assert main([*arguments, "--out", str(tmp_path / "file")]) == 2
        assert "cannot be a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "here already"


def test_a_run_that_diverges_says_so_and_keeps_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "erm", "--dataset", "rotated-digits", "--optimizer", "sgd", "--lr", "1e6"]
    assert main([*arguments, "--steps", "20", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "the loss turned" in capsys.readouterr().err
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "diverged"
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("arguments", [["demo", "--seeds", "0"], ["train", "erm"], ["swim"]])
def test_argparse_refuses_the_rest(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_reproduce_theorem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "theorem", "--out", str(tmp_path), "--json"]) == 0
    for result in json.loads(capsys.readouterr().out)["results"]:
        assert abs(result["slope"] - 2) < 0.2
    assert (tmp_path / "theorem.png").stat().st_size > 10_000
    assert (tmp_path / "theorem.svg").exists()


def tiny(part: str) -> list[str]:
    small = ["--numbers", "2", "--seeds", "1", "--passes", "200", "--size", "32", "--device", "cpu"]
    return ["reproduce", "cdsprites", *small, "--parts", part]


def test_cdsprites_shows_what_is_there_and_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = cdsprites.figure([2], range(1), 200, 32)["Adam"]
    history = [
        {
            "step": 1,
            "passes": 200,
            "loss": 0.1,
            "scores": {s: {"average": a, "domains": {}} for s, a in (("train", 1.0), ("test", 0.75))},
        }
    ]
    for config in configs[:-1]:
        record = RunRecord(config, "finished", tuple(history), 0, "last step", 1.0, {"device": "cpu"})
        Store(tmp_path / "cdsprites").save(record)
    assert main([*tiny("Adam"), "--no-run", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "75.0" in shown
    assert "1 of 4 runs are missing: Reptile (Adam), N=2, seed 0." in shown
    assert (tmp_path / "cdsprites.png").exists()
    assert "| Adam | ERM |" in (tmp_path / "cdsprites.md").read_text()


def gone(group: int) -> bool:
    """Whether the last process of a group ends within 30 seconds."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def started_demo(processes: int, out: Path) -> subprocess.Popen[str]:
    """A demo in a group of processes of its own, well into its first run."""
    command = [sys.executable, "-m", "shoal", "demo", "--processes", str(processes), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert "3 runs to do" in process.stderr.readline()
    time.sleep(6)
    return process


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    process = started_demo(2, tmp_path)
    process.kill()
    process.wait()
    try:
        assert gone(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_ends_quietly_and_leaves_no_process(processes: int, tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to the whole group of processes."""
    process = started_demo(processes, tmp_path)
    assert process.stderr is not None
    try:
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 130, errors
        assert "the same command goes on" in errors
        assert "Traceback" not in errors
        assert not list(tmp_path.rglob(".*.json*"))
        assert gone(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
