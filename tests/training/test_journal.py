"""What lies in the folder of a run: enough to repeat it, and nothing of this machine."""

from __future__ import annotations

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
from shoal.training.card import card
from shoal.training.journal import Journal
from shoal.training.processes import Processes
from training import finetuning


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_that_it_takes_to_repeat_a_run_and_nothing_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bin/shoal", "train", "fish", "--out", "a folder"])
    options: dict[str, Any] = {"steps": 20, "batch_size": 8, "device": "cpu", "eval_every": 10}
    options |= {"settings": {"meta_lr": 0.3}, "data_options": {"per_domain": 200}, "progress": False}
    folder = tmp_path / "a folder"
    shoal.train("fish", "linear", out=folder, clip=1e-05, checkpoint_every=3, **options)
    files = {"checkpoints", "config.yaml", "metrics.jsonl", "model.safetensors", "record.json", "tensorboard"}
    assert {p.name for p in folder.iterdir()} == files | {".lock", "inputs.json", "card.md"}
    assert len(list((folder / "checkpoints").iterdir())) == 2
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    config = RunConfig.from_dict(content["run"])
    assert (config.settings, config.clip) == ({"meta_lr": 0.3}, 1e-05)
    assert content["environment"]["torch"] == torch.__version__
    assert content["command"] == "shoal train fish --out 'a folder'"
    secrets = (str(tmp_path), str(Path.home()), sys.prefix, socket.gethostname(), f" {getpass.getuser()} ")
    assert not [secret for secret in secrets if secret in text]
    assert not re.search(r"[\s'\"=]/\w", text)
    again = run(config, "cpu", folder=Path("again"), options=content["options"])
    record = RunRecord.from_dict(json.loads((folder / "record.json").read_text()))
    assert again.history == record.history
    assert Path("again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_lines_and_the_selected_model() -> None:
    run = finetuning.fit("fish", steps=100, eval_every=50, warm_start=50, folder="run")
    for folder, stage, steps in (("run/stages/warm-start", "warm start", (50,)), ("run", "train", (50, 100))):
        found = [json.loads(text) for text in Path(folder, "metrics.jsonl").read_text().splitlines()]
        logs, scored = ([line for line in found if key in line] for key in ("loss", "scores"))
        for lines in (logs, scored):
            assert [(line["phase"], line["step"]) for line in lines] == [(stage, step) for step in steps]
        seconds = [line["seconds"] for line in found]
        assert seconds == sorted(seconds)
    for line in logs:
        assert set(line["losses"]) == {"a", "b"}
        assert line["loss"] == pytest.approx(sum(line["losses"].values()) / 2)
        assert (line["lr"], line["gradient_norm"] > 0) == (finetuning.RATE, True)
    record = json.loads(Path("run/record.json").read_text())
    assert [line["scores"] for line in scored] == [point["scores"] for point in record["history"]]
    torch.testing.assert_close(
        load_file("run/model.safetensors"), dict(run.model.state_dict()), rtol=0, atol=0
    )
    assert record["history"][record["selected"]]["step"] == run.selected.step
    config = RunRecord.from_dict(record).config
    assert (config.dataset, config.algorithm, config.lr) == ("python", "fish", finetuning.RATE)


def test_a_resumed_run_keeps_its_config_and_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in ({"first": 1e-05, "名": [None, {"a": "no"}]}, {"second": 2}):
        with Journal("run", Processes("cpu")) as journal:
            journal.write_config(config)
            assert journal.read_config() == {"first": 1e-05, "名": [None, {"a": "no"}]}

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        Journal("run", Processes("cpu"), resume_hint="shoal train again") as journal,
    ):
        assert journal.restore() is None
        assert journal.checkpoint(1, {"step": 1})
        patch.setattr("shoal.training.checkpoint.write_atomically", full)
        with pytest.warns(UserWarning, match=r"step 2 could not be .*No space.*the latest is that of 1\. Tr"):
            assert not journal.checkpoint(2, {"step": 2})
        assert not journal.checkpoint(3, {"step": 3})  # one warning
        patch.setattr("shoal.files.write_atomically", full)
        with pytest.raises(
            InputError, match=r"run/record\.json .*No space left.*resume with: shoal train again"
        ):
            journal.record({})
    with Journal("run", Processes("cpu")) as journal:
        state = journal.restore()
        assert state is not None
        assert (state["step"], journal.saved) == (1, 1)


def test_a_card_says_what_the_model_is_and_escapes_what_comes_from_outside() -> None:
    scores = {"metric": "accuracy", "average": 0.5, "metrics": {"AUC": None}, "sizes": [10, 3000]}
    scores["domains"] = {"a|b": 0.5, "c": None}
    record = {"history": [{"step": 1200, "scores": {"test": scores}}], "selected": 0, "seconds": 3.2}
    record |= {"rule": "best on validation", "environment": {"torch": "2"}, "notes": {"validation": "x*y"}}
    content: dict[str, Any] = {"model": {"class": "m.Net"}, "inputs": {"kind": "table"}, "input_shape": [3]}
    column = {"column": "q", "kind": "numeric", "missing": 0, "distinct": 3, "becomes": "1 number"}
    content["inputs"]["columns_report"] = [{**column, "warnings": ["odd"]}]
    content |= {"classes": 2, "class_names": ["yes", "<no>"], "task": "ordinal"}
    run = {"dataset": "heart", "algorithm": "fish", "seed": 3, "steps": 10, "settings": {"a": 1}}
    sizes = {"train": {f"d{i}": i for i in range(60)}, "test": {"a|b": 10, "c": 3000}}
    text = card(record, content, {"run": run, "command": "shoal `x`"}, sizes)
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        *("# fish on heart", "## Data", "## Columns", "## Results", "## Training", "## Limitations")
    ]
    for part in (
        *("2 classes in order: yes, &lt;no&gt;", "model=YOUR_MODEL", "Held-out domains: a\\|b, c."),
        *("| … 12 more |", "- q: odd.", "| test | a\\|b | 10 | accuracy | 0.5 |", "| AUC | – |"),
        *("settings | a 1", "Weights of step 1,200", "```\nshoal `x`\n```", "seed 3", "validation is x\\*y"),
        "unreliable: a\\|b (10).",
    ):
        assert part in text, part
