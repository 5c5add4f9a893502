"""How well the gradients of the domains agree while a training goes on.

Measured before a step, on one batch of each of a few domains: the step's own examples, also where they are
regrouped, if it takes one batch per domain, else additional ones. ``track_after`` measures the same batches
again after the step. With g_i the gradient of domain i's mean loss over what the
optimizer trains, that is

- ``mean_cosine`` and ``mean_inner_product`` over pairs i ≠ j (see :mod:`shoal.gradients`),
- ``sign_agreement``, the mean over parameters of |mean of signs|,
- ``matrix``, the cosines of all pairs, up to :data:`LARGEST` domains.

Where there are more domains than are measured at once, those of a measurement are dealt by a keyed
permutation, so that every pair comes in its turn, whatever their number; which ones depends on the seed and
the step alone. No weight, buffer, gradient or random number of the training is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.algorithms.base import Algorithm, Log
from shoal.data.batch import DomainBatch
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader, seeded
from shoal.data.sampler import DomainBatchSampler, key
from shoal.errors import InputError
from shoal.gradients import Gradient, cosines, gradient, gram_matrix, mean_of_pairs, sign_agreement
from shoal.replay import leaves_no_trace
from shoal.training.callbacks import Callback, State
from shoal.training.capture import Fixed, Replay
from shoal.training.engine import Engine

LARGEST = 50
"""Most domains that a measurement compares by default, and whose matrix is written down."""
DRAWN = 41  # what a key is for
MEANS = ("mean_cosine", "mean_inner_product", "sign_agreement")
"""What a measurement after a step consists of."""


class Pending(NamedTuple):
    """A measurement that is still on the device."""

    step: int
    domains: Sequence[str]
    gram: Tensor
    """Inner products (S, S)."""
    signs: Tensor


class Agreement:
    """Measures how well gradients agree, on batches that it is given.

    Of several processes each has its share of every batch: gradients are averaged over them before anything
    else is done, and all find the same. They are computed in the precision of the training, one domain at a
    time, and compared in float32.

    ``capture`` replays the measurement as a CUDA graph, as long as batches have the same shapes.
    """

    def __init__(self, algorithm: Algorithm, engine: Engine, *, capture: bool = False) -> None:
        self.algorithm, self.engine = algorithm, engine
        self._fixed = Fixed()
        self._replay = (
            Replay(lambda: self._measure(self._fixed.batches), algorithm, engine) if capture else None
        )

    def __call__(self, step: int, domains: Sequence[str], batches: Sequence[DomainBatch]) -> Pending:
        """Compares batches of at least two domains; nothing waits for the device."""
        # A model may draw from any of the generators; `seeded` puts back those that are not torch's.
        with seeded(step), leaves_no_trace(self.algorithm):
            plain = [b._replace(domain=None) for b in batches]
            replayed = self._replay is not None and self._fixed.take(plain)
            log = self._replay() if self._replay and replayed else self._measure(plain)
        return Pending(step, list(domains), log["gram"], log["signs"])

    def _gradient(self, batch: DomainBatch) -> Gradient:
        """Of the mean loss of a whole batch, in float32."""
        engine, total = self.engine, Gradient()
        scale = engine.scale.value if engine.scale is not None else None
        for weight, (part,) in engine.parts([batch]):
            loss = self.algorithm.domain_loss(part) * weight
            found = gradient(loss if scale is None else loss * scale, engine.params)
            total = found if not total else list(torch._foreach_add(total, found))
            del loss
        total = [g.float() if g.dtype in (torch.bfloat16, torch.float16) else g for g in total]
        return engine.average(total if scale is None else list(torch._foreach_div(total, scale)))

    def _measure(self, batches: Sequence[DomainBatch]) -> Log:
        gradients = [self._gradient(batch) for batch in batches]
        return {"gram": gram_matrix(gradients), "signs": sign_agreement(gradients)}

    def read(self, pending: Pending) -> dict[str, Any]:
        """A measurement as plain data; what is not finite is ``None``."""
        gram = pending.gram.cpu().double()
        matrix = cosines(gram)
        found: dict[str, Any] = {
            "step": pending.step,
            "domains": list(pending.domains),
            "mean_cosine": _number(mean_of_pairs(matrix)),
            "mean_inner_product": _number(mean_of_pairs(gram)),
            "sign_agreement": _number(pending.signs),
        }
        if len(matrix) <= LARGEST:
            found["matrix"] = [[_number(v) for v in row] for row in matrix.tolist()]
        return found


class Tracking(Callback):
    """The measurements of a training: when there is one, on which domains and which batches."""

    def __init__(
        self,
        agreement: Agreement,
        domains: Domains,
        sampler: DomainBatchSampler,
        examples: Any,
        *,
        every: int,
        count: int | None = None,
        after: bool = False,
        workers: int = 0,
        share: tuple[int, int] = (0, 1),
        enter: Callable[[Any], Any] | None = None,
    ) -> None:
        self.agreement, self.domains, self.every, self.enter = agreement, domains, every, enter
        self.sampler, self.examples, self.share, self.workers = sampler, examples, share, workers
        slots = sampler.domains_per_step
        if len(domains) < 2:
            only = domains.names[0]
            raise InputError(f"track_every compares domains, and there is only one to train on ({only!r}).")
        self.count = min(count or max(2, min(slots, LARGEST)), len(domains))
        self.own = sampler.draw == "domains" and not sampler.by_size and slots >= self.count
        """Whether a step's own batches are measured."""
        self._loader: MetaBatchLoader | None = None
        self._drawn: Iterator[list[DomainBatch]] | None = None
        self.after = after
        self._again: tuple[int, list[str], list[DomainBatch]] | None = None
        self.unread: list[Pending] = []
        self.unread_after: list[Pending] = []
        self.found: list[dict[str, Any]] = []
        """What was measured; only the newest has its matrix."""
        self.log: Callable[[Mapping[str, Any]], None] = lambda line: None

    def before_step(self, state: State) -> None:
        self(state.step, state.batches)

    def on_step(self, state: State) -> None:
        if self._again is not None:
            self.unread_after.append(self.agreement(*self._again))
            self._again = None

    def on_sync(self, state: State) -> None:
        for found in self.read():
            if self.found:
                self.found[-1].pop("matrix", None)
            self.found.append(dict(found))
            self.log({"phase": "agreement", **found})

    def on_end(self, state: State) -> None:
        """Ends a worker process that reads ahead."""
        if self._loader is not None:
            self._loader.close()
        self._loader = self._drawn = None

    def __call__(self, step: int, batches: Sequence[DomainBatch] | None = None) -> None:
        """Measures, if that is due before this step; ``batches`` are the step's, where they are at hand."""
        if step % self.every:
            return
        if not self.own:
            batches = self._next(step)
        elif batches is None:  # they are gathered on the device, and here once more
            where: dict[str, Any] = {"share": self.share, "enter": self.enter}
            own = MetaBatchLoader(self.examples, self.sampler, start=step, stop=step + 1, **where)
            batches = next(iter(own))
        chosen = list(batches)[: self.count]
        names = [self.domains.names[int(b.domain)] for b in chosen if b.domain is not None]
        self.unread.append(self.agreement(step, names, chosen))
        self._again = (step, names, chosen) if self.after else None

    def _next(self, step: int) -> list[DomainBatch]:
        """Drawn for this alone, and read ahead by worker processes where the training has some."""
        if self._drawn is None:
            first = step // self.every
            seed = self.sampler.seed
            if self.sampler.draw != "regrouped":  # else these are the examples of the step, by domain
                seed = int(key(seed, DRAWN)[0] >> np.uint64(1))
            drawn: Any = _Every(
                DomainBatchSampler(self.domains, self.sampler.batch_size, self.count, seed=seed, steps=1),
                self.every,
            )
            self._loader = MetaBatchLoader(
                self.examples,
                drawn,
                workers=min(self.workers, 1),
                device=self.agreement.engine.device,
                start=first,
                stop=first + 2**40,
                share=self.share,
                enter=self.enter,
            )
            self._drawn = iter(self._loader)
        return next(self._drawn)

    def read(self) -> list[dict[str, Any]]:
        """What was measured since it was last asked; this waits for the device."""
        unread, after = self.unread, self.unread_after
        self.unread, self.unread_after = [], []
        found = [self.agreement.read(pending) for pending in unread]
        for point, pending in zip(found, after, strict=False):  # none, unless they are measured
            again = self.agreement.read(pending)
            point["after"] = {name: again[name] for name in MEANS}
        return found


class _Every:
    """Of a sampler's steps every ``every``-th."""

    def __init__(self, sampler: DomainBatchSampler, every: int) -> None:
        self.sampler, self.every = sampler, every
        self.seed, self.domains_per_step = sampler.seed, sampler.domains_per_step

    def plans(self, start: int, stop: int) -> tuple[list[list[int | None]], NDArray[np.int64]]:
        found = [self.sampler.plans(k * self.every, k * self.every + 1) for k in range(start, stop)]
        return [d for domains, _ in found for d in domains], np.concatenate([rows for _, rows in found])


def _number(value: float | Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
