"""What the public functions write: never over an input or the files of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from trained_models import patients, table_model, write_csv

QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}
TO_FILE: dict[str, Callable[[str], Any]] = {
    "predict": lambda out: shoal.predict("run", "in.csv", out=out),
    "score": lambda out: shoal.score("run", "in.csv", out=out),
    "export": lambda out: shoal.export("run", out, format="safetensors"),
    "report": lambda out: shoal.report("run", out),
}
TO_FOLDER: dict[str, Callable[[str], Any]] = {
    "train": lambda out: shoal.train("erm", "images", steps=1, out=out, **QUIET),
    "compare": lambda out: shoal.compare("images", steps=1, out=out, **QUIET),
    "diagnose": lambda out: shoal.diagnose("images", out=out, progress=False),
    "sweep": lambda out: shoal.sweep("linear", algorithms="erm", steps=1, out=out, **QUIET),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_model(tmp_path_factory.mktemp("outputs") / "run", steps=2)


@pytest.fixture
def here(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, a table, and a folder of images."""
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "in.csv", patients(1, 60))
    (tmp_path / "link.csv").symlink_to("in.csv")
    os.link(tmp_path / "in.csv", tmp_path / "hard.csv")
    for folder in ("a/x", "a/y", "b/x", "b/y"):
        (tmp_path / "images" / folder).mkdir(parents=True)
    (tmp_path / "elsewhere").symlink_to("images")
    return tmp_path


def refused(write: Callable[[str], Any], *names: str) -> None:
    """Whether each of these outputs is refused, and nothing is changed."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for name in names:
        with pytest.raises(shoal.InputError):
            write(name)
        assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before, name


@pytest.mark.parametrize("function", TO_FILE)
def test_files(function: str, here: Path) -> None:
    names = [f"run/{name}" for name in ("model.safetensors", "record.json", "inputs.json", "config.yaml")]
    names += [
        *map(str, Path("run/checkpoints").iterdir()),
        str(here / "run" / "record.json"),
        "in.csv/x.json",
    ]
    names += [] if function == "score" else ["run", "."]  # which takes a folder
    names += ["in.csv", "./in.csv", "link.csv", "hard.csv"] if function == "predict" else []
    refused(TO_FILE[function], *names)
    (here / "out.json").write_text("old")
    TO_FILE[function]("out.json")
    assert (here / "out.json").read_bytes() != b"old"
    assert not list(here.glob(".out*"))


@pytest.mark.parametrize("function", TO_FOLDER)
def test_folders(function: str, here: Path) -> None:
    of_data = ["images", "images/", "elsewhere", "images/out"] if function != "sweep" else []
    refused(TO_FOLDER[function], *of_data, "run", "in.csv")
