"""Callbacks see a training as it goes, change nothing in it, and one that fails is named."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import InputError
from shoal.training.callbacks import Callback, State

EVENTS = ("on_start", "before_step", "on_step", "on_log", "on_evaluate", "on_checkpoint", "on_end")


def domain(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(40) % 2
    return torch.randn(40, 3, generator=draw) + y[:, None], y


def fit(**options: Any) -> shoal.Fit:
    base: dict[str, Any] = {"steps": 6, "batch_size": 4, "device": "cpu", "progress": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
    data = {"a": domain(0), "b": domain(1)}
    return shoal.fit("fish", model, data, validation={"v": domain(2)}, eval_every=3, **base | options)


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.losses: list[list[float]] = []


def _note(name: str) -> Any:
    def note(self: Watch, state: State) -> None:
        self.seen.append((name, state.stage, state.step))
        if name == "on_step":
            assert state.losses is not None
            self.losses.append(state.losses.tolist())
        if name == "on_evaluate":
            assert state.point.step == state.step
            assert state.history[-1] is state.point
        if name == "on_log":
            assert state.line["step"] == state.step
        if name == "on_checkpoint":
            assert state.folder is not None
            assert list((state.folder / "checkpoints").iterdir())

    return note


for event in EVENTS:
    setattr(Watch, event, _note(event))


def steps(watch: Watch, event: str, phase: str = "train") -> list[int]:
    return [step for name, there, step in watch.seen if (name, there) == (event, phase)]


def test_every_event_comes_when_it_should(tmp_path: Path) -> None:
    watch = Watch()
    fit(callbacks=[watch], folder=tmp_path, checkpoint_every=2, warm_start=2)
    assert steps(watch, "on_start") == [0]
    assert steps(watch, "before_step") == list(range(6))
    assert steps(watch, "on_step") == list(range(1, 7))
    assert steps(watch, "on_log") == [3, 6]
    assert steps(watch, "on_evaluate") == [3, 6]
    assert steps(watch, "on_checkpoint") == [2, 4, 6]
    assert steps(watch, "on_end") == [6]
    assert steps(watch, "on_step", "warm start") == [1, 2]
    assert all(len(losses) == 2 for losses in watch.losses[2:])


def test_they_change_nothing() -> None:
    plain, watched = fit(), fit(callbacks=[Watch()])
    torch.testing.assert_close(plain.model.state_dict(), watched.model.state_dict(), rtol=0, atol=0)
    assert plain.history == watched.history


class Fails(Callback):
    def __init__(self, event: str, step: int, error: BaseException) -> None:
        self.count = 0

        def fail(state: State) -> None:
            self.count += 1
            if state.step == step:
                raise error

        setattr(self, event, fail)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("event", ["on_step", "on_evaluate", "on_log", "before_step"])
def test_one_that_raises_is_named_and_the_run_can_be_resumed(tmp_path: Path, event: str) -> None:
    whole = fit()
    watch = Watch()
    message = rf"callback Fails failed in {event} at step 3 of fish \(OSError: oh no\); its newest"
    callbacks = [Fails(event, 3, OSError("oh no\nmore")), watch]
    with pytest.raises(InputError, match=message):
        fit(callbacks=callbacks, folder=tmp_path, checkpoint_every=1)
    assert steps(watch, "on_end") == [3]
    resumed = fit(folder=tmp_path, resume=True, checkpoint_every=1)
    torch.testing.assert_close(whole.model.state_dict(), resumed.model.state_dict(), rtol=0, atol=0)
    assert whole.history == resumed.history


def test_an_error_in_the_end_does_not_hide_the_first() -> None:
    both = [Fails("on_step", 2, ValueError("first")), Fails("on_end", 2, ValueError("second"))]
    with pytest.raises(InputError, match="first"):
        fit(callbacks=both)


def test_what_one_remembers_is_in_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        fit(callbacks=[Fails("on_step", 4, ValueError("x"))], folder=tmp_path, checkpoint_every=1)
    again = Fails("on_step", 99, ValueError("x"))
    fit(callbacks=[again], folder=tmp_path, checkpoint_every=1, resume=True)
    assert again.count == 6


@pytest.mark.parametrize("wrong", [[3], "watch", [Watch], 5])
def test_what_is_no_callback_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="callbacks"):
        fit(callbacks=wrong)


def test_the_example() -> None:
    spec = importlib.util.spec_from_file_location(
        "callback", Path(__file__).parents[2] / "examples/callback.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert len(example.main().spreads) == 4
