"""A run's folder: what lies in it, who may write to it, and that nothing goes through a link."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.training.folder import RunFolder
from training import finetuning


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
    assert content["command"] == "shoal train fish --out 'a folder'"
    secrets = (str(tmp_path), str(Path.home()), sys.prefix, socket.gethostname(), f" {getpass.getuser()} ")
    assert not [secret for secret in secrets if secret in text]
    assert not re.search(r"[\s'\"=]/\w", text)
    again = run(config, "cpu", folder=tmp_path / "again", options=content["options"])
    record = RunRecord.from_dict(json.loads((folder / "record.json").read_text()))
    assert again.history == record.history
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_it_is_locked_until_its_process_is_killed(tmp_path: Path) -> None:
    listen, say = os.pipe()
    if (child := os.fork()) == 0:
        with RunFolder(tmp_path):
            os.write(say, b"x")
            time.sleep(60)
    os.read(listen, 1)
    message = f"^{tmp_path} is in use by process {child} on host {socket.gethostname()};"
    try:
        with pytest.raises(InputError, match=message), RunFolder(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with RunFolder(tmp_path), pytest.raises(InputError, match="is in use by"), RunFolder(tmp_path):
        pass


@pytest.mark.parametrize("name", ["card.md", ".lock", "checkpoints", "stages/train/record.json"])
def test_links_are_refused_and_what_they_point_to_is_left_alone(tmp_path: Path, name: str) -> None:
    """Those of a stranger's run, whoever resumes it."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir() if name == "checkpoints" else outside.write_text("mine")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)
    with pytest.raises(InputError, match=f"{name}' is a symbolic link"):
        finetuning.fit("erm", steps=2, folder=run, resume=True)
    assert not list(outside.iterdir()) if outside.is_dir() else outside.read_text() == "mine"
    if name == "card.md":  # one that is made later is replaced
        RunFolder(run).write("card.md", b"a card")
        assert ((run / name).read_text(), outside.read_text()) == ("a card", "mine")


def test_a_full_disk_is_named_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, RunFolder(tmp_path, hint="again") as folder:
        assert folder.restore() is None
        assert folder.save(1, {"step": 1})
        patch.setattr("shoal.training.checkpoint.replacing", full)
        patch.setattr("shoal.files.write_atomically", full)
        with pytest.warns(UserWarning, match=r"step 2 could not be .*No space.*the latest is that of 1\. Tr"):
            assert not folder.save(2, {"step": 2})
        assert not folder.save(3, {"step": 3})  # one warning
        with pytest.raises(InputError, match=r"record\.json .*No space left.*: again"):
            folder.write_record({})
    with RunFolder(tmp_path) as folder:
        state = folder.restore()
        assert state is not None
        assert (state["step"], folder.saved) == (1, 1)
