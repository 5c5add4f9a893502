"""The loop: one training from its first step, or its newest checkpoint, to the selected weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from shoal.data.batch import MetaBatch, TensorData
from shoal.data.loader import Draw, seed_all
from shoal.data.sampler import key
from shoal.errors import InputError
from shoal.options import TrainingOptions, declared
from shoal.tensors import like
from shoal.training.agreement import Tracking
from shoal.training.callbacks import Callback, Callbacks, Point, State
from shoal.training.capture import Steps
from shoal.training.monitor import Monitor
from shoal.training.options import plain
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
        options = setup.options
        self.setup, self.model, self.progress, self.last = setup, setup.model, setup.progress, last
        self.state = State(setup.label, setup.stage, options["steps"], setup.model, setup.engine.optimizer)
        self.monitor = Monitor(setup, self.state)
        self.selection = Selection(self)
        self.tracking = Tracking(setup, self.write_line) if options["track_every"] is not None else None
        internal: list[Callback] = [self.selection, *([self.tracking] if self.tracking else [])]
        self.callbacks = Callbacks(internal, options["callbacks"])
        self.steps = Steps(setup.engine, options["capture"], setup.schedule)
        self.journal: Journal | None = None
        self.signals = Signals(watch=False)
        self.seconds, self._began, self._saved = 0.0, time.monotonic(), time.monotonic()

    @property
    def history(self) -> list[Point]:
        return self.state.history

    @property
    def agreement(self) -> list[dict[str, Any]]:
        """What was tracked; only the newest measurement has its matrix, the log has all of them."""
        return self.tracking.measurements if self.tracking is not None else []

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        return self.selection.selected

    def run(self, journal: Journal | None = None) -> Point:
        """Train to the end, from the newest checkpoint of ``journal`` where there is one.

        The model then has the selected weights, and is in evaluation mode.
        """
        setup, self.journal = self.setup, journal
        self._began = time.monotonic()
        with (
            Signals(watch=journal is not None) as self.signals,
            isolated_rng(setup.device, setup.options["deterministic"]),
            setup.training(),
        ):
            try:
                if journal is not None:
                    self.state.folder = journal.path
                    if (checkpoint := journal.restore()) is not None:
                        self.load_state_dict(checkpoint)
                self._train()
            finally:
                self.selection.close()
                self.progress.close()
                self.seconds += time.monotonic() - self._began
        return self.selection.restore()

    def _train(self) -> None:
        state = self.state
        try:
            self.callbacks("on_start", state)
            self.setup.train_mode()
            self.progress.start(state.step)
            self.monitor.start()
            loader = self.setup.loader(self.setup.sampler, state.step, state.steps)
            state.gather = loader.gather
            with closing(loader):
                self._loop(loader.draws() if isinstance(self.setup.examples, TensorData) else iter(loader))
            self.selection.finish()
        except BaseException:
            with suppress(Exception):
                self.callbacks("on_end", state)
            raise
        self.callbacks("on_end", state)

    def _loop(self, batches: Iterator[MetaBatch | Draw]) -> None:
        state, setup, chunk = self.state, self.setup, 1
        if setup.options["compile"] or self.steps.reason is None:
            self.progress.show("compiling or capturing the first steps")
        while not self.finished:
            began, first = time.monotonic(), state.step
            self._advance(batches, self._next_stop(chunk))
            self.monitor.read()
            if state.step % LOG_EVERY == 0:
                self.write_line(self.monitor.line())
            if evaluated := state.step % setup.eval_every == 0 or state.step >= state.steps:
                self._evaluate()
            if setup.processes.main:
                self.progress.update(state.step, self.monitor.note())
            pace = (state.step - first) / max(time.monotonic() - began, 1e-9)
            chunk = self._save_if_due(evaluated, max(1, min(LONGEST, int(pace * SECONDS))))

    def _advance(self, batches: Iterator[MetaBatch | Draw], stop: int) -> None:
        """To step ``stop``, or after a signal to the next step."""
        setup, state = self.setup, self.state
        first, alone = state.step, setup.engine.alone
        by_domain = setup.sampler.draw in ("domains", "one-domain")
        seeds = key(setup.options["seed"], NUMBERS, np.arange(first, stop), setup.processes.index).tolist()
        for seed in seeds:
            if self.signals.asked and alone and state.step > first:
                return
            batch = state.batch = next(batches)
            # Random numbers are a function of the step, so that nothing of them has to be remembered.
            seed_all(seed, setup.device)
            self.callbacks("before_step", state)
            log = self.steps(state, seed)
            self.monitor.add(log, batch.ids if by_domain else None)
            state.step += 1
            state.losses = log["losses"]
            if setup.schedule is not None:
                with warnings.catch_warnings():  # of the optimizer's step, which a graph does unseen
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    setup.schedule.step()
            self.callbacks("on_step", state)

    def _next_stop(self, chunk: int) -> int:
        """The next step at which something is to be done, ``chunk`` steps from here at the latest."""
        step, steps = self.state.step, self.state.steps
        every = [self.setup.eval_every, LOG_EVERY, self.setup.options["checkpoint_every"] or steps]
        return min(steps, step + chunk, *(step + n - step % n for n in every))

    @property
    def finished(self) -> bool:
        return self.state.step >= self.state.steps or self.selection.stop

    def _evaluate(self) -> None:
        self.monitor.check_weights()
        point = self.selection.evaluate(self.monitor.since_point.take().get("loss", np.nan))
        self.history.append(point)
        scores = point.to_dict()["scores"]
        self.write_line({"phase": self.setup.stage, "step": point.step, "scores": scores})
        self.callbacks("on_evaluate", self.state)

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Write a line of the log."""
        self.state.line = {**line, "seconds": round(self._seconds_now(), 3)}
        if self.journal is not None:
            self.journal.line(self.state.line)
        self.callbacks("on_log", self.state)

    def _seconds_now(self) -> float:
        return self.seconds + time.monotonic() - self._began

    # Checkpoints

    def _save_if_due(self, evaluated: bool, chunk: int) -> int:
        """Write a checkpoint where it is time, or a signal asks for it; how many steps to go on with."""
        every, journal = self.setup.options["checkpoint_every"], self.journal
        overdue = every is None and time.monotonic() - self._saved > CHECKPOINT_SECONDS
        # All processes do the same: by the main one's pace and clock, and anybody's signal.
        found = self.setup.processes.gather((chunk, overdue, self.signals.asked))
        chunk, overdue, _ = found[0]
        asked = next((signal for _, _, signal in found if signal is not None), None)
        regular = evaluated if every is None else self.state.step % every == 0 or self.finished
        if journal is not None and (asked or overdue or regular):
            self._saved = time.monotonic()
            self.monitor.check_weights()
            if journal.checkpoint(self.state.step, self.state_dict()):
                self.callbacks("on_checkpoint", self.state)
        if journal is not None and asked and not (self.finished and self.last):
            raise self._interrupted(journal, int(asked))
        return chunk

    def _parts(self) -> dict[str, Any]:
        """What has a state dict of its own, by its name in checkpoints."""
        setup = self.setup
        named: dict[str, Any] = {"algorithm": setup.algorithm, "schedule": setup.schedule}
        named |= {"monitor": self.monitor, "selection": self.selection, "tracking": self.tracking}
        named |= {f"callback {n}": each for n, each in enumerate(self.callbacks.users)}
        return {name: part for name, part in named.items() if part is not None}

    def _optimizers(self) -> dict[str, Optimizer]:
        engine = self.setup.engine
        return {"model": engine.optimizer, **engine.auxiliary}

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the training depends on."""
        return {
            "training": _identity(self.setup),
            "step": self.state.step,
            "seconds": self._seconds_now(),
            "history": [point.to_dict() for point in self.history],
            "optimizers": {name: _optimizer_state(each) for name, each in self._optimizers().items()},
            **{name: dict(part.state_dict()) for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint was made; that of another training is refused."""
        before, now = state["training"], _identity(self.setup)
        if different := [k for k in now if before.get(k) != now[k]]:
            changes = ", ".join(f"{k} was {before.get(k)!r}, now {now[k]!r}" for k in different)
            raise InputError(f"the checkpoint belongs to another training: {changes}.")
        self.state.step, self.seconds = state["step"], state["seconds"]
        self.history[:] = [Point.from_dict(point) for point in state["history"]]
        for name, optimizer in self._optimizers().items():
            _load_optimizer(optimizer, state["optimizers"][name])
        try:
            for name, part in self._parts().items():
                if name in state:  # a callback may be new
                    part.load_state_dict(state[name])
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit this model: {error}") from error

    def _interrupted(self, journal: Journal, number: int) -> Interrupted:
        step, saved = self.state.step, journal.saved
        where = f"the last saved step is {saved}" if saved is not None else "and nothing could be saved"
        if saved == step or not self.setup.processes.main:
            where = "which is saved"
        return Interrupted(f"interrupted at step {step}, {where}. Resume with: {journal.resume_hint}", number)


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """With learning rates as numbers, also where a CUDA graph reads them off the device."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:  # which are copies
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = float(group["lr"])
    return state


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Its moments and settings, but not how they are computed: that is this device's and this run's."""
    before, saved = [dict(group) for group in optimizer.param_groups], state["param_groups"]
    if len(saved) == len(before):
        kernels = [{k: group[k] for k in KERNELS if k in group} for group in before]
        saved = [{**group, **own} for group, own in zip(saved, kernels, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": saved})
    for group, old in zip(optimizer.param_groups, before, strict=True):
        if isinstance(old.get("lr"), Tensor):
            group["lr"] = old["lr"].fill_(float(group["lr"]))
    for p, entry in optimizer.state.items():  # checkpoints are contiguous, the parameters may not be
        same = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.shape == p.shape}
        entry.update({k: like(v, p) for k, v in same.items()})


def _identity(setup: Setup) -> dict[str, Any]:
    """What must be the same when a training is resumed."""
    options, train, optimizer = setup.options, setup.data.splits["train"], setup.engine.optimizer
    return {
        **{name: plain(options[name]) for name in declared(TrainingOptions)},  # type: ignore[literal-required]
        "loss": plain(options["loss"]),
        "stage": setup.stage,
        "algorithm": type(setup.algorithm).__name__,
        "precision": setup.precision,
        "optimizer": type(optimizer).__name__,
        "lr": [float(group.get("initial_lr", group.get("lr", 1.0))) for group in optimizer.param_groups],
        "domains": list(train.names)[:1000],
        "sizes": train.sizes.tolist()[:1000],
    }
