"""The memory format and the precision in which a model is computed, and a short trial that chooses them.

Convolutions on CUDA are mostly faster with the channels last in memory, and in bf16; small networks, which
are bound by launching kernels, mostly are not. With ``"auto"`` the forward and backward passes of one step
are timed in each combination before a training begins, captured as a CUDA graph where the training will be.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Log
from shoal.data.batch import DomainBatch
from shoal.data.loader import seeded
from shoal.models.calling import call
from shoal.replay import leaves_no_trace
from shoal.tensors import map_nest
from shoal.training.capture import WARM_UP, Replay
from shoal.training.options import precision_of

if TYPE_CHECKING:
    from shoal.training.engine import Precision
    from shoal.training.setup import Setup

MemoryFormat = Literal["contiguous", "channels-last"]
MARGIN = 0.05
"""A simpler format is kept where it takes at most so much longer than the fastest."""
ROUNDS, TIMED = 3, 5
"""The time of a format is the shortest of so many rounds, of so many steps each."""


class Format(NamedTuple):
    """How a model is computed; weights are float32 in any case."""

    memory_format: MemoryFormat = "contiguous"
    precision: Precision = "fp32"

    def __str__(self) -> str:
        return f"{self.memory_format} {self.precision}"


class Choice(NamedTuple):
    """A format, and in words how it was found ("" where it was asked for)."""

    format: Format
    trial: str = ""

    def state_dict(self) -> dict[str, str]:
        return {**self.format._asdict(), "trial": self.trial}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Choice:
        return cls(Format(state["memory_format"], state["precision"]), state["trial"])


def channels_last(x: Any) -> Any:
    """A nest in which every tensor (B, c, h, w) has its channels last in memory; the values are the same."""
    return map_nest(_channels_last, x)


def _channels_last(x: Any) -> Any:
    if isinstance(x, Tensor) and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def lay_out(model: nn.Module) -> list[Tensor]:
    """Puts the channels of a model's weights last in memory, and returns those that were laid out anew."""
    found = [
        t
        for t in (*model.parameters(), *model.buffers())
        if t.ndim == 4 and not t.is_contiguous(memory_format=torch.channels_last)
    ]
    for tensor in found:
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return found


def candidates(setup: Setup) -> list[Format]:
    """What may be chosen, the simplest first."""
    options = setup.options
    memory, precision = options["memory_format"] or "contiguous", precision_of(options)
    memories: list[Any] = [memory] if memory != "auto" else ["contiguous"]
    precisions: list[Any] = [precision] if precision != "auto" else ["fp32"]
    # A choice by time is not the same every time.
    if setup.device.type == "cuda" and not options["deterministic"]:
        # A compiled model is laid out by the compiler.
        if memory == "auto" and not options["compile"] and any(p.ndim == 4 for p in setup.model.parameters()):
            memories.append("channels-last")
        if precision == "auto" and torch.cuda.is_bf16_supported(including_emulation=False):
            precisions.append("bf16")
    return [Format(m, p) for p, m in product(precisions, memories)]


def choose(setup: Setup, step: int) -> Choice:
    """The fastest format on the batches of ``step``; nothing of the training is changed.

    A format in which the model fails is left out with a warning; one that is not contiguous is tried also
    where it is the only one that may be chosen.
    """
    asked = candidates(setup)
    timed = len(asked) > 1
    if asked == [Format("contiguous", asked[0].precision)]:
        return Choice(asked[0])
    seconds: dict[Format, float] = {}
    problems: dict[Format, str] = {}
    with _batches(setup, step) as batches:
        for each in asked:
            own = batches
            if each.memory_format == "channels-last":
                own = [b._replace(x=channels_last(b.x)) for b in batches]
            try:
                with _computing_in(setup, each), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    seconds[each] = _seconds(setup, own, timed)
            except (RuntimeError, TypeError, ValueError) as error:
                problems[each] = (str(error).splitlines() or [type(error).__name__])[0]
    chosen = fastest(seconds) if seconds else Format("contiguous", asked[0].precision)
    if setup.processes.main:
        for each, problem in problems.items():
            warnings.warn(f"the model is not computed in {each}, in which it fails: {problem}", stacklevel=3)
    words = [f"{each} {1000 * t:.1f} ms" for each, t in seconds.items() if timed]
    words += [f"{each} fails" for each in problems]
    found: Choice = setup.processes.told(Choice(chosen, ", ".join(words)))
    return found


def fastest(seconds: Mapping[Format, float]) -> Format:
    """The first, that is the simplest, of those that take hardly longer than the fastest."""
    limit = (1 + MARGIN) * min(seconds.values())
    return next(each for each, t in seconds.items() if t <= limit)


@contextmanager
def _batches(setup: Setup, step: int) -> Iterator[list[DomainBatch]]:
    """The training's batches of ``step``; the block leaves buffers and random numbers as they were."""
    training = setup.model.training
    with seeded(setup.options["seed"]), leaves_no_trace(setup.algorithm):
        try:
            yield next(iter(setup.loader(setup.sampler, step, step + 1, workers=0)))
        finally:
            setup.engine.begin()
            setup.model.train(training)


@contextmanager
def _computing_in(setup: Setup, chosen: Format) -> Iterator[None]:
    """Within the block the training computes in this format, on copies of its parameters and buffers."""
    tensors = [*setup.algorithm.parameters(), *setup.algorithm.buffers()]
    originals, before = [t.data for t in tensors], setup.engine.autocast
    try:
        for tensor in tensors:
            tensor.data = tensor.data.clone()
        if chosen.memory_format == "channels-last":
            lay_out(setup.model)
        setup.compute_in(chosen.precision)
        yield
    finally:
        for tensor, data in zip(tensors, originals, strict=True):
            tensor.data = data
        setup.engine.autocast = setup.algorithm.autocast = before
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()  # of graphs, and after what did not fit


def _seconds(setup: Setup, batches: Sequence[DomainBatch], timed: bool) -> float:
    """How long the passes of a step take, in the format that the training computes in now; 0 if not timed."""
    algorithm, model = setup.algorithm, setup.model
    with torch.inference_mode(), algorithm.autocast():
        call(model.eval(), batches[0].x)
    model.train()

    def passes() -> Log:
        """Forward and backward: all that depends on the format."""
        setup.engine.begin()
        if type(algorithm).step is Algorithm.step:
            return {"losses": algorithm.gradient(batches, setup.engine)[1]["losses"]}
        return {"losses": algorithm.domain_gradients(batches, setup.engine)[1]["losses"]}

    if not timed:
        passes()
        return 0.0
    run: Callable[[], Log] = Replay(passes, algorithm, setup.engine) if setup.unroll else passes
    for _ in range(WARM_UP + 2):  # with the capture
        run()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(setup.device)
        began = time.perf_counter()
        for _ in range(TIMED):
            run()
        torch.cuda.synchronize(setup.device)
        found.append((time.perf_counter() - began) / TIMED)
    return min(found)
