"""A training that is stopped anywhere and resumed ends as one that never was, bit for bit."""

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
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
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training import capture, checkpoint, journal, loop, setup, stepping
from shoal.training.checkpoint import Checkpoints
from shoal.training.evaluate import Evaluator
from shoal.training.stopping import Interrupted

CLOCKS = {"seconds", "examples_per_second", "environment", "command"}
NOT_RESULTS = {"progress", "workers", "checkpoint_every", "deterministic"}
PARTS = toy()
pytestmark = pytest.mark.filterwarnings("ignore:average='swad|swad found no start|wise_ft interpolates")


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


def fit(folder: Path | None, algorithm: str = "fish", log_every: int = 4, **options: Any) -> shoal.Fit:
    """A training of BatchNorm and dropout; evaluations, lines of the log and checkpoints never coincide."""
    x, y = toy(20)["domain 1"]
    given: dict[str, Any] = {
        **{"model": network(), "train": PARTS, "validation": {"unseen": (x + 1, y)}, "device": "cpu"},
        **{"steps": 12, "batch_size": 8, "lr": 0.01, "eval_every": 5, "checkpoint_every": 3},
        "progress": False,
    }
    if "optimizer" in options:
        del given["lr"]  # which is the optimizer's own then
    with pytest.MonkeyPatch.context() as patch:
        for module in (loop, setup, stepping):
            patch.setattr(module, "LOG_EVERY", log_every)
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


@pytest.mark.parametrize("name", registry.names())
def test_every_algorithm(tmp_path: Path, name: str) -> None:
    check(tmp_path, [5], crash, algorithm=name, steps=8)


@pytest.mark.parametrize("name", ["erm", "fish", "idgm", "dann", "groupdro", "fishr", "mixup"])
def test_one_of_each_kind_with_much_else(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"average": "sma:2", "accumulate": 2, "schedule": "cosine", "warm_start": 0.2}
    check(tmp_path, [7], send(signal.SIGTERM), algorithm=name, train=plain(), steps=8, **options)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["erm", "fish", "coral", "dann"])
def test_in_half_precision(tmp_path: Path, name: str, precision: str) -> None:
    check(tmp_path, [4], send(signal.SIGTERM), algorithm=name, precision=precision, clip=0.5, steps=7)


def test_again_and_again(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    there = tmp_path / "stopped"
    for calls in (1, 4, 1, 3):
        stopped(there, calls, send(signal.SIGTERM), resume=True)
    assert Checkpoints(there / "checkpoints").latest() == 9
    assert_same(fit(there, resume=True), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("name", [n for n in registry.names() if algorithm_class(n).trains_discriminator])
def test_a_checkpoint_without_the_discriminators_optimizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
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


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": others, "weight_decay": 0.3}], 0.01)


def large_loss(output: Tensor, y: Tensor) -> Tensor:
    """Overflows in fp16 until the loss scale has come down."""
    return 300 * nn.functional.cross_entropy(output, y)


def two_schedules(optimizer: Any) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


TUNED: dict[str, Any] = {"head_lr": 0.05, "layer_decay": 0.5, "l2_sp": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "sma": {"average": "sma:3"},
    "sma, last": {"average": "sma:3", "select": "last"},
    "ema": {"average": "ema:0.9"},
    "swad": {"average": "swad", "eval_every": 1, "checkpoint_every": 4},
    "swad, plain dataset": {"average": "swad", "eval_every": 2, "train": plain()},
    "no validation": {"validation": None},
    "accumulate, clip": {"accumulate": 3, "clip": 0.1},
    "dense checkpoints": {"checkpoint_every": 1},
    "checkpoints at evaluations": {"checkpoint_every": None},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True)},
    "two groups": {"optimizer": two_groups},
    "two groups, smoothfish": {"optimizer": two_groups, "algorithm": "smoothfish"},
    "inner state reset": {"settings": {"inner_state": "reset"}},
    "inner state reset every 3 steps": {"settings": {"inner_state": 3}},
    "few domains a step": {"domains_per_step": 2},
    "regrouped": {"draw": "regrouped"},
    "loss scale": {"precision": "fp16", "loss": large_loss, "steps": 16},
    "schedule by name": {"schedule": "warmup:3,step:0.5:4"},
    "one cycle": {"schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=13)},
    "two schedules": {"schedule": two_schedules},
    "deterministic": {"deterministic": True},
    "tracked": {"track_every": 3},
    "warm start": {"warm_start": 4, "steps": 7},
    "head first": {"warm_start": "head:4", "steps": 7},
    "head first, coral": {"warm_start": "head:4", "steps": 7, "algorithm": "coral"},
    "wise": {"wise_ft": "validation", "warm_start": "head:3"},
    "wise, ema": {"wise_ft": 0.5, "average": "ema", "select": "last"},
    "fine-tuning": TUNED,
    "miro": {"miro": 0.1, "algorithm": "erm", "warm_start": "head:2"},
    "retrain": {"retrain": True, "validation": PARTS, "steps": 6, "eval_every": 2},
    "retrain, all": {
        **{"retrain": True, "validation": PARTS, "steps": 6, "eval_every": 1, "average": "swad"},
        **{"warm_start": "head:2", "wise_ft": "validation", **TUNED},
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_every_option(tmp_path: Path, options: dict[str, Any]) -> None:
    check(
        tmp_path, [2, 7] if {"average", "warm_start"} & set(options) else [7], send(signal.SIGTERM), **options
    )


@BY_CRASH
def test_in_every_phase(tmp_path: Path, act: Callable[[int], None]) -> None:
    """In the warm start, at its last step, in the search, in the repeated warm start, and after it."""
    options: dict[str, Any] = {"retrain": True, "validation": PARTS, "steps": 6, "eval_every": 2}
    options |= {"warm_start": "head:2", "checkpoint_every": 1, "select": "last"}
    check(tmp_path, [1, 2, 5, 8, 9, 11, 14], act, **options)


@BY_CRASH
def test_plateau(tmp_path: Path, act: Callable[[int], None]) -> None:
    """The best weights of the warm phase are not its last."""
    options: dict[str, Any] = {"warm_start": "plateau", "validation": TURNED, "steps": 4}
    warm = fit(None, **options).warm_up
    assert len(warm) >= 6
    last = warm[-1].step
    check(tmp_path, [last - 1, last, last + 1], act, **options)


def test_swad_that_has_found_its_start(tmp_path: Path) -> None:
    """It goes on to its end, which is before the training's."""
    options: dict[str, Any] = {"average": "swad", "eval_every": 1, "steps": 60, "validation": TURNED}
    run = fit(None, **options)
    assert "swad of steps" in run.rule
    assert run.last.step < 60
    check(tmp_path, [2, 5, run.last.step - 2], send(signal.SIGTERM), **options)


class TestPatience:
    options: ClassVar[dict[str, Any]] = {"validation": TURNED, "patience": 3, "eval_every": 2, "steps": 60}

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


@pytest.mark.parametrize("workers", [(0, 2), (2, 0)], ids=str)
def test_any_number_of_workers(tmp_path: Path, workers: tuple[int, int]) -> None:
    """Dropout and the transform draw the same numbers, whichever process reads from whichever step on."""
    whole = fit(tmp_path / "whole", train=plain())
    there = tmp_path / "stopped"
    stopped(there, 7, crash, train=plain(), workers=workers[0])
    assert_same(fit(there, resume=True, train=plain(), workers=workers[1]), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


# Signals


IN_EVALUATION: dict[str, tuple[int, dict[str, Any]]] = {
    "first": (2, {}),
    "last": (120, {}),
    "with checkpoint": (60, {"eval_every": 4, "checkpoint_every": 4}),
    "plain dataset": (10, {"train": plain()}),
    "of the warm start": (2, {"warm_start": 3, "steps": 7}),
    "of averaged weights": (60, {"average": "sma:2"}),
    "at the end, of averaged weights": (-3, {"average": "swad", "eval_every": 1}),
}


@pytest.mark.parametrize(("batch", "options"), IN_EVALUATION.values(), ids=IN_EVALUATION.keys())
def test_a_signal_in_an_evaluation(tmp_path: Path, batch: int, options: dict[str, Any]) -> None:
    """It is abandoned after the batch, and repeated by the training that is resumed."""
    options = {"eval_batch": 3, **options}
    with passes() as every:
        whole = fit(tmp_path / "whole", **options)
    at = batch if batch > 0 else len(every) + batch
    with passes(at) as done, pytest.raises(Interrupted, match="which is saved"):
        fit(tmp_path / "stopped", **options)
    assert len(done) == at + 1 < len(every)
    assert_same(fit(tmp_path / "stopped", resume=True, **options), whole)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@contextlib.contextmanager
def passes(kill: int = -1) -> Iterator[list[int]]:
    """The batches that evaluations pass through the model; at one of them a signal comes."""
    output, seen = Evaluator._output, list[int]()

    def watched(self: Evaluator, model: nn.Module, x: Any, count: int) -> Any:
        if len(seen) == kill:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(count)
        return output(self, model, x, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "_output", watched)
        yield seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
class TestSignals:
    def test_the_step_is_finished_and_saved(self, tmp_path: Path, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        with pytest.raises(Interrupted, match=f"step 5, .*{tmp_path}'?, resume=True") as caught:
            fit(tmp_path, progress=lambda step, _: step == 5 and send(number)(0))
        assert caught.value.signal == number
        assert signal.getsignal(number) == before
        assert Checkpoints(tmp_path / "checkpoints").latest() == 5

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
        options: dict[str, Any] = {"train": plain(), "steps": 4}

        def to_all() -> None:
            each = [*(child.pid for child in multiprocessing.active_children()), os.getpid()]
            subprocess.run(["kill", f"-{int(number)}", *map(str, each)], check=True)

        def soon(step: int) -> None:
            threading.Timer(0.15, to_all).start()  # while the next step waits for its examples

        with pytest.raises(Interrupted, match="which is saved"):
            fit(tmp_path, workers=2, progress=after(1, soon), **options | {"train": plain(0.02)})
        assert Checkpoints(tmp_path / "checkpoints").latest() in (1, 2, 3)
        assert_same(fit(tmp_path, resume=True, **options), fit(None, **options))


def test_without_a_folder_signals_are_not_watched() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(None, progress=after(2, send(signal.SIGINT)))
    assert type(caught.value) is KeyboardInterrupt


# Steps that are replayed


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

    @pytest.mark.parametrize("changed", [{}, {"log_every": 4}, {"checkpoint_every": 3}], ids=str)
    @pytest.mark.parametrize("first", [False, True], ids=["eager first", "captured first"])
    @pytest.mark.parametrize("stop", [1, 7])
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


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {
        **{"steps": 150, "checkpoint_every": 2, "eval_every": 40, "warm_start": 20, "average": "sma"},
        **{"train": plain() if workers else PARTS},
    }
    whole = fit(tmp_path / "whole", **options)
    there = tmp_path / "killed"
    draw, context, reached = random.Random(workers), others(), [0]
    for _ in range(4):
        given = (there, {**options, "workers": workers}, context.Event())
        process = context.Process(target=train_elsewhere, args=given)
        process.start()
        while process.is_alive() and (Checkpoints(there / "checkpoints").latest() or 0) <= reached[-1]:
            time.sleep(0.01)
        process.join(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        reached.append(Checkpoints(there / "checkpoints").latest() or 0)
    assert reached == sorted(reached)
    assert_same(fit(there, resume=True, **options), whole)
    assert outcome(there) == outcome(tmp_path / "whole")


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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"steps": 13}, "steps was 12, now 13"),
    "seed": ({"seed": 1}, "seed was 0, now 1"),
    "algorithm": ({"algorithm": "erm"}, "algorithm was 'Fish', now 'ERM'"),
    "settings": ({"settings": {"meta_lr": 0.3}}, "settings was {}, now .*'meta_lr': 0.3"),
    "optimizer": ({"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "optimizer was 'Adam', now 'SGD'"),
    "schedule": ({"schedule": "cosine"}, "schedule was None, now 'cosine'"),
    "loss": ({"loss": large_loss}, "loss was None, now 'large_loss'"),
    "domains": ({"train": {k + "!": v for k, v in PARTS.items()}}, "domains was .*'domain 0'.*'domain 0!'"),
    "another model": ({"model": network(norm=False)}, "does not fit this model"),
    **{
        name: ({name: value}, f"{name} was .*, now ")
        for name, value in {
            "lr": 0.5,
            "clip": 1.0,
            "average": "sma",
            "warm_start": 3,
            "select": "last",
        }.items()
    },
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_another_training_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    stopped(tmp_path, 8)
    kept = {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}
    with pytest.raises(InputError, match=f"(?s){message}"):
        fit(tmp_path, resume=True, **changed)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()} == kept
    assert_same(fit(tmp_path, resume=True), fit(None))


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
    with pytest.raises(InputError, match="folder"):
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


# In a run of shoal.train


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_train(tmp_path: Path, number: signal.Signals) -> None:
    def train(out: str, progress: Any = False, **options: Any) -> Any:
        options = {"steps": 8, "batch_size": 4, "warm_start": 3, "seed": 3, "eval_every": 4} | options
        place = tmp_path / out
        return shoal.train(
            "fish",
            "rotated-digits",
            out=place,
            device="cpu",
            progress=progress,
            checkpoint_every=3,
            **options,
        )

    train("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHUNK", 1)
        for calls in (2, 4):
            with pytest.raises(KeyboardInterrupt, match="saved"):
                train("stopped", after(calls, send(number)))
    train("stopped")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    with pytest.raises(InputError, match="seed 3, not 4"):
        train("stopped", seed=4)
