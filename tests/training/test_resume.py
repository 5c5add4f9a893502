"""A training that is stopped anywhere and resumed ends as one that never was, bit for bit."""

import contextlib
import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

import shoal
from algorithms.every_algorithm import network, toy
from shoal.algorithms import algorithm_class, registry
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments.status import RunStatus
from shoal.models import FeatureModel
from shoal.training import capture, checkpoint, journal, loop, monitoring, selection, setup
from shoal.training.checkpoint import Checkpoints
from shoal.training.evaluate import Evaluator
from shoal.training.folder import RunFolder
from shoal.training.stopping import Interrupted

CLOCKS = {"seconds", "examples_per_second", "environment", "command", "git"}
NOT_RESULTS = {"progress", "workers", "checkpoint_every", "deterministic", "keep"}
PARTS = toy()


@pytest.fixture(autouse=True)
def _no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of these tests' time would be spent waiting for the disk, which no kill depends on."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C as usual: a shell's background job, which tests may be, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Noisy(Dataset):
    """A plain dataset with a random transform."""

    def __init__(self, x: Tensor, y: Tensor, seconds: float = 0.0) -> None:
        self.x, self.y, self.seconds = x, y, seconds

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.seconds:  # to sleep for no time is to wait for the next turn
            time.sleep(self.seconds)
        noise = torch.rand(4) + torch.as_tensor(np.random.rand(4)).float() + random.random()
        return self.x[i] + 0.1 * noise, int(self.y[i])


def plain(seconds: float = 0.0) -> dict[str, Dataset]:
    return {name: Noisy(x, y, seconds) for name, (x, y) in PARTS.items()}


def fit(folder: Path | None, algorithm: str = "fish", **options: Any) -> shoal.Fit:
    """A training of BatchNorm and dropout; evaluations, lines of the log and checkpoints never coincide."""
    x, y = toy(20)["domain 1"]
    given: dict[str, Any] = {
        **{"model": network(), "train": PARTS, "validation": {"unseen": (x + 1, y)}, "device": "cpu"},
        **{"steps": 12, "batch_size": 8, "lr": 0.01, "eval_every": 5, "log_every": 4, "checkpoint_every": 3},
        "progress": False,
    }
    if "optimizer" in options:
        del given["lr"]  # which is the optimizer's own then
    return shoal.fit(algorithm, folder=folder, **given | options)


X, Y = PARTS["domain 1"]
TURNED = {"turned round": (X, 1 - Y)}
"""Validation that gets worse by training."""


class Crash(Exception):
    """As a kill: what is not on the disk by then is lost."""


def crash(number: int) -> None:
    raise Crash


def send(number: int) -> Callable[[int], None]:
    return lambda _: os.kill(os.getpid(), number)


def after(calls: int, act: Callable[[int], None]) -> Callable[[int, str], None]:
    """A progress function that acts when it is called for the ``calls``-th time."""
    count = itertools.count(1)

    def tell(step: int, note: str) -> None:
        if next(count) == calls:
            act(step)

    return tell


def stopped(folder: Path, calls: int, act: Callable[[int], None] = crash, **options: Any) -> None:
    """Trains for so many steps only; the next call looks up from the work as often as it likes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHUNK", 1)
        with pytest.raises((Crash, Interrupted)):
            fit(folder, progress=after(calls, act), **options)


def timeless(nest: Any) -> Any:
    """Without clocks; numbers as text, so that NaN is equal to itself."""
    if isinstance(nest, dict):
        return {k: timeless(v) for k, v in nest.items() if k not in CLOCKS | NOT_RESULTS}
    if isinstance(nest, list):
        return [timeless(v) for v in nest]
    return repr(nest)


def lines(folder: Path) -> list[Any]:
    return [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def outcome(folder: Path) -> tuple[Any, list[Any], bytes]:
    """All that a run leaves, without clocks."""
    record = json.loads((folder / "record.json").read_text())
    return timeless(record), lines(folder), (folder / "model.safetensors").read_bytes()


def assert_same(a: shoal.Fit, b: shoal.Fit) -> None:
    torch.testing.assert_close(a.model.state_dict(), b.model.state_dict(), rtol=0, atol=0, equal_nan=True)
    for name in ("history", "warm_up", "selected", "rule"):
        assert repr(getattr(a, name)) == repr(getattr(b, name)), name
    assert not a.model.training


def check(folder: Path, stops: Iterator[int] | list[int], act: Callable[[int], None], **options: Any) -> None:
    """For each of ``stops``: a training that stops there and is resumed is as one without a stop."""
    whole = fit(folder / "whole", **options)
    expected = outcome(folder / "whole")
    for calls in stops:
        there = folder / f"stopped-{calls}"
        stopped(there, calls, act, **options)
        assert not (there / "record.json").exists()
        assert_same(fit(there, resume=True, **options), whole)
        assert outcome(there) == expected, f"stopped at {calls}"


BY_CRASH = pytest.mark.parametrize("act", [crash, send(signal.SIGTERM)], ids=["crash", "signal"])


# One of each kind, for what need not be tried with all.
KINDS = ["erm", "fish", "idgm", "smoothfish", "reptile", "coral", "dann", "groupdro", "fishr", "mixup", "irm"]


@pytest.mark.parametrize("name", registry.names())
class TestEveryAlgorithm:
    def test_crashed(self, tmp_path: Path, name: str) -> None:
        check(tmp_path, [5], crash, algorithm=name, steps=8)


@pytest.mark.parametrize("name", KINDS)
class TestEveryKind:
    def test_with_all_else(self, tmp_path: Path, name: str) -> None:
        check(
            tmp_path,
            [7],
            send(signal.SIGTERM),
            algorithm=name,
            train=plain(),
            average="sma",
            average_start=2,
            accumulate=2,
            schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
            warm_start=0.2,
            steps=8,
        )

    def test_again_and_again(self, tmp_path: Path, name: str) -> None:
        whole = fit(tmp_path / "whole", name)
        there = tmp_path / "stopped"
        for calls in (1, 4, 1, 3):
            stopped(there, calls, send(signal.SIGTERM), algorithm=name, resume=True)
        assert Checkpoints(there / "checkpoints").latest() == 9
        assert_same(fit(there, name, resume=True), whole)
        assert outcome(there) == outcome(tmp_path / "whole")

    def test_with_a_warm_start(self, tmp_path: Path, name: str) -> None:
        """In the warm phase, at its last step, at the first of the main phase, and later."""
        check(tmp_path, [1, 2, 3, 5], send(signal.SIGTERM), algorithm=name, warm_start=2, steps=4)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_in_half_precision(self, tmp_path: Path, name: str, precision: str) -> None:
        if precision == "fp16" and algorithm_class(name).second_order:
            pytest.skip("has second derivatives")
        check(tmp_path, [4], send(signal.SIGTERM), algorithm=name, precision=precision, clip=0.5, steps=7)


ADVERSARIAL = [n for n in registry.names() if algorithm_class(n).trains_discriminator]


@pytest.mark.parametrize("name", ADVERSARIAL)
class TestHelpers:
    """Optimizers that an algorithm has of its own."""

    def test_moments_are_in_the_checkpoint(self, tmp_path: Path, name: str) -> None:
        stopped(tmp_path, 7, send(signal.SIGTERM), algorithm=name)
        loaded = Checkpoints(tmp_path / "checkpoints").load()
        assert loaded is not None
        state = loaded.state["training"]["auxiliary"]["discriminator"]["state"]
        own = [k for k in loaded.state["training"]["algorithm"] if k.startswith("discriminator.")]
        assert len(state) == len(own) > 0
        assert {int(s["step"]) for s in state.values()} == {7}
        assert all(s["exp_avg_sq"].any() for s in state.values())

    def test_they_are_restored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """To forget them would be seen: the weights after them differ."""
        options: dict[str, Any] = {"algorithm": name, "select": "last", "settings": {"width": 16}}
        whole = fit(None, **options)
        for forgetful in (False, True):
            there = tmp_path / str(forgetful)
            stopped(there, 7, send(signal.SIGTERM), **options)
            with monkeypatch.context() as patch:
                if forgetful:
                    patch.setattr(torch.optim.Adam, "load_state_dict", forgets(1e-3))
                resumed = fit(there, resume=True, **options)
            if forgetful:
                with pytest.raises(AssertionError):
                    assert_same(resumed, whole)
            else:
                assert_same(resumed, whole)
                ours, theirs = resumed.algorithm.state_dict(), whole.algorithm.state_dict()
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def test_a_checkpoint_without_them_is_not_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        stopped(tmp_path, 7, send(signal.SIGTERM), algorithm=name)
        load = Checkpoints.load

        def without(self: Checkpoints) -> Any:
            found = load(self)
            if found is not None:
                del found.state["training"]["auxiliary"]
            return found

        monkeypatch.setattr(Checkpoints, "load", without)
        with pytest.raises(InputError, match="does not contain the optimizer of the discriminator"):
            fit(tmp_path, name, resume=True)


def forgets(lr: float) -> Callable[[Any, Any], None]:
    """Loads nothing into optimizers of this rate."""
    load = torch.optim.Adam.load_state_dict

    def maybe(self: torch.optim.Adam, state: Any) -> None:
        if self.param_groups[0]["lr"] != lr:
            load(self, state)

    return maybe


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": others, "weight_decay": 0.3}], 0.01)


def sometimes_nan(output: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output, y)
    return torch.where(y[0] + y[1] == 0, math.nan, loss)


def large_loss(output: Tensor, y: Tensor) -> Tensor:
    """Overflows in fp16 until the loss scale has come down."""
    return 300 * nn.functional.cross_entropy(output, y)


SCHEDULES: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=13),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [3, 7], 0.3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "two in a row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "sma": {"average": "sma", "average_start": 3},
    "sma, last": {"average": "sma", "average_start": 3, "select": "last"},
    "swad": {"average": "swad", "eval_every": 1, "checkpoint_every": 4},
    "swad, plain dataset": {"average": "swad", "eval_every": 2, "train": plain()},
    "swad-paper": {"average": "swad-paper", "eval_every": 1, "checkpoint_every": 4, "average_ratio": 1.1},
    "last": {"select": "last"},
    "no validation": {"validation": None},
    "accumulate, clip": {"accumulate": 3, "clip": 0.1},
    "dense checkpoints": {"checkpoint_every": 1, "keep": 1},
    "checkpoints at evaluations": {"checkpoint_every": None},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True)},
    "adagrad": {"optimizer": lambda p: torch.optim.Adagrad(p, 0.05)},
    "two groups": {"optimizer": two_groups},
    "two groups, smoothfish": {"optimizer": two_groups, "algorithm": "smoothfish"},
    "inner state kept": {"settings": {"inner_state": "carry"}},
    "inner state reset": {"settings": {"inner_state": "reset"}},
    "inner state reset every 3 steps": {"settings": {"inner_state": 3}},
    "warm start, its best": {"warm_start": 7, "warm_select": "best"},
    "few domains a step": {"domains_per_step": 2},
    "regrouped": {"draw": "regrouped"},
    "skipped steps": {"on_nan": "skip", "loss": sometimes_nan},
    "loss scale": {"precision": "fp16", "loss": large_loss, "steps": 16},
    "warm start, share": {"warm_start": 0.3},
    "deterministic": {"deterministic": True},
    **{f"schedule: {name}": {"schedule": make} for name, make in SCHEDULES.items()},
}


@pytest.mark.filterwarnings("ignore:average='swad|swad found no start|swad-paper found no start")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_every_option(tmp_path: Path, options: dict[str, Any]) -> None:
    check(tmp_path, [2, 7] if "average" in options else [7], send(signal.SIGTERM), **options)


IN_EVALUATION: dict[str, tuple[int, dict[str, Any]]] = {
    "first": (2, {}),
    "second, at its first batch": (55, {}),
    "last": (120, {}),
    "with log and checkpoint": (60, {"eval_every": 4, "checkpoint_every": 4}),
    "plain dataset": (10, {"train": plain()}),
    "of the warm start": (2, {"warm_start": 3, "steps": 7}),
    "after a warm start": (60, {"warm_start": 3, "steps": 7}),
    "of averaged weights": (60, {"average": "sma", "average_start": 2}),
    "at the end, of averaged weights": (-3, {"average": "swad", "eval_every": 1}),
}


class TestSignalInEvaluation:
    """It is abandoned after the batch, and repeated by the training that is resumed."""

    @pytest.mark.filterwarnings("ignore:swad found no start")
    @pytest.mark.parametrize(("batch", "options"), IN_EVALUATION.values(), ids=IN_EVALUATION.keys())
    def test_is_honoured(self, tmp_path: Path, batch: int, options: dict[str, Any]) -> None:
        options = {"eval_batch": 3, **options}
        with passes() as every:
            whole = fit(tmp_path / "whole", **options)
        at = batch if batch > 0 else len(every) + batch
        with passes(at) as done, pytest.raises(Interrupted, match="which is saved"):
            fit(tmp_path / "stopped", **options)
        assert len(done) == at + 1 < len(every)
        with passes() as after:
            assert_same(fit(tmp_path / "stopped", resume=True, **options), whole)
        assert len(after) == len(every) - at // 55 * 55  # batches of whole evaluations
        assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")

    def test_while_batchnorm_is_refreshed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options: dict[str, Any] = {"average": "sma", "average_start": 2}
        whole = fit(tmp_path / "whole", **options)
        refresh = selection.refresh_batchnorm

        def asked(model: nn.Module, batches: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            refresh(model, batches)

        monkeypatch.setattr(selection, "refresh_batchnorm", asked)
        with pytest.raises(Interrupted):
            fit(tmp_path / "stopped", **options)
        monkeypatch.undo()
        assert_same(fit(tmp_path / "stopped", resume=True, **options), whole)
        assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")

    def test_at_once(self, tmp_path: Path) -> None:
        """An evaluation of ten seconds."""
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        began = time.monotonic()
        with passes(seconds=0.1), pytest.raises(Interrupted):
            fit(tmp_path, steps=1, eval_batch=1)
        assert time.monotonic() - began < 3


@contextlib.contextmanager
def passes(kill: int = -1, seconds: float = 0.0) -> Iterator[list[int]]:
    """The batches that evaluations pass through the model; at one of them a signal comes."""
    output, seen = Evaluator._output, list[int]()

    def watched(self: Evaluator, model: nn.Module, x: Any, count: int) -> Any:
        time.sleep(seconds)
        if len(seen) == kill:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(count)
        return output(self, model, x, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "_output", watched)
        yield seen


class Eager:
    """In place of a CUDA graph, the function itself."""

    def __init__(self, function: Callable[[], Any], *_: Any) -> None:
        self.function = function

    def __call__(self) -> Any:
        return self.function()


@contextlib.contextmanager
def captured(yes: bool = True) -> Iterator[None]:
    """Trainings stride as they do on a CUDA device."""
    with pytest.MonkeyPatch.context() as patch:
        if yes:
            patch.setattr(setup, "why_not", lambda *_: None)
            patch.setattr(capture, "Replay", Eager)
            patch.setattr(capture.GatheredSteps, "_put", lambda self, tensor: tensor)
        yield


class TestStrides:
    """However a training strides, it evaluates at the same steps."""

    options: ClassVar[dict[str, Any]] = {
        **{"steps": 20, "eval_every": 10, "log_every": 20, "checkpoint_every": None, "domains_per_step": 2},
    }

    def model(self) -> FeatureModel:
        """Without dropout, which would be seeded for every step."""
        return FeatureModel(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2))

    def fit(self, folder: Path | None, yes: bool = False, **options: Any) -> shoal.Fit:
        torch.manual_seed(0)
        with captured(yes):
            return fit(folder, model=self.model(), **{**self.options, **options})

    def test_captured_is_as_eager(self) -> None:
        found = self.fit(None, True)
        assert found.captured
        assert [p.step for p in found.history] == [10, 20]
        whole = self.fit(None)
        assert not whole.captured
        assert_same(found, whole)

    @pytest.mark.parametrize(
        "changed",
        [{}, {"log_every": 4}, {"checkpoint_every": 3}, {"log_every": 7, "checkpoint_every": 10}],
        ids=str,
    )
    @pytest.mark.parametrize("first", [False, True], ids=["eager first", "captured first"])
    @pytest.mark.parametrize("stop", [1, 7, 9])
    def test_resumed_in_another_way(
        self, tmp_path: Path, stop: int, first: bool, changed: dict[str, Any]
    ) -> None:
        """Stopped where strides of the other way do not come by."""
        whole = self.fit(None)
        early = {"log_every": 1} if first else {}  # for strides of a single step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "CHUNK", 1)
            with pytest.raises(Interrupted):
                self.fit(tmp_path, first, progress=after(stop, send(signal.SIGTERM)), **early)
        loaded = Checkpoints(tmp_path / "checkpoints").load()
        assert loaded is not None
        assert loaded.step == stop
        assert_same(self.fit(tmp_path, True, resume=True, **changed), whole)

    def test_captured_and_then_eager(self, tmp_path: Path) -> None:
        whole = self.fit(None)
        with pytest.raises(Interrupted):
            self.fit(tmp_path, True, progress=after(1, send(signal.SIGTERM)))
        loaded = Checkpoints(tmp_path / "checkpoints").load()
        assert loaded is not None
        assert loaded.step == 5
        assert_same(self.fit(tmp_path, resume=True), whole)

    def test_how_an_optimizer_computes_is_not_resumed(self, tmp_path: Path) -> None:
        """A checkpoint of a CUDA device has settings that the CPU refuses."""

        def graph(params: Any) -> torch.optim.Optimizer:
            made = torch.optim.Adam(params, 0.01)
            made.register_state_dict_post_hook(
                lambda _, state: (
                    [g.update(capturable=True, fused=True) for g in state["param_groups"]] and None
                )
            )
            return made

        whole = self.fit(None)
        with pytest.raises(Interrupted):
            self.fit(tmp_path, optimizer=graph, progress=after(1, send(signal.SIGTERM)))
        assert_same(self.fit(tmp_path, resume=True), whole)


@pytest.mark.parametrize("average", ["swad", "swad-paper"])
def test_swad_that_has_found_its_start(tmp_path: Path, average: str) -> None:
    """It goes on to its end, which is before the training's."""
    options: dict[str, Any] = {"average": average, "eval_every": 1, "steps": 60, "validation": TURNED}
    run = fit(None, **options)
    assert f"{average} of steps" in run.rule
    assert run.last.step < 60
    check(tmp_path, [2, 5, run.last.step - 2], send(signal.SIGTERM), **options)


def test_skipped_steps_are_remembered(tmp_path: Path) -> None:
    stopped(tmp_path, 7, send(signal.SIGTERM), **CASES["skipped steps"])
    loaded = Checkpoints(tmp_path / "checkpoints").load()
    assert loaded is not None
    skipped = loaded.state["training"]["skipped"]
    assert 0 < len(skipped) < 7
    fit(tmp_path, resume=True, **CASES["skipped steps"])
    assert len(skipped) < json.loads((tmp_path / "record.json").read_text())["skipped"] < 12


@BY_CRASH
def test_plateau(tmp_path: Path, act: Callable[[int], None]) -> None:
    """The best weights of the warm phase are not its last."""
    options: dict[str, Any] = {"warm_start": "plateau", "validation": TURNED, "steps": 4}
    warm = fit(None, **options).warm_up
    assert len(warm) >= 6
    last = warm[-1].step
    check(tmp_path, [1, last - 1, last, last + 1], act, **options)


class TestPatience:
    options: ClassVar[dict[str, Any]] = {"validation": TURNED, "patience": 3, "eval_every": 2, "steps": 60}

    def test_goes_on_counting(self, tmp_path: Path) -> None:
        run = fit(None, **self.options)
        assert run.last.step < 60
        check(tmp_path, [run.last.step - 3, run.last.step - 2], crash, **self.options)

    def test_what_is_finished_is_not_trained_again(self, tmp_path: Path) -> None:
        first = fit(tmp_path, **self.options)
        expected = outcome(tmp_path)
        model, told = network(), []
        passes: list[bool] = []
        model.register_forward_pre_hook(lambda module, _: passes.append(module.training))
        options = {**self.options, "model": model, "progress": lambda *a: told.append(a)}
        again = fit(tmp_path, resume=True, **options)
        assert not told
        assert not any(passes)
        assert_same(again, first)
        assert outcome(tmp_path) == expected


def test_stopped_after_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is trained, the weights and the record are not written."""
    options: dict[str, Any] = {"average": "sma", "select": "last"}
    whole = fit(tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "finish", lambda *_: crash(0))
        with pytest.raises(Crash):
            fit(tmp_path / "stopped", **options)
    assert_same(fit(tmp_path / "stopped", resume=True, **options), whole)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (0, 2), (2, 0)], ids=str)
def test_any_number_of_workers(tmp_path: Path, workers: tuple[int, int]) -> None:
    """Dropout and the transform draw the same numbers, whichever process reads from whichever step on."""
    whole = fit(tmp_path / "whole", train=plain())
    there = tmp_path / "stopped"
    stopped(there, 7, crash, train=plain(), workers=workers[0])
    assert_same(fit(there, resume=True, train=plain(), workers=workers[1]), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
class TestSignals:
    def test_the_step_is_finished_and_saved(self, tmp_path: Path, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        with pytest.raises(Interrupted, match=f"step 5, .*{tmp_path}'?, resume=True") as caught:
            fit(tmp_path, progress=lambda step, _: step == 5 and send(number)(0))
        assert caught.value.signal == number
        assert signal.getsignal(number) == before
        assert Checkpoints(tmp_path / "checkpoints").latest() == 5
        assert RunStatus.of(tmp_path).state == "stopped"

    def test_in_the_middle_of_a_step(self, tmp_path: Path, number: signal.Signals) -> None:
        whole = fit(None)
        calls = itertools.count(1)

        def loss(output: Tensor, y: Tensor) -> Tensor:
            if next(calls) == 20:  # the second of three domains, in the seventh step, after an evaluation
                os.kill(os.getpid(), number)
            return nn.functional.cross_entropy(output, y)

        with pytest.raises(Interrupted, match=r"step \d+, which is saved"):
            fit(tmp_path, loss=loss)
        assert Checkpoints(tmp_path / "checkpoints").latest() in (5, 6, 7)
        assert_same(fit(tmp_path, resume=True), whole)

    def test_a_second_one_acts_at_once(self, tmp_path: Path, number: signal.Signals) -> None:
        class Second(Exception):
            pass

        def hear(number: int, frame: object) -> None:
            raise Second

        def twice(step: int) -> None:
            send(number)(0)
            send(number)(0)
            pytest.fail("went on")

        before = signal.signal(number, hear)
        try:
            with pytest.raises(Second):
                fit(tmp_path, progress=after(3, twice))
        finally:
            signal.signal(number, before)
        assert_same(fit(tmp_path, resume=True), fit(None))

    def test_sent_to_the_workers_too(self, tmp_path: Path, number: signal.Signals) -> None:
        """As Ctrl-C and most cluster managers do: the workers must live to finish the step."""
        options: dict[str, Any] = {"train": plain(), "steps": 4, "eval_splits": ("validation",)}

        def to_all() -> None:
            each = [*(child.pid for child in multiprocessing.active_children()), os.getpid()]
            subprocess.run(["kill", f"-{int(number)}", *map(str, each)], check=True)

        def soon(step: int) -> None:
            threading.Timer(0.15, to_all).start()  # while the next step waits for its examples

        with pytest.raises(Interrupted, match="which is saved"):
            fit(tmp_path, workers=2, progress=after(1, soon), **options | {"train": plain(0.02)})
        assert Checkpoints(tmp_path / "checkpoints").latest() in (1, 2, 3)
        assert_same(fit(tmp_path, resume=True, **options), fit(None, **options))


def test_a_second_ctrl_c_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    def twice(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(tmp_path, progress=after(2, twice))
    assert type(caught.value) is KeyboardInterrupt


def test_without_a_folder_signals_are_not_watched() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(None, progress=after(2, send(signal.SIGINT)))
    assert type(caught.value) is KeyboardInterrupt


# What lies in the folder


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "gone best"])
def test_a_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    options: dict[str, Any] = {"checkpoint_every": 1, "eval_every": 1, "lr": 0.002, "steps": 15}
    whole = fit(tmp_path / "whole", **options)
    scores = [p.scores["validation"].average for p in whole.history]
    improved = [n for n in range(1, 15) if scores[n] > max(scores[:n])]
    there = tmp_path / "stopped"
    stopped(there, improved[-1] + 1, send(signal.SIGTERM), **options)
    older, newest = checkpoints(there)
    content = newest.read_bytes()
    changed = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    if damage == "gone best":  # the newest alone refers to it
        max((there / "checkpoints").glob("best-*")).unlink()
    else:
        newest.write_bytes({"cut": content[:-1], "changed": changed, "empty": b""}[damage])
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged: .*; {older.name} is used instead"):
        run = fit(there, resume=True, **options)
    assert_same(run, whole)
    assert outcome(there) == outcome(tmp_path / "whole")


def test_nothing_but_damaged_checkpoints(tmp_path: Path) -> None:
    stopped(tmp_path, 8)
    for path in checkpoints(tmp_path):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"none of the 2 checkpoints .* can be read"):
        fit(tmp_path, resume=True)


@pytest.mark.parametrize("what", ["step-", "best-", "model.", "record."])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_kill_inside_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, share: float
) -> None:
    """It leaves a part of the file under a temporary name, and whatever was there before."""
    whole = fit(tmp_path / "whole")
    there = tmp_path / "stopped"
    write, count = checkpoint.write_atomically, itertools.count(1)
    final = what in ("model.", "record.")

    def killed(path: Path, content: bytes) -> None:
        if path.name.startswith(what) and (final or next(count) == 2):
            (path.parent / f".{path.name}.abc").write_bytes(content[: int(share * len(content))])
            raise Crash
        write(path, content)

    with monkeypatch.context() as patch:
        for module in (checkpoint, journal):
            patch.setattr(module, "write_atomically", killed)
        with pytest.raises(Crash):
            fit(there)
    assert_same(fit(there, resume=True), whole)
    assert outcome(there) == outcome(tmp_path / "whole")
    if not final:
        assert not [*(there / "checkpoints").glob(".*")]


TAILS = {"whole": b'{"step": 7, "loss": 1}\n{"step": 8}\n', "cut": b'{"phase": "tr', "zeros": b"\0" * 50}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
def test_lines_after_the_checkpoint_are_cut(tmp_path: Path, tail: bytes) -> None:
    fit(tmp_path / "whole")
    there = tmp_path / "stopped"
    stopped(there, 8)
    assert RunStatus.of(there).last["step"] == 8  # the checkpoint is of step 6
    with (there / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    fit(there, resume=True)
    assert outcome(there) == outcome(tmp_path / "whole")


def _flipped(content: bytes) -> bytes:
    return content[:40] + bytes([content[40] ^ 0x80]) + content[41:]


LOSSES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "shortened": lambda content: content[: len(content) // 3],
    "zeros": lambda content: b"\0" * len(content),
    "a flipped bit": _flipped,
    "another run's": lambda content: content.replace(b'"step": ', b'"step": 9'),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES.keys())
def test_a_damaged_log_costs_lines_and_not_the_checkpoint(
    tmp_path: Path, lose: Callable[[bytes], bytes | None]
) -> None:
    """The training ends the same, and the log has every evaluation."""
    whole = fit(tmp_path / "whole")
    there = tmp_path / "damaged"
    stopped(there, 8)
    log = there / "metrics.jsonl"
    content = lose(log.read_bytes())
    log.unlink() if content is None else log.write_bytes(content)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl has lost or changed lines"):
        assert_same(fit(there, resume=True), whole)
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    wanted = [json.loads(text) for text in (tmp_path / "whole" / log.name).read_text().splitlines()]
    measured = [[(x["phase"], x["step"], x["scores"]) for x in y if "scores" in x] for y in (lines, wanted)]
    assert measured[0] == measured[1]


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_log_without_a_checkpoint_begins_anew(tmp_path: Path, log_every: int) -> None:
    fit(tmp_path / "whole", log_every=log_every)
    stopped(tmp_path / "stopped", 2, log_every=log_every)
    assert not checkpoints(tmp_path / "stopped")
    fit(tmp_path / "stopped", resume=True, log_every=log_every)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


# A full disk


class FullDisk:
    """Refuses files of the given kinds, while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
        self.full, self.kinds, self.refused = False, kinds, 0
        self.write = checkpoint.write_atomically
        for module in (checkpoint, journal):
            monkeypatch.setattr(module, "write_atomically", self)

    def __call__(self, path: Path, content: bytes) -> None:
        if self.full and path.name.startswith(self.kinds):
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.write(path, content)


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "whole")
    disk = FullDisk(monkeypatch, "step-", "best-")
    there = tmp_path / "full"

    def watch(step: int, _: str) -> None:
        disk.full = 4 <= step < 10

    with pytest.warns(UserWarning, match="could not be written") as caught:
        fit(there, progress=watch)
    said = [str(w.message) for w in caught]
    assert all(
        "No space left on device); the latest is that of step 3. Training continues." in m for m in said
    )
    assert (len(said), disk.refused) == (1, 2)  # said once
    assert outcome(there) == outcome(tmp_path / "whole")


def test_a_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(tmp_path / "whole")
    disk = FullDisk(monkeypatch, "")
    there = tmp_path / "full"

    def watch(step: int, _: str) -> None:
        disk.full = step >= 4

    with pytest.raises(InputError) as caught, pytest.warns(UserWarning, match="the latest is that of step 3"):
        fit(there, progress=watch)
    assert str(there / "model.safetensors") in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert f"folder={str(there)!r}, resume=True" in str(caught.value)
    assert Checkpoints(there / "checkpoints").load().step == 3  # type: ignore[union-attr]
    assert not (there / "record.json").exists()
    disk.full = False
    assert_same(fit(there, resume=True), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


def test_full_from_the_first_checkpoint_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, "step-")
    disk.full = True
    with pytest.warns(UserWarning, match="there is none yet"):
        with pytest.raises(Interrupted, match="no checkpoint could be written"):
            fit(tmp_path, progress=after(4, send(signal.SIGINT)))
    disk.full = False
    assert_same(fit(tmp_path, resume=True), fit(None))


# Other processes. They are forked from one that has imported everything and trained nothing.


def others() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "shoal.api.fit", "shoal.cli"])
    return context


def train_elsewhere(folder: Path, options: dict[str, Any], began: Any, start: str = "fork") -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method(start, force=True)
    multiprocessing.set_forkserver_preload(["pytest", "torch", "shoal.api.fit", "shoal.cli"])
    fit(folder, resume=True, progress=lambda *_: began.set(), **options)


def train_with_a_limit(folder: Path, said: Any) -> None:
    """No file may grow beyond 8 kB from step 4 on: the system itself refuses, in the middle of a write."""
    torch.set_num_threads(1)

    def limit(step: int, _: str) -> None:
        if step >= 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(folder, model=large(), progress=limit)
            error = ""
        except InputError as refused:
            error = str(refused)
    said.send((error, [str(w.message) for w in caught]))


def large() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        features = nn.Sequential(nn.Linear(4, 700), nn.BatchNorm1d(700), nn.Dropout(0.2))
        return FeatureModel(features, nn.Linear(700, 2))


def test_a_real_limit_on_files(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", model=large())
    there = tmp_path / "limited"
    context = others()
    here, said = context.Pipe()
    process = context.Process(target=train_with_a_limit, args=(there, said))
    process.start()
    error, warned = here.recv() if here.poll(60) else pytest.fail("no answer")
    process.join()
    assert process.exitcode == 0
    assert "model.safetensors could not be written (File too large)" in error
    assert [w for w in warned if "step 6 could not be written" in w and "the latest is that of step 3" in w]
    assert not [*(there / "checkpoints").glob(".*")]
    assert Checkpoints(there / "checkpoints").load().step == 3  # type: ignore[union-attr]
    assert_same(fit(there, resume=True, model=large()), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {
        **{"steps": 150, "checkpoint_every": 2, "eval_every": 40, "warm_start": 20, "average": "sma"},
        **{"train": plain() if workers else PARTS, "keep": 1},
    }
    whole = fit(tmp_path / "whole", **options)
    there = tmp_path / "killed"
    draw, context, reached = random.Random(workers), others(), []
    for _ in range(4 if workers else 5):
        began = context.Event()
        given = (there, {**options, "workers": workers}, began)
        process = context.Process(target=train_elsewhere, args=given)
        process.start()
        while process.is_alive() and not began.wait(0.1):
            pass
        process.join(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        reached.append(Checkpoints(there / "checkpoints").latest() or 0)
    assert reached == sorted(reached)
    assert 0 < reached[1] < 170  # not over at once, nor always back at the beginning
    assert_same(fit(there, resume=True, **options), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


def test_a_process_with_workers_ends(tmp_path: Path) -> None:
    context = others()
    given = (tmp_path, {"train": plain(), "warm_start": 2, "workers": 2}, context.Event(), "forkserver")
    process = context.Process(target=train_elsewhere, args=given)
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    assert ended == 0


class Signed(Noisy):
    """Leaves the id of every process that reads it."""

    def __init__(self, x: Tensor, y: Tensor, folder: Path) -> None:
        super().__init__(x, y, 0.01)
        self.folder = folder

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if torch.utils.data.get_worker_info() is not None:
            (self.folder / str(os.getpid())).touch()
        return super().__getitem__(i)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_end_with_a_process_that_is_killed(tmp_path: Path, start: str) -> None:
    ids = tmp_path / "ids"
    ids.mkdir()
    data = {name: Signed(x, y, ids) for name, (x, y) in PARTS.items()}
    context = others()
    options = {"train": data, "workers": 2, "steps": 10_000, "eval_every": 5_000}
    given = (tmp_path / "run", options, context.Event(), start)
    process = context.Process(target=train_elsewhere, args=given)
    process.start()
    deadline = time.monotonic() + 60
    while len(list(ids.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = [int(path.name) for path in ids.iterdir()]
    process.kill()
    process.join()
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(workers) >= 2
    assert not left


# What is refused


SGD = torch.optim.SGD
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "seed was 0, now 1"),
    "batch size": ({"batch_size": 9}, "batch_size was 8, now 9"),
    "algorithm": ({"algorithm": "erm"}, "algorithm was 'Fish', now 'ERM'"),
    "settings": ({"settings": {"meta_lr": 0.3}}, "settings was {}, now .*'meta_lr': '0.3'"),
    "domains a step": ({"domains_per_step": 2}, "domains_per_step was 3, now 2"),
    "optimizer": ({"optimizer": lambda p: SGD(p, 0.1)}, "optimizer was 'Adam', now 'SGD'"),
    "schedule": ({"schedule": SCHEDULES["cosine"]}, "schedule was 'NoneType', now 'CosineAnnealingLR'"),
    "precision": ({"precision": "bf16"}, "precision was 'fp32', now 'bf16'"),
    "average": ({"average": "sma"}, "average was None, now 'sma'"),
    "warm start": ({"warm_start": 3}, "warm start was None, now 3"),
    "evaluations": ({"eval_every": 2}, "eval_every was 5, now 2"),
    "domains": ({"train": {k + "!": v for k, v in PARTS.items()}}, "domains was .*'domain 0'.*'domain 0!'"),
    "a larger model": ({"model": large()}, "does not fit this model.*size mismatch"),
    "another model": ({"model": network(norm=False)}, "does not fit this model.*Unexpected key"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_another_training_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    stopped(tmp_path, 8)
    kept = {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}
    with pytest.raises(InputError, match=f"(?s){message}"):
        fit(tmp_path, resume=True, **changed)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()} == kept
    assert_same(fit(tmp_path, resume=True), fit(None))


def test_a_folder_in_use(tmp_path: Path) -> None:
    stopped(tmp_path, 8)
    with RunFolder(tmp_path), pytest.raises(InputError, match=f"in use by process {os.getpid()} on"):
        fit(tmp_path, resume=True)
    fit(tmp_path, resume=True)


def test_a_folder_in_use_by_another_process(tmp_path: Path) -> None:
    context = others()
    began = context.Event()
    given = (tmp_path, {"train": plain(0.01), "steps": 1000}, began)
    process = context.Process(target=train_elsewhere, args=given)
    process.start()
    try:
        assert began.wait(60)
        with pytest.raises(InputError, match=f"in use by process {process.pid} on"):
            fit(tmp_path, resume=True)
        assert RunStatus.of(tmp_path).state == "running"
    finally:
        process.kill()
        process.join()


def test_a_used_folder_without_resume(tmp_path: Path) -> None:
    stopped(tmp_path, 8)
    with pytest.raises(InputError, match=r"contains a run that is not finished; .* resume=True"):
        fit(tmp_path)
    fit(tmp_path, resume=True)
    with pytest.raises(InputError, match="contains a finished run"):
        fit(tmp_path)
    with pytest.raises(InputError, match="require folder="):
        fit(None, resume=True)


# What is left alone


def test_the_outside_is_untouched(tmp_path: Path) -> None:
    def state() -> Any:
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    before = state()
    options: dict[str, Any] = {"train": plain(), "warm_start": 3, "average": "sma"}
    stopped(tmp_path, 6, crash, **options)
    assert state() == before
    stopped(tmp_path, 2, send(signal.SIGTERM), resume=True, **options)
    assert state() == before
    torch.manual_seed(12)
    before = state()
    run = fit(tmp_path, resume=True, **options)
    assert state() == before
    assert_same(run, fit(None, **options))


def test_deterministic_kernels_are_asked_for_meanwhile_only(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(step: int, _: str) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    run = fit(tmp_path, deterministic=True, progress=look)
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
    assert_same(run, fit(None))


# The command line


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_train_and_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    text = (
        "train fish rotated-digits --steps 8 --batch-size 4 --warm-start 3 --seed 3 --log-every 2 "
        "--checkpoint-every 3 --eval-every 4 --device cpu --json --out"
    )
    command = text.split()
    assert main([*command, str(tmp_path / "whole")]) == 0
    there = str(tmp_path / "stopped")
    for calls in (2, 4):
        tell = after(calls, send(number))
        with monkeypatch.context() as patch:
            patch.setattr(loop, "CHUNK", 1)
            patch.setattr(monitoring.Monitor, "note", lambda self, tell=tell: tell(0, "") or "")
            assert main([*command, there]) == code
        assert f"Resume with: shoal resume {there}" in capsys.readouterr().err
    assert main(["show", there, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "stopped"
    assert main(["resume", there, "--json"]) == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    capsys.readouterr()
    assert main([*command[:-1], "--seed", "4", "--out", there]) == 2
    assert "contains another run (seed 3, not 4)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.5}, {"clip": 1.0}, {"accumulate": 2}, {"select": "last"}],
    ids=["lr", "clip", "accumulate", "select"],
)
def test_other_settings_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    fit(tmp_path)
    (name,) = change
    with pytest.raises(InputError, match=f"another training: {name} was"):
        fit(tmp_path, resume=True, **change)


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    fit(tmp_path)
    left = [tmp_path / f".{name}.abc" for name in ("model.safetensors", "record.json", "config.yaml")]
    for path in left:
        path.write_bytes(b"half")
    fit(tmp_path, resume=True)
    assert not [path for path in left if path.exists()]


def test_logging_elsewhere_needs_a_folder_and_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="require folder="):
        fit(None, wandb="project")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        fit(tmp_path, wandb="project")
