"""Runs as data: identities, records, stores, and the experiments that need no download."""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import store as stores
from shoal.experiments.config import RunConfig, change_config, read_config, read_file
from shoal.experiments.execute import execute, make_executor
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.experiments.store import Index, Store
from shoal.files import write_atomically
from shoal.paper import cdsprites, linear

TINY = RunConfig("linear", "erm", 4, optimizer="sgd", optimizer_options={"lr": 0.5}, eval_every=2)
CONFIGS = [
    TINY,
    replace(TINY, algorithm="fish", settings={"meta_lr": 0.3}, label="Fish, ours"),
    replace(TINY, seed=1),
]


def record(config: RunConfig = TINY, **changes: Any) -> RunRecord:
    score = {"metric": "accuracy", "average": 0.75, "mean": 0.7, "domains": {"D3": 0.75}}
    better = score | {"average": 0.9}
    content: dict[str, Any] = {
        "config": config,
        "status": "finished",
        "history": (
            {"step": 2, "passes": 4, "loss": 0.7, "scores": {"test": better}},
            {"step": 4, "passes": 8, "loss": 0.5, "scores": {"test": score}},
        ),
        "selected": 0,
        "rule": "best on validation",
        "seconds": 1.5,
        "environment": {"torch": "2"},
    }
    return RunRecord(**content | changes)


SPOILT: list[dict[str, Any]] = [
    {"metric": "r", "average": "0.5", "domains": {}},
    {"metric": "r", "average": 0.5, "domains": {"a": "0.5"}},
    {"metric": "r", "average": 0.5, "domains": None},
    {"metric": None, "average": 0.5, "domains": {}},
    {"metric": "r", "average": 0.5, "domains": {}, "metrics": {"x": "0.5"}},
]
WRONG: list[dict[str, Any]] = [
    {"status": None},
    {"rule": 3},
    {"error": None},
    {"seconds": "1"},
    {"environment": None},
    {"notes": []},
    {"skipped": None},
    {"selected": 2},
    {"selected": "0"},
    {"agreement": 1},
    {"agreement": ["x"]},
    {"agreement": [{"step": None}]},
    {"agreement": [{"step": 1, "mean_cosine": "0.5"}]},
    {"agreement": [{"step": 1, "sign_agreement": []}]},
    {"agreement": [{"step": 1, "layers": {"a": "0.5"}}]},
    {"agreement": [{"step": 1, "domains": ["a"], "matrix": [["1"]]}]},
    {"agreement": [{"step": 1, "matrix": {"domains": ["a"], "values": [["1"]]}}]},
    {"agreement": [{"step": 1, "matrix": [1]}]},
    {"agreement": [{"step": 1, "domains": 2}]},
    {"history": ["x"]},
    {"history": [{"step": "2", "scores": {}}]},
    {"history": [{"step": 2}]},
    {"history": [{"step": 2, "scores": None}]},
    {"history": [{"step": 2, "scores": {"test": None}}]},
    *({"history": [{"step": 2, "scores": {"test": score}}]} for score in SPOILT),
]


def run_all(
    configs: list[RunConfig],
    store: Store,
    *,
    device: str | None = "cpu",
    jobs: int | None = None,
    **options: Any,
) -> list[RunRecord]:
    return execute(configs, store, make_executor(device=device, jobs=jobs), **options).records


def result(found: RunRecord) -> tuple[Any, ...]:
    """What must not depend on how and where a run was started."""
    return found.config, found.status, found.history, found.selected, found.rule, found.warm_up


class TestConfig:
    def test_identity_is_the_same_everywhere(self) -> None:
        config = RunConfig("cdsprites", "fish", 100, {"domains": 10, "size": 32}, {"meta_lr": 0.1}, seed=3)
        assert config.identity == "a81f36b81ad45c20"
        backwards = replace(config, data_options={"size": 32, "domains": 10})
        assert backwards.identity == config.identity

    def test_label_is_no_part_of_it(self) -> None:
        named = replace(TINY, label="Row 1")
        assert named.identity == TINY.identity
        assert (named.name, TINY.name) == ("Row 1", "erm")

    def test_every_other_field_is(self) -> None:
        changes: dict[str, Any] = {
            "dataset": "cdsprites",
            "algorithm": "fish",
            "steps": 5,
            "data_options": {"per_domain": 200},
            "settings": {"a": 1},
            "model": "mlp",
            "model_options": {"width": 8},
            "optimizer": "adam",
            "optimizer_options": {"lr": 0.25},
            "batch_size": 16,
            "domains_per_step": 2,
            "draw": "pooled",
            "seed": 7,
            "warm_start": 3,
            "warm_select": "best",
            "eval_every": 1,
            "eval_limit": 9,
            "select": "last",
            "patience": 3,
            "precision": "bf16",
            "memory_format": "channels-last",
            "clip": 1.0,
            "accumulate": 2,
            "schedule": "cosine",
            "average": "sma",
            "average_start": 2,
            "average_ratio": 1.2,
            "average_decay": 0.9,
            "wise_ft": 0.5,
            "miro": 0.1,
            "l2_sp": 0.1,
            "l2_sp_head": 0.01,
            "head_lr": 0.1,
            "layer_decay": 0.5,
            "retrain": True,
            "on_nan": "skip",
            "weights": "start.safetensors",
            "holdout": 0.2,
            "protocol": {"leave_out": ["a"], "trial": 0},
            "metric": "macro F1",
            "eval_splits": ["test"],
        }
        assert {*changes, "label"} == set(TINY.to_dict())
        different = {replace(TINY, **{k: v}).identity for k, v in changes.items()} | {TINY.identity}
        assert len(different) == len(changes) + 1

    def test_a_field_at_its_default_is_not(self) -> None:
        """So that a field which comes with a later version changes no name."""
        config = RunConfig("linear", "erm", 4)
        usual = {f.name: getattr(config, f.name) for f in fields(RunConfig)}
        assert RunConfig(**usual).identity == config.identity
        known = json.dumps({"algorithm": "erm", "dataset": "linear", "steps": 4}, sort_keys=True)
        assert config.identity == hashlib.sha256(known.encode()).hexdigest()[:16]

    def test_it_survives_the_file(self, tmp_path: Path) -> None:
        """Also values that YAML would read as something else."""
        odd = {
            "list": [1, 2.5, None, [True, "no"]],
            "nest": {"a": {"b": []}, "ключ": "東京 🐟"},
            "small": 1e-05,
            "large": 1e22,
            "whole": 1.0,
            "inf": float("inf"),
            "texts": ["1e-5", "null", "yes", "0x10", "2024-01-01", " a: b # c", "two\nlines", "", "\x1b[2J"],
        }
        config = replace(TINY, settings=odd, data_options={"0": odd}, warm_start=0.1, clip=1e-7, label="é")
        (tmp_path / "config.yaml").write_text("run: {}\nhow: {workers: 3}\n")
        change_config(tmp_path, config)
        assert read_config(tmp_path) == config
        assert read_config(tmp_path).identity == config.identity
        assert read_file(tmp_path)["how"] == {"workers": 3}

    def test_from_dict(self) -> None:
        assert RunConfig.from_dict(json.loads(json.dumps(CONFIGS[1].to_dict()))) == CONFIGS[1]
        with pytest.raises(InputError, match=r"'stepz'\. Did you mean 'steps'"):
            RunConfig.from_dict({"dataset": "linear", "algorithm": "erm", "stepz": 4})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"optimizer": "adm"}, "Did you mean 'adam'"),
            ({"schedule": "cosin"}, "Did you mean 'cosine'"),
            ({"schedule": "step"}, "step:FACTOR:EVERY"),
            ({"schedule": "step:2:5"}, "step:FACTOR:EVERY"),
            ({"schedule": "step:0.5:0"}, "step:FACTOR:EVERY"),
            ({"schedule": "step:0.5:3:1"}, "step:FACTOR:EVERY"),
            ({"seed": -1}, "got -1"),
            ({"seed": 0.5}, "got 0.5"),
        ],
    )
    def test_wrong_values(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            replace(TINY, **changes)


class TestRecord:
    def test_round_trip_through_json(self) -> None:
        one = record(CONFIGS[1], warm_up=({"step": 1, "passes": 1, "loss": 2.0, "scores": {}},), error="?")
        assert RunRecord.from_dict(json.loads(json.dumps(one.to_dict()))) == one

    @pytest.mark.parametrize("wrong", WRONG)
    def test_content_of_other_types_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError, KeyError)):
            RunRecord.from_dict({**record().to_dict(), **wrong})

    def test_content_of_other_types_is_named_in_a_report(self, tmp_path: Path) -> None:
        for number, wrong in enumerate([*WRONG, {}]):
            (tmp_path / f"{number:03}").mkdir()
            content = {**record().to_dict(), **wrong}
            (tmp_path / f"{number:03}" / "record.json").write_text(json.dumps(content))
        page = tmp_path / "page.html"
        assert main(["report", str(tmp_path), "--out", str(page)]) == 0
        assert page.read_text(encoding="utf-8").count("is not a run record") == len(WRONG)

    def test_an_index_from_before_that_was_refused_is_made_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stores, "INDEX_FROM", 1)
        (tmp_path / "record.json").write_text(json.dumps(record(status=None).to_dict()))
        with monkeypatch.context() as before:
            before.setattr("shoal.experiments.record.check_record", lambda content: content)
            before.setattr(stores, "_FORMAT", stores._FORMAT[:-3])
            assert not Index(tmp_path).read()[1]
        assert list(Index(tmp_path).read()[1]) == ["record.json"]

    def test_what_may_be_missing_is_read(self) -> None:
        matrix = [[1, None], [None, math.nan]]
        point = {"step": 1, "domains": ["a", "b"], "mean_cosine": None, "sign_agreement": 1, "matrix": matrix}
        within = {"step": 2, "matrix": {"domains": ["a", "b"], "values": matrix}}
        last = {"step": 3, "mean_cosine": 0.5, "layers": {"a": None}}
        score = {
            "metric": "r",
            "average": None,
            "domains": {"a": None, "b": math.nan},
            "metrics": {"x": None},
        }
        history = ({"step": 2, "passes": 2, "loss": None, "scores": {"test": score}},)
        found = record(agreement=(point, within, last), history=history)
        again = RunRecord.from_dict(found.to_dict())
        assert again == found
        old = {k: v for k, v in record().to_dict().items() if k not in ("agreement", "notes", "error")}
        assert RunRecord.from_dict(old) == record()

    @pytest.mark.parametrize("value", [None, math.nan, math.inf])
    def test_in_a_notebook_what_is_no_number_is_a_dash(self, value: float | None) -> None:
        score = {"metric": "r", "average": value, "domains": {"a": value, "b": 0.25}}
        shown = record(history=({"step": 2, "scores": {"test": score}},))._repr_html_()
        for name, cell in (("all", "–"), ("a", "–"), ("b", "0.25")):
            assert f"<td>test</td><td>{name}</td><td>r</td><td>{cell}</td>" in shown

    def test_measures(self) -> None:
        score = {
            "metric": "accuracy",
            "average": 0.75,
            "domains": {"D3": 0.75},
            "metrics": {"AUC": 0.5, "r": None},
        }
        found = record(history=({"step": 2, "scores": {"test": score}},))
        assert found.measure("test", "AUC") == 0.5
        assert found.measure("test", "accuracy") == 0.75
        assert found.measure("test", "r") is None
        assert record().measure("test", "accuracy", last=True) == 0.75
        assert record().measure("test", "accuracy") == 0.9
        assert record(history=()).measure("test", "AUC") is None
        with pytest.raises(InputError, match=r"measure 'auc'.*Known: AUC, accuracy, r"):
            found.measure("test", "auc")
        with pytest.raises(InputError, match="unknown split 'validation'"):
            found.measure("validation", "AUC")

    def test_scores_and_curves(self) -> None:
        assert (record().score("test"), record().score("test", last=True)) == (0.9, 0.75)
        assert record().curve("test") == ([4, 8], [0.9, 0.75])
        assert np.isnan(record(history=(), selected=-1, status="diverged").score("test"))
        with pytest.raises(InputError, match=r"split 'tst'\. Did you mean 'test'"):
            record().score("tst")


class TestNothingLeft:
    """What a run leaves behind that could not begin."""

    @pytest.mark.parametrize(
        "wrong",
        [
            ["image-folder", "--data", "folder=nowhere"],
            ["linear", "--data", "tset=3"],
            ["linear", "--model", "lineer"],
            ["linear", "--model-set", "width=x"],
        ],
    )
    def test_nothing_is_left(
        self, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("SHOAL_DATA", raising=False)
        for more in ([], ["--out", str(tmp_path / "runs" / "mine")]):
            assert main(["train", "erm", *wrong, "--steps", "2", "--device", "cpu", *more]) == 2
            assert list((tmp_path / "runs").glob("*")) == []
        assert len(capsys.readouterr().err.strip().splitlines()) <= 4

    def test_what_was_there_stays(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="option of dataset"):
            run(replace(TINY, data_options={"tset": 3}), "cpu", folder=tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"

    def test_a_run_that_began_stays(self, tmp_path: Path) -> None:
        """Also where it cannot go on."""
        run(TINY, "cpu", folder=tmp_path)
        with pytest.raises(InputError, match="another run"):
            run(replace(TINY, data_options={"tset": 3}), "cpu", folder=tmp_path)
        assert (tmp_path / "record.json").exists()


class TestStore:
    def test_finds_what_was_saved(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "deep" / "runs")
        assert store.all() == []
        assert store.missing(CONFIGS) == CONFIGS
        assert store.find(TINY) is None
        store.save(record())
        assert store.find(TINY) == record()
        assert store.missing(CONFIGS) == CONFIGS[1:]
        assert store.all() == [record()]

    @pytest.mark.parametrize("fails", ["fdopen", "fsync", "replace"])
    def test_a_failure_leaves_the_old_record(
        self, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Store(tmp_path)
        store.save(record())

        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        def open_nearly_full(*given: Any, **more: Any) -> Any:
            file = opened(*given, **more)
            write = file.write
            file.write = lambda text: full(write(text[:100]), file.flush())
            return file

        opened = os.fdopen
        failures = {"fdopen": open_nearly_full, "fsync": full, "replace": interrupt}
        monkeypatch.setattr(os, fails, failures[fails])
        with pytest.raises((OSError, KeyboardInterrupt)):
            store.save(record(seconds=99.0))
        monkeypatch.undo()
        assert [p.name for p in tmp_path.iterdir()] == [f"{TINY.identity}.json"]
        assert store.find(TINY) == record()

    def test_content_that_cannot_be_written(self, tmp_path: Path) -> None:
        write_atomically(tmp_path / "a.txt", b"old")
        with pytest.raises(TypeError):
            write_atomically(tmp_path / "a.txt", "not bytes")  # type: ignore[arg-type]
        assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "{}", '"x"', '{"config": {}, "history": []}', '{"config": [], "history": []}']
    )
    def test_a_damaged_file_is_named(self, text: str, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.path(TINY).write_text(text)
        for look in (lambda: store.find(TINY), store.all):
            with pytest.raises(InputError, match=rf"{TINY.identity}\.json' is not a run record"):
                look()

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("")
        with pytest.raises(InputError, match="runs' is a file"):
            Store(tmp_path / "runs")


@pytest.mark.slow
def test_news_that_nobody_reads_do_not_hold_up_the_workers(tmp_path: Path) -> None:
    """Far more of it than a pipe holds."""
    many = [replace(TINY, seed=s, steps=600, eval_every=1) for s in (0, 1)]
    began = time.monotonic()
    records = run_all(many, Store(tmp_path), jobs=2)
    assert len(records) == 2
    assert time.monotonic() - began < 120


class TestRun:
    def test_rotated_digits(self) -> None:
        config = RunConfig(
            "rotated-digits",
            "fish",
            steps=4,
            model_options={"width": 8},
            batch_size=4,
            domains_per_step=2,
            warm_start=2,
            eval_every=2,
            eval_limit=20,
        )
        found = run(config, device="cpu")
        assert found.status == "finished"
        assert [m["step"] for m in found.history] == [2, 4]
        assert [m["passes"] for m in found.history] == [4, 8]
        assert [m["step"] for m in found.warm_up] == [2]
        assert set(found.history[0]["scores"]) == {"train", "validation", "test"}
        assert set(found.history[0]["scores"]["test"]["domains"]) == {"75°"}
        assert found.rule == "best on validation"
        averages = [m["scores"]["validation"]["average"] for m in found.history]
        assert averages[found.selected] == max(averages)
        assert result(run(config, device="cpu")) == result(found)
        assert RunRecord.from_dict(json.loads(json.dumps(found.to_dict()))) == found
        assert {"shoal", "torch", "python", "device"} <= set(found.environment)

    def test_divergence_is_a_result(self, tmp_path: Path) -> None:
        wild = replace(TINY, optimizer_options={"lr": 1e38, "momentum": 10.0}, steps=40)
        (found,) = run_all([wild], Store(tmp_path), device="cpu")
        assert found.status == "diverged"
        assert re.search(
            "the (loss|gradient) became (nan|inf) at step .*, which was not applied", found.error
        )
        assert Store(tmp_path).find(wild) == found

    def test_what_is_stored_is_not_run_again(self, tmp_path: Path) -> None:
        store, finished = Store(tmp_path), list[RunRecord]()
        stored = record()
        store.save(stored)
        named = [replace(TINY, label="first"), *CONFIGS[1:]]
        found = run_all(named, store, device="cpu", jobs=1, done=finished.append)
        assert [r.config for r in finished] == CONFIGS[1:]
        assert found[0] == replace(stored, config=named[0])  # the stored one, under today's label
        assert [r.config.label for r in found] == ["first", "Fish, ours", ""]
        finished.clear()
        assert [result(r) for r in run_all(named, store, done=finished.append)] == [result(r) for r in found]
        assert finished == []

    def test_two_processes_give_what_one_gives(self, tmp_path: Path) -> None:
        told: list[tuple[str, int]] = []
        one, two = (
            run_all(
                CONFIGS,
                Store(tmp_path / str(n)),
                device="cpu",
                jobs=n,
                tell=lambda config, step, note: told.append((config.identity, step)),
            )
            for n in (1, 2)
        )
        assert [result(r) for r in one] == [result(r) for r in two]
        assert one[0].history != one[1].history
        assert {c.identity for c in CONFIGS} == {i for i, _ in told}

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_an_interrupt_keeps_what_has_finished(self, jobs: int, tmp_path: Path) -> None:
        def interrupt(_: RunRecord) -> None:
            raise KeyboardInterrupt

        store = Store(tmp_path)
        threads = os.environ.get("OMP_NUM_THREADS")
        with pytest.raises(KeyboardInterrupt):
            run_all(CONFIGS, store, device="cpu", jobs=jobs, done=interrupt)
        assert os.environ.get("OMP_NUM_THREADS") == threads
        kept = store.all()
        assert len(kept) == 1
        assert kept[0].status == "finished"
        rest: list[RunRecord] = []
        assert len(run_all(CONFIGS, store, device="cpu", jobs=1, done=rest.append)) == 3
        assert {r.config.identity for r in rest} == {c.identity for c in CONFIGS} - {kept[0].config.identity}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dataset": "lineer"}, "dataset 'lineer'. Did you mean 'linear'"),
            ({"algorithm": "fsh"}, "algorithm 'fsh'. Did you mean 'fish'"),
            ({"algorithm": "fish", "settings": {"meta_rl": 1}}, "'meta_rl'. Did you mean 'meta_lr'"),
        ],
    )
    def test_a_wrong_name_is_found_before_the_first_run(
        self, changes: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(InputError, match=message):
            run_all([TINY, replace(TINY, **changes)], Store(tmp_path), device="cpu", jobs=1)
        assert list(tmp_path.iterdir()) == []


class TestFolder:
    """A run in a folder of its own."""

    def test_what_is_there_is_not_run_again(self, tmp_path: Path) -> None:
        found = run(TINY, "cpu", folder=tmp_path)
        kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        again = run(replace(TINY, label="the same"), "cpu", folder=tmp_path, how={"keep": 5})
        assert again == found
        assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == kept

    def test_folder_or_not_the_result_is_the_same(self, tmp_path: Path) -> None:
        assert result(run(TINY, "cpu", folder=tmp_path)) == result(run(TINY, "cpu"))

    def test_another_run_is_refused(self, tmp_path: Path) -> None:
        run(TINY, "cpu", folder=tmp_path)
        with pytest.raises(
            InputError, match=r"contains another run \(steps 4, not 8\); choose another folder"
        ):
            run(replace(TINY, steps=8), "cpu", folder=tmp_path)

    def test_a_diverged_run_keeps_its_record_and_no_model(self, tmp_path: Path) -> None:
        wild = replace(TINY, optimizer_options={"lr": 1e38, "momentum": 10.0}, steps=40)
        found = run(wild, "cpu", folder=tmp_path)
        assert found.status == "diverged"
        assert run(wild, "cpu", folder=tmp_path) == found
        assert not (tmp_path / "model.safetensors").exists()

    def test_seeds_of_another_run_are_not_taken_for_these(self, tmp_path: Path) -> None:
        store = Store(tmp_path, weights=True)
        run_all([TINY, replace(TINY, seed=1)], store, device="cpu", jobs=1)
        with pytest.raises(InputError, match=r"seed-0' contains another run \(steps 4, not 8\)"):
            run_all([replace(TINY, steps=8)], store, device="cpu", jobs=1)


class TestCdSprites:
    methods = (cdsprites.ERM, cdsprites.FISH, cdsprites.REGROUPED, cdsprites.REPTILE, cdsprites.IDGM)

    def test_every_method_gets_the_same_deal(self) -> None:
        found = cdsprites.configs(self.methods, [5, 10], [0, 1], passes=4000, size=32)
        assert len(found) == len(self.methods) * 4
        assert {c.steps * (c.domains_per_step or 0) for c in found} == {4000}
        same = {(c.optimizer, str(c.optimizer_options), c.batch_size, str(c.model_options)) for c in found}
        assert len(same) == 1
        assert all(c.steps // (c.eval_every or 1) == cdsprites.POINTS for c in found)
        assert all(
            c.domains_per_step == (1 if c.algorithm == "erm" else c.data_options["domains"]) for c in found
        )
        assert all(c.data_options["seed"] == c.seed for c in found)
        assert len({c.identity for c in found}) == len(found)
        assert [c.draw for c in found if c.label == "Fish, random grouping"] == ["regrouped"] * 4

    @pytest.mark.parametrize("passes", [4010, 100, 199])
    def test_passes_must_be_divisible(self, passes: int) -> None:
        with pytest.raises(InputError, match=f"passes={passes} must be a multiple of 200 for N=10"):
            cdsprites.configs(self.methods, [10], [0], passes=passes)

    @pytest.mark.parametrize("passes", [None, 2400])
    def test_in_figure_and_demo_too(self, passes: int | None) -> None:
        """Within a part of the figure and an N; how many passes that is may be tuned."""
        parts = cdsprites.figure([10, 20], [0], passes=passes)
        parts["demo"] = cdsprites.demo([0])
        assert {c.optimizer for c in parts["plain SGD"]} == {"sgd"}
        assert {c.data_options["palette"] for c in parts["random palette"]} == {"random"}
        for name, part in parts.items():
            if name in ("IDGM, equal updates", "IDGM, N = 10"):  # which test_sprites_figure.py checks
                continue
            given: dict[int, set[int]] = {}
            for c in part:
                given.setdefault(c.data_options["domains"], set()).add(c.steps * (c.domains_per_step or 0))
            assert all(len(different) == 1 for different in given.values())
            if passes and part is not parts["demo"]:
                assert set.union(*given.values()) == {passes}
        for part in ("Adam", "plain SGD", "random palette", "demo"):
            assert {"ERM", "Fish", "Fish, random grouping"} <= {c.label for c in parts[part]}


ROWS = {row.label: row for row in linear.ROWS}


def table(extra: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A domain by hand: x, y, share; its own feature is number ``extra``."""
    own = np.zeros(4)
    own[[0, extra]] = 1
    x = np.array([np.zeros(4), own, [1, 0, 0, 0], [1, 0, 0, 0]])
    return x, np.array([0.0, 1, 1, 0]), np.array([0.5, 0.4, 0.03, 0.07])


def naive(step: Callable[[np.ndarray], np.ndarray], steps: int) -> np.ndarray:
    w = np.zeros(5)
    for _ in range(steps):
        w = step(w)
    return w


def slope(w: np.ndarray, domain: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    x, y, share = domain
    wrong = share * (1 / (1 + np.exp(-(x @ w[:4] + w[4]))) - y)
    return np.append(wrong @ x, wrong.sum())


class TestLinear:
    def test_erm_against_gradient_descent_by_hand(self) -> None:
        found = linear.follow(ROWS["ERM"], 0.0, 200)
        for steps in (10, 200):
            by_hand = naive(lambda w: w - (slope(w, table(1)) + slope(w, table(2))) / 2, steps)
            assert found.weights[found.steps.index(steps)] == pytest.approx(by_hand, abs=2e-6)

    def test_random_grouping_is_fish_on_the_mixture_by_hand(self) -> None:
        def walk(w: np.ndarray) -> np.ndarray:
            there = w
            for _ in range(2):
                there = there - 10 * ((slope(there, table(1)) + slope(there, table(2))) / 2 + 0.008 * there)
            return w + 0.05 * (there - w)

        found = linear.follow(ROWS["Fish, random grouping"], 0.008, 50)
        assert found.weights[-1] == pytest.approx(naive(walk, 50), abs=2e-6)

    def test_erm_passes_the_invariant_solution_and_leaves_it(self) -> None:
        found = linear.follow(ROWS["ERM"], 0.0)
        assert found.at(linear.STEPS) == pytest.approx((0.97, 0.57))
        passed = list(zip(found.train, found.test, strict=True))
        assert any(p == pytest.approx((0.93, 0.93)) for p in passed)
        left = found.leaves_invariance
        assert left is not None
        assert found.at(left - 2)[1] > 0.9 > found.at(left)[1]
        assert found.steps[-1] == linear.STEPS

    def test_fish_stays_where_its_control_leaves(self) -> None:
        fish, control = (linear.follow(ROWS[r], 0.008) for r in ("Fish", "Fish, random grouping"))
        assert fish.at(linear.STEPS) == pytest.approx((0.93, 0.93))
        assert control.at(linear.STEPS) == pytest.approx((0.97, 0.57))
        assert fish.leaves_invariance is None
        assert control.leaves_invariance is not None

    def test_exact_domains_are_the_papers(self) -> None:
        for number, (x, y) in enumerate(linear.exact_domains(), 1):
            found = {(tuple(a.tolist()), float(b[0])): float(b[1]) for a, b in zip(x, y, strict=True)}
            by_hand = {(tuple(a), b): c for a, b, c in zip(*table(number), strict=True)}
            assert found == pytest.approx(by_hand)

    def test_printed_weights(self) -> None:
        """The paper's table, recomputed: its ERM row gives 93/93, its Fish row sits on the boundary."""
        found = linear.printed_accuracies()
        assert found["ERM"] == pytest.approx((0.93, 0.93))
        assert found["IDGM and Fish"] == pytest.approx((0.97, 0.57))
