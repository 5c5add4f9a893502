"""What lies in the folder of a run: enough to repeat it, and nothing of this machine."""

import getpass
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.training import loop, setup, stepping
from shoal.training.journal import Journal
from shoal.training.processes import Processes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (loop, setup, stepping):
        monkeypatch.setattr(module, "LOG_EVERY", 5)


def trained(out: str = "run", **options: Any) -> Path:
    given = {"steps": 20, "batch_size": 8, "device": "cpu", "eval_every": 10, "progress": False} | options
    shoal.train("fish", "linear", out=out, **given)
    return Path(out)


def test_what_there_is_in_the_end() -> None:
    folder = trained()
    assert {p.name for p in folder.iterdir()} == {
        *(".lock", "checkpoints", "config.yaml", "metrics.jsonl"),
        *("model.safetensors", "record.json", "tensorboard", "inputs.json", "card.md"),
    }
    assert RunRecord.from_dict(json.loads((folder / "record.json").read_text())).status == "finished"
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_config_has_all_that_it_takes_to_repeat_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bin/shoal", "train", "fish", "--out", "a folder"])
    options: dict[str, Any] = {"settings": {"meta_lr": 0.3}, "data_options": {"per_domain": 200}}
    folder = trained("a folder", clip=1e-05, checkpoint_every=3, **options)
    content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    config = RunConfig.from_dict(content["run"])
    assert (config.settings, config.clip) == ({"meta_lr": 0.3}, 1e-05)
    assert config.data_options["per_domain"] == 200
    assert content["options"]["checkpoint_every"] == 3
    assert content["environment"]["torch"] == torch.__version__
    assert content["command"] == "shoal train fish --out 'a folder'"
    again = run(config, "cpu", folder=Path("again"), options=content["options"])
    assert again.history == RunRecord.from_dict(json.loads((folder / "record.json").read_text())).history
    assert Path("again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_config_says_nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{sys.prefix}/bin/shoal", "train"])
    text = (trained() / "config.yaml").read_text()
    secrets = (str(tmp_path), str(Path.home()), sys.prefix, socket.gethostname(), f" {getpass.getuser()} ")
    assert not [secret for secret in secrets if secret in text]
    assert not re.search(r"[\s'\"=]/\w", text)


def test_a_run_that_goes_on_keeps_its_config() -> None:
    folder = Path("run")
    with Journal(folder, Processes("cpu")) as journal:
        journal.begin({"first": 1e-05, "名": [None, {"a": "no"}]})
    with Journal(folder, Processes("cpu")) as journal:
        journal.begin({"second": 2})
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"first": 1e-05, "名": [None, {"a": "no"}]}


def test_lines() -> None:
    folder = trained(warm_start=5)
    found = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    logs, scored = ([line for line in found if key in line] for key in ("loss", "scores"))
    phases = [("warm start", 5), *(("train", step) for step in (5, 10, 15, 20))]
    assert [(line["phase"], line["step"]) for line in logs] == phases
    phases = [("warm start", 5), ("train", 10), ("train", 20)]
    assert [(line["phase"], line["step"]) for line in scored] == phases
    for line in logs[1:]:
        assert set(line["losses"]) == {"D1", "D2"}
        assert line["loss"] == pytest.approx(sum(line["losses"].values()) / 2)
        assert line["lr"] == 0.001
        assert line["gradient_norm"] > 0
    record = json.loads((folder / "record.json").read_text())
    assert [line["scores"] for line in scored[1:]] == [point["scores"] for point in record["history"]]
    seconds = [line["seconds"] for line in found[2:]]
    assert seconds == sorted(seconds)


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
    assert (config.dataset, config.algorithm, config.lr) == ("python", "erm", 0.1)
    assert config.data_options == {"domains": {"train": 2, "validation": 2}}


def test_a_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with Journal("run", Processes("cpu")) as journal:
        monkeypatch.setattr("shoal.training.journal.write_atomically", full)
        with pytest.raises(InputError, match=r"run/record\.json .*No space left"):
            journal.record({})
