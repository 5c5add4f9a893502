"""Which weights of a training count: the best on validation, the last, or an average over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
from shoal.tensors import map_nest
from shoal.training.averaging import (
    SWAD,
    applied,
    batchnorm_in_training,
    interpolate,
    make_average,
    refresh_batchnorm,
)
from shoal.training.callbacks import Callback, Point, State
from shoal.training.evaluate import snapshot

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

Weights = dict[str, Tensor]
REFRESH_BATCHES = 100
REFRESHING = "averaging BatchNorm statistics"
ALPHAS = tuple(n / 10 for n in range(11))
"""Between which ``wise_ft="validation"`` chooses."""


class Selection(Callback):
    """Evaluates the model, keeps the weights that are to be selected, and says when to stop.

    Attributes:
        average: the average of weights at every evaluation, if there is one.
        swad: the average of weights that is known at the end only, if there is one.
        best: the best evaluation on validation, and its weights.
        final: at the end, the averaged or interpolated weights, and their evaluation.
        start: the weights at the start, if they are to be interpolated with (WiSE-FT).
        interpolation: its ``alpha``, and the validation ``scores`` of those that were tried.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.setup, self.state = trainer.setup, trainer.state
        average = make_average(self.setup.options["average"], self.setup.options["steps"])
        self.swad = average if isinstance(average, SWAD) else None
        self.average = None if isinstance(average, SWAD) else average
        self.best: tuple[Point, Weights] | None = None
        self.final: tuple[Point, Weights] | None = None
        self.start: Weights | None = None
        self.interpolation: dict[str, Any] = {}
        self._refreshing: MetaBatchLoader | None = None

    # During the training

    def on_start(self, state: State) -> None:
        if state.step:
            return
        if self.setup.options["wise_ft"] is not None:
            self.start = snapshot(self.setup.model)
        if self.setup.l2_sp is not None:
            self.setup.l2_sp.record_start()
        if self.average is not None and self.average.online:
            self.average.state["buffers"] = [b.clone() for b in self.setup.model.buffers()]

    def on_step(self, state: State) -> None:
        setup = self.setup
        if (average := self.swad or self.average) is not None:
            average.update(state.step, setup.engine.params)
        if self.average is not None and self.average.online:
            assert state.batch is not None
            with setup.engine.autocast():
                self.average.track(setup.model, setup.engine.params, state.batch.x)

    def evaluate(self, loss: float) -> Point:
        """The scores at this step, with the mean ``loss`` since the point before; keeps the best weights."""
        setup, step = self.setup, self.state.step
        with self._averaged():
            scores = self._scores()
            point = Point(step, step * setup.sampler.domains_per_step, loss, scores)
            if setup.options["select"] == "best" and (self.best is None or _better(point, self.best[0])):
                self.best = (point, snapshot(setup.model))
        if self.swad is not None:
            self.swad.evaluated(scores["validation"].loss)
        return point

    def _scores(self) -> Any:
        with self.setup.progress.phase("evaluating"):
            return self.setup.evaluator(self.setup.model)

    @property
    def stop(self) -> bool:
        """Whether the training may end before its last step: SWAD has ended, or patience has run out."""
        patience, history, best = self.setup.options["patience"], self.state.history, 0
        for number, point in enumerate(history if patience is not None else ()):
            best = number if _better(point, history[best]) else best
        out_of_patience = patience is not None and len(history) > best + patience
        return out_of_patience or (self.swad is not None and self.swad.done)

    # Averaged weights

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block the model holds the average of its weights, where there is one."""
        mean = None if self.average is None else self.average.mean()
        if self.average is None or mean is None:
            yield
            return
        buffers, tracked = list(self.setup.model.buffers()), self.average.state["buffers"]
        with applied([*self.setup.engine.params, *buffers], [*mean["tensors"], *(tracked or buffers)]):
            if tracked is None:
                self.refresh()
            yield

    def refresh(self) -> None:
        """BatchNorm's statistics from training data under the present weights."""
        setup, options = self.setup, self.setup.options
        if not batchnorm_in_training(setup.model):
            return
        if self._refreshing is None:
            train = setup.data.splits["train"]
            sampler = DomainBatchSampler(train, options["batch_size"], 1, draw="pooled", seed=options["seed"])
            self._refreshing = setup.loader(sampler, 0, stop=min(REFRESH_BATCHES, sampler.steps))
        with setup.engine.autocast(), setup.progress.phase(REFRESHING):
            refresh_batchnorm(setup.model, self._inputs(self._refreshing))
        setup.engine.average_buffers()

    def _inputs(self, batches: MetaBatchLoader) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            self.setup.progress.show(f"{REFRESHING} {number:,}/{len(batches):,}")
            yield batch.x

    # At the end

    def finish(self) -> None:
        """Makes the weights that are selected, if they are an average or interpolated."""
        model, point = self.setup.model, self.state.history[-1]
        if self.swad is not None and (mean := self.swad.mean()) is not None:
            with applied(self.setup.engine.params, mean["tensors"]):
                self.refresh()
                self.final = replace(point, scores=self._scores()), snapshot(model)
        elif self.average is not None and self.average.started and self.best is None:
            with self._averaged():
                self.final = point, snapshot(model)
        if self.start is not None:
            self._interpolate(self.start)

    def _interpolate(self, start: Weights) -> None:
        """WiSE-FT: (1 − α) of the weights at the start, α of the selected ones; of equal ones the largest α.

        BatchNorm's statistics are computed anew, but for α = 0 and 1, which have their own.
        """
        model, wanted = self.setup.model, self.setup.options["wise_ft"]
        (point, _), chosen = self.selected, self.final or self.best
        end, self.final, tried = chosen[1] if chosen else snapshot(model), None, {}
        for alpha in ALPHAS[::-1] if wanted == "validation" else (float(wanted or 0),):
            model.load_state_dict(interpolate(start, end, alpha))
            if 0 < alpha < 1:
                self.refresh()
            found = point if alpha == 1 else replace(point, scores=self._scores())
            if wanted == "validation":
                score = found.scores["validation"].selection_score
                tried[f"{alpha:g}"] = score if isfinite(score) else None
            if self.final is None or _better(found, self.final[0]):
                self.final, self.interpolation["alpha"] = (found, snapshot(model)), alpha
        if tried:
            self.interpolation["scores"] = dict(reversed(tried.items()))

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        if not self.state.history:
            raise RuntimeError("the training has not been run yet.")
        name, selects = self.setup.options["average"], self.setup.evaluator.selects
        average, chosen = self.swad or self.average, self.final or self.best
        mean = average.mean() if average and (self.final or not self.swad) else None
        if self.best is not None and not (self.swad and mean):
            rule = f"best on validation by {selects.name}" if selects else "best on validation"
            rule += f", {name}" if mean else ""
        else:
            rule = f"last step, {name} of steps {mean['first']} to {mean['last']}" if mean else "last step"
        if average is not None and not average.started:
            rule += f" ({name} found no start)"
        if (alpha := self.interpolation.get("alpha")) is not None:
            rule += f", interpolated by {alpha:g} from the start"
        return (chosen[0] if chosen else self.state.history[-1]), rule

    def restore(self) -> Point:
        """Puts the selected weights into the model, ready to predict, and says where they come from."""
        self.setup.model.eval()
        if chosen := self.final or self.best:
            self.setup.model.load_state_dict(chosen[1])
        return self.selected[0]

    # Saving

    def close(self) -> None:
        """Ends the processes that read examples for evaluations."""
        for loader in (self.setup.evaluator.loader, self._refreshing):
            if loader is not None:
                loader.close()

    def state_dict(self) -> dict[str, Any]:
        best = None if self.best is None else {"step": self.best[0].step, "weights": self.best[1]}
        average = self.swad or self.average
        return {"best": best, "start": self.start, "average": average.state if average else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Once the history is there."""
        device = self.setup.device
        state = map_nest(lambda v: v.to(device) if isinstance(v, Tensor) else v, state)
        if state["best"] is not None:
            point = next(p for p in self.state.history if p.step == state["best"]["step"])
            self.best = point, state["best"]["weights"]
        self.start = state["start"]
        if (average := self.swad or self.average) is not None:
            average.state = state["average"]


def _better(one: Point, other: Point) -> bool:
    return one.scores["validation"].better_than(other.scores["validation"])
