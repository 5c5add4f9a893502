"""Callbacks: what is done along the way of a training, ours and yours. ::

class Show(shoal.Callback):
    def on_evaluate(self, state):
        print(state.step, state.point.scores["validation"].average)

shoal.fit("fish", model, train=train, validation=validation, steps=500, callbacks=[Show()])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.batch import MetaBatch
from shoal.data.loader import Draw
from shoal.errors import InputError
from shoal.training.evaluate import Scores

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Point:
    """What was measured at one step: the mean loss since the point before, and scores by split.

    ``passes`` counts the batches passed forward and backward so far, in which methods with different numbers
    of batches per step are to be compared.
    """

    step: int
    passes: int
    loss: float
    scores: Mapping[str, Scores]

    def to_dict(self) -> dict[str, Any]:
        scores = {split: s.to_dict() for split, s in self.scores.items()}
        loss = self.loss if math.isfinite(self.loss) else None
        return {"step": self.step, "passes": self.passes, "loss": loss, "scores": scores}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Point:
        scores = {split: Scores.from_dict(s) for split, s in content["scores"].items()}
        loss = math.nan if content["loss"] is None else content["loss"]
        return cls(content["step"], content["passes"], loss, scores)


@dataclass
class State:
    """Where a training stands, as callbacks see it."""

    label: str
    stage: str
    """``"train"``, or the stage of a recipe, such as ``"warm start"``."""
    steps: int
    model: nn.Module
    optimizer: Optimizer
    folder: Path | None = None
    step: int = 0
    losses: Tensor | None = None
    """One per domain of the newest step, on the device: to read it is to wait for the step."""
    draw: Draw | None = None
    """Which examples the step takes, if they are in memory."""
    gather: Callable[[Draw], MetaBatch] | None = None
    line: Mapping[str, Any] = field(default_factory=dict)
    """The newest line of the log."""
    history: list[Point] = field(default_factory=list)
    _batch: MetaBatch | None = None

    @property
    def batch(self) -> MetaBatch | None:
        """The data of the step, in ``before_step`` and ``on_step``; gathered when it is first asked for."""
        if self._batch is None and self.draw is not None and self.gather is not None:
            self._batch = self.gather(self.draw)
        return self._batch

    @batch.setter
    def batch(self, data: MetaBatch | Draw) -> None:
        self.draw, self._batch = (None, data) if isinstance(data, MetaBatch) else (data, None)

    @property
    def point(self) -> Point:
        """The newest evaluation."""
        return self.history[-1]


class Callback:
    """Base class of callbacks.

    Each method receives the :class:`State` of a stage of the training; override them as needed.

    An exception ends the training with an error that names the callback; the latest checkpoint of a run with
    a folder is kept and can be resumed. State that must survive this is returned by ``state_dict``: tensors,
    numbers and strings in dicts, lists and tuples.
    """

    def on_start(self, state: State) -> None:
        """Called before the first step, also of a resumed training."""

    def before_step(self, state: State) -> None:
        """Called before a step."""

    def on_step(self, state: State) -> None:
        """Called after every step."""

    def on_log(self, state: State) -> None:
        """Called with a new log entry in ``state.line``."""

    def on_evaluate(self, state: State) -> None:
        """Called with new scores in ``state.point``."""

    def on_checkpoint(self, state: State) -> None:
        """Called after a checkpoint was written to ``state.folder``."""

    def on_end(self, state: State) -> None:
        """Called when the training has ended, for any reason."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""


class CallbackError(InputError):
    """A callback raised an exception, which is the ``__cause__``."""
