"""What lies in the folder of a run: enough to repeat it, nothing half written, nothing of this machine."""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import shoal
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.training.checkpoint import unpack
from shoal.training.journal import Journal
from shoal.training.processes import Processes

LINEAR = ["train", "fish", "linear", "--steps", "20", "--batch-size", "8", "--device", "cpu"]
LINEAR += ["--eval-every", "2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(*more: str) -> Path:
    assert main([*LINEAR, "--out", "run", *more]) == 0
    return Path("run")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_there_is_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained("--json", "--eval-every", "2")
    assert {p.name for p in folder.iterdir()} == {
        *(".lock", "checkpoints", "config.yaml", "metrics.jsonl"),
        *("model.safetensors", "record.json", "tensorboard", "inputs.json", "card.md"),
    }
    shown = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "record.json").read_text()) == shown
    assert RunRecord.from_dict(shown).status == "finished"
    assert len(list((folder / "checkpoints").iterdir())) == 2
    (board,) = (folder / "tensorboard").iterdir()
    assert board.name.startswith("events.out.tfevents.")
    assert board.stat().st_size > 500


def test_config_has_all_that_it_takes_to_repeat_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        *LINEAR,
        "--set",
        "meta_lr=0.3",
        "--data",
        "per_domain=200",
        "--clip",
        "1e-05",
        "--keep",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bin/shoal", *arguments, "--out", "a folder"])
    assert main([*arguments, "--out", "a folder"]) == 0
    content = yaml.safe_load(Path("a folder/config.yaml").read_text(encoding="utf-8"))
    assert set(content) == {"run", "how", "environment", "git", "command"}
    config = RunConfig.from_dict(content["run"])
    assert config.settings == {"meta_lr": 0.3}
    assert (config.clip, config.data_options) == (1e-05, {"per_domain": 200})
    assert content["how"]["keep"] == 3
    assert {"shoal", "python", "torch", "numpy", "device", "processes"} <= set(content["environment"])
    assert content["environment"]["torch"] == torch.__version__
    assert content["command"].startswith("shoal train fish ")
    assert content["command"].endswith("--out 'a folder'")
    again = run(config, "cpu", folder=Path("again"), how=content["how"])
    assert again.history == RunRecord.from_dict(json.loads(Path("a folder/record.json").read_text())).history
    assert Path("again/model.safetensors").read_bytes() == Path("a folder/model.safetensors").read_bytes()


def test_config_says_nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{sys.prefix}/bin/shoal", *LINEAR])
    text = (trained() / "config.yaml").read_text()
    for secret in (
        str(tmp_path),
        str(Path.home()),
        sys.prefix,
        socket.gethostname(),
        f" {getpass.getuser()} ",
    ):
        assert secret not in text
    assert not re.search(r"[\s'\"=]/\w", text)


def test_the_command_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/lib/python3/site-packages/shoal/__main__.py", *LINEAR])
    content = yaml.safe_load((trained() / "config.yaml").read_text())
    assert content["command"] == " ".join(["shoal", *LINEAR])


def test_git(tmp_path: Path) -> None:
    assert yaml.safe_load((trained() / "config.yaml").read_text())["git"] is None
    (tmp_path / "project").mkdir()
    os.chdir("project")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    state = yaml.safe_load((trained() / "config.yaml").read_text())["git"]
    assert re.fullmatch("[0-9a-f]{40}", state["commit"])
    assert state["changed"] is False


def test_a_run_that_goes_on_keeps_its_config() -> None:
    folder = Path("run")
    with Journal(folder, Processes("cpu")) as journal:
        journal.begin({"first": 1e-05, "名": [None, {"a": "no"}]})
    with Journal(folder, Processes("cpu")) as journal:
        journal.begin({"second": 2})
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"first": 1e-05, "名": [None, {"a": "no"}]}


def test_lines() -> None:
    folder = trained("--log-every", "5", "--eval-every", "10", "--warm-start", "5")
    found = lines(folder)
    logs = [line for line in found if "loss" in line]
    judged = [line for line in found if "scores" in line]
    assert [(line["phase"], line["step"]) for line in logs] == [
        ("warm start", 5),
        *(("train", step) for step in (5, 10, 15, 20)),
    ]
    assert [(line["phase"], line["step"]) for line in judged] == [
        ("warm start", 5),
        ("train", 10),
        ("train", 20),
    ]
    for line in logs[1:]:
        assert set(line["losses"]) == {"D1", "D2"}
        assert line["loss"] == pytest.approx(sum(line["losses"].values()) / 2)
        assert (line["lr"], line["skipped"]) == (0.001, 0)
        assert line["gradient_norm"] > 0
        assert line["examples_per_second"] > 0
    record = json.loads((folder / "record.json").read_text())
    assert [line["scores"] for line in judged[1:]] == [point["scores"] for point in record["history"]]
    seconds = [line["seconds"] for line in found[2:]]
    assert seconds == sorted(seconds)


def test_tensorboard_shows_the_lines() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = trained("--log-every", "5")
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    logs = [line for line in lines(folder) if "loss" in line]
    assert [e.step for e in read.Scalars("loss")] == [line["step"] for line in logs]
    assert [e.value for e in read.Scalars("losses/D1")] == pytest.approx([x["losses"]["D1"] for x in logs])
    assert "scores/test/domains/D3" in read.Tags()["scalars"]


def test_the_model_is_the_selected_one() -> None:
    data = {name: (torch.randn(40, 3), torch.randint(2, (40,))) for name in ("oslo", "lima")}
    model = torch.nn.Linear(3, 2)
    done = shoal.fit(
        "erm", model, data, validation=data, steps=20, lr=0.1, eval_every=2, folder="run", progress=False
    )
    kept = load_file("run/model.safetensors")
    assert all(torch.equal(kept[name], value.cpu()) for name, value in model.state_dict().items())
    record = json.loads(Path("run/record.json").read_text())
    assert record["history"][record["selected"]]["step"] == done.selected.step
    config = RunRecord.from_dict(record).config
    assert (config.dataset, config.algorithm, config.optimizer_options) == ("python", "erm", {"lr": 0.1})
    assert config.data_options == {"domains": {"train": 2, "validation": 2}}


def test_a_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with Journal("run", Processes("cpu")) as journal:
        monkeypatch.setattr("shoal.training.journal.write_atomically", full)
        with pytest.raises(InputError, match=r"run/record\.json could not be written \(No space left"):
            journal.record({})


def test_a_full_disk_costs_checkpoints_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.training.checkpoint.Checkpoints.save", full)
        folder = trained("--eval-every", "2")
    said = capsys.readouterr().err
    assert re.search(r"shoal: .* of step 2 could not be written .* there is none yet\. Training", said)
    assert said.count("could not be written") == 1
    assert len(list((folder / "checkpoints").glob("*"))) == 0
    assert (folder / "model.safetensors").exists()


@pytest.mark.skipif(os.name == "nt", reason="kills a process")
def test_a_kill_leaves_whole_files_only(capsys: pytest.CaptureFixture[str]) -> None:
    """At any moment, with a checkpoint every step; what is hidden was never finished, and goes later."""
    long = [*LINEAR, "--steps", "100000", "--checkpoint-every", "1", "--log-every", "1", "--out", "run"]
    process = subprocess.Popen([sys.executable, "-m", "shoal", *long], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if len(list(Path("run").glob("checkpoints/step-*"))) > 1:
                break
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = Path("run")
    checkpoints = list(folder.glob("checkpoints/step-*"))
    assert checkpoints
    for path in checkpoints:
        assert unpack(path.read_bytes())
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["steps"] == 100000
    assert not (folder / "model.safetensors").exists()
    assert not (folder / "record.json").exists()
    hidden = [p for p in folder.rglob(".*") if p.name != ".lock"]
    assert all(re.match(r"\.(step|best)-", p.name) for p in hidden)
    assert main(["show", "run"]) == 0
    assert "stopped: step " in capsys.readouterr().out
