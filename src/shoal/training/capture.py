"""Steps on CUDA, replayed as one graph where that is possible.

A step is a thousand kernels or more, and launching them from Python may take longer than running them. The
whole step (all of Fish's inner loop, with its interpolation) is captured once, over a batch that stays in one
place in memory, and replayed for every other batch of the same shapes. torch registers the generator of the
device with the graph, so random numbers drawn on the device are those of an ordinary step.
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
from shoal.data.batch import MetaBatch, leaves, map_nest
from shoal.data.loader import Draw, seed_all
from shoal.errors import InputError
from shoal.training.callbacks import State
from shoal.training.engine import Engine

WARM_UP = 3
"""Steps run in the ordinary way before the capture: state that is made lazily must exist by then."""
KEPT = 64
"""Steps whose log a graph keeps; it is read at least so often."""


class Steps:
    """Runs the steps of an algorithm; on CUDA as a graph, unless ``capture`` is false.

    The graph gathers examples that are in memory, takes the step and writes its log to one row of a table, so
    that beside it a step is a single copy. A step that cannot be a graph (it draws random numbers on the CPU,
    or counts or decides in Python) runs as it is written, with the same result; ``reason`` says why.
    """

    def __init__(self, engine: Engine, capture: bool | None, schedule: LRScheduler | None) -> None:
        self.engine = engine
        self.reason = "capture=False" if capture is False else why_not(engine)
        if capture and self.reason is not None:
            raise InputError(f"capture=True is not possible: {self.reason}.")
        self.asked, self.draws, self.warm = bool(capture), False, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: MetaBatch | None = None
        self.plan: Tensor | None = None
        if self.reason is None and schedule is not None:  # which a graph reads where the schedule writes it
            for group in engine.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=engine.device)

    def __call__(self, state: State, seed: int) -> Log:
        """A step, under random numbers that ``seed`` has set."""
        if self.reason is not None or not self._load(state):
            assert state.batch is not None
            return self.engine.step(state.batch, state.step)
        if self.warm < WARM_UP:
            return self._warm_up(state)
        if self.graph is None and not self._capture(state):
            assert state.batch is not None
            seed_all(seed, self.engine.device)  # the attempt may have drawn numbers
            return self.engine.step(state.batch, state.step)
        assert self.graph is not None
        self.graph.replay()
        row, found, at = self.table[state.step % KEPT], {}, 0
        for name, shape in self.shapes.items():
            found[name] = row[at : at + shape.numel()].view(shape)
            at += shape.numel()
        return found

    def _load(self, state: State) -> bool:
        """Puts what a step reads where the graph reads it; whether it has the shapes of the first."""
        if state.draw is not None:
            if self.plan is None:
                self.plan, self.sizes = state.draw.plan.clone(), state.draw.sizes
            if same := self.plan.shape == state.draw.plan.shape and self.sizes == state.draw.sizes:
                self.plan.copy_(state.draw.plan)
            return same
        batch = state.batch
        assert batch is not None
        if self.batch is None:
            self.number = torch.zeros((), dtype=torch.int64, device=self.engine.device)
            x = map_nest(lambda part: part.clone() if isinstance(part, Tensor) else part, batch.x)
            weight = None if batch.weight is None else batch.weight.clone()
            self.batch = MetaBatch(x, batch.y.clone(), batch.domain.clone(), batch.sizes, weight)
        own, given = self.batch.tensors, batch.tensors
        same = [_kind(t) for t in own] == [_kind(t) for t in given] and self.batch.sizes == batch.sizes
        same = same and _others(self.batch.x) == _others(batch.x)
        if same:
            torch._foreach_copy_(own, given)
            self.number.fill_(state.step)
        return same

    def _step(self, state: State) -> Log:
        """What the graph does."""
        if self.plan is not None:
            assert state.gather is not None
            return self.engine.step(state.gather(Draw(self.plan, self.sizes)), self.plan[-1])
        assert self.batch is not None
        return self.engine.step(self.batch, self.number)

    def _warm_up(self, state: State) -> Log:
        """A step as it is written, on a stream of its own."""
        self.warm += 1
        before, drawn = _outside(self.engine), self._random_state()
        now, stream = torch.cuda.current_stream(self.engine.device), torch.cuda.Stream(self.engine.device)
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            found = self._step(state)
        now.wait_stream(stream)
        if self.warm == WARM_UP and _outside(self.engine) != before:
            self.reason = "it draws random numbers on the CPU or changes a Python variable"
            self._tell()
        self.draws = not torch.equal(self._random_state(), drawn)
        self.shapes = {name: value.shape for name, value in found.items()}
        packed = torch.cat([value.reshape(-1) for value in found.values()])
        self.table = packed.new_zeros(KEPT, len(packed))
        return found

    def _random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.engine.device)

    def _capture(self, state: State) -> bool:
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.collect()
        gc.disable()  # a graph of an earlier run that is thrown away now would spoil this one
        replay.random_in_graph = self.draws
        try:
            # Other threads, which pin memory for the loader, may do so meanwhile.
            stream = torch.cuda.Stream(self.engine.device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                log = self._step(state)
                packed = torch.cat([log[name].reshape(-1) for name in self.shapes])
                number = self.number if self.plan is None else self.plan[-1]
                self.table.index_copy_(0, (number % KEPT).reshape(1), packed[None])
            self.graph = graph
        except RuntimeError as error:
            for p in self.engine.params:
                p.grad = None
            self.reason = (str(error).splitlines() or [""])[0]
            self._tell()
            # A capture that fails leaves the generator of the device in it; with a new state it is out of it.
            generator = torch.cuda.default_generators[self.engine.device.index or 0]
            generator.graphsafe_set_state(torch.Generator(self.engine.device).graphsafe_get_state())
        finally:
            replay.random_in_graph = False
            if collecting:
                gc.enable()
        return self.graph is not None

    def _tell(self) -> None:
        message = f"steps are not captured as a CUDA graph: {self.reason}"
        if self.asked:
            warnings.warn(message, stacklevel=4)
        else:
            logging.getLogger("shoal").info(message)


def why_not(engine: Engine) -> str | None:
    """The reason why steps cannot be captured, or ``None`` where nothing is known to be in the way."""
    if engine.device.type != "cuda":
        return "the model is not on a CUDA device"
    if engine.processes.count > 1:
        return "training is distributed over several processes"
    for optimizer in (engine.optimizer, *engine.auxiliary.values()):
        capturable = all(group.get("capturable") for group in optimizer.param_groups)
        if not capturable and type(optimizer) is not torch.optim.SGD:
            return f"{type(optimizer).__name__} is not capturable"
    for name, module in engine.algorithm.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in (hook for each in hooks for hook in each.values()):
            own = getattr(hook, "__module__", None) or type(hook).__module__
            if not str(own).startswith("shoal."):
                return f"{name!r} has a hook, which a graph would not call"
    return None


def _others(x: Any) -> list[Any]:
    return [part for part in leaves(x) if not isinstance(part, Tensor)]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def _outside(engine: Engine) -> tuple[Any, ...]:
    """What a graph does not see: the CPU's random numbers, and plain values that modules keep."""
    numpy: Any = np.random.get_state()
    drawn = torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2], random.getstate()
    kept = [
        (name, value)
        for module in engine.algorithm.modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    ]
    return *drawn, kept
