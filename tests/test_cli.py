"""The commands as a user types them, in this process unless a fresh one matters."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import shoal
from shoal.cli import COMMANDS, main
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.run import _loaded
from shoal.paper import cdsprites
from shoal.training.folder import RunFolder
from shoal.training.loop import Training

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to runs/ under the current directory."""
    monkeypatch.chdir(tmp_path)


LINEAR = ["train", "fish", "linear", "--steps", "20", "--batch-size", "8", "--device", "cpu"]
LINEAR += ["--eval-every", "2"]
DIVERGING = ["train", "erm", "rotated-digits", "--optimizer", "sgd", "--lr", "1e6"]
DIVERGING += ["--steps", "20", "--device", "cpu"]


@contextlib.contextmanager
def stopping(step: int, number: int = signal.SIGINT, seed: int = 0) -> Iterator[None]:
    """A signal comes right after the evaluation at ``step``."""
    measure = Training._measure

    def measure_and_stop(training: Training, journal: Any) -> None:
        measure(training, journal)
        if (training.step, training.options.seed) == (step, seed):
            signal.raise_signal(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_measure", measure_and_stop)
        yield


def one_line(captured: Captured) -> str:
    """What was said of wrong input: a line or two on stderr and nothing else."""
    shown = captured.readouterr()
    assert not shown.out
    assert shown.err.startswith("shoal: ")
    assert len(shown.err.strip().splitlines()) <= 2
    return shown.err


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_without_a_command_help_is_shown(capsys: Captured) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in shown


@pytest.mark.parametrize("what", ["algorithms", "datasets"])
def test_list_names_what_there_is(what: str, capsys: Captured) -> None:
    assert main(["list", what]) == 0
    text = capsys.readouterr().out
    assert main(["list", what, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)[what]
    assert len(entries) >= 4
    for entry in entries:
        assert entry["name"] in text
        assert entry["summary"]
        assert entry["paper"]


def test_algorithms_are_listed_with_needs_and_costs(capsys: Captured) -> None:
    assert main(["list", "algorithms", "--json"]) == 0
    entries = {e["name"]: e for e in json.loads(capsys.readouterr().out)["algorithms"]}
    assert entries["erm"]["cost"] == 1
    assert entries["dann"]["needs"] == ["two domains", "features", "discriminator"]
    assert "second order" in entries["idgm"]["needs"]
    assert entries["idgm"]["cost"] > 5
    assert entries["reweighted"]["batches"] == "balanced"
    assert all(e["cost"] and e["memory"] for e in entries.values())
    assert main(["list", "algorithms", "irm"]) == 0
    alone = capsys.readouterr().out
    assert "weight=100.0: a number of at least 0; search space: 10^U[-1, 5]" in alone
    assert "dann" not in alone
    assert main(["list", "algorithms", "dann"]) == 0
    both = " ".join(capsys.readouterr().out.split())
    assert "search space: 10^U[-4.5, -2.5] (for large images and pretrained models 10^U[-5, -3.5]" in both
    assert (
        "discriminator_steps=1: a whole number from 1 to 100; search space: 2^U[0, 3], rounded down" in both
    )
    assert entries["dann"]["search_large"].keys() == {"discriminator_lr"}
    assert entries["irm"]["search"]["start"] == "10^U[0, 4] steps of 5,000, rounded down"
    assert main(["list", "algorithms", "imr"]) == 2
    assert "Did you mean 'irm'" in capsys.readouterr().err


SWEEP = ["sweep", "linear", "--data", "per_domain=100", "--algorithms", "erm", "--seeds", "1"]
SWEEP += ["--search", "1", "--steps", "2", "--eval-every", "1", "--device", "cpu", "--jobs", "1"]


def test_a_sweep_runs_what_is_missing_and_writes_tables(tmp_path: Path, capsys: Captured) -> None:
    out = ["--out", str(tmp_path)]
    assert main([*SWEEP, *out, "--plan"]) == 0
    assert capsys.readouterr().out == "3 runs, 3 remaining.\n"
    assert main([*SWEEP, *out, "--no-run"]) == 0
    assert "3 missing: erm on linear, D1 held out, seed 0, hyperparameter trial 0" in capsys.readouterr().out
    assert main([*SWEEP, *out]) == 0
    shown = capsys.readouterr()
    assert "3 runs to do." in shown.err
    assert "held out: D3" in shown.err
    assert "training:" in shown.out
    assert "oracle:" in shown.out
    for rule in ("training", "oracle"):
        for ending in ("md", "tex", "csv", "html"):
            assert "D3" in (tmp_path / f"sweep-{rule}.{ending}").read_text()
    assert main([*SWEEP, *out, "--json"]) == 0
    again = capsys.readouterr()
    assert not again.err
    (result,) = json.loads(again.out)["rules"]["training"]
    records = [json.loads(p.read_text()) for p in (tmp_path / "runs").glob("*.json")]
    assert len(records) == 3
    for record in records:
        (name,) = record["config"]["protocol"]["leave_out"]
        best = max(record["history"], key=lambda m: (m["scores"]["validation"]["mean"], -m["step"]))
        assert result["rows"][0]["domains"][name]["values"] == [best["scores"]["test"]["average"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear"], "DATA and --algorithms are required, such as: shoal sweep"),
        (["liner", "--algorithms", "erm"], "Did you mean 'linear'"),
        (["linear", "--algorithms", "emr"], "Did you mean 'erm'"),
        (["linear", "--algorithms", "erm", "--rules", "orakle"], "Did you mean 'oracle'"),
        (["--domainbed", "nowhere"], "nowhere"),
    ],
)
def test_a_sweep_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["sweep", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_train_saves_what_it_says(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["train", "fish", "rotated-digits", "--steps", "4", "--batch-size", "8"]
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
    "algorithm": (["train", "fush", "linear"], "Did you mean 'fish'"),
    "dataset": (["train", "fish", "cdsprite"], "Did you mean 'cdsprites'"),
    "setting": (["train", "fish", "linear", "--set", "meta_l=1"], "Did you mean 'meta_lr'"),
    "option": (["train", "fish", "linear", "--data", "domain=3"], "option of dataset 'linear'"),
    "pair": (["train", "fish", "linear", "--set", "meta_lr"], "NAME=VALUE pairs, got 'meta_lr'"),
    "value": (
        ["train", "fish", "linear", "--set", "meta_lr=0"],
        "meta_lr of Fish must be a number above 0",
    ),
    "rate": (["train", "fish", "linear", "--lr", "0"], "--lr must be a number above 0"),
    "optimizer": (["train", "fish", "linear", "--optimizer", "adm"], "Did you mean 'adam'"),
    "domains": (["train", "fish", "linear", "--domains-per-step", "3"], "--domains-per-step 3 but there"),
    "draw": (["train", "fish", "linear", "--draw", "pool"], "Did you mean 'pooled'"),
    "warm start": (["train", "erm", "linear", "--warm-start", "-1"], "--warm-start must be"),
    "seed": (["train", "erm", "linear", "--seed", "-1"], "seed must be"),
    "precision": ([*LINEAR, "--precision", "fp8"], "'fp32' or 'bf16' or 'fp16' or 'auto', got 'fp8'"),
    "schedule": ([*LINEAR, "--schedule", "foo"], "unknown schedule 'foo'"),
    "average": ([*LINEAR, "--average", "foo"], "'sma' or 'ema' or 'swad' or 'swad-paper', got 'foo'"),
    "average start": ([*LINEAR, "--average-start", "5"], "--average-start 5 requires --average 'sma'"),
    "swad": ([*LINEAR, "--average", "swad"], "require validation data"),
    "swad-paper": ([*LINEAR, "--average", "swad-paper"], "require validation data"),
    "average ratio": (
        [*LINEAR, "--average-ratio", "1.2"],
        "--average-ratio 1.2 requires --average 'swad' or",
    ),
    "on nan": ([*LINEAR, "--on-nan", "maybe"], "'stop' or 'skip', got 'maybe'"),
    "clip": ([*LINEAR, "--clip", "-1"], "--clip must be a number above 0"),
    "clip nan": ([*LINEAR, "--clip", "nan"], "--clip must be a number above 0"),
    "accumulate": ([*LINEAR, "--accumulate", "99"], "must be at most 8"),
    "select": ([*LINEAR, "--select", "foo"], "'best' or 'last', got 'foo'"),
    "best": ([*LINEAR, "--select", "best"], "require validation data"),
    "patience": ([*LINEAR, "--patience", "2"], "require validation data"),
    "workers": ([*LINEAR, "--workers", "-1"], "workers"),
    "device": ([*LINEAR, "--device", "gpu"], "is not a device"),
    "model": ([*LINEAR, "--model", "mpl"], "Did you mean 'mlp'"),
    "weights": ([*LINEAR, "--weights", "none.pt"], "there is no file none.pt"),
    "wandb": ([*LINEAR, "--wandb", "project"], "pip install wandb"),
    "fp16": (["train", "idgm", "linear", "--precision", "fp16"], "use 'bf16' or 'fp32'"),
    "wandb and seeds": ([*LINEAR, "--wandb", "project", "--seeds", "2"], "--wandb logs a single run"),
    "value in seeds": (
        [*LINEAR, "--clip", "-1", "--seeds", "2", "--jobs", "1"],
        "--clip must be a number above 0",
    ),
    "no folder to resume": (["resume", "nowhere"], "there is no folder 'nowhere'"),
    "no folder to show": (["show", "nowhere"], "there is no folder 'nowhere'"),
    "no run to resume": (["resume", "."], "'.' contains no run"),
    "no run to show": (["show", "."], "'.' contains no run"),
    "passes": (["reproduce", "cdsprites", "--passes", "7"], "multiple of"),
    "part": (["reproduce", "cdsprites", "--parts", "Adm"], "Did you mean 'Adam'"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_input_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    said = [line for line in shown.err.splitlines() if not line.endswith("runs to do.")]
    assert message in shown.err
    assert said[0].startswith("shoal: ")
    assert len(said) <= 2
    assert not shown.out
    assert files_in(tmp_path) == []


def test_results_need_a_folder(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("here already")
    for arguments in (["train", "erm", "linear"], ["demo"], ["reproduce", "theorem"]):
        assert main([*arguments, "--out", str(tmp_path / "file")]) == 2
        assert "cannot be a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "here already"


def test_a_run_that_diverges_says_so_and_keeps_its_record(tmp_path: Path, capsys: Captured) -> None:
    assert main([*DIVERGING, "--out", str(tmp_path)]) == 1
    assert "the loss became nan at step 3, which was not applied" in one_line(capsys)
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "diverged"
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--seeds", "0"],
        ["train", "erm"],
        ["swim"],
        ["resume"],
        ["show"],
        ["resume", ".", "--on-nan", "stop"],
        *(
            [*LINEAR, option, value]
            for option, value in (
                ("--seeds", "0"),
                ("--keep", "0"),
                ("--accumulate", "0"),
                ("--patience", "x"),
                ("--clip", "much"),
                ("--checkpoint-every", "0"),
                ("--log-every", "-1"),
                ("--average-start", "1.5"),
                ("--workers", "x"),
            )
        ),
    ],
)
def test_argparse_refuses_the_rest(arguments: list[str], tmp_path: Path) -> None:
    assert main(arguments) == 2
    assert list(tmp_path.iterdir()) == []


class TestTrain:
    def test_a_run_has_a_folder_and_the_same_command_shows_it(self, tmp_path: Path, capsys: Captured) -> None:
        assert main([*LINEAR, "--json"]) == 0
        first = json.loads(capsys.readouterr().out)
        (folder,) = (tmp_path / "runs").iterdir()
        assert folder.name.startswith("fish-linear-")
        when = (folder / "model.safetensors").stat().st_mtime_ns
        assert main([*LINEAR, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == first
        assert main(LINEAR) == 0
        assert f"Saved in runs/{folder.name}." in capsys.readouterr().out
        assert (folder / "model.safetensors").stat().st_mtime_ns == when
        assert main([*LINEAR, "--lr", "0.01"]) == 0
        assert len(list((tmp_path / "runs").iterdir())) == 2

    def test_a_folder_that_holds_another_run(self, tmp_path: Path, capsys: Captured) -> None:
        assert main([*LINEAR, "--out", "run"]) == 0
        before = files_in(tmp_path)
        capsys.readouterr()
        assert main([*LINEAR, "--out", "run", "--clip", "1", "--seed", "3"]) == 2
        said = one_line(capsys)
        assert "'run' contains another run (" in said
        assert "seed 0, not 3" in said
        assert "clip None, not 1.0" in said
        assert files_in(tmp_path) == before

    def test_stopped_and_the_same_command_goes_on(self, capsys: Captured) -> None:
        with stopping(10):
            assert main([*LINEAR, "--out", "run"]) == 130
        said = capsys.readouterr().err
        assert "interrupted at step 10, which is saved. Resume with: shoal resume run" in said
        assert main([*LINEAR, "--out", "run"]) == 0
        assert main([*LINEAR, "--out", "whole"]) == 0
        assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()

    def test_a_folder_in_use(self, capsys: Captured) -> None:
        with RunFolder("run"):
            assert main([*LINEAR, "--out", "run"]) == 2
        assert f"run is in use by process {os.getpid()}" in one_line(capsys)
        assert files_in(Path("run")) == [".lock"]


class TestSeeds:
    def test_each_seed_is_the_run_that_it_is_alone(self, capsys: Captured) -> None:
        assert main([*LINEAR, "--seed", "5", "--seeds", "3", "--jobs", "2", "--out", "all"]) == 0
        shown = capsys.readouterr()
        assert "mean ± sd  seed 5  seed 6  seed 7" in shown.out
        assert "mean ± standard deviation over 3 seeds" in shown.out
        assert "[3/3]" in shown.err
        assert sorted(p.name for p in Path("all").glob("seed-*")) == ["seed-5", "seed-6", "seed-7"]
        for seed in (5, 6, 7):
            assert main([*LINEAR, "--seed", str(seed), "--out", f"alone-{seed}"]) == 0
            alone, among = Path(f"alone-{seed}"), Path(f"all/seed-{seed}")
            assert (alone / "model.safetensors").read_bytes() == (among / "model.safetensors").read_bytes()
            records = [json.loads((p / "record.json").read_text()) for p in (alone, among)]
            assert [r["history"] for r in records] == [records[0]["history"]] * 2
            assert [r["config"] for r in records] == [records[0]["config"]] * 2
        assert len({p.read_bytes() for p in Path("all").rglob("model.safetensors")}) == 3

    def test_json_and_more_seeds_later(self, capsys: Captured) -> None:
        assert main([*LINEAR, "--seeds", "1", "--out", "all", "--jobs", "1"]) == 0
        capsys.readouterr()
        assert main([*LINEAR, "--seeds", "2", "--out", "all", "--jobs", "1", "--json"]) == 0
        shown = capsys.readouterr()
        assert "1 already finished" in shown.err
        assert [r["config"]["seed"] for r in json.loads(shown.out)["records"]] == [0, 1]

    def test_ctrl_c_keeps_checkpoints_and_the_same_command_goes_on(self, capsys: Captured) -> None:
        several = [*LINEAR, "--seeds", "3", "--jobs", "1"]
        with stopping(10, seed=1):
            assert main([*several, "--out", "all"]) == 130
        said = capsys.readouterr().err
        assert "[1/3]" in said
        assert "the same command" in said or "shoal resume all\n" in said
        assert list(Path("all/seed-1/checkpoints").glob("step-0000000010-*"))
        assert not Path("all/seed-1/record.json").exists()
        assert not Path("all/seed-2").exists()
        assert main([*several, "--out", "all"]) == 0
        shown = capsys.readouterr()
        assert "2 runs to do, 1 already finished." in shown.err
        assert main([*several, "--out", "whole"]) == 0
        for seed in range(3):
            one, other = (Path(d, f"seed-{seed}", "model.safetensors").read_bytes() for d in ("all", "whole"))
            assert one == other

    def test_not_of_several_processes(self, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        assert main([*LINEAR, "--seeds", "3"]) == 2
        assert "run it without torchrun" in one_line(capsys)
        assert files_in(Path()) == []

    def test_one_seed_and_several_do_not_share_a_folder(self, tmp_path: Path, capsys: Captured) -> None:
        assert main(LINEAR) == 0
        assert main([*LINEAR, "--seeds", "2", "--jobs", "1"]) == 0
        assert len(list((tmp_path / "runs").iterdir())) == 2
        capsys.readouterr()
        assert main(["show", "runs", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["runs"]) == 3

    def test_one_that_diverges(self, capsys: Captured) -> None:
        assert main([*DIVERGING, "--seeds", "2", "--jobs", "1", "--out", "all"]) == 1
        shown = capsys.readouterr()
        assert "[2/2] erm, seed 1: diverged" in shown.err
        assert "shoal: seed 0: erm: the loss became nan" in shown.err


class TestResume:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_stopped_run(self, number: int, code: int, capsys: Captured) -> None:
        plain = [*LINEAR, "--schedule", "cosine", "--average", "sma", "--warm-start", "6"]
        with stopping(12, number):
            assert main([*plain, "--out", "run"]) == code
        assert "Resume with: shoal resume run" in capsys.readouterr().err
        assert main(["resume", "run"]) == 0
        assert "Saved in run." in capsys.readouterr().out
        assert main([*plain, "--out", "whole"]) == 0
        assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
        one, other = (json.loads(Path(d, "record.json").read_text()) for d in ("run", "whole"))
        assert one["history"] == other["history"]

        def lines(folder: str) -> list[dict[str, Any]]:
            found = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
            return [{k: v for k, v in line.items() if "second" not in k} for line in found]

        assert lines("run") == lines("whole")

    def test_during_the_warm_start(self, capsys: Captured) -> None:
        plain = [*LINEAR, "--warm-start", "6"]
        with stopping(6):
            assert main([*plain, "--out", "run"]) == 130
        assert "shoal resume run" in capsys.readouterr().err
        assert main(["resume", "run"]) == 0
        assert main([*plain, "--out", "whole"]) == 0
        assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()

    def test_a_finished_run_is_shown(self, capsys: Captured) -> None:
        assert main([*LINEAR, "--out", "run"]) == 0
        first = capsys.readouterr().out
        when = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()}
        assert main(["resume", "run"]) == 0
        assert capsys.readouterr().out == first
        assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()} == when
        assert main(["resume", "run", "--on-nan", "skip"]) == 2
        assert "is finished; there is nothing to skip" in one_line(capsys)

    def test_a_run_of_fit(self, capsys: Captured) -> None:
        data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in ("oslo", "lima")}
        shoal.fit("erm", torch.nn.Linear(3, 2), data, steps=4, progress=False, folder="run", device="cpu")
        assert main(["resume", "run"]) == 2
        assert "call shoal.fit with resume=True" in one_line(capsys)

    def test_several_seeds_also_those_not_begun(self, capsys: Captured) -> None:
        several = [*LINEAR, "--seeds", "3", "--jobs", "1"]
        with stopping(10, seed=1):
            assert main([*several, "--out", "all"]) == 130
        capsys.readouterr()
        assert main(["resume", "all", "--jobs", "1"]) == 0
        assert "over 3 seeds" in capsys.readouterr().out
        assert main([*several, "--out", "whole"]) == 0
        for seed in range(3):
            one, other = (Path(d, f"seed-{seed}", "model.safetensors").read_bytes() for d in ("all", "whole"))
            assert one == other

    def test_folders_that_only_look_like_seeds(self, capsys: Captured) -> None:
        Path("all/seed-best").mkdir(parents=True)
        Path("all/seed-best/config.yaml").write_text("run: {}")
        assert main(["resume", "all"]) == 2
        assert "'all' contains no run" in one_line(capsys)

    def test_a_diverged_run_with_steps_skipped(self, capsys: Captured) -> None:
        assert main([*DIVERGING, "--out", "run"]) == 1
        said = one_line(capsys)
        assert "shoal resume run --on-nan skip" in said
        assert main(["resume", "run"]) == 1
        assert one_line(capsys) == said
        assert main(["resume", "run", "--on-nan", "skip"]) == 0
        assert "18 non-finite steps were skipped" in capsys.readouterr().out
        assert yaml.safe_load(Path("run/config.yaml").read_text())["run"]["on_nan"] == "skip"
        record = json.loads(Path("run/record.json").read_text())
        assert (record["status"], record["skipped"]) == ("finished", 18)
        assert main([*DIVERGING, "--out", "never", "--on-nan", "skip"]) == 0
        assert Path("run/model.safetensors").read_bytes() == Path("never/model.safetensors").read_bytes()

    def test_several_diverged_seeds_with_steps_skipped(self, capsys: Captured) -> None:
        assert main([*DIVERGING, "--seeds", "2", "--jobs", "1", "--out", "all"]) == 1
        capsys.readouterr()
        assert main(["resume", "all", "--on-nan", "skip", "--jobs", "1"]) == 0
        assert "over 2 seeds" in capsys.readouterr().out

    def test_a_run_in_use_is_not_touched(self, capsys: Captured) -> None:
        assert main([*DIVERGING, "--out", "run"]) == 1
        before = {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file() and p.name != ".lock"}
        capsys.readouterr()
        with RunFolder("run"):
            assert main(["resume", "run", "--on-nan", "skip"]) == 2
        assert "in use by" in one_line(capsys)
        assert {p: p.read_bytes() for p in before if p.exists()} == before

    @pytest.mark.parametrize(
        "text",
        ["", "- a\n", "{", "run: 5\n", "run: {}\n", "run: {steps: 5}\n", "run: {stepz: 5}\n", "\x00", "a: b"],
    )
    def test_a_broken_config(self, text: str, capsys: Captured) -> None:
        Path("run").mkdir()
        Path("run/config.yaml").write_text(text)
        assert main(["resume", "run"]) == 2
        assert "run" in one_line(capsys)

    def test_a_config_without_how(self, capsys: Captured) -> None:
        with stopping(10):
            main([*LINEAR, "--out", "run"])
        content = yaml.safe_load(Path("run/config.yaml").read_text())
        Path("run/config.yaml").write_text(yaml.safe_dump({"run": content["run"]}))
        assert main(["resume", "run"]) == 0

    def test_damaged_checkpoints(self, capsys: Captured) -> None:
        with stopping(10):
            assert main([*LINEAR, "--out", "run"]) == 130
        capsys.readouterr()
        for path in Path("run/checkpoints").iterdir():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert main(["resume", "run"]) == 2
        assert "none of the 2 checkpoints" in one_line(capsys)


class TestShow:
    def test_finished(self, capsys: Captured) -> None:
        assert main([*LINEAR, "--out", "run"]) == 0
        record = json.loads(Path("run/record.json").read_text())
        capsys.readouterr()
        assert main(["show", "run"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("fish on linear, seed 0\nfinished: step 20 of 20")
        assert "(last step)" in shown
        assert f"{record['history'][-1]['scores']['test']['domains']['D3']:.3f}" in shown
        assert "resume" not in shown
        assert main(["show", "run", "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert (run["state"], run["step"], run["steps"]) == ("finished", 20, 20)
        assert run["scores"] == record["history"][-1]["scores"]

    def test_stopped(self, capsys: Captured) -> None:
        with stopping(10):
            main([*LINEAR, "--out", "run"])
        capsys.readouterr()
        assert main(["show", "run"]) == 0
        shown = capsys.readouterr().out
        assert "stopped: step 10 of 20" in shown
        assert "Latest checkpoint: step-0000000010-" in shown
        assert shown.endswith("Resume with: shoal resume run\n")

    def test_running(self, capsys: Captured) -> None:
        """While another process holds the lock, which ends with it."""
        with stopping(10):
            main([*LINEAR, "--out", "run"])
        hold = "from shoal.training.folder import RunFolder\nwith RunFolder('run'): input('held')"
        command = [sys.executable, "-c", hold]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(4) == b"held"
            capsys.readouterr()
            assert main(["show", "run"]) == 0
            shown = capsys.readouterr().out
            assert main(["resume", "run"]) == 2
            assert f"run is in use by process {process.pid}" in one_line(capsys)
            process.kill()
        assert "running: step 10 of 20" in shown
        assert "Resume with" not in shown
        assert main(["show", "run"]) == 0
        assert "stopped: step 10 of 20" in capsys.readouterr().out

    def test_diverged(self, capsys: Captured) -> None:
        main([*DIVERGING, "--out", "run"])
        capsys.readouterr()
        assert main(["show", "run"]) == 0
        shown = capsys.readouterr().out
        assert "diverged: step " in shown
        assert "the loss became nan at step 3" in shown

    def test_several(self, capsys: Captured) -> None:
        main([*LINEAR, "--out", "runs/a"])
        with stopping(10):
            main([*LINEAR, "--out", "runs/b"])
        capsys.readouterr()
        assert main(["show", "runs"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("runs/a: finished, step 20 of 20, train accuracy 0.")
        assert second.startswith("runs/b: stopped, step 10 of 20, train accuracy 0.")

    def test_one_broken_run_does_not_hide_the_others(self, capsys: Captured) -> None:
        main([*LINEAR, "--out", "runs/a"])
        Path("runs/b").mkdir()
        Path("runs/b/config.yaml").write_text("{")
        capsys.readouterr()
        assert main(["show", "runs"]) == 0
        shown = capsys.readouterr()
        assert "runs/a: finished" in shown.out
        assert "runs/b: " in shown.out + shown.err
        assert "cannot be read" in shown.out + shown.err

    def test_names_of_domains_do_not_reach_the_terminal_raw(self, capsys: Captured) -> None:
        names = ["<script>", "\x1b[2J", "two\nlines", "\u202eback", "東京"]
        data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in names}
        shoal.fit("erm", torch.nn.Linear(3, 2), data, steps=4, progress=False, folder="run", device="cpu")
        assert main(["show", "run"]) == 0
        shown = capsys.readouterr().out
        assert "ERM (started from Python)" in shown
        assert "<script>" in shown
        assert "東京" in shown
        assert not set("\x1b\u202e") & set(shown)
        assert not any(line.startswith("lines") for line in shown.splitlines())
        assert main(["show", "run", "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert list(run["scores"]["train"]["domains"]) == names


class Trap:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("trapped"),)


class TestWeights:
    start = {"weight": torch.full((2, 4), 0.25), "bias": torch.full((2,), 0.5)}  # noqa: RUF012

    def names(self) -> list[str]:
        assert main([*LINEAR, "--out", "names"]) == 0
        return list(load_file("names/model.safetensors"))

    @pytest.mark.parametrize("file", ["start.safetensors", "start.pt"])
    def test_they_are_where_training_starts(self, file: str, capsys: Captured) -> None:
        weights = {n: self.start[n.rpartition(".")[2]] for n in self.names()}
        save_file(weights, file) if file.endswith("safetensors") else torch.save(
            {"state_dict": weights}, file
        )
        still = [*LINEAR, "--weights", file, "--steps", "1", "--optimizer", "sgd", "--lr", "1e-30"]
        assert main([*still, "--out", "run"]) == 0
        found = load_file("run/model.safetensors")
        assert all(torch.equal(found[n], w) for n, w in weights.items())
        assert yaml.safe_load(Path("run/config.yaml").read_text())["run"]["weights"] == file

    def test_of_a_run_before(self, capsys: Captured) -> None:
        assert main([*LINEAR, "--out", "first"]) == 0
        assert main([*LINEAR, "--out", "second", "--weights", "first/model.safetensors"]) == 0

    @pytest.mark.parametrize("name", ["trap.pt", "trap.safetensors", "trap.pth"])
    @pytest.mark.parametrize(
        "written", [torch.save, lambda what, path: Path(path).write_bytes(pickle.dumps(what))]
    )
    def test_no_code_in_a_file_is_run(self, written: Any, name: str, capsys: Captured) -> None:
        written({"weight": Trap()}, name)
        assert main([*LINEAR, "--weights", name]) == 2
        assert re.search(rf"weights: {re.escape(name)} (was rejected|is not a valid)", one_line(capsys))
        assert not Path("trapped").exists()
        assert files_in(Path()) == [name]

    def test_wrong_shapes_are_named(self, capsys: Captured) -> None:
        name = next(n for n in self.names() if n.endswith("weight"))
        save_file({**load_file("names/model.safetensors"), name: torch.zeros(3, 3)}, "wrong.safetensors")
        capsys.readouterr()
        assert main([*LINEAR, "--weights", "wrong.safetensors"]) == 2
        said = one_line(capsys)
        assert "do not fit the model" in said
        assert name in said
        assert "[3, 3]" in said

    def test_other_names_are_named(self, capsys: Captured) -> None:
        save_file({"head.weight": torch.zeros(2)}, "other.safetensors")
        assert main([*LINEAR, "--weights", "other.safetensors"]) == 2
        assert "it needs 'head.bias'" in one_line(capsys)


def started(*arguments: str) -> subprocess.Popen[str]:
    """`shoal` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(ready: Any, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if ready():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it did not begin in 30 seconds")


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
def test_signals_to_a_real_training(capsys: Captured) -> None:
    """Stopped by SIGTERM, refused to a second, stopped by SIGINT, killed, and still the same weights."""
    long = ["train", "fish", "linear", "--steps", "1200", "--batch-size", "8", "--device", "cpu"]
    long += ["--checkpoint-every", "50", "--log-every", "10"]
    folder = Path("run")

    def step() -> int:
        return max((int(p.name.split("-")[1]) for p in folder.glob("checkpoints/step-*")), default=0)

    process = started(*long, "--out", "run")
    until(lambda: step() >= 50, process)
    process.send_signal(signal.SIGSTOP)
    second = started(*long, "--out", "run")
    out, said = second.communicate(timeout=60)
    process.send_signal(signal.SIGCONT)
    assert (second.returncode, out) == (2, "")
    assert f"run is in use by process {process.pid}" in said.splitlines()[-1]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        at = step()
        process.send_signal(number)
        out, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        assert "Traceback" not in said
        if number != signal.SIGKILL:
            assert f"interrupted at step {step()}, which is saved. Resume with: shoal resume run" in said
            assert step() >= at
            assert not [p for p in folder.rglob(".*") if p.name != ".lock"]
        assert main(["show", "run"]) == 0
        assert f"stopped: step {step():,} of 1,200" in capsys.readouterr().out or code == -9
        at = step()
        if code != -9:
            process = started("resume", "run")
            until(lambda at=at: step() > at, process)
    assert main(["resume", "run", "--json"]) == 0
    assert not [p for p in folder.rglob(".*") if p.name != ".lock"]
    assert main([*long, "--out", "whole", "--json"]) == 0
    assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_reproduce_theorem(tmp_path: Path, capsys: Captured) -> None:
    assert main(["reproduce", "theorem", "--out", str(tmp_path), "--json"]) == 0
    for result in json.loads(capsys.readouterr().out)["results"]:
        assert abs(result["slope"] - 2) < 0.2
    assert (tmp_path / "theorem.png").stat().st_size > 10_000
    assert (tmp_path / "theorem.svg").exists()


def tiny(part: str) -> list[str]:
    small = ["--numbers", "2", "--seeds", "1", "--passes", "200", "--size", "32", "--device", "cpu"]
    return ["reproduce", "cdsprites", *small, "--parts", part]


def test_passes_of_cdsprites_need_only_suit_the_parts_that_are_asked_for() -> None:
    """Those of N = 10 do not matter where there is none."""
    configs = cdsprites.figure([5], range(1), 300, 32, ["IDGM"])
    assert [(c.steps, c.domains_per_step) for c in configs.pop("IDGM")] == [(60, 5)]
    assert not configs
    with pytest.raises(InputError, match="passes=300 must be a multiple of 200 for N=10"):
        cdsprites.figure([5], range(1), 300, 32)
    with pytest.raises(InputError, match="passes=50 must be a multiple of 100 for N=5"):
        cdsprites.figure([5], range(1), 50, 32, ["IDGM"])


def test_cdsprites_shows_what_is_there_and_names_what_is_missing(tmp_path: Path, capsys: Captured) -> None:
    configs = cdsprites.figure([2], range(1), 200, 32)["Adam"]
    history = [
        {
            "step": 1,
            "passes": 200,
            "loss": 0.1,
            "scores": {
                s: {"metric": "accuracy", "average": a, "domains": {}}
                for s, a in (("train", 1.0), ("test", 0.75))
            },
        }
    ]
    for config in configs[:-1]:
        record = RunRecord(config, "finished", tuple(history), 0, "last step", 1.0, {"device": "cpu"})
        Store(tmp_path / "cdsprites").save(record)
    assert main([*tiny("Adam"), "--no-run", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "75.0" in shown
    assert "1 of 4 runs are missing: ERM (Adam), N=2, seed 0." in shown
    assert (tmp_path / "cdsprites.png").exists()
    assert "| Adam | Fish |" in (tmp_path / "cdsprites.md").read_text()


def test_missing_runs_of_cdsprites_are_listed_by_their_seeds(tmp_path: Path, capsys: Captured) -> None:
    config = cdsprites.figure([2], range(3), 200, 32)["Adam"]
    point = {
        "step": 1,
        "passes": 200,
        "loss": 0.1,
        "scores": {
            s: {"metric": "accuracy", "average": a, "domains": {}} for s, a in (("train", 1.0), ("test", 0.5))
        },
    }
    for c in config:
        if c.algorithm == "reptile" or (c.algorithm == "erm" and c.seed == 1):
            Store(tmp_path / "cdsprites").save(
                RunRecord(c, "finished", (point,), 0, "last step", 1.0, {"device": "cpu"})
            )
    three = [*tiny("Adam"), "--seeds", "3", "--no-run", "--out", str(tmp_path)]
    assert main(three) == 0
    shown = capsys.readouterr().out
    assert "8 of 12 runs are missing: Fish (Adam), N=2, seeds 0, 1, 2; Fish, random grouping" in shown
    assert "ERM (Adam), N=2, seeds 0, 2." in shown
    rows = [line.split(" | ") for line in (tmp_path / "cdsprites.md").read_text().splitlines()[2:]]
    assert {row[1]: row[3] for row in rows} == {"Reptile": "3", "ERM": "1"}


def gone(group: int) -> bool:
    """Whether the last process of a group ends within 30 seconds."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def started_demo(jobs: int, out: Path) -> subprocess.Popen[str]:
    """A demo in a group of processes of its own, well into its first run."""
    command = [sys.executable, "-m", "shoal", "demo", "--jobs", str(jobs), "--device", "cpu"]
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
@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_ends_quietly_and_leaves_no_process(jobs: int, tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to the whole group of processes."""
    process = started_demo(jobs, tmp_path)
    assert process.stderr is not None
    try:
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 130, errors
        assert "The same command resumes" in errors
        assert "Traceback" not in errors
        assert not list(tmp_path.rglob(".*.json*"))
        assert gone(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def recorded(
    folder: Path, algorithm: str, seed: int, test: float, status: str = "finished", **more: Any
) -> None:
    """A record as `shoal compare` would have left it."""
    config = RunConfig("digits", algorithm, 10, data_options={"test": "15°"}, seed=seed, **more)
    split = {"metric": "accuracy", "average": test, "domains": {"15°": test}}
    history = ({"step": 10, "passes": 10, "loss": 1.0, "scores": {"test": split}},)
    Store(folder).save(RunRecord(config, status, history, 0, "last step", 2.0, {"device": "cpu"}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    for seed, test in enumerate((0.5, 0.7, 0.9)):
        recorded(folder / "runs", "erm", seed, test)
        recorded(folder / "runs", "fish", seed, test - 0.25, settings={"meta_lr": 0.5})
    recorded(folder / "runs", "fish", 7, 0.99, "diverged")
    return folder


def test_results_are_a_table(runs: Path, capsys: Captured) -> None:
    assert main(["results", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["dataset", "name", "left_out", "seed", "test", "test_last", "seconds"]
    assert lines[2].split() == ["digits", "erm", "15°", "0", "0.500", "0.500", "2.0"]
    assert lines[8].split() == ["digits", "fish", "15°", "7", "diverged", "diverged", "2.0"]
    assert lines[10].startswith("7 runs. Scores are accuracy at the selected step")
    assert "1 run diverged" in lines[10]


def test_results_are_asked(runs: Path, capsys: Captured) -> None:
    asked = ["results", str(runs), "--query", 'algorithm == "fish" and test > 0.3']
    asked += ["--columns", "seed", "settings.meta_lr", "test", "--sort", "test", "--reverse"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:4]] == [["2", "0.5", "0.650"], ["1", "0.5", "0.450"]]
    assert main([*asked, "--json", "--limit", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == [{"seed": 2, "settings.meta_lr": 0.5, "test": 0.65}]
    assert (shown["runs"], shown["matching"], shown["duplicates"], shown["broken"]) == (7, 2, 0, {})
    assert main(["results", str(runs), "--query", "seed > 100"]) == 0
    assert "0 runs" in capsys.readouterr().out


def test_results_in_groups(runs: Path, capsys: Captured) -> None:
    assert main(["results", str(runs), "--group", "algorithm", "--sort", "test", "--csv", "groups.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["fish", "4", "4", "1", "0.450", "±", "0.200"]
    assert lines[3].split() == ["erm", "3", "3", "0", "0.700", "±", "0.200"]
    with open("groups.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["diverged"]) for row in rows] == [("fish", "1"), ("erm", "0")]
    assert float(rows[0]["mean"]) == pytest.approx(0.45)
    assert float(rows[0]["sd"]) == pytest.approx(0.2)


@pytest.mark.parametrize("label", ["<script>\nA,\x1b[31m 鱼", "<script>\rA;\x1b[31m 鱼"])
def test_results_show_fifty_rows_and_write_all(label: str, tmp_path: Path, capsys: Captured) -> None:
    for seed in range(60):
        recorded(tmp_path / "many", "erm", seed, 0.5, label=label)
    assert main(["results", str(tmp_path / "many"), "--csv", "all.csv"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(f"<script>?A{label[10]}?[31m 鱼") == 50
    assert "\x1b" not in shown
    assert "The first 50 of 60 runs (use --limit 60 for all)" in shown
    with open("all.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == 60 * [label]
    assert [int(row["seed"]) for row in rows] == list(range(60))
    assert rows[0]["data.test"] == rows[0]["left_out"] == "15°"
    assert main(["results", str(tmp_path / "many"), "--limit", "55"]) == 0
    assert capsys.readouterr().out.count("<script>") == 55


def test_results_say_what_they_leave_out(runs: Path, capsys: Captured) -> None:
    recorded(runs / "again", "erm", 0, 0.5)
    (runs / "0123456789abcdef.json").write_text("{")
    assert main(["results", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "7 runs." in shown
    assert "1 older record of the same runs omitted." in shown
    assert "Not shown: '0123456789abcdef.json' is not a run record (" in shown
    assert main(["results", str(runs), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (len(content["rows"]), content["duplicates"]) == (7, 1)
    assert list(content["broken"]) == ["0123456789abcdef.json"]


def test_results_of_what_train_and_its_seeds_leave(tmp_path: Path, capsys: Captured) -> None:
    assert main([*LINEAR, "--out", str(tmp_path / "one")]) == 0
    assert main([*LINEAR, "--out", str(tmp_path / "more"), "--seeds", "2", "--jobs", "1"]) == 0
    capsys.readouterr()
    before = files_in(tmp_path)
    assert main(["results", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["seed"] for row in content["rows"]] == [0, 1]
    assert content["duplicates"] == 1
    saved = RunRecord.from_dict(json.loads((tmp_path / "one" / "record.json").read_text()))
    assert content["rows"][0]["test"] == saved.score("test")
    assert content["rows"][0]["test_last"] == saved.score("test", last=True)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder 'nowhere'"),
        (["empty"], "'empty' and its subfolders contain no record of a run"),
        (["broken"], "no record in 'broken' can be read: 'record.json' is not a run record"),
        (["sweep", "--query", "sed < 3"], "Did you mean 'seed'"),
        (["sweep", "--query", "seed <"], "cannot be read"),
        (["sweep", "--query", ""], "--query is empty"),
        (["sweep", "--query", "print(1)"], "neither a column nor a value"),
        (["sweep", "--columns", "tset"], "Did you mean 'test'"),
        (["sweep", "--sort", "tset"], "Did you mean 'test'"),
        (["sweep", "--group", "algoritm"], "Did you mean 'algorithm'"),
        (["sweep", "--group", "algorithm", "--sort", "lr"], "groups cannot be sorted by 'lr'"),
        (["sweep", "--group", "algorithm", "--columns", "lr"], "cannot be combined"),
        (["sweep", "--csv", "empty"], "--csv 'empty' is a folder; specify a file"),
    ],
)
def test_wrong_questions_end_in_one_line(
    arguments: list[str], message: str, runs: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("[]")
    assert main(["results", *arguments]) == 2
    assert message in one_line(capsys)


# Pictures


def plant_pictures(root: Path) -> Path:
    from PIL import Image

    for d, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        for c, label in enumerate(("dog", "<script>é")):
            (root / domain / label).mkdir(parents=True)
            for i in range(5):
                picture = Image.new("RGB", (30, 20), (60 * d, 100 * c, 40 * i))
                picture.save(root / domain / label / f"{i}.jpg")
    return root


def test_pictures_are_trained_on_alike_with_any_number_of_workers(tmp_path: Path, capsys: Captured) -> None:
    folder = plant_pictures(tmp_path / "pictures")
    train = ["train", "erm", "image-folder", "--steps", "2", "--batch-size", "3", "--device", "cpu"]
    weights = []
    for workers in ("0", "1"):
        out = tmp_path / workers
        data = ["--data", f"folder={folder}", "size=16", "cache=false"]
        assert main([*train, *data, "--workers", workers, "--out", str(out)]) == 0
        assert "sketch" in capsys.readouterr().out  # the last domain is left out
        weights.append(load_file(out / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def plant_hospitals(root: Path, age: int = 63) -> Path:
    folder = root / "heart_disease"
    folder.mkdir(parents=True)
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [f"{age},{i % 2},1,145,233,1,2,{150 + i},0,2.3,3,0,6,{i % 3}" for i in range(12)]
        (folder / f"processed.{name}.data").write_text("\n".join(rows))
    return root


class TestDataDir:
    """Where datasets are: stronger than the environment, and no part of what a run is."""

    @staticmethod
    def typed(*arguments: str) -> int:
        """As in a process of its own, which has loaded nothing yet."""
        _loaded.cache_clear()
        return main(arguments)

    HEART = ("train", "erm", "heart", "--steps", "4", "--batch-size", "4", "--device", "cpu")

    def test_it_is_stronger_than_the_environment_and_ends_with_the_command(
        self, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data, other = plant_hospitals(tmp_path / "data"), plant_hospitals(tmp_path / "other", age=99)
        (other / "heart_disease/processed.va.data").write_text("spoilt")
        for before in (str(other), None):
            if before is None:
                monkeypatch.delenv("SHOAL_DATA", raising=False)
            else:
                monkeypatch.setenv("SHOAL_DATA", before)
            assert self.typed(*self.HEART, "--data-dir", str(data), "--out", f"from-{before is None}") == 0
            assert os.environ.get("SHOAL_DATA") == before
            capsys.readouterr()
            assert self.typed(*self.HEART) == 2
            said = "va.data', line 1" if before else "`shoal data get heart` downloads them"
            assert said in one_line(capsys)
        own = ["--data", f"folder={other / 'heart_disease'}"]
        assert self.typed(*self.HEART, "--data-dir", str(data), *own) == 2
        assert "va.data', line 1" in one_line(capsys)
        assert self.typed(*self.HEART, "--data-dir", "nowhere") == 2
        assert "--data-dir: there is no folder 'nowhere'" in one_line(capsys)

    def test_the_same_run_wherever_its_files_are(
        self, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "nowhere"))
        data = plant_hospitals(tmp_path / "data")
        with stopping(2):
            assert self.typed(*self.HEART, "--eval-every", "2", "--out", "run", "--data-dir", "data") == 130
        moved = data.rename(tmp_path / "moved")
        capsys.readouterr()
        assert self.typed("resume", "run") == 2
        assert "there is no file 'processed.cleveland.data'" in one_line(capsys)
        assert self.typed("resume", "run", "--data-dir", str(moved)) == 0
        assert "data_dir" not in Path("run/config.yaml").read_text()
        record = RunRecord.from_dict(json.loads(Path("run/record.json").read_text()))
        assert record.config.data_options == {}
        capsys.readouterr()
        assert self.typed(*self.HEART, "--eval-every", "2", "--out", "run", "--data-dir", str(moved)) == 0

    def test_worker_processes_look_there_too(
        self, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SHOAL_DATA", raising=False)
        data = plant_hospitals(tmp_path / "data")
        several = ["--seeds", "2", "--jobs", "2", "--data-dir", str(data)]
        assert self.typed(*self.HEART, *several) == 0
        assert "over 2 seeds" in capsys.readouterr().out
        few = ["--algorithms", "erm", "--held-out", "va", "--seeds", "1", "--search", "1", "--steps", "2"]
        compare = ["compare", "heart", *few, "--jobs", "1", "--device", "cpu"]
        assert self.typed(*compare, "--data-dir", str(data)) == 0
        assert self.typed(*compare) == 2
        assert "`shoal data get heart` downloads them" in capsys.readouterr().err


def test_data_check_passes_sound_pictures(tmp_path: Path, capsys: Captured) -> None:
    folder = plant_pictures(tmp_path / "pictures")
    assert main(["data", "check", str(folder), "--workers", "1"]) == 0
    shown = capsys.readouterr()
    assert "All 40 images can be read" in shown.out
    assert "40 of 40 images decoded" in shown.err
    assert main(["data", "check", str(folder), "--json", "--workers", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["classes"]["photo"] == {"<script>é": 5, "dog": 5}
    assert (report["images"], report["wrong"], report["unreadable"]) == (40, [], {})


def test_data_check_finds_what_is_wrong(tmp_path: Path, capsys: Captured) -> None:
    folder = plant_pictures(tmp_path / "pictures")
    (folder / "photo/dog/9.jpg").write_bytes(b"")
    (folder / "photo/dog/8.jpg").write_bytes((folder / "sketch/dog/1.jpg").read_bytes())
    (folder / "cartoon/dog/8.jpg").write_bytes((folder / "cartoon/<script>é/1.jpg").read_bytes())
    (folder / "cartoon/dog/copy.jpg").write_bytes((folder / "cartoon/dog/2.jpg").read_bytes())
    assert main(["data", "check", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == [
        "images that cannot be read: 1",
        "images that are in several domains: 1",
        "images that are in several classes: 1",
    ]
    assert list(report["unreadable"]) == ["photo/dog/9.jpg"]
    found = {group["kind"]: group["files"] for group in report["duplicates"]}
    assert found == {
        "domains": ["photo/dog/8.jpg", "sketch/dog/1.jpg"],
        "classes": ["cartoon/<script>é/1.jpg", "cartoon/dog/8.jpg"],
        "copies": ["cartoon/dog/2.jpg", "cartoon/dog/copy.jpg"],
    }
    assert main(["data", "check", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "same image in several domains: 'photo/dog/8.jpg' = 'sketch/dog/1.jpg'" in shown
    assert "cannot be read: 'photo/dog/9.jpg' (empty" in shown


def test_data_check_compares_with_what_was_published(tmp_path: Path, capsys: Captured) -> None:
    folder = plant_pictures(tmp_path / "PACS")
    shutil.rmtree(folder / "cartoon")
    assert main(["data", "check", str(tmp_path), "--dataset", "pacs", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["published"]["sketch"] == 3929
    assert report["wrong"][:3] == [
        "domain cartoon is missing",
        "art_painting has 10 images, not 2,048",
        "photo has 10 images, not 1,670",
    ]
    assert "there are 2 classes, not 7" in report["wrong"]
    assert "photo has 5 images of dog, not 189" in report["wrong"]
    assert main(["data", "check", str(tmp_path), "--dataset", "pacs"]) == 1
    shown = capsys.readouterr().out
    assert "cartoon" in shown
    assert "PACS can be obtained with `shoal data get pacs`, or by hand from the authors' group" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder 'nowhere'"),
        (["."], "there is no image in"),
        ([".", "--dataset", "pacs"], "PACS is not in"),
        ([".", "--dataset", "linear"], "linear is not a folder of images; datasets that are: domainnet,"),
        ([".", "--dataset", "pasc"], "Did you mean 'pacs'?"),
    ],
)
def test_data_check_says_what_cannot_be_checked(arguments: list[str], message: str, capsys: Captured) -> None:
    assert main(["data", "check", *arguments]) == 2
    assert message in one_line(capsys)
