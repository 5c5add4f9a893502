"""How far a run is, read from a folder in any state."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run
from shoal.experiments.status import RunStatus, in_use, runs_in
from shoal.training.folder import RunFolder

TINY = RunConfig("linear", "erm", 4, optimizer="sgd", optimizer_options={"lr": 0.5}, eval_every=2)
SCORES = {"test": {"metric": "accuracy", "average": 0.5, "domains": {"D3": 0.5}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that was stopped after its first evaluation."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": TINY.to_dict(), "how": {}}))
    lines: list[dict[str, Any]] = [
        {"phase": "warm start", "step": 9, "loss": 2.0, "seconds": 0.5},
        {"phase": "train", "step": 1, "loss": 1.0, "seconds": 1.0},
        {"phase": "train", "step": 2, "scores": SCORES, "seconds": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_finished(tmp_path: Path) -> None:
    record = run(TINY, "cpu", folder=tmp_path)
    status = RunStatus.of(tmp_path)
    assert (status.state, status.step, status.steps) == ("finished", 4, 4)
    assert status.scores == record.history[record.selected]["scores"]
    assert (status.rule, status.seconds, status.error) == (record.rule, record.seconds, "")
    assert status.checkpoint.startswith("step-0000000004-")
    assert RunConfig.from_dict(status.config["run"]) == TINY
    assert json.loads(json.dumps(status.to_dict()))["state"] == "finished"


def test_diverged(tmp_path: Path) -> None:
    wild = replace(TINY, optimizer_options={"lr": 1e38, "momentum": 10.0}, steps=40)
    record = run(wild, "cpu", folder=tmp_path)
    status = RunStatus.of(tmp_path)
    assert (status.state, status.error) == ("diverged", record.error)
    assert status.step < 40


def test_stopped(folder: Path) -> None:
    status = RunStatus.of(folder)
    assert (status.state, status.step, status.steps, status.seconds) == ("stopped", 2, 4, 1.5)
    assert (status.scores, status.rule) == (SCORES, "so far")
    assert status.line == "stopped, step 2 of 4, test accuracy 0.500"


def test_running_is_whoever_holds_the_lock(folder: Path) -> None:
    with RunFolder(folder):
        assert in_use(folder)
        assert RunStatus.of(folder).state == "running"
    assert not in_use(folder)
    assert RunStatus.of(folder).state == "stopped"


def test_looking_changes_nothing(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*")}
    RunStatus.of(folder)
    assert {p: p.read_bytes() for p in folder.rglob("*")} == before


def test_just_begun(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    status = RunStatus.of(folder)
    assert (status.state, status.step, status.scores, status.last) == ("stopped", 0, {}, {})
    assert status.line == "stopped, step 0 of 4"


@pytest.mark.parametrize("rest", ['{"phase": "tr', '{"phase": "train", "step": 3}{"ph', "7", "\x00\x00"])
def test_a_line_that_is_half_written(folder: Path, rest: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(rest)
    assert RunStatus.of(folder).step == 2


def test_metrics_that_are_no_text(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00" * 9)
    assert RunStatus.of(folder).step == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "{}", '"x"', "7", '{"status": "finished"}', "\x00"])
def test_a_broken_record_is_named(folder: Path, text: str) -> None:
    (folder / "record.json").write_text(text)
    with pytest.raises(InputError, match=r"record\.json' is not a run record"):
        RunStatus.of(folder)


@pytest.mark.parametrize("text", ["", "7", "[]", "a: [", "run: 7", "run: {steps: many}", "\x00", "run: [1]"])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml"):
        RunStatus.of(folder)


def test_a_run_of_fit(tmp_path: Path) -> None:
    data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in ("<script>", "\x1b[2J\n")}
    shoal.fit("fish", torch.nn.Linear(3, 2), data, steps=4, progress=False, folder=tmp_path, device="cpu")
    status = RunStatus.of(tmp_path)
    assert (status.state, status.step, status.steps) == ("finished", 4, 4)
    assert list(status.scores["train"]["domains"]) == ["<script>", "\x1b[2J\n"]
    assert status.config["algorithm"] == "Fish"


def test_runs_below(tmp_path: Path, folder: Path) -> None:
    assert runs_in(folder) == [folder]
    assert runs_in(folder / "checkpoints") == []
    content = (folder / "config.yaml").read_text()
    (folder / "config.yaml").unlink()
    for name in ("b", "a/seed-0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(content)
    assert runs_in(tmp_path) == [tmp_path / "a" / "seed-0", tmp_path / "b"]
