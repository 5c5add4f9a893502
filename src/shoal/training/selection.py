"""Which weights of a training count: the best on validation, the last, or a mean over steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
from shoal.training.averaging import SWAD, applied, has_batchnorm, interpolate, refresh_batchnorm
from shoal.training.callbacks import Callback, Point, State
from shoal.training.evaluate import Scores, snapshot
from shoal.training.options import make_average

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

REFRESH_BATCHES = 100
REFRESHING = "averaging BatchNorm statistics"
ALPHAS = tuple(n / 10 for n in range(11))
"""Between which ``wise_ft="validation"`` chooses."""


class Selection(Callback):
    """Evaluates the model, keeps the weights that are to be selected, and says when to stop."""

    def __init__(self, trainer: Trainer) -> None:
        self.setup, self.state, self.watched = trainer.setup, trainer.state, trainer.watched
        self.average = make_average(self.setup.options)
        self.few_evaluations = self._few_evaluations()
        if self.few_evaluations and self.setup.processes.main:
            warnings.warn(self.few_evaluations, stacklevel=3)
        self.best: tuple[Point, dict[str, Tensor]] | None = None
        self.final: tuple[Point, dict[str, Tensor]] | None = None
        self.start: dict[str, Tensor] | None = None
        """The weights at the start, if they are to be interpolated with (WiSE-FT)."""
        self.interpolation: dict[str, Any] = {}
        """By which ``alpha``, and the validation ``scores`` of those that were tried."""
        self._rule = ""
        self._refreshing: MetaBatchLoader | None = None

    @property
    def history(self) -> list[Point]:
        return self.state.history

    def _few_evaluations(self) -> str:
        """What is wrong where SWAD could not find an end in so few evaluations."""
        average, steps, every = self.average, self.setup.options["steps"], self.setup.eval_every
        count = -(-steps // every)
        if not isinstance(average, SWAD) or count >= average.converge + average.tolerate:
            return ""
        return (
            f"average='swad' has {count} evaluation{'s' * (count != 1)} (steps={steps:,}, "
            f"eval_every={every:,}). It needs {average.converge} to find a start and "
            f"{average.converge + average.tolerate} to find an end; its authors evaluate 31 to 101 times. "
            f"Set eval_every={max(1, steps // 50)}."
        )

    @property
    def stop(self) -> bool:
        """Whether the training may end before its last step."""
        return self._stale() or bool(self.average and self.average.done)

    def on_start(self, state: State) -> None:
        """Before the first step: notes the weights, if they are to be interpolated with."""
        if state.step:
            return
        if self.setup.options["wise_ft"] is not None and self.start is None:
            self.start = snapshot(self.setup.model)
        if self.setup.l2_sp is not None:
            self.setup.l2_sp.begin()

    def on_step(self, state: State) -> None:
        if self.average is not None:
            self.average.update(state.step, self.setup.engine.params)

    def _stale(self) -> bool:
        """Whether validation has not improved for as many evaluations as patience allows."""
        patience = self.setup.options["patience"]
        if patience is None or not self.history:
            return False
        return len(self.history) - 1 - self._best_so_far() >= patience

    def _best_so_far(self) -> int:
        best = 0
        for i, point in enumerate(self.history):
            if point.scores["validation"].better_than(self.history[best].scores["validation"]):
                best = i
        return best

    @property
    def selected_step(self) -> int:
        """That of the selected weights, also of a training that was over when it was resumed."""
        return self.history[self._best_so_far() if self.setup.select == "best" else -1].step

    def evaluate(self, loss: float) -> Point:
        """The scores at this step, with the mean ``loss`` since the point before; keeps the best weights."""
        setup, step = self.setup, self.state.step
        with self._averaged(), self.watched("evaluating"):
            scores = setup.evaluator(setup.model)
            point = Point(step, step * setup.sampler.domains_per_step, loss, scores)
            if setup.select == "best" and (
                self.best is None or scores["validation"].better_than(self.best[0].scores["validation"])
            ):
                self.best = (point, snapshot(setup.model))
        if self.average is not None:
            validation = point.scores.get("validation")
            self.average.evaluated(point.step, validation.loss if validation else None)
        return point

    @contextmanager
    def _averaged(self, always: bool = False) -> Iterator[None]:
        """Within the block the model holds the running mean of its weights, if it is evaluated by that."""
        average, model = self.average, self.setup.model
        weights = average.weights() if average and (always or average.running) else None
        if weights is None:
            yield
            return
        buffers = [(b, b.clone()) for b in model.buffers()]
        try:
            with applied(self.setup.engine.params, weights):
                if has_batchnorm(model):
                    self.refresh()
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def refresh(self) -> None:
        """BatchNorm's statistics from training data under the present weights."""
        setup = self.setup
        if self._refreshing is None:
            train, options = setup.data.splits["train"], setup.options
            sampler = DomainBatchSampler(train, options["batch_size"], 1, draw="pooled", seed=options["seed"])
            self._refreshing = setup.loader(sampler, 0, stop=min(REFRESH_BATCHES, sampler.steps))
        with setup.engine.autocast(), self.watched(REFRESHING):
            refresh_batchnorm(setup.model, self._inputs(self._refreshing))
        if setup.processes.count > 1:
            buffers = [b for b in setup.model.buffers() if b.is_floating_point()]
            with torch.no_grad():
                for buffer, mean in zip(buffers, setup.engine.average(buffers), strict=True):
                    buffer.copy_(mean)

    def _inputs(self, batches: MetaBatchLoader) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            self.setup.watch and self.setup.watch(REFRESHING, number, len(batches))
            yield batch.x

    def finish(self) -> None:
        """What the selected weights are in the end, where they are averaged or interpolated."""
        self._finish_average()
        if self.start is not None:
            self._interpolate(self.start)

    def _interpolate(self, start: dict[str, Tensor]) -> None:
        """WiSE-FT: (1 − α) of the weights at the start, α of the selected ones.

        BatchNorm's statistics are computed anew, but for α = 0 and 1, which have their own.
        """
        setup, model, chosen = self.setup, self.setup.model, self.setup.options["wise_ft"]
        point, rule = self.selected
        kept = self.final or self.best
        end = kept[1] if kept else snapshot(model)

        def put(alpha: float) -> None:
            model.load_state_dict(interpolate(start, end, alpha) if alpha else start)
            model.train()
            if 0 < alpha < 1 and has_batchnorm(model):
                self.refresh()

        if chosen == "validation":
            limit = setup.options["eval_limit"]
            evaluator = setup.evaluator_of(["validation"], {"validation": limit} if limit else None)
            found: dict[float, Scores] = {}
            alpha = ALPHAS[-1]
            for each in reversed(ALPHAS):  # of equal ones the largest is kept
                put(each)
                with self.watched("evaluating"):
                    found[each] = evaluator(model)["validation"]
                if found[each].better_than(found[alpha]):
                    alpha = each
            evaluator.loader.close()
            values = {a: found[a].selection_score for a in ALPHAS}
            self.interpolation["scores"] = {f"{a:g}": v if isfinite(v) else None for a, v in values.items()}
        else:
            assert isinstance(chosen, float)
            alpha = chosen
        put(alpha)
        if alpha < 1:
            with self.watched("evaluating"):
                point = replace(point, scores=setup.evaluator(model))
        self.final = (point, snapshot(model))
        self.interpolation["alpha"] = alpha
        self._rule = f"{rule}, interpolated by {alpha:g} from the start"

    def _finish_average(self) -> None:
        average, model = self.average, self.setup.model
        if average is None or average.span is None:
            return
        if average.running and self.best is not None:
            return
        model.train()
        with self._averaged(always=True):
            point = self.history[-1]
            if not average.running:
                with self.watched("evaluating"):
                    point = replace(point, scores=self.setup.evaluator(model))
            self.final = (point, snapshot(model))
        if (note := self._no_start()) and self.setup.processes.main:
            warnings.warn(note, stacklevel=2)

    def _no_start(self) -> str:
        """Which weights SWAD takes where its rule found no start."""
        average, count = self.average, len(self.history)
        if not isinstance(average, SWAD) or average.started or self.final is None or average.span is None:
            return ""
        first, last = average.span
        return (
            f"swad found no start in {count:,} evaluation{'s' * (count != 1)}: none was followed by "
            f"{average.converge - 1} without a lower validation loss. The result is the mean over steps "
            f"{first:,} to {last:,}, those since the last evaluation but one. Train for longer, or set "
            "a smaller eval_every."
        )

    @property
    def notes(self) -> dict[str, str]:
        """What a reader of the record must know of the averaged weights."""
        found = " ".join(filter(None, (self.few_evaluations, self._no_start())))
        return {"average": found.removesuffix(".")} if found else {}

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        if not self.history:
            raise RuntimeError("the training has not been run yet.")
        name, average, selects = self.setup.options["average"], self.average, self.setup.selects
        if self.final is not None and self._rule:
            return self.final[0], self._rule
        span = average.span if average else None
        unfound = f" ({name} found no start)" if average and not (span and average.started) else ""
        if self.final is not None:
            of = f", {name} of steps {span[0]} to {span[1]}" if span else ""
            return self.final[0], "last step" + of + unfound
        if self.best is not None:
            by = f" by {selects.name}" if selects else ""
            averaged = f", {name}" if average and average.running and span else unfound
            return self.best[0], f"best on validation{by}{averaged}"
        return self.history[-1], "last step" + unfound

    def restore(self) -> Point:
        """Puts the selected weights into the model, ready to predict, and says where they come from."""
        point, _ = self.selected
        self.setup.model.eval()
        if kept := self.final or self.best:
            self.setup.model.load_state_dict(kept[1])
        return point

    def close(self) -> None:
        """Ends the processes that read examples for evaluations."""
        for loader in (self.setup.evaluator.loader, self._refreshing):
            if loader is not None:
                loader.close()

    def state_dict(self) -> dict[str, Any]:
        kept = {"best": None, "start": self.start, "average": None}
        if self.best is not None:
            kept["best"] = {"point": self.best[0].to_dict(), "weights": self.best[1]}
        if self.average is not None:
            kept["average"] = self.average.state_dict()
        return kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.setup.device
        if state["best"] is not None:
            weights = {k: v.to(device) for k, v in state["best"]["weights"].items()}
            step = state["best"]["point"]["step"]
            self.best = next(point for point in self.history if point.step == step), weights
        if state["start"] is not None:
            self.start = {k: v.to(device) for k, v in state["start"].items()}
        if self.average is not None:
            self.average.load_state_dict(state["average"], self.setup.engine.params)
