"""The steps of a training: taken one by one, or replayed as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from shoal.algorithms.base import Log
from shoal.data.loader import seed_all
from shoal.data.sampler import key
from shoal.training.callbacks import Callbacks, State
from shoal.training.capture import GatheredSteps, LoadedSteps
from shoal.training.setup import LOG_EVERY, Setup
from shoal.training.stopping import Signals

WORLD = 31  # what a key is for


class Taken(NamedTuple):
    """Steps whose log is still on the device: the first of them, the domains of each, and what was logged."""

    first: int
    domains: list[list[int | None]]
    log: Log


class Stepper:
    """Advances a training from where ``state`` stands; logs wait in ``unread`` to be read off the device."""

    def __init__(self, setup: Setup, state: State, callbacks: Callbacks) -> None:
        self.setup, self.state, self.callbacks = setup, state, callbacks
        self.unread: list[Taken] = []
        strides = self._gathered() if setup.unroll and setup.gathers else self._loaded()
        self._strides = strides

    def advance(self, stop: int, signals: Signals) -> Iterator[None]:
        """To step ``stop``, or after a signal to the next step; one turn of the caller's for each stride."""
        setup, state = self.setup, self.state
        first, alone = state.step, setup.processes.count == 1
        seeds = key(setup.options["seed"], WORLD, np.arange(first, stop), setup.processes.index).tolist()
        while state.step < stop and not (signals.asked and alone and state.step > first):
            # Random numbers are a function of the step, so that nothing of them has to be remembered.
            seed_all(seeds[state.step - first], setup.device)
            taken = next(self._strides)
            self.unread.append(taken)
            state.step += len(taken.domains)
            state.losses, state.batches = taken.log["losses"][-1], None
            if setup.schedule is not None:
                with warnings.catch_warnings():  # a step that was skipped is not one that was forgotten
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    setup.schedule.step()
            if setup.average is not None:
                setup.average.update(state.step, setup.engine.params)
            self.callbacks("on_step", state)
            yield

    def close(self) -> None:
        """Ends the processes that read examples."""
        self._strides.close()

    def read(self) -> list[Taken]:
        unread, self.unread = self.unread, []
        return unread

    def next_stop(self, chunk: int) -> int:
        """The next step at which something is to be done, ``chunk`` steps from here at the latest."""
        options, step, unroll = self.setup.options, self.state.step, self.setup.unroll
        if unroll:
            chunk = max(unroll, chunk - chunk % unroll)
        every = [self.setup.eval_every, LOG_EVERY, options["checkpoint_every"] or options["steps"]]
        return min(options["steps"], step + chunk, *(step + n - step % n for n in every))

    def _loaded(self) -> Generator[Taken, None, None]:
        setup, state = self.setup, self.state
        algorithm, engine = setup.algorithm, setup.engine
        captured = LoadedSteps(algorithm, engine) if setup.unroll else None
        with closing(setup.loader(setup.sampler, state.step, setup.options["steps"])) as loader:
            for batches in loader:
                state.batches = batches
                self.callbacks("before_step", state)
                log = captured.run(batches) if captured else engine.step(algorithm, batches)
                domains: list[Any] = [b.domain for b in batches]
                yield Taken(state.step, [domains], {k: v[None] for k, v in log.items()})

    def _gathered(self) -> Generator[Taken, None, None]:
        """Strides of ``unroll`` steps, which hit every step at which something is to be done.

        A training that was stopped between two of them first takes single steps to where the next begins.
        """
        setup, step = self.setup, self.state.step
        aside = -step % setup.unroll
        whole = (setup.options["steps"] - step - aside) // setup.unroll
        for unroll, count in ((1, aside), (setup.unroll, whole)):
            captured = GatheredSteps(
                setup.algorithm, setup.engine, setup.examples, setup.sampler, unroll, setup.entering
            )
            for _ in range(count):
                self.callbacks("before_step", self.state)
                yield Taken(step, *captured.run(step))
                step += unroll
