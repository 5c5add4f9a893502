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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import MetaBatch
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader, seeded
from shoal.data.sampler import DomainBatchSampler, key
from shoal.errors import InputError
from shoal.gradients import Gradient, cosines, gradient, gram_matrix, mean_of_pairs, sign_agreement
from shoal.replay import preserve_state
from shoal.training.callbacks import Callback, State
from shoal.training.engine import Engine

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

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

    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, step: int, domains: Sequence[str], batch: MetaBatch) -> Pending:
        """Compares the blocks of a batch, at least two; nothing waits for the device."""
        # A model may draw from any of the generators; `seeded` puts back those that are not torch's.
        with seeded(step), preserve_state(self.engine.algorithm):
            gradients = [self._gradient(block) for block in batch.split()]
        return Pending(step, list(domains), gram_matrix(gradients), sign_agreement(gradients))

    def _gradient(self, batch: MetaBatch) -> Gradient:
        """Of the mean loss of a whole batch, in float32."""
        total, _ = self.engine.mean_gradient(batch)
        return [g.float() if g.dtype in (torch.bfloat16, torch.float16) else g for g in total]

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
        self._drawn: Iterator[MetaBatch] | None = None
        self.after = after
        self._again: tuple[int, list[str], MetaBatch] | None = None
        self.unread: list[Pending] = []
        self.unread_after: list[Pending] = []
        self.found: list[dict[str, Any]] = []
        """What was measured; only the newest has its matrix."""
        self.log: Callable[[Mapping[str, Any]], None] = lambda line: None

    @classmethod
    def of(cls, trainer: Trainer) -> Tracking:
        """That of a training, by its options."""
        setup = trainer.setup
        made = cls(
            Agreement(setup.engine),
            setup.data.splits["train"],
            setup.sampler,
            setup.examples,
            every=setup.options["track_every"] or 1,
            after=setup.options["track_after"],
            workers=setup.options["workers"],
            share=(setup.processes.index, setup.processes.count),
            enter=setup.enter,
        )
        made.log = trainer.write_line
        return made

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = [dict(found) for found in state["found"]]

    def before_step(self, state: State) -> None:
        self(state.step, state.batch)

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

    def __call__(self, step: int, batch: MetaBatch | None = None) -> None:
        """Measures, if that is due before this step; ``batch`` is the step's."""
        if step % self.every:
            return
        if not self.own:
            batch = self._next(step)
        elif batch is None:
            where: dict[str, Any] = {"share": self.share, "enter": self.enter}
            batch = next(
                iter(MetaBatchLoader(self.examples, self.sampler, start=step, stop=step + 1, **where))
            )
        sizes = batch.sizes[: self.count]
        batch = batch.rows(slice(sum(sizes)), sizes)
        names = [self.domains.names[n] for n in batch.ids.tolist()]
        self.unread.append(self.agreement(step, names, batch))
        self._again = (step, names, batch) if self.after else None

    def _next(self, step: int) -> MetaBatch:
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

    def plans(self, start: int, stop: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        found = [self.sampler.plans(k * self.every, k * self.every + 1) for k in range(start, stop)]
        return np.concatenate([d for d, _ in found if d is not None]), np.concatenate([r for _, r in found])


def _number(value: float | Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
