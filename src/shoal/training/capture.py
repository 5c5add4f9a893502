"""Steps on CUDA, replayed as one graph where that is possible, all of Fish's inner loop included.

torch registers the generator of the device with the graph, so random numbers are those of an ordinary step.
"""

from __future__ import annotations

import gc
import logging
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal import replay
from shoal.algorithms.base import Log
from shoal.data.batch import MetaBatch, leaves
from shoal.data.loader import Draw, seed_all
from shoal.errors import InputError
from shoal.tensors import map_nest
from shoal.training.callbacks import State
from shoal.training.engine import Engine

WARM_UP = 3
"""Steps run in the ordinary way before the capture: state that is made lazily must exist by then."""
LOGS = 64
"""Steps whose log a graph keeps; it is read at least so often."""


class Steps:
    """Runs the steps of an algorithm; on CUDA as a graph, over a batch that stays in one place in memory.

    A step that cannot be a graph (it draws random numbers on the CPU, or counts or decides in Python) runs as
    it is written, with the same result; ``reason`` says why.
    """

    def __init__(self, engine: Engine, capture: bool | None, schedule: LRScheduler | None) -> None:
        self.engine = engine
        self.reason = "capture=False" if capture is False else why_not(engine)
        if capture and self.reason is not None:
            raise InputError(f"capture=True is not possible: {self.reason}.")
        self.required, self.draws, self.warm = bool(capture), False, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: MetaBatch | Draw | None = None
        """What the graph reads; a batch has the number of its step beside it."""
        if self.reason is None and schedule is not None:  # which a graph reads where the schedule writes it
            for group in engine.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=engine.device)

    def __call__(self, state: State, seed: int) -> Log:
        """A step, under random numbers that ``seed`` has set."""
        if self.reason is None and self._load(state):
            if self.warm < WARM_UP:
                return self._warm_up(state)
            if self.graph is None:
                self._capture(state)
            if self.graph is not None:
                self.graph.replay()
                parts = self.table[state.step % LOGS].split([shape.numel() for shape in self.shapes.values()])
                return {n: p.view(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}
            seed_all(seed, self.engine.device)  # the attempt may have drawn numbers
        assert state.batch is not None
        return self.engine.step(state.batch, state.step)

    def _load(self, state: State) -> bool:
        """Puts what a step reads where the graph reads it; whether it has the shapes of the first."""
        if state.draw is not None:
            if self.static is None:
                self.static = state.draw._replace(plan=state.draw.plan.clone())
                self.number = self.static.plan[-1]
            same = isinstance(self.static, Draw) and self.static.sizes == state.draw.sizes
            if same and isinstance(self.static, Draw):
                self.static.plan.copy_(state.draw.plan)
            return same
        batch = state.batch
        assert batch is not None
        if self.static is None:
            x = map_nest(lambda part: part.clone() if isinstance(part, Tensor) else part, batch.x)
            weight = None if batch.weight is None else batch.weight.clone()
            self.static = MetaBatch(x, batch.y.clone(), batch.domain.clone(), batch.sizes, weight)
            self.number = torch.zeros((), dtype=torch.int64, device=self.engine.device)
        if same := isinstance(self.static, MetaBatch) and _form(self.static) == _form(batch):
            torch._foreach_copy_(self.static.tensors, batch.tensors)
            self.number.fill_(state.step)
        return same

    def _step(self, state: State) -> tuple[Log, Tensor]:
        """What the graph does: a step, and its log as one row."""
        batch = self.static
        if isinstance(batch, Draw):
            assert state.gather is not None
            batch = state.gather(batch)
        assert batch is not None
        log = self.engine.step(batch, self.number)
        return log, torch.cat([value.reshape(-1) for value in log.values()])

    def _warm_up(self, state: State) -> Log:
        """A step as it is written, on a stream of its own."""
        self.warm += 1
        device = self.engine.device
        before, drawn = _outside(self.engine), torch.cuda.get_rng_state(device)
        now, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            log, row = self._step(state)
        now.wait_stream(stream)
        if self.warm == WARM_UP and _outside(self.engine) != before:
            self._give_up("it draws random numbers on the CPU or changes a Python variable")
        self.draws = not torch.equal(torch.cuda.get_rng_state(device), drawn)
        self.shapes, self.table = {name: v.shape for name, v in log.items()}, row.new_zeros(LOGS, len(row))
        return log

    def _capture(self, state: State) -> None:
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.collect()
        gc.disable()  # a graph of an earlier run that is thrown away meanwhile would invalidate this one
        replay.random_in_graph = self.draws
        try:
            # Other threads, which pin memory for the loader, may do so meanwhile.
            stream = torch.cuda.Stream(self.engine.device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                _, row = self._step(state)
                self.table.index_copy_(0, (self.number % LOGS).reshape(1), row[None])
            self.graph = graph
        except RuntimeError as error:
            for p in self.engine.params:
                p.grad = None
            self._give_up((str(error).splitlines() or [""])[0])
            # A capture that fails leaves the generator of the device in it; with a new state it is out of it.
            generator = torch.cuda.default_generators[self.engine.device.index or 0]
            generator.graphsafe_set_state(torch.Generator(self.engine.device).graphsafe_get_state())
        finally:
            replay.random_in_graph = False
            if collecting:
                gc.enable()

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        message = f"steps are not captured as a CUDA graph: {reason}"
        if self.required:
            warnings.warn(message, stacklevel=4)
        else:
            logging.getLogger("shoal").info(message)


def why_not(engine: Engine) -> str | None:
    """The reason why steps cannot be captured, or ``None`` where nothing is known to be in the way."""
    if engine.device.type != "cuda":
        return "the model is not on a CUDA device"
    if not engine.alone:
        return "training is distributed over several processes"
    for optimizer in (engine.optimizer, *engine.auxiliary.values()):
        capturable = all(group.get("capturable") for group in optimizer.param_groups)
        if not capturable and type(optimizer) is not torch.optim.SGD:
            return f"{type(optimizer).__name__} is not capturable"
    for name, module in engine.algorithm.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            for hook in hooks.values():
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if not str(home).startswith("shoal."):
                    return f"{name!r} has a hook, which a graph would not call"
    return None


def _form(batch: MetaBatch) -> tuple[Any, ...]:
    """What must be the same in all batches of a graph: shapes, types and layouts, and what is no tensor."""
    tensors = [(t.shape, t.dtype, t.stride()) for t in batch.tensors]
    return tensors, batch.sizes, [part for part in leaves(batch.x) if not isinstance(part, Tensor)]


def _outside(engine: Engine) -> tuple[Any, ...]:
    """What a graph does not see: the CPU's random numbers, and plain values that modules have."""
    numpy: Any = np.random.get_state()
    drawn = torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2], random.getstate()
    values = [
        (name, value)
        for module in engine.algorithm.modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    ]
    return *drawn, values
