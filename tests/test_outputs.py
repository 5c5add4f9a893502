"""What commands write: never over an input or a run's own files, through links and devices, whole or not."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run
from test_damaged_runs import write_table

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    data = {"file": str(write_table(root / "in.csv")), "label": "ill", "domain": "place", "test": "c"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (0, 1):
            config = RunConfig("table", "erm", 2, data_options=data, batch_size=4, seed=seed)
            run(config, "cpu", folder=root / f"run-{seed}")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    shutil.copytree(made, place)
    monkeypatch.chdir(place)
    (place / "link.csv").symlink_to("in.csv")
    os.link(place / "in.csv", place / "hard.csv")
    return place


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Each writes one file, which comes last.
TO_FILE = {
    "predict": ["predict", "run-0", "in.csv", "--out"],
    "score": ["score", "run-0", "in.csv", "--out"],
    "export": ["export", "run-0", "--format", "safetensors", "--out"],
    "results": ["results", ".", "--csv"],
    "report": ["report", ".", "--out"],
}
# Each writes a folder, which comes last.
TO_FOLDER = {
    "train": ["train", "erm", "images", "--steps", "1", "--out"],
    "seeds": ["train", "erm", "images", "--steps", "1", "--seeds", "2", "--out"],
    "compare": ["compare", "images", "--steps", "1", "--out"],
    "diagnose": ["diagnose", "images", "--out"],
}
INPUTS = {
    "predict": ["in.csv", "./in.csv", "link.csv", "hard.csv"],
    "score": [],  # its output ends in .json
    "export": [],
    "results": ["run-0/record.json", "./run-1/record.json"],
    "report": ["run-0/record.json"],
}
OF_A_RUN = ["model.safetensors", "record.json", "inputs.json", "metrics.jsonl", "config.yaml", ".lock"]


@pytest.mark.parametrize("command", TO_FILE)
def test_inputs_are_never_outputs(command: str, here: Path, capsys: Said) -> None:
    before = contents(here)
    files = [f"run-{n}/{name}" for n in (0, 1) for name in OF_A_RUN]
    files += [str(p.relative_to(here)) for p in (here / "run-1" / "checkpoints").iterdir()]
    if command == "score":
        files = [name for name in files if name.endswith(".json")]
    for name in [*INPUTS[command], *files, str(here / "run-0" / "record.json")]:
        assert main([*TO_FILE[command], name]) == 2, name
        assert len(capsys.readouterr().err.splitlines()) <= 3
        assert contents(here) == before, name


def test_one_of_several_inputs(here: Path, capsys: Said) -> None:
    (here / "more").mkdir()
    shutil.copy(here / "in.csv", here / "more" / "b.csv")
    before = contents(here)
    assert main(["predict", "run-0", "in.csv", "more/b.csv", "--out", "more/b.csv"]) == 2
    assert main(["predict", "run-0", "more", "--out", "more/b.csv"]) == 2
    assert contents(here) == before
    capsys.readouterr()


@pytest.mark.parametrize("command", TO_FILE)
def test_a_place_that_cannot_be_a_file(command: str, here: Path, capsys: Said) -> None:
    before = contents(here)
    ending = "x.json" if command == "score" else "x"
    places = [f"in.csv/{ending}"] if command == "score" else ["run-0", ".", "in.csv/x"]
    for name in places:
        assert main([*TO_FILE[command], name]) == 2, name
        assert len(capsys.readouterr().err.splitlines()) == 1
    if os.geteuid() != 0:
        (here / "locked").mkdir(mode=0o500)
        assert main([*TO_FILE[command], f"locked/{ending}"]) == 2
    assert contents(here) == before


@pytest.mark.parametrize("command", TO_FILE)
def test_links_and_devices_are_written_through(command: str, here: Path, capsys: Said) -> None:
    ending = "json" if command == "score" else "x"
    (here / "old").write_text("old")
    (here / f"link.{ending}").symlink_to("old")
    assert main([*TO_FILE[command], f"link.{ending}"]) == 0
    assert (here / f"link.{ending}").is_symlink()
    assert (here / "old").read_bytes() != b"old"
    if command in ("score", "export"):  # a name of their own, and one that is read back
        return
    assert main([*TO_FILE[command], "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    os.mkfifo(here / "pipe")
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append((here / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert main([*TO_FILE[command], "pipe"]) == 0
    reader.join(10)
    assert read == [(here / "old").read_bytes()] or command == "report"  # which has the time in it
    assert (here / "pipe").is_fifo()
    capsys.readouterr()


def test_predictions_to_standard_output(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "run-0", "in.csv", "--out", "/dev/stdout"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("row,prediction\n")
    assert len(shown.out.splitlines()) == 61
    assert "60 predictions" in shown.err


@pytest.mark.parametrize("command", TO_FOLDER)
def test_a_folder_of_data_or_of_a_run_is_no_output(command: str, here: Path, capsys: Said) -> None:
    for domain in "ab":
        for kind in "xy":
            (here / "images" / domain / kind).mkdir(parents=True)
    (here / "elsewhere").symlink_to("images")
    before = contents(here)
    for name in ("images", "images/", "elsewhere", "images/out", "run-1", "in.csv"):
        assert main([*TO_FOLDER[command], name]) == 2, name
        assert len(capsys.readouterr().err.splitlines()) <= 3
        assert contents(here) == before, name


OTHERS = {
    "sweep": ["sweep", "linear", "--algorithms", "erm", "--steps", "1", "--out"],
    "track": ["track", "linear", "--steps", "1", "--out"],
    "demo": ["demo", "--out"],
    "reproduce": ["reproduce", "theorem", "--out"],
}


@pytest.mark.parametrize("command", OTHERS)
def test_results_do_not_go_into_the_folder_of_a_run(command: str, here: Path, capsys: Said) -> None:
    before = contents(here)
    for name in ("run-1", "in.csv"):
        assert main([*OTHERS[command], name]) == 2, name
        assert len(capsys.readouterr().err.splitlines()) <= 3
        assert contents(here) == before, name
