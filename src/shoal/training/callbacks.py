"""Callbacks: what is done along the way of a training, ours and yours. ::

class Show(shoal.Callback):
    def on_evaluate(self, state):
        print(state.step, state.point.scores["validation"].average)

shoal.fit("fish", model, train=train, validation=validation, steps=500, callbacks=[Show()])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.training.stopping import Diverged

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shoal.data.batch import DomainBatch
    from shoal.training.history import Point


PHASES = ("warm start", "train", "retrain warm start", "retrain")
"""Of a run, in their order."""


@dataclass
class State:
    """Where a training stands, as callbacks see it."""

    label: str
    phase: str
    """``"train"``, or ``"warm start"`` for the ERM steps before it; one of :data:`PHASES`."""
    steps: int
    model: nn.Module
    optimizer: Optimizer
    last: bool = True
    """Whether no phase comes after this one."""
    main: bool = True
    """Whether this process is the one that writes and shows."""
    folder: Path | None = None
    step: int = 0
    seconds: float = 0.0
    losses: Tensor | None = None
    """One per batch of the newest step, on the device: to read it is to wait for the step."""
    batches: Sequence[DomainBatch] | None = None
    """Those of the step to come, in ``before_step``, unless they are gathered on the device."""
    line: Mapping[str, Any] = field(default_factory=dict)
    """The newest line of the log."""
    note: str = ""
    history: list[Point] = field(default_factory=list)

    @property
    def point(self) -> Point:
        """The newest evaluation."""
        return self.history[-1]


class Callback:
    """Override what you need. Each method gets the :class:`State` of a phase of the training.

    An exception ends the training with an error that names the callback; the newest checkpoint of a run with
    a folder stays and can be resumed. What a callback must remember across that, it gives as ``state_dict``:
    tensors, numbers and text in dicts, lists and tuples.
    """

    def on_start(self, state: State) -> None:
        """Before the first step, also of a training that is resumed."""

    def before_step(self, state: State) -> None:
        """Before a step; of several that are one CUDA graph, before the first."""

    def on_step(self, state: State) -> None:
        """After every step."""

    def on_sync(self, state: State) -> None:
        """After some steps (half a second or so), just before their losses are read off the device."""

    def on_progress(self, state: State) -> None:
        """After that, and after evaluations: ``state.note`` says how it goes."""

    def on_log(self, state: State) -> None:
        """``state.line`` is a new line of the log."""

    def on_evaluate(self, state: State) -> None:
        """``state.point`` has new scores."""

    def on_checkpoint(self, state: State) -> None:
        """A checkpoint was written to ``state.folder``."""

    def on_end(self, state: State) -> None:
        """The training has ended, for whatever reason."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class CallbackError(InputError):
    """A callback raised an exception, which is the ``__cause__``."""


class Callbacks:
    """Several as one: ``ours``, whose errors are their own, and then the user's."""

    def __init__(self, ours: Iterable[Callback] = (), own: Iterable[Callback] = ()) -> None:
        self.ours, self.own = list(ours), list(own)

    def __call__(self, event: str, state: State, failing: bool = False) -> None:
        """While ``failing`` with an error, another one is not told."""
        for callback in (*self.ours, *self.own):
            try:
                getattr(callback, event)(state)
            except Exception as error:
                if failing:
                    continue
                if callback in self.ours or isinstance(error, (InputError, Diverged)):
                    raise
                first = f"{type(error).__name__}: {error}".splitlines()[0]
                kept = "; its newest checkpoint can be resumed" if state.folder else ""
                raise CallbackError(
                    f"callback {type(callback).__qualname__} failed in {event} at step {state.step} of "
                    f"{state.label} ({first}){kept}."
                ) from error


def each_step(callbacks: Iterable[Callback]) -> bool:
    """Whether any of them is to be called after every step."""
    return any(type(c).on_step is not Callback.on_step for c in callbacks)
