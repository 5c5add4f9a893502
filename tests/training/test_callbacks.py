"""Callbacks see a training as it goes, change nothing in it, and one that fails is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import InputError
from shoal.training.callbacks import Callback, State
from training import finetuning

EVENTS = ("on_start", "before_step", "on_step", "on_log", "on_evaluate", "on_checkpoint", "on_end")


def fit(**options: Any) -> shoal.Fit:
    return finetuning.fit("fish", **{"steps": 6, "batch_size": 4} | options)


class Watch(Callback):
    """Notes every event; ``fails`` is one at which it raises an error."""

    def __init__(self, fails: tuple[str, int] | None = None, error: str = "oh no\nmore") -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.steps = 0
        self.fails, self.error = fails, error

    def note(self, name: str, state: State) -> None:
        self.seen.append((name, state.stage, state.step))
        self.steps += name == "on_step"
        if name == "on_step":
            assert state.losses is not None
            assert state.batch is not None
            assert len(state.losses) == len(state.batch.sizes) == (1 if state.stage == "warm start" else 2)
        if name == "on_evaluate":
            assert state.history[-1] is state.point
            assert state.point.step == state.step
        if name == "on_log":
            assert state.line["step"] == state.step
        if name == "on_checkpoint":
            assert state.folder is not None
            assert list((state.folder / "checkpoints").iterdir())
        if self.fails == (name, state.step):
            raise OSError(self.error)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


for event in EVENTS:
    setattr(Watch, event, lambda self, state, event=event: self.note(event, state))


def steps(watch: Watch, event: str, stage: str = "train") -> list[int]:
    return [step for name, where, step in watch.seen if (name, where) == (event, stage)]


def test_every_event_comes_when_it_should_and_changes_nothing(tmp_path: Path) -> None:
    watch = Watch()
    watched = fit(callbacks=[watch], folder=tmp_path, checkpoint_every=2, warm_start=2)
    assert steps(watch, "on_start") == [0]
    assert steps(watch, "before_step") == list(range(6))
    assert steps(watch, "on_step") == list(range(1, 7))
    assert steps(watch, "on_log") == [3, 6]
    assert steps(watch, "on_evaluate") == [3, 6]
    assert steps(watch, "on_checkpoint") == [2, 4, 6]
    assert steps(watch, "on_end") == [6]
    assert steps(watch, "on_step", "warm start") == [1, 2]
    plain = fit(warm_start=2)
    torch.testing.assert_close(plain.model.state_dict(), watched.model.state_dict(), rtol=0, atol=0)
    assert plain.history == watched.history


@pytest.mark.parametrize("event", ["on_step", "on_evaluate", "on_log"])
def test_one_that_raises_is_named_and_the_run_can_be_resumed(tmp_path: Path, event: str) -> None:
    watch = Watch()
    message = rf"callback Watch failed in {event} at step 3 of fish \(OSError: oh no\); its newest"
    with pytest.raises(InputError, match=message):
        fit(callbacks=[Watch((event, 3)), watch], folder=tmp_path, checkpoint_every=1)
    assert steps(watch, "on_end") == [3]
    again = Watch()
    resumed = fit(callbacks=[again], folder=tmp_path, resume=True, checkpoint_every=1)
    torch.testing.assert_close(fit().model.state_dict(), resumed.model.state_dict(), rtol=0, atol=0)
    assert again.steps == 6  # what it remembers is in the checkpoint


def test_what_is_no_callback_is_refused() -> None:
    for wrong in ([3], "watch", [Watch]):
        with pytest.raises(InputError, match="callbacks"):
            fit(callbacks=wrong)
