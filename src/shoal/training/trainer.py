"""The loop: one training from its first step, or its newest checkpoint, to the selected weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from shoal.data.batch import InMemory, MetaBatch
from shoal.data.loader import Draw, seed_all
from shoal.data.sampler import key
from shoal.errors import InputError
from shoal.options import TrainingOptions, declared
from shoal.tensors import like
from shoal.training.agreement import Tracking
from shoal.training.callbacks import Callbacks, Point, State
from shoal.training.capture import Steps
from shoal.training.monitor import Monitor, Window
from shoal.training.options import plain
from shoal.training.progress import ProgressFunction
from shoal.training.selection import Selection
from shoal.training.setup import Setup
from shoal.training.stopping import Interrupted, Signals, isolated_rng

if TYPE_CHECKING:
    from shoal.training.journal import Journal

NUMBERS = 31  # what a key is for
LOG_EVERY = 50
"""Steps between two lines of the log."""
LONGEST, SECONDS = 50, 0.5
"""The most steps between two readings of losses off the device, and about as long as they should take."""
CHECKPOINT_SECONDS = 300.0
KERNELS = ("foreach", "fused", "capturable")


class Trainer:
    """Trains the model of a :class:`~shoal.training.setup.Setup` in place.

    ``state`` says where it stands, ``monitor`` watches the losses, ``selection`` evaluates and keeps weights.
    What changes from step to step, beside the model, is a function of the seed and the step or is in a state
    dict, so that a training that is resumed is the same, bit for bit.
    """

    def __init__(self, setup: Setup, *, last: bool = True) -> None:
        options, main = setup.options, setup.processes.main
        self.setup, self.model = setup, setup.model
        self.state = State(
            setup.label, setup.stage, options["steps"], setup.model, setup.engine.optimizer, last, main
        )
        self.monitor = Monitor(setup, self.state)
        self.selection = Selection(self)
        self.progress: Any = setup.progress
        shown = (
            ProgressFunction(options["progress"]) if main and callable(options["progress"]) else self.progress
        )
        self.tracking = Tracking(setup, self.write_line) if options["track_every"] is not None else None
        tracked = [self.tracking] if self.tracking is not None else []
        self.callbacks = Callbacks([self.selection, shown, *tracked], options["callbacks"])
        self.steps = Steps(setup.engine, options["capture"], setup.schedule)
        self.journal: Journal | None = None
        self.signals = Signals(watch=False)
        self.seconds, self._began, self._saved = 0.0, time.monotonic(), time.monotonic()
        self._show: Any = lambda text, done, total: None

    @property
    def history(self) -> list[Point]:
        return self.state.history

    @property
    def agreement(self) -> list[dict[str, Any]]:
        """What was tracked; only the newest measurement has its matrix, the log has all of them."""
        return self.tracking.found if self.tracking is not None else []

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        return self.selection.selected

    def run(self, journal: Journal | None = None) -> Point:
        """Trains to the end, from the newest checkpoint of ``journal`` where there is one.

        The model then has the selected weights, and is in evaluation mode.
        """
        setup, self.journal = self.setup, journal
        self._began = time.monotonic()
        with (
            Signals(watch=journal is not None) as self.signals,
            isolated_rng(setup.device, setup.options["deterministic"]),
            setup.training(),
        ):
            setup.watch = self.watch
            try:
                self._restore()
                self._train()
            finally:
                self.selection.close()
                self.seconds += time.monotonic() - self._began
        return self.selection.restore()

    def _train(self) -> None:
        state, options = self.state, self.setup.options
        if self.journal is not None:
            self.callbacks.add(self.journal.callbacks)
            state.folder = self.journal.folder.path
        self.monitor.begin()
        try:
            self.callbacks("on_start", state)
            self.setup.train_mode()
            loader = self.setup.loader(self.setup.sampler, state.step, options["steps"])
            state.gather = loader.gather
            with closing(loader):
                self._loop(loader.draws() if isinstance(self.setup.examples, InMemory) else iter(loader))
            self.selection.finish()
            state.seconds = self._seconds_now()
        except BaseException:
            self.callbacks("on_end", state, failing=True)
            raise
        self.callbacks("on_end", state)

    def _loop(self, batches: Iterator[MetaBatch | Draw]) -> None:
        state, chunk = self.state, 1
        while not self.finished:
            began, first = time.monotonic(), state.step
            if not self.evaluation_is_due:
                with self.progress.phase(self._slow_start()):
                    self._advance(batches, self._next_stop(chunk))
                self.callbacks("on_sync", state)
                self.monitor.read()
                if state.step % LOG_EVERY == 0:
                    self.write_line(self.monitor.line())
            evaluated = self.evaluation_is_due
            if evaluated:
                self._evaluate()
            state.note = self.monitor.note()
            self.callbacks("on_progress", state)
            pace = (state.step - first) / max(time.monotonic() - began, 1e-9)
            chunk = max(1, min(LONGEST, int(pace * SECONDS)))
            chunk = self._checkpoint_if_due(evaluated, chunk)

    def _advance(self, batches: Iterator[MetaBatch | Draw], stop: int) -> None:
        """To step ``stop``, or after a signal to the next step."""
        setup, state = self.setup, self.state
        first, alone = state.step, setup.processes.count == 1
        seeds = key(setup.options["seed"], NUMBERS, np.arange(first, stop), setup.processes.index).tolist()
        for seed in seeds:
            if self.signals.asked and alone and state.step > first:
                return
            state.take(next(batches))
            # Random numbers are a function of the step, so that nothing of them has to be remembered.
            seed_all(seed, setup.device)
            self.callbacks("before_step", state)
            log = self.steps(state, seed)
            self.monitor.add(log)
            state.step += 1
            state.losses = log["losses"]
            if setup.schedule is not None:
                with warnings.catch_warnings():  # of the optimizer's step, which a graph does unseen
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    setup.schedule.step()
            self.callbacks("on_step", state)

    def _next_stop(self, chunk: int) -> int:
        """The next step at which something is to be done, ``chunk`` steps from here at the latest."""
        options, step = self.setup.options, self.state.step
        every = [self.setup.eval_every, LOG_EVERY, options["checkpoint_every"] or options["steps"]]
        return min(options["steps"], step + chunk, *(step + n - step % n for n in every))

    @property
    def evaluation_is_due(self) -> bool:
        """Whether this step is still to be evaluated, as also after an evaluation that was interrupted."""
        step = self.state.step
        at = step % self.setup.eval_every == 0 or step >= self.state.steps
        return at and step > (self.history[-1].step if self.history else 0)

    @property
    def finished(self) -> bool:
        over = self.state.step >= self.state.steps or self.selection.stop
        return over and not self.evaluation_is_due

    def _evaluate(self) -> None:
        self.monitor.check_weights()
        try:
            point = self.selection.evaluate(self.monitor.since_point.means.get("loss", np.nan))
        except Interrupted:  # the evaluation is repeated when the training is resumed
            self._checkpoint()
            raise self._interrupted() from None
        self.monitor.since_point = Window()
        self.monitor.warn_of_collapse(point)
        self.history.append(point)
        scores = point.to_dict()["scores"]
        self.write_line({"phase": self.setup.stage, "step": point.step, "scores": scores})
        self.callbacks("on_evaluate", self.state)

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Writes a line of the log."""
        self.state.seconds = self._seconds_now()
        self.state.line = {**line, "seconds": round(self.state.seconds, 3)}
        self.callbacks("on_log", self.state)

    def _seconds_now(self) -> float:
        return self.seconds + time.monotonic() - self._began

    def _slow_start(self) -> str:
        """What may make the first steps slow."""
        if self._seconds_now() > 60 or not (self.setup.options["compile"] or self.steps.reason is None):
            return ""
        return "compiling the model" if self.setup.options["compile"] else "capturing steps"

    @contextmanager
    def watched(self, text: str) -> Iterator[None]:
        """A block in which batches are counted, and may be interrupted by a signal."""
        self._ticks, self._next_tick, self._tick_began = 0, 0, time.monotonic()
        with self.progress.phase(text) as self._show:
            yield

    def watch(self, split: str, done: int, total: int) -> None:
        """Between two batches of an evaluation, or of another pass over data."""
        self._show(f"evaluating {split}" if split in self.setup.data.splits else split, done, total)
        if self.journal is None:
            return
        asked, processes = self.signals.asked is not None, self.setup.processes
        if processes.count > 1:  # all come here equally often, and ask each other now and then
            self._ticks += 1
            if self._ticks < self._next_tick:
                return
            pace = self._ticks / max(time.monotonic() - self._tick_began, 1e-9)
            wait = max(1, min(LONGEST, int(pace * SECONDS)))
            waits, askers = processes.numbers(wait if processes.main else 0, float(asked))
            self._next_tick, asked = self._ticks + int(waits), askers > 0
        if asked:
            raise self._interrupted()

    # Checkpoints

    def _checkpoint_if_due(self, evaluated: bool, chunk: int) -> int:
        """Writes a checkpoint where it is time, or a signal asks for it; how many steps to go on with."""
        every, step, processes = self.setup.options["checkpoint_every"], self.state.step, self.setup.processes
        asked = self.signals.asked is not None
        due = every is None and time.monotonic() - self._saved > CHECKPOINT_SECONDS
        if processes.count > 1:  # all do the same: by the main one's pace and clock, and anybody's signal
            numbers = (chunk, float(due)) if processes.main else (0, 0.0)
            chunks, dues, askers = processes.numbers(*numbers, float(asked))
            chunk, due, asked = int(chunks), dues > 0, askers > 0
        regular = evaluated if every is None else step % every == 0 or self.finished
        if asked or due or regular:
            self._checkpoint()
        if self.journal is not None and asked and not (self.finished and self.state.last):
            raise self._interrupted()
        return chunk

    def _checkpoint(self) -> None:
        self._saved = time.monotonic()
        if self.journal is not None:
            self.monitor.check_weights()
            if self.journal.checkpoint(self.state.step, self.state_dict()):
                self.callbacks("on_checkpoint", self.state)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the training depends on."""
        setup = self.setup
        return {
            "made_with": _fingerprint(setup),
            "step": self.state.step,
            "seconds": self._seconds_now(),
            "history": [point.to_dict() for point in self.history],
            "algorithm": dict(setup.algorithm.state_dict()),
            "optimizer": _optimizer_state(setup.engine.optimizer),
            "auxiliary": {name: o.state_dict() for name, o in setup.engine.auxiliary.items()},
            "schedule": None if setup.schedule is None else setup.schedule.state_dict(),
            "monitor": self.monitor.state_dict(),
            "selection": self.selection.state_dict(),
            "tracking": None if self.tracking is None else self.tracking.state_dict(),
            "callbacks": [callback.state_dict() for callback in self.callbacks.own],
        }

    def _restore(self) -> None:
        """Continues where the newest checkpoint was made, if there is one; refuses another run's."""
        state = None if self.journal is None else self.journal.restore()
        if state is None:
            return
        was, now = state["made_with"], _fingerprint(self.setup)
        if different := [k for k in now if was.get(k) != now[k]]:
            changes = ", ".join(f"{k} was {was.get(k)!r}, now {now[k]!r}" for k in different)
            raise InputError(f"the checkpoint belongs to another training: {changes}.")
        setup = self.setup
        self.state.step, self.seconds = state["step"], state["seconds"]
        self.history[:] = [Point.from_dict(point) for point in state["history"]]
        try:
            setup.algorithm.load_state_dict(state["algorithm"])
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit this model: {error}") from error
        _load_optimizer(setup.engine.optimizer, state["optimizer"])
        for name, optimizer in setup.engine.auxiliary.items():
            _load_optimizer(optimizer, state["auxiliary"][name])
        if setup.schedule is not None:
            setup.schedule.load_state_dict(state["schedule"])
        self.monitor.load_state_dict(state["monitor"])
        self.selection.load_state_dict(state["selection"])
        if self.tracking is not None:
            self.tracking.load_state_dict(state["tracking"])
        for callback, own in zip(self.callbacks.own, state["callbacks"], strict=False):
            callback.load_state_dict(own)

    def _interrupted(self) -> Interrupted:
        assert self.journal is not None
        number, step, saved = int(self.signals.asked or 15), self.state.step, self.journal.saved
        if saved is None and self.setup.processes.main:
            return Interrupted(f"interrupted at step {step}; no checkpoint could be written.", number)
        where = "which is saved" if saved in (step, None) else f"the last saved step is {saved}"
        return Interrupted(
            f"interrupted at step {step}, {where}. Resume with: {self.journal.resume_hint}", number
        )


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """With learning rates as numbers, also where a CUDA graph reads them off the device."""
    state = optimizer.state_dict()
    groups = [
        {**group, "lr": float(group["lr"])} if isinstance(group.get("lr"), Tensor) else group
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Its moments and settings, but not how they are computed: that is this device's and this run's."""
    own = [{k: group[k] for k in KERNELS if k in group} for group in optimizer.param_groups]
    rates = [group.get("lr") for group in optimizer.param_groups]
    saved = state["param_groups"]
    if len(saved) == len(own):
        saved = [{**group, **kernels} for group, kernels in zip(saved, own, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": saved})
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(rate, Tensor):
            group["lr"] = rate.fill_(float(group["lr"]))
    for p, entry in optimizer.state.items():  # checkpoints are contiguous, the parameters may not be
        same = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.shape == p.shape}
        entry.update({k: like(v, p) for k, v in same.items()})


def _fingerprint(setup: Setup) -> dict[str, Any]:
    """What must be the same when a training is resumed."""
    options, sampler, train = setup.options, setup.sampler, setup.data.splits["train"]
    optimizer = setup.engine.optimizer
    return {
        **{name: plain(options[name]) for name in declared(TrainingOptions)},  # type: ignore[literal-required]
        "loss": plain(options["loss"]),
        "stage": setup.stage,
        "algorithm": type(setup.algorithm).__name__,
        "draw": sampler.draw,
        "batch_size": sampler.batch_size,
        "domains_per_step": sampler.domains_per_step,
        "precision": setup.precision,
        "optimizer": type(optimizer).__name__,
        "lr": [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups],
        "select": setup.select,
        "metric": setup.selects.name if setup.selects else None,
        "eval_every": setup.eval_every,
        "domains": list(train.names)[:1000],
        "sizes": train.sizes.tolist()[:1000],
    }
