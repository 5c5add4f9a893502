"""The loop: one training from its first step, or its newest checkpoint, to the selected weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.data.batch import MetaBatch, TensorData
from shoal.data.loader import Draw, seed_all
from shoal.data.sampler import key
from shoal.errors import InputError
from shoal.options import TrainingOptions, declared
from shoal.tensors import like
from shoal.training.agreement import Tracking
from shoal.training.callbacks import Callback, CallbackError, Point, State
from shoal.training.capture import Steps
from shoal.training.folder import RunFolder
from shoal.training.monitor import Monitor
from shoal.training.options import plain
from shoal.training.selection import Selection
from shoal.training.setup import Setup
from shoal.training.stopping import Diverged, Interrupted, Signals, isolated_rng

NUMBERS = 31  # what a key is for
LOG_EVERY = 50
"""Steps between two lines of the log."""
SECONDS, TOGETHER_EVERY = 0.5, 10
"""After how long losses are read off the device, at the latest; several processes do so after some steps."""
CHECKPOINT_SECONDS = 60.0
NO_MEMORY = "allocate memory"  # of the CPU, in the words of torch
KERNELS = ("foreach", "fused", "capturable")


class Trainer:
    """Trains the model of a :class:`~shoal.training.setup.Setup` in place.

    ``state`` says where it stands, ``monitor`` watches the losses, ``selection`` evaluates and keeps weights.
    What changes from step to step, beside the model, is a function of the seed and the step or is in a state
    dict, so that a training that is resumed is the same, bit for bit.
    """

    def __init__(self, setup: Setup) -> None:
        options = setup.options
        self.setup, self.model = setup, setup.model
        self.state = State(setup.label, setup.stage, options["steps"], setup.model, setup.engine.optimizer)
        self.history = self.state.history
        self.monitor = Monitor(setup, self.state)
        self.selection = Selection(self)
        self.tracking = Tracking(setup, self.write_line) if options["track_every"] is not None else None
        self.internal: list[Callback] = [self.selection, *([self.tracking] if self.tracking else [])]
        self.steps = Steps(setup.engine, options["capture"], setup.schedule)
        self.folder: RunFolder | None = None
        self.signals = Signals(watch=False)
        self.seconds, self._began = 0.0, time.monotonic()
        self._saved = self._read = self._began

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        return self.selection.selected

    def run(self, folder: RunFolder | None = None) -> Point:
        """Train to the end, from the newest checkpoint in ``folder`` where there is one.

        The model then has the selected weights, and is in evaluation mode.
        """
        setup, self.folder = self.setup, folder
        self._began = time.monotonic()
        with (
            Signals(watch=folder is not None) as self.signals,
            isolated_rng(setup.device, setup.options["deterministic"]),
            setup.training(),
        ):
            try:
                if folder is not None:
                    self.state.folder = folder.path
                    if (checkpoint := folder.restore()) is not None:
                        self.load_state_dict(checkpoint)
                self._train()
            finally:
                self.selection.close()
                setup.progress.close()
                self.seconds += time.monotonic() - self._began
        return self.selection.restore()

    def _train(self) -> None:
        setup, state = self.setup, self.state
        try:
            self._notify("on_start")
            loader = setup.loader(setup.sampler, state.step, state.steps)
            state.gather = loader.gather
            with closing(loader), _enough_memory(setup):
                self._loop(loader.draws() if isinstance(setup.data.examples, TensorData) else iter(loader))
            self.selection.finish()
        except BaseException:
            with suppress(Exception):
                self._notify("on_end")
            raise
        self._notify("on_end")

    def _loop(self, batches: Iterator[MetaBatch | Draw]) -> None:
        state, setup, seeds = self.state, self.setup, self._seeds()
        if setup.options["compile"] or self.steps.reason is None:
            setup.progress.show("compiling or capturing the first steps")
        while not self.finished:
            self._step(next(batches), next(seeds))
            while not self._is_due():
                self._step(next(batches), next(seeds))
            self.monitor.read()
            if state.step % LOG_EVERY == 0:
                self.write_line(self.monitor.line())
            if state.step % setup.eval_every == 0 or state.step >= state.steps:
                self._evaluate()
            setup.progress.update(state.step, self.monitor.note())
            if self.folder is not None:
                self._save_if_due(self.folder)
            self._read = time.monotonic()

    def _seeds(self) -> Iterator[int]:
        """Random numbers are a function of the step, so that nothing of them has to be remembered."""
        seed, process = self.setup.options["seed"], self.setup.processes.index
        for first in range(self.state.step, self.state.steps, 1000):
            yield from key(seed, NUMBERS, np.arange(first, first + 1000), process).tolist()

    def _step(self, batch: MetaBatch | Draw, seed: int) -> None:
        setup, state = self.setup, self.state
        state.batch = batch
        seed_all(seed, setup.device)
        self._notify("before_step")
        log = self.steps(state, seed)
        by_domain = setup.sampler.draw in ("domains", "one-domain")
        self.monitor.add(log, batch.ids if by_domain else None)
        state.step += 1
        state.losses = log["losses"]
        if setup.schedule is not None:
            with warnings.catch_warnings():  # of the optimizer's step, which a graph does unseen
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                setup.schedule.step()
        self._notify("on_step")

    def _is_due(self) -> bool:
        """Whether there is something to do before the next step; all processes say the same."""
        step, steps = self.state.step, self.state.steps
        every = (self.setup.eval_every, LOG_EVERY, self.setup.options["checkpoint_every"] or steps)
        if step >= steps or any(step % n == 0 for n in every):
            return True
        if not self.setup.engine.alone:
            return step % TOGETHER_EVERY == 0
        return self.signals.asked is not None or time.monotonic() - self._read > SECONDS

    @property
    def finished(self) -> bool:
        return self.state.step >= self.state.steps or self.selection.stop

    def _evaluate(self) -> None:
        self.monitor.check_weights()
        point = self.selection.evaluate(self.monitor.mean_loss())
        self.history.append(point)
        scores = point.to_dict()["scores"]
        self.write_line({"phase": self.setup.stage, "step": point.step, "scores": scores})
        self._notify("on_evaluate")

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Write a line of the log."""
        self.state.line = {**line, "seconds": round(self._seconds_now(), 3)}
        if self.folder is not None:
            self.folder.log(self.state.line)
        self._notify("on_log")

    def _seconds_now(self) -> float:
        return self.seconds + time.monotonic() - self._began

    def _notify(self, event: str) -> None:
        """Calls the callbacks: ours, whose errors are passed on, and the user's, whose errors are named."""
        for callback in self.internal:
            getattr(callback, event)(self.state)
        for callback in self.setup.options["callbacks"]:
            try:
                getattr(callback, event)(self.state)
            except (InputError, Diverged):
                raise
            except Exception as error:
                first = f"{type(error).__name__}: {error}".splitlines()[0]
                resumable = "; its newest checkpoint can be resumed" if self.folder else ""
                raise CallbackError(
                    f"callback {type(callback).__qualname__} failed in {event} at step {self.state.step} of "
                    f"{self.state.label} ({first}){resumable}."
                ) from error

    # Checkpoints

    def _save_if_due(self, folder: RunFolder) -> None:
        """Write a checkpoint where it is time, or a signal asks for it."""
        state, every = self.state, self.setup.options["checkpoint_every"]
        due = state.step % every == 0 if every else time.monotonic() - self._saved > CHECKPOINT_SECONDS
        # All processes do the same: by the main one's clock, and anybody's signal.
        found = self.setup.processes.gather((due, self.signals.asked))
        asked = next((signal for _, signal in found if signal is not None), None)
        if asked or found[0][0] or self.finished:
            self._saved = time.monotonic()
            self.monitor.check_weights()
            if folder.save(state.step, self.state_dict()):
                self._notify("on_checkpoint")
        if asked:
            where = "which is saved"
            if folder.main and folder.saved != state.step:
                where = f"the last saved step is {folder.saved}" if folder.saved else "nothing could be saved"
            raise Interrupted(
                f"interrupted at step {state.step}, {where}. Resume with: {folder.hint}", int(asked)
            )

    def _parts(self) -> dict[str, Any]:
        """What has a state dict of its own, by its name in checkpoints."""
        setup = self.setup
        named: dict[str, Any] = {"algorithm": setup.algorithm, "schedule": setup.schedule}
        named |= {"monitor": self.monitor, "selection": self.selection, "tracking": self.tracking}
        named |= {f"callback {n}": each for n, each in enumerate(setup.options["callbacks"])}
        return {name: part for name, part in named.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the training depends on."""
        engine = self.setup.engine
        return {
            "training": _identity(self.setup),
            "step": self.state.step,
            "seconds": self._seconds_now(),
            "history": [point.to_dict() for point in self.history],
            "optimizers": [_optimizer_state(each) for each in (engine.optimizer, *engine.auxiliary.values())],
            **{name: dict(part.state_dict()) for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint was made; that of another training is refused."""
        before, now, engine = state["training"], _identity(self.setup), self.setup.engine
        if different := [k for k in now if before.get(k) != now[k]]:
            changes = ", ".join(f"{k} was {before.get(k)!r}, now {now[k]!r}" for k in different)
            raise InputError(f"the checkpoint belongs to another training: {changes}.")
        self.state.step, self.seconds = state["step"], state["seconds"]
        self.history[:] = [Point.from_dict(point) for point in state["history"]]
        try:
            optimizers = (engine.optimizer, *engine.auxiliary.values())
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                _load_optimizer(optimizer, saved)
            for name, part in self._parts().items():
                if name in state:  # a callback may be new
                    part.load_state_dict(state[name])
        except (RuntimeError, ValueError) as error:
            raise InputError(f"the checkpoint does not fit this model: {error}") from error


@contextmanager
def _enough_memory(setup: Setup) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and NO_MEMORY not in str(error):
            raise
        size, count = setup.sampler.batch_size, setup.sampler.domains_per_step
        raise InputError(
            f"{size:,} examples from each of {count} domains do not fit in memory; set a smaller one, or "
            "accumulate=2.",
            "batch_size",
        ) from error


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """With learning rates as numbers, also where a CUDA graph reads them off the device."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:  # which are copies
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = float(group["lr"])
    return state


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Its moments and settings, but not how they are computed: that is this device's and this run's."""
    before, groups = [dict(group) for group in optimizer.param_groups], []
    for group, old in zip(state["param_groups"], before, strict=True):
        groups.append({**group, **{name: old[name] for name in KERNELS if name in old}})
    optimizer.load_state_dict({**state, "param_groups": groups})
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
        "optimizer": type(optimizer).__name__,
        "lr": [float(group.get("initial_lr", group.get("lr", 1.0))) for group in optimizer.param_groups],
        "domains": list(train.names)[:1000],
        "sizes": train.sizes.tolist()[:1000],
    }
