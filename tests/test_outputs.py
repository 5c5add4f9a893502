"""What the public functions write: never over an input or the files of a run."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run

QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}
TO_FILE: dict[str, Callable[[str], Any]] = {
    "predict": lambda out: shoal.predict("run-0", "in.csv", out=out),
    "score": lambda out: shoal.score("run-0", "in.csv", out=out),
    "export": lambda out: shoal.export("run-0", out, format="safetensors"),
    "report": lambda out: shoal.report("run-0", out),
}
TO_FOLDER: dict[str, Callable[[str], Any]] = {
    "train": lambda out: shoal.train("erm", "images", steps=1, out=out, **QUIET),
    "compare": lambda out: shoal.compare("images", steps=1, out=out, **QUIET),
    "diagnose": lambda out: shoal.diagnose("images", out=out, progress=False),
}
OF_A_RUN = ["model.safetensors", "record.json", "inputs.json", "config.yaml"]


def write_table(path: Path) -> Path:
    chance = random.Random(0)
    rows = [(chance.gauss(n % 2, 1), chance.random(), "abc"[n % 3], n % 2) for n in range(60)]
    path.write_text("x,z,place,ill\n" + "".join(f"{x:.3f},{z:.3f},{d},{y}\n" for x, z, d, y in rows))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    data = {"file": str(write_table(root / "in.csv")), "label": "ill", "domain": "place", "held_out": "c"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(RunConfig("table", "erm", 2, data_options=data, batch_size=4), "cpu", folder=root / "run-0")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, the table that it was trained on, and a folder of images."""
    place = tmp_path / "here"
    shutil.copytree(made, place)
    monkeypatch.chdir(place)
    (place / "link.csv").symlink_to("in.csv")
    os.link(place / "in.csv", place / "hard.csv")
    for folder in ("a/x", "a/y", "b/x", "b/y"):
        (place / "images" / folder).mkdir(parents=True)
    (place / "elsewhere").symlink_to("images")
    return place


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(write: Callable[[str], Any], *names: str) -> None:
    """Whether each of these outputs is refused, and nothing is changed."""
    before = contents(Path())
    for name in names:
        with pytest.raises(shoal.InputError):
            write(name)
        assert contents(Path()) == before, name


@pytest.mark.parametrize("function", TO_FILE)
def test_inputs_and_runs_are_never_outputs(function: str, here: Path) -> None:
    files = [f"run-0/{name}" for name in OF_A_RUN]
    files += [str(p.relative_to(here)) for p in (here / "run-0" / "checkpoints").iterdir()]
    refused(TO_FILE[function], *files, str(here / "run-0" / "record.json"), "in.csv/x.json")
    if function != "score":  # which takes a folder
        refused(TO_FILE[function], "run-0", ".")
    if function == "predict":
        refused(TO_FILE[function], "in.csv", "./in.csv", "link.csv", "hard.csv")


@pytest.mark.parametrize("function", TO_FILE)
def test_a_file_is_replaced(function: str, here: Path) -> None:
    (here / "out.json").write_text("old")
    TO_FILE[function]("out.json")
    assert (here / "out.json").read_bytes() != b"old"
    assert not list(here.glob(".out*"))


@pytest.mark.parametrize("function", TO_FOLDER)
def test_folders_of_data_and_of_runs_are_no_outputs(function: str, here: Path) -> None:
    refused(TO_FOLDER[function], "images", "images/", "elsewhere", "images/out", "run-0", "in.csv")


def test_a_sweep_does_not_go_into_a_run(here: Path) -> None:
    refused(lambda out: shoal.sweep("linear", algorithms="erm", steps=1, out=out, **QUIET), "run-0", "in.csv")
