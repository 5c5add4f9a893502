"""A fast path on CUDA: a whole training step replayed as one graph.

A step is a thousand kernels or more, and launching them from Python may take longer than running them.
Captured once and replayed, the same kernels follow each other without Python in between. It works where every
step has the same shapes.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.algorithms.base import Algorithm, Log
from shoal.data.batch import DomainBatch, tensors_in
from shoal.data.sampler import BLOCK, DomainBatchSampler
from shoal.optim import can_skip
from shoal.training.engine import Engine

WARM_UP = 3
"""Steps run in the ordinary way before the capture: lazily made state must exist by then."""


def why_not(algorithm: Algorithm, engine: Engine) -> str | None:
    """The reason why these steps cannot be captured, or ``None`` where nothing is known to be in the way."""
    if engine.device.type != "cuda":
        return "the model is not on a CUDA device"
    if not algorithm.capturable:
        return f"{type(algorithm).__name__} decides in Python what to do with a batch"
    dropout = draws(algorithm)
    if dropout and (algorithm.repeats_passes or (engine.accumulate > 1 and not algorithm.additive)):
        return f"{type(algorithm).__name__} must repeat the dropout masks of {dropout[0]!r}"
    if not all(map(can_skip, (engine.optimizer, *engine.auxiliary.values()))):
        return "its optimizer cannot skip a step on the device; Adam, AdamW and SGD with fused=True can"
    if engine.processes > 1:
        return "training is distributed over several processes"
    for name, module in algorithm.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return f"{name!r} has a hook, which a graph would not call"
    return None


def draws(algorithm: Algorithm) -> list[str]:
    """The modules that draw random numbers: dropout, and those with an attribute ``draws_numbers``."""
    own = [type(algorithm).__name__] if algorithm.draws_numbers else []
    return own + [
        name
        for name, module in algorithm.named_modules()
        if "Dropout" in type(module).__name__ or (name and getattr(module, "draws_numbers", False))
    ]


class Replay:
    """A function of no arguments that trains, run as a CUDA graph once it has run a few times.

    One that draws random numbers on the CPU, or counts or decides in Python, stays as it is.
    """

    def __init__(self, function: Callable[[], Log], algorithm: Algorithm, engine: Engine) -> None:
        self.function = function
        self.algorithm = algorithm
        self.engine = engine
        self.graph: torch.cuda.CUDAGraph | None = None
        self.log: Log = {}
        self.warm = 0
        self.refused = False
        for optimizer in (engine.optimizer, *engine.auxiliary.values()):
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True

    def __call__(self) -> Log:
        """What the function returns; the tensors are the caller's to keep."""
        if self.graph is None and not self.refused and self.warm >= WARM_UP:
            self._capture()
        if self.graph is None:
            return self._watched()
        self.graph.replay()
        return {k: v.clone() for k, v in self.log.items()}  # the next replay overwrites them

    def _watched(self) -> Log:
        self.warm += 1
        if self.refused:
            return self.function()
        before = _outside(self.algorithm)
        log = self.function()
        if _outside(self.algorithm) != before:
            self.refused = True
        return log

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a graph of an earlier run that is thrown away now would spoil this one
        try:
            # cuBLAS keeps a workspace for each stream, and graphs that share one cannot run at the same time.
            # So a run that shares the device captures on its own stream; the default one cannot be captured.
            stream = torch.cuda.current_stream(self.engine.device)
            if stream == torch.cuda.default_stream(self.engine.device):
                stream = torch.cuda.Stream(self.engine.device)
            # Other threads, which pin memory for the loader, may do so meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.log = self.function()
            self.graph = graph
        except RuntimeError as error:
            self.refused = True
            self.engine.forget()
            first = (str(error).splitlines() or [""])[0]
            warnings.warn(f"steps are not captured as a CUDA graph: {first}", stacklevel=2)
        finally:
            if collecting:
                gc.enable()


def _outside(algorithm: Algorithm) -> tuple[Any, ...]:
    """What a graph does not see: the CPU's random numbers, and plain values that modules keep."""
    numpy: Any = np.random.get_state()
    drawn = torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2], random.getstate()
    kept = [
        (name, value)
        for module in algorithm.modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    ]
    return *drawn, kept


class GatheredSteps:
    """Runs ``unroll`` consecutive steps at a time on examples in the device's memory."""

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        examples: Any,
        sampler: DomainBatchSampler,
        unroll: int,
        enter: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        self.algorithm, self.engine, self.enter = algorithm, engine, enter
        self.examples, self.sampler, self.unroll = examples, sampler, unroll
        shape = (unroll, sampler.domains_per_step, sampler.batch_size)
        self.indices = torch.zeros(shape, dtype=torch.int64, device=examples.device)
        self.numbers: Tensor | None = None
        """The domains' numbers, for algorithms that ask."""
        self.first, self.domains = 0, list[list[int | None]]()
        self.ahead: Tensor | None = None
        self.replay = Replay(self._steps, algorithm, engine)

    def run(self, step: int) -> tuple[list[list[int | None]], Log]:
        """Steps ``step`` to ``step + unroll − 1``: the domains of each, and their logs, stacked."""
        domains = self._load(step)
        return domains, self.replay()

    def _load(self, step: int) -> list[list[int | None]]:
        """Puts the examples of the next steps where the graph reads them; their domains."""
        if self.ahead is None or not self.first <= step < self.first + len(self.domains):
            self.first = step
            self.domains, rows = self.sampler.plans(step, step + BLOCK * self.unroll)
            self.ahead = self._put(torch.from_numpy(rows))
            if self.algorithm.knows_domains and self.domains[0][0] is not None:
                self.numbers_ahead = self._put(torch.tensor(self.domains))
                if self.numbers is None:
                    self.numbers = self.numbers_ahead[: self.unroll].clone()
        at = step - self.first
        self.indices.copy_(self.ahead[at : at + self.unroll])
        if self.numbers is not None:
            self.numbers.copy_(self.numbers_ahead[at : at + self.unroll])
        return self.domains[at : at + self.unroll]

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.indices.device, non_blocking=True)

    def _steps(self) -> Log:
        logs: list[Log] = []
        for u in range(self.unroll):
            drawn = [self.examples.batch(row) for row in self.indices[u]]
            numbers = [None] * len(drawn) if self.numbers is None else list(self.numbers[u])
            pairs = zip(drawn, numbers, strict=True)
            batches = [DomainBatch(self.enter(x), y, n, *w) for (x, y, *w), n in pairs]
            logs.append(self.engine.step(self.algorithm, batches))
        return {k: torch.stack([log[k] for log in logs]) for k in logs[0]}


class Fixed:
    """Batches in places of their own, where a graph reads them; all must have the shapes of the first."""

    def __init__(self) -> None:
        self.batches: list[DomainBatch] = []
        self.kinds: list[Any] = []

    def take(self, batches: Sequence[DomainBatch]) -> bool:
        """Puts these there; whether they have the same shapes."""
        leaves = [leaf for b in batches for leaf in tensors_in(tuple(b))]
        kinds = [(leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves]
        if not self.kinds:
            self.batches = [DomainBatch(*tree_map_only(Tensor, torch.clone, tuple(b))) for b in batches]
            self.kinds = kinds
        elif kinds == self.kinds:
            torch._foreach_copy_([leaf for b in self.batches for leaf in tensors_in(tuple(b))], leaves)
        return kinds == self.kinds


class LoadedSteps:
    """Runs steps on batches that a loader brings, as long as their shapes stay the same."""

    def __init__(self, algorithm: Algorithm, engine: Engine) -> None:
        self.algorithm, self.engine, self.fixed = algorithm, engine, Fixed()
        self.replay = Replay(lambda: engine.step(algorithm, self.fixed.batches), algorithm, engine)

    def run(self, batches: Sequence[DomainBatch]) -> Log:
        known = [b._replace(domain=self._number(b.domain)) for b in batches]
        return self.replay() if self.fixed.take(known) else self.engine.step(self.algorithm, batches)

    def _number(self, domain: int | Tensor | None) -> int | Tensor | None:
        """As a tensor, which a graph can read, for algorithms that ask."""
        if not self.algorithm.knows_domains or domain is None:
            return None
        return self.algorithm.numbers[domain]
