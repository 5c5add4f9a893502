"""Which weights of a training count: the best on validation, the last, or an average over steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
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
        average: the average of weights, if there is one.
        best: the best evaluation on validation, and its weights.
        final: at the end, the averaged or interpolated weights, and their evaluation.
        start: the weights at the start, if they are to be interpolated with (WiSE-FT).
        interpolation: its ``alpha``, and the validation ``scores`` of those that were tried.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.setup, self.state = trainer.setup, trainer.state
        self.average = make_average(self.setup.options["average"], self.setup.options["steps"])
        self.best: tuple[Point, Weights] | None = None
        self.final: tuple[Point, Weights] | None = None
        self.start: Weights | None = None
        self.interpolation: dict[str, Any] = {}
        self._refreshing: MetaBatchLoader | None = None
        self._warn()

    # During the training

    def on_start(self, state: State) -> None:
        if state.step:
            return
        if self.setup.options["wise_ft"] is not None:
            self.start = snapshot(self.setup.model)
        if self.setup.l2_sp is not None:
            self.setup.l2_sp.begin()
        if self.average is not None:
            self.average.begin(self.setup.model)

    def on_step(self, state: State) -> None:
        setup, average = self.setup, self.average
        if average is not None:
            average.update(state.step, setup.engine.params)
            if average.buffers:
                assert state.batch is not None
                with setup.engine.autocast():
                    average.track(setup.model, setup.engine.params, state.batch.x)

    def evaluate(self, loss: float) -> Point:
        """The scores at this step, with the mean ``loss`` since the point before; keeps the best weights."""
        setup, step = self.setup, self.state.step
        with self._averaged():
            scores = self._scores()
            point = Point(step, step * setup.sampler.domains_per_step, loss, scores)
            if setup.select == "best" and (self.best is None or _better(point, self.best[0])):
                self.best = (point, snapshot(setup.model))
        if self.average is not None:
            self.average.evaluated(step, scores["validation"].loss if "validation" in scores else None)
        return point

    def _scores(self) -> Any:
        with self.setup.progress.phase("evaluating"):
            return self.setup.evaluator(self.setup.model)

    @property
    def stop(self) -> bool:
        """Whether the training may end before its last step: SWAD has ended, or patience has run out."""
        patience, history = self.setup.options["patience"], self.state.history
        if patience is not None and history and len(history) - 1 - self._best_so_far() >= patience:
            return True
        return self.average is not None and self.average.done

    def _best_so_far(self) -> int:
        best, history = 0, self.state.history
        for i, point in enumerate(history):
            best = i if _better(point, history[best]) else best
        return best

    @property
    def selected_step(self) -> int:
        """That of the selected weights."""
        return self.state.history[self._best_so_far() if self.setup.select == "best" else -1].step

    # Averaged weights

    @contextmanager
    def _averaged(self, always: bool = False) -> Iterator[None]:
        """Within the block the model holds the average of its weights, if it is evaluated by that."""
        average, model = self.average, self.setup.model
        weights = average.weights() if average and (always or average.running) else None
        if weights is None:
            yield
            return
        buffers, own = list(model.buffers()), average.buffers if average else None
        with applied([*self.setup.engine.params, *buffers], [*weights, *(own or buffers)]):
            if own is None:
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
            self.setup.progress.count(REFRESHING, number, len(batches))
            yield batch.x

    # At the end

    def finish(self) -> None:
        """Makes the weights that are selected, if they are an average or interpolated."""
        average, model = self.average, self.setup.model
        if average is not None and average.span is not None and not (average.running and self.best):
            model.train()
            with self._averaged(always=True):
                point = self.state.history[-1]
                if not average.running:
                    point = replace(point, scores=self._scores())
                self.final = (point, snapshot(model))
            self._warn()
        if self.start is not None:
            self._interpolate(self.start)

    def _interpolate(self, start: Weights) -> None:
        """WiSE-FT: (1 − α) of the weights at the start, α of the selected ones.

        BatchNorm's statistics are computed anew, but for α = 0 and 1, which have their own.
        """
        setup, model, alpha = self.setup, self.setup.model, self.setup.options["wise_ft"]
        point, _ = self.selected
        chosen = self.final or self.best
        end = chosen[1] if chosen else snapshot(model)

        def put(alpha: float) -> None:
            model.load_state_dict(interpolate(start, end, alpha) if alpha else start)
            model.train()
            if 0 < alpha < 1:
                self.refresh()

        if alpha == "validation":
            limit, found = setup.options["eval_limit"], {}
            evaluator = setup.evaluator_of(["validation"], {"validation": limit} if limit else None)
            with closing(evaluator.loader):
                for each in ALPHAS:
                    put(each)
                    with setup.progress.phase("evaluating"):
                        found[each] = evaluator(model)["validation"]
            alpha = ALPHAS[-1]
            for each in reversed(ALPHAS):  # of equal ones the largest
                alpha = each if found[each].better_than(found[alpha]) else alpha
            values = {f"{a:g}": found[a].selection_score for a in ALPHAS}
            self.interpolation["scores"] = {a: v if isfinite(v) else None for a, v in values.items()}
        assert isinstance(alpha, float)
        put(alpha)
        if alpha < 1:
            point = replace(point, scores=self._scores())
        self.final = (point, snapshot(model))
        self.interpolation["alpha"] = alpha

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        if not self.state.history:
            raise RuntimeError("the training has not been run yet.")
        name, average, selects = self.setup.options["average"], self.average, self.setup.selects
        span, rule = average.span if average else None, "last step"
        averaged = average is not None and span is not None and (average.running or self.final is not None)
        if self.best is not None and not (averaged and average and not average.running):
            rule = f"best on validation by {selects.name}" if selects else "best on validation"
            rule += f", {name}" if averaged else ""
        elif averaged and span is not None:
            rule += f", {name} of steps {span[0]} to {span[1]}"
        if average is not None and not (span and average.started):
            rule += f" ({name} found no start)"
        if (alpha := self.interpolation.get("alpha")) is not None:
            rule += f", interpolated by {alpha:g} from the start"
        chosen = self.final or self.best
        return (chosen[0] if chosen else self.state.history[-1]), rule

    def restore(self) -> Point:
        """Puts the selected weights into the model, ready to predict, and says where they come from."""
        self.setup.model.eval()
        if chosen := self.final or self.best:
            self.setup.model.load_state_dict(chosen[1])
        return self.selected[0]

    @property
    def notes(self) -> dict[str, str]:
        """What a reader of the record must know of averaged weights."""
        return {"average": note.removesuffix(".")} if (note := self._swad_note()) else {}

    def _swad_note(self) -> str:
        """That SWAD has too few evaluations to end, or that its rule found no start."""
        average, steps, every = self.average, self.setup.options["steps"], self.setup.eval_every
        if not isinstance(average, SWAD):
            return ""
        needed, count = average.converge + average.tolerate, -(-steps // every)
        if count < needed:
            return (
                f"average='swad' needs {needed} evaluations and has {count} (steps={steps:,}, "
                f"eval_every={every:,}); set eval_every={max(1, steps // 50)}."
            )
        if average.started or average.span is None or self.state.step < steps:
            return ""
        return (
            f"swad found no start in {count:,} evaluations: none was followed by {average.converge - 1} "
            f"without a lower validation loss. The result is the mean over steps {average.span[0]:,} to "
            f"{average.span[1]:,}. Train for longer, or set a smaller eval_every."
        )

    def _warn(self) -> None:
        if (note := self._swad_note()) and self.setup.processes.main:
            warnings.warn(note, stacklevel=4)

    # Saving

    def close(self) -> None:
        """Ends the processes that read examples for evaluations."""
        for loader in (self.setup.evaluator.loader, self._refreshing):
            if loader is not None:
                loader.close()

    def state_dict(self) -> dict[str, Any]:
        best = None if self.best is None else {"step": self.best[0].step, "weights": self.best[1]}
        average = None if self.average is None else self.average.state_dict()
        return {"best": best, "start": self.start, "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Once the history is there."""
        if state["best"] is not None:
            point = next(p for p in self.state.history if p.step == state["best"]["step"])
            self.best = point, self._on_device(state["best"]["weights"])
        if state["start"] is not None:
            self.start = self._on_device(state["start"])
        if self.average is not None:
            self.average.load_state_dict(state["average"], self.setup.engine.params)

    def _on_device(self, weights: Weights) -> Weights:
        return {name: value.to(self.setup.device) for name, value in weights.items()}


def _better(one: Point, other: Point) -> bool:
    return one.scores["validation"].better_than(other.scores["validation"])
