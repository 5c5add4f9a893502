"""Runs as data: identities, records, stores, and the experiments that need no download."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig, read_config
from shoal.experiments.execute import execute, make_executor
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.experiments.store import Store
from shoal.files import dump_yaml
from shoal.paper import cdsprites, linear

TINY = RunConfig("linear", "erm", 4, optimizer="sgd", lr=0.5, eval_every=2)
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


WRONG: list[dict[str, Any]] = [
    {"status": None},
    {"seconds": "1"},
    {"environment": None},
    {"notes": []},
    {"selected": 2},
    {"agreement": [{"step": None}]},
    {"agreement": [{"step": 1, "domains": ["a"], "matrix": [["1"]]}]},
    {"history": ["x"]},
    {"history": [{"step": "2", "scores": {}}]},
    {"history": [{"step": 2, "scores": {"test": None}}]},
    {"history": [{"step": 2, "scores": {"test": {"metric": "r", "average": "0.5", "domains": {}}}}]},
    {"history": [{"step": 2, "scores": {"test": {"metric": "r", "average": 0.5, "domains": {"a": "1"}}}}]},
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
    def test_label_and_order_are_no_part_of_the_identity(self) -> None:
        named = replace(TINY, label="Row 1")
        assert named.identity == TINY.identity
        assert (named.name, TINY.name) == ("Row 1", "erm")
        config = replace(TINY, data_options={"domains": 10, "size": 32})
        assert config.identity == replace(config, data_options={"size": 32, "domains": 10}).identity

    def test_other_fields_are(self) -> None:
        changes: dict[str, Any] = {
            "dataset": "cdsprites",
            "algorithm": "fish",
            "steps": 5,
            "data_options": {"per_domain": 200},
            "settings": {"a": 1},
            "model_options": {"width": 8},
            "optimizer": "adam",
            "optimizer_options": {"momentum": 0.9},
            "lr": 0.25,
            "seed": 7,
            "average": "sma:2",
            "holdout": 0.2,
            "protocol": {"held_out": ["a"], "trial": 0},
        }
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
        (tmp_path / "config.yaml").write_text(dump_yaml({"run": config.to_dict()}))
        assert read_config(tmp_path) == config
        assert read_config(tmp_path).identity == config.identity

    def test_from_dict(self) -> None:
        assert RunConfig.from_dict(json.loads(json.dumps(CONFIGS[1].to_dict()))) == CONFIGS[1]
        with pytest.raises(InputError, match=r"'stepz'\. Did you mean 'steps'"):
            RunConfig.from_dict({"dataset": "linear", "algorithm": "erm", "stepz": 4})

    @pytest.mark.parametrize(
        "changes",
        [
            {"optimizer": "adm"},
            {"schedule": "cosin"},
            {"schedule": "step:2:5"},
            {"schedule": "step:0.5:0"},
            {"seed": -1},
            {"seed": 0.5},
        ],
        ids=str,
    )
    def test_wrong_values(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=str(next(iter(changes)))):
            replace(TINY, **changes)


class TestRecord:
    def test_round_trip_through_json(self) -> None:
        one = record(CONFIGS[1], warm_up=({"step": 1, "passes": 1, "loss": 2.0, "scores": {}},), error="?")
        assert RunRecord.from_dict(json.loads(json.dumps(one.to_dict()))) == one

    @pytest.mark.parametrize("wrong", WRONG)
    def test_content_of_other_types_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError, KeyError)):
            RunRecord.from_dict({**record().to_dict(), **wrong})

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
        ("data", "options"),
        [
            ("image-folder", {"data_options": {"folder": "nowhere"}}),
            ("linear", {"data_options": {"tset": 3}}),
            ("linear", {"model": "lineer"}),
            ("linear", {"model_options": {"width": "x"}}),
        ],
    )
    @pytest.mark.parametrize("more", [{}, {"out": "runs/mine"}, {"seeds": 2, "jobs": 1}], ids=str)
    def test_nothing_is_left(
        self, data: str, options: Any, more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("SHOAL_DATA", raising=False)
        with pytest.raises(InputError):
            shoal.train("erm", data, steps=2, device="cpu", progress=False, **options, **more)
        assert list((tmp_path / "runs").glob("*")) == []

    def test_what_was_there_stays(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="option of dataset"):
            run(replace(TINY, data_options={"tset": 3}), "cpu", folder=tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"


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

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "{}", '"x"', '{"config": {}, "history": []}', '{"config": [], "history": []}']
    )
    def test_a_damaged_file_is_named(self, text: str, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.path(TINY).write_text(text)
        for look in (lambda: store.find(TINY), store.all):
            with pytest.raises(InputError, match=rf"{TINY.identity}\.json' is not a run record"):
                look()


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
        wild = replace(TINY, lr=1e6, optimizer_options={"momentum": 10.0}, steps=40)
        (found,) = run_all([wild], Store(tmp_path), device="cpu")
        assert found.status == "diverged"
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


class TestFolder:
    """A run in a folder of its own."""

    def test_what_is_there_is_not_run_again(self, tmp_path: Path) -> None:
        found = run(TINY, "cpu", folder=tmp_path)
        kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        again = run(replace(TINY, label="the same"), "cpu", folder=tmp_path, how={"workers": 0})
        assert again == found
        assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == kept

    def test_folder_or_not_the_result_is_the_same(self, tmp_path: Path) -> None:
        assert result(run(TINY, "cpu", folder=tmp_path)) == result(run(TINY, "cpu"))

    def test_a_diverged_run_keeps_its_record_and_no_model(self, tmp_path: Path) -> None:
        wild = replace(TINY, lr=1e6, optimizer_options={"momentum": 10.0}, steps=40)
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
        assert len({c.identity for c in found}) == len(self.methods) * 4
        assert {c.steps * (c.domains_per_step or 0) for c in found} == {4000}
        same = {(c.optimizer, c.lr, str(c.optimizer_options), c.batch_size, c.model) for c in found}
        assert len(same) == 1
        assert all(
            c.domains_per_step == (1 if c.algorithm == "erm" else c.data_options["domains"]) for c in found
        )
        assert all(c.data_options["seed"] == c.seed for c in found)


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
        found = linear.follow("ERM", [0.0], 200)
        for steps in (10, 200):
            by_hand = naive(lambda w: w - (slope(w, table(1)) + slope(w, table(2))) / 2, steps)
            assert found[steps, 0] == pytest.approx(by_hand, abs=1e-9)

    def test_random_grouping_is_fish_on_the_mixture_by_hand(self) -> None:
        def walk(w: np.ndarray) -> np.ndarray:
            there = w
            for _ in range(2):
                there = there - 10 * ((slope(there, table(1)) + slope(there, table(2))) / 2 + 0.008 * there)
            return w + 0.05 * (there - w)

        found = linear.follow("Fish, random grouping", [0.008], 50)
        assert found[-1, 0] == pytest.approx(naive(walk, 50), abs=1e-9)

    def test_fish_stays_invariant_where_its_control_and_erm_leave(self) -> None:
        ends = {name: linear.follow(name, [0.008])[-1] for name in ("Fish", "Fish, random grouping")}
        ends["ERM"] = linear.follow("ERM", [0.0])[-1]
        tested = {name: float(linear.TEST.accuracy(end)[0]) for name, end in ends.items()}
        assert tested == pytest.approx({"Fish": 0.93, "Fish, random grouping": 0.57, "ERM": 0.57})
