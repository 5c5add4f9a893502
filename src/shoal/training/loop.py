"""One training, from checked input to the selected weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm
from shoal.data.batch import DomainData
from shoal.optim import inner_of
from shoal.options import FitOptions
from shoal.training.callbacks import Callback, Callbacks, State
from shoal.training.formats import choose
from shoal.training.history import Point
from shoal.training.journal import Journal
from shoal.training.monitoring import Monitor, Window
from shoal.training.probing import only_trained, train_mode
from shoal.training.processes import Processes
from shoal.training.progress import Told
from shoal.training.retraining import Plan, plan, with_validation
from shoal.training.selection import Selection
from shoal.training.session import CHUNK, SECONDS, Session
from shoal.training.setup import LOG_EVERY, Setup
from shoal.training.stepping import Stepper
from shoal.training.stopping import Interrupted, Signals
from shoal.training.world import world

CHECKPOINT_SECONDS = 300.0


class Training(Setup):
    """Trains ``model`` in place; everything is checked when it is made, before any step.

    ``state`` says where it stands, ``monitor`` watches the losses, ``selection`` evaluates and keeps weights.
    A warm start is another training, ``warm``, that comes first; with ``options["retrain"]`` another,
    ``retraining``, comes last, once this one has found its ``plan``.
    """

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: FitOptions,
        label: str | None = None,
        phase: str = "train",
        processes: Processes | None = None,
        only: nn.Module | None = None,
        horizon: int | None = None,
    ) -> None:
        super().__init__(algorithm, model, data, options, label, phase, processes, only, horizon)
        main = self.processes.main
        optimizer = self.engine.optimizer
        last = phase in ("train", "retrain") and not options["retrain"]
        self.state = State(self.label, phase, options["steps"], self.model, optimizer, last, main)
        self.monitor = Monitor(self, self.state)
        self.selection = Selection(self, self.state, self._watched)
        shown = Told(options["progress"]) if main and callable(options["progress"]) else self.progress
        self._ours: list[Callback] = [shown]
        if self.tracking is not None:
            self.tracking.log = self._log
            self._ours.append(self.tracking)
        self.callbacks = Callbacks(self._ours, options["callbacks"])
        self.warm: Training | None = None
        if options["warm_start"] is not None:
            name, given = "warm start", self.warm_options()
            of = name if phase == "train" else f"{phase} {name}"
            self.warm = Training("erm", self.model, data, given, name, of, self.processes, self.head)
        self.retraining: Training | None = None
        self.plan: Plan | None = None
        self._searched: Point | None = None  # what the search selected
        self.initial: dict[str, Tensor] | None = None
        """The weights before the warm start, if they are to be trained from again."""
        if options["compile"] and phase == "train":
            self.compile()
        self.session: Session | None = None
        self.seconds, self._began = 0.0, time.monotonic()
        self._show: Callable[[str, int, int], None] = lambda text, done, total: None

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def history(self) -> list[Point]:
        return self.state.history

    @property
    def agreement(self) -> list[dict[str, Any]]:
        """What was tracked; only the newest measurement has its matrix, the log has all of them."""
        return self.tracking.found if self.tracking else []

    @property
    def points(self) -> list[Point]:
        """All that was measured: the history, and the final weights where they are not of a step in it."""
        found = list(self.history)
        for point in (self._searched, self.selected[0]) if found else ():
            if point is not None and point not in found:
                found.append(point)
        return found

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        if self.plan is None or self._searched is None:
            return self.selection.selected
        if self.retraining is None or not self.retraining.history:
            return self._searched, self.plan["rule"]
        point, rule = self.retraining.selected
        return point, f"retrained with the validation data, {rule} (the search: {self.plan['rule']})"

    def restore_selected(self) -> Point:
        """Puts the selected weights into the model, ready to predict, and says where they come from."""
        return (self.retraining or self).selection.restore()

    def make_retraining(self, found: Plan) -> Training:
        """The training on all data that a search calls for, from the initial weights."""
        assert self.initial is not None
        self.plan, at = found, found["at"]
        self._searched = Point.from_dict(found["point"]) if at is None else self.history[at]
        self.selection.best = self.selection.final = self.selection.start = self.average = None
        inner_of(self.engine.optimizer).state.clear()
        self.model.load_state_dict(self.initial)
        self.retraining = Training(
            type(self.algorithm),
            self.model,
            with_validation(replace(self.data, examples=self.examples)),
            self.retrain_options(found["options"]),
            "retraining",
            "retrain",
            self.processes,
            horizon=self.task.steps,
        )
        if self.retraining.algorithm.extractor is not None:
            torch.compiler.reset()  # a compiled model knows no hooks but those of the search
        return self.retraining

    @property
    def seconds_now(self) -> float:
        """Spent in this training's turns, the present one included."""
        return self.seconds + time.monotonic() - self._began

    def run(self, journal: Journal | None = None) -> None:
        """Trains to the end, resuming from the newest checkpoint of ``journal`` where there is one."""
        with Signals(journal is not None) as signals, world(self.device, self.options["deterministic"]):
            for _ in self.stages(journal, signals):
                pass

    def stages(self, journal: Journal | None, signals: Signals) -> Iterator[None]:
        """The same in turns, so that several trainings can share a device: each gives it a step to do.

        Random numbers are a function of the step, so that the others' do not matter; see :func:`world`.
        """
        turns = self._stages(journal, signals)
        while True:
            self._began = time.monotonic()
            try:
                next(turns)
            except StopIteration:
                return
            finally:
                self.seconds += time.monotonic() - self._began
            yield

    def _stages(self, journal: Journal | None, signals: Signals) -> Iterator[None]:
        session = Session(self, journal, signals)
        try:
            if not session.restore():
                self._choose_format(session)
            yield from self._in_turn(session)
            if self.options["retrain"]:
                if self.retraining is None:
                    session.retrain(plan(self))
                assert self.retraining is not None
                yield from self.retraining._in_turn(session)
        finally:
            for training in session.trainings:
                training.selection.close()
                training.give_back()

    def _choose_format(self, session: Session) -> None:
        """Where it is left to a trial, or may have to be given up."""
        with self._recording(), self.progress.phase("timing memory formats and precisions"):
            choice = choose(self, self.state.step)
        session.use(choice)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """What records the model's features is attached to it."""
        with self.algorithm.recording(), self.miro.recording() if self.miro else nullcontext():
            yield

    def _in_turn(self, session: Session) -> Iterator[None]:
        """The warm start and the training, but for what is over."""
        with self._recording():
            if self.warm is not None and not session.is_past(self.warm):
                yield from self.warm._train(session)
                self.warm.restore_selected()
            if not session.is_past(self):
                yield from self._train(session)

    def _train(self, session: Session) -> Iterator[None]:
        self.session, state = session, self.state
        if session.journal is not None:
            self.callbacks.ours = [*self._ours, *session.journal.callbacks]
            state.folder = session.journal.folder.path
        self.monitor.begin()
        if not state.step:
            self.selection.begin()
            if self.l2_sp is not None:
                self.l2_sp.begin()
        try:
            self.callbacks("on_start", state)
            if self.choice.trial and not state.step:
                self._log({"phase": self.phase, "step": 0, "format": self.choice.state_dict()})
            if not self.selection.finished:
                with (
                    only_trained(self.model, self.only),
                    closing(Stepper(self, state, self.callbacks)) as stepper,
                ):
                    yield from self._loop(session, stepper)
            self.selection.finish()
            state.seconds = session.main.seconds_now
        except BaseException:
            self.callbacks("on_end", state, failing=True)
            raise
        self.callbacks("on_end", state)

    def _loop(self, session: Session, stepper: Stepper) -> Iterator[None]:
        options, state, selection = self.options, self.state, self.selection
        train_mode(self.model, self.only)
        chunk, saved = 1, time.monotonic()
        while not selection.finished:
            began, first = time.monotonic(), state.step
            if not selection.due:
                with self.progress.phase(self._beginning()):
                    yield from stepper.advance(stepper.next_stop(chunk), session.signals)
                self.callbacks("on_sync", state)
                self.monitor.read(stepper.read())
                if state.step % LOG_EVERY == 0:
                    self._log(self.monitor.line())
            measured = selection.due
            if measured:
                self._measure(session)
            state.note = self.monitor.note()
            self.callbacks("on_progress", state)
            pace = (state.step - first) / max(time.monotonic() - began, 1e-9)
            due = options["checkpoint_every"] is None and time.monotonic() - saved > CHECKPOINT_SECONDS
            chunk, due, asked = session.agreed(max(1, min(CHUNK, int(pace * SECONDS))), due)
            at_step = options["checkpoint_every"] and state.step % options["checkpoint_every"] == 0
            regular = measured and (options["checkpoint_every"] is None or selection.finished)
            if asked or due or at_step or regular:
                self._checkpoint(session)
                saved = time.monotonic()
            if session.journal and asked and not (selection.finished and state.last):
                raise session.interrupted(self)

    def _beginning(self) -> str:
        """What may make the first steps slow."""
        if self.seconds_now > 60 or not (self.options["compile"] or self.unroll):
            return ""
        return "compiling the model" if self.options["compile"] else "capturing steps"

    def _log(self, line: Mapping[str, Any]) -> None:
        state = self.state
        state.seconds = self.session.main.seconds_now if self.session else self.seconds_now
        state.line = {**line, "seconds": round(state.seconds, 3)}
        self.callbacks("on_log", state)

    def _measure(self, session: Session) -> None:
        self.monitor.check_weights()
        try:
            point = self.selection.evaluate(self.monitor.since_point.mean)
        except Interrupted:  # the evaluation is repeated when the training is resumed
            if session.journal is not None:
                self._checkpoint(session)
                raise session.interrupted(self) from None
            raise
        self.monitor.since_point = Window()
        self.monitor.warn_of_collapse(point)
        self.selection.add(point)
        scores = point.to_dict()["scores"]
        self._log({"phase": self.phase, "step": point.step, "scores": scores})
        self.callbacks("on_evaluate", self.state)

    def _checkpoint(self, session: Session) -> None:
        if session.checkpoint(self):
            self.callbacks("on_checkpoint", self.state)

    def watch(self, split: str, done: int, total: int) -> None:
        """Between two batches of an evaluation, or of another pass over data."""
        self._show(f"evaluating {split}" if split in self.data.splits else split, done, total)
        if self.session is not None:
            self.session.tick(self)

    @contextmanager
    def _watched(self, text: str) -> Iterator[None]:
        if self.session is not None:
            self.session.count_ticks()
        with self.progress.phase(text) as self._show:
            yield
