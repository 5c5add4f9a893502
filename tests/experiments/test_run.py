"""One run in a folder of its own, and `shoal.train`: what they leave, resume and refuse."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_execute import numbers, replace_run
from test_record import TINY

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import execute
from shoal.experiments.run import of_same_run, run
from shoal.experiments.store import Store
from shoal.training.stopping import Interrupted

CONFIG = RunConfig("linear", "erm", 60, batch_size=8, eval_every=20)
SHORT: dict[str, Any] = {"steps": 12, "batch_size": 8, "device": "cpu", "out": "run", "progress": False}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def at(step: int, act: Callable[[], Any]) -> Callable[[int, str], None]:
    """Progress that acts once, when that step is reached."""
    done = list[int]()

    def report(now: int, note: str) -> None:
        if now >= step and not done:
            done.append(now)
            act()

    return report


def test_a_run_in_a_folder_is_the_same_and_is_not_repeated() -> None:
    record = run(TINY, "cpu", Path("run"))
    assert numbers(record) == numbers(run(TINY, "cpu"))
    times = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()}
    assert run(replace(TINY, label="the same"), "cpu", Path("run"), options={"workers": 0}) == record
    assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()} == times


def test_an_interrupted_run_resumes_to_the_same_bits() -> None:
    run(CONFIG, "cpu", Path("whole"))
    with pytest.raises(Interrupted, match="is saved"):
        run(CONFIG, "cpu", Path("part"), progress=at(30, lambda: signal.raise_signal(signal.SIGTERM)))
    run(CONFIG, "cpu", Path("part"))
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in ("whole", "part")]
    assert weights[0] == weights[1]


def test_a_record_of_another_run_is_refused() -> None:
    other = replace(TINY, seed=7)
    run(TINY, "cpu", Path("runs/seed-0"))
    run(other, "cpu", Path("runs/seed-7"))
    with pytest.raises(InputError, match=r"seed-0' contains another run \(steps 4, not 8\)"):
        execute([replace(TINY, steps=8)], Store("runs", weights=True), device="cpu")
    shutil.copy("runs/seed-7/record.json", "runs/seed-0/record.json")
    for look in (
        lambda: of_same_run(Path("runs/seed-0"), TINY),
        lambda: Store("runs", weights=True).missing([TINY]),
    ):
        with pytest.raises(InputError, match=r"record of another run \(seed 7, not 0\)"):
            look()


def test_seeds_of_which_one_fails_and_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig) -> None:
        if config.seed == 1:
            raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        replace_run(patch, fail)
        result = shoal.train("erm", "linear", **SHORT, seeds=2, jobs=1)
    assert list(result.problems) == ["seed 1: RuntimeError: no memory"]
    assert "seed 1: RuntimeError: no memory" in str(result)
    assert Store("run").frame().set_index("seed")["status"].to_dict() == {0: "finished", 1: "failed"}
    again = shoal.train("erm", "linear", **SHORT, seeds=2, jobs=1)
    assert [r.status for r in again.records] == ["finished", "finished"]
    assert {p.name for p in Path("run").iterdir()} == {"seed-0", "seed-1"}
    assert len(again.load().predict(np.zeros((1, 4), np.float32))) == 1


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("image-folder", {"data_options": {"folder": "nowhere"}}),
        ("linear", {"data_options": {"tset": 3}}),
        ("linear", {"model": "lineer"}),
        ("linear", {"model_options": {"width": "x"}}),
    ],
)
def test_a_run_that_could_not_start_leaves_nothing(data: str, options: Any, tmp_path: Path) -> None:
    for more in ({}, {"out": "runs/mine"}, {"seeds": 2, "jobs": 1}):
        with pytest.raises(InputError):
            shoal.train("erm", data, steps=2, device="cpu", progress=False, **options, **more)
        assert list((tmp_path / "runs").glob("*")) == []
