"""A fast path for small models on CUDA: a whole training step replayed as one graph.

A small network's step is a thousand tiny kernels, and launching them from Python takes longer than running
them. Captured once and replayed, the same kernels follow each other without Python in between. It works
where every step has the same shapes and the examples are on the device already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm, Log
from shoal.data.batch import DomainBatch
from shoal.data.sampler import BLOCK, DomainBatchSampler
from shoal.optim import can_skip
from shoal.training.engine import Engine

WARM_UP = 3
"""Steps run in the ordinary way before the capture: lazily made state must exist by then."""


def why_not(algorithm: Algorithm, engine: Engine, examples: Any) -> str | None:
    """The reason why these steps cannot be captured, or ``None`` where they can."""
    device = engine.device
    if device.type != "cuda":
        return "the model is not on a CUDA device"
    if not hasattr(examples, "batch") or examples.device != device:
        return "the examples are not in the device's memory"
    if not algorithm.capturable:
        return f"{type(algorithm).__name__} decides in Python what to do with a batch"
    dropout = draws(algorithm)
    if algorithm.repeats_passes and dropout:
        return f"{type(algorithm).__name__} must repeat the dropout masks of {dropout[0]!r}"
    if not can_skip(engine.optimizer):
        return "its optimizer cannot skip a step on the device; Adam, AdamW and SGD with fused=True can"
    if engine.processes > 1:
        return "several processes train together"
    return None


def draws(algorithm: Algorithm) -> list[str]:
    """The modules that draw random numbers."""
    return [n for n, m in algorithm.named_modules() if "Dropout" in type(m).__name__]


class CapturedSteps:
    """Runs ``unroll`` consecutive steps of an algorithm as one CUDA graph."""

    def __init__(
        self, algorithm: Algorithm, engine: Engine, examples: Any, sampler: DomainBatchSampler, unroll: int
    ) -> None:
        self.algorithm = algorithm
        self.engine = engine
        self.examples = examples
        self.sampler = sampler
        self.unroll = unroll
        shape = (unroll, sampler.domains_per_step, sampler.batch_size)
        self.indices = torch.zeros(shape, dtype=torch.int64, device=examples.device)
        self.first, self.domains = 0, list[list[int | None]]()
        self.ahead: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.log: Log = {}
        self.warm = 0
        for group in engine.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True

    def load(self, step: int) -> list[list[int | None]]:
        """Puts the examples of ``unroll`` steps from ``step`` where the graph reads them; their domains."""
        if self.ahead is None or not self.first <= step < self.first + len(self.domains):
            self.first = step
            self.domains, rows = self.sampler.plans(step, step + BLOCK * self.unroll)
            self.ahead = torch.from_numpy(rows).pin_memory().to(self.indices.device, non_blocking=True)
        at = step - self.first
        self.indices.copy_(self.ahead[at : at + self.unroll])
        return self.domains[at : at + self.unroll]

    def _steps(self) -> Log:
        logs: list[Log] = []
        for u in range(self.unroll):
            drawn = [self.examples.batch(row) for row in self.indices[u]]
            batches = [DomainBatch(x, y, None) for x, y in drawn]
            logs.append(self.engine.step(self.algorithm, batches))
        return {k: torch.stack([log[k] for log in logs]) for k in logs[0]}

    def run(self, step: int) -> tuple[list[list[int | None]], Log]:
        """Steps ``step`` to ``step + unroll − 1``: the domains of each, and their logs, stacked."""
        domains = self.load(step)
        if self.graph is not None:
            self.graph.replay()
        elif self.warm < WARM_UP:
            self.warm += 1
            self.log = self._steps()
        else:
            graph = torch.cuda.CUDAGraph()
            # On a stream of its own: cuBLAS keeps a workspace for each stream, and graphs that share one
            # cannot run at the same time.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.indices.device)):
                self.log = self._steps()
            self.graph = graph
            graph.replay()
        return domains, {k: v.clone() for k, v in self.log.items()}  # the next replay overwrites them
