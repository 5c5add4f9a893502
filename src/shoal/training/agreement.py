"""How well the gradients of the domains agree during a training.

Measured before a step, on one batch from each of a few domains: the step's own examples, if it takes one
batch per domain (also where they are regrouped), otherwise additional ones. ``track_after`` measures the same
batches again after the step. With g_i the gradient of domain i's mean loss, that is

- ``mean_cosine`` and ``mean_inner_product`` over pairs i ≠ j (see :mod:`shoal.gradients`),
- ``sign_agreement``, the mean over parameters of |mean of signs|,
- ``matrix``, the cosines of all pairs, up to :data:`LARGEST` domains.

Which domains are measured, where there are more of them, depends on the seed and the step alone. No weight,
buffer, gradient or random number of the training is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shoal.data.batch import MetaBatch
from shoal.data.loader import seeded
from shoal.data.sampler import DomainBatchSampler, key
from shoal.errors import InputError
from shoal.gradients import cosines, gram_matrix, mean_of_pairs, sign_agreement
from shoal.replay import preserve_state
from shoal.training.callbacks import Callback, State
from shoal.training.setup import Setup

LARGEST = 50
"""Most domains that a measurement compares by default, and whose matrix is written down."""
DRAWN = 41  # what a key is for
Measured = tuple[int, Sequence[str], Tensor, Tensor]
"""The step, the domains, and on the device the inner products (S, S) and the sign agreement."""


class Tracking(Callback):
    """Measures every ``track_every`` steps; ``write_line`` writes a measurement to the log."""

    def __init__(self, setup: Setup, write_line: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self.setup, self.write_line = setup, write_line
        sampler, self.domains = setup.sampler, setup.data.splits["train"]
        if len(self.domains) < 2:
            only = self.domains.names[0]
            raise InputError(f"track_every compares domains, and there is only one to train on ({only!r}).")
        slots = sampler.domains_per_step
        self.count = min(max(2, min(slots, LARGEST)), len(self.domains))
        self._sampler: DomainBatchSampler | None = None
        """Draws the batches, if they are not those of the steps."""
        if sampler.draw != "domains" or sampler.by_size or slots < self.count:
            seed = sampler.seed
            if sampler.draw != "regrouped":  # otherwise these are the examples of the step, by domain
                seed = int(key(seed, DRAWN)[0] >> np.uint64(1))
            self._sampler = DomainBatchSampler(
                self.domains, sampler.batch_size, self.count, seed=seed, steps=1
            )
        self.measurements: list[dict[str, Any]] = []
        """Only the newest has its matrix; the log has all of them."""
        self._unread: list[tuple[Measured, Measured | None]] = []
        self._batch: MetaBatch | None = None

    def before_step(self, state: State) -> None:
        self._batch = None
        if state.step % (self.setup.options["track_every"] or 1) == 0:
            batch = self.measure(state.step, state.batch)
            self._batch = batch if self.setup.options["track_after"] else None

    def on_step(self, state: State) -> None:
        if self._batch is not None:
            self._unread[-1] = (self._unread[-1][0], self._compare(state.step - 1, self._batch))

    def flush(self) -> None:
        """Write down what was measured; this waits for the device."""
        for point in self.read():
            if self.measurements:
                self.measurements[-1].pop("matrix", None)
            self.measurements.append(dict(point))
            if self.write_line is not None:
                self.write_line({"phase": "agreement", **point})

    def state_dict(self) -> dict[str, Any]:
        return {"measurements": self.measurements}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measurements = [dict(point) for point in state["measurements"]]

    def measure(self, step: int, batch: MetaBatch | None = None) -> MetaBatch:
        """Measure at a step with this batch, without waiting for the device; returns the batch used."""
        if self._sampler is not None or batch is None:
            setup = self.setup
            sampler = self._sampler or setup.sampler
            batch = next(iter(setup.loader(sampler, step, step + 1, workers=0)))
        sizes = batch.sizes[: self.count]
        batch = batch.rows(slice(sum(sizes)), sizes)
        self._unread.append((self._compare(step, batch), None))
        return batch

    def _compare(self, step: int, batch: MetaBatch) -> Measured:
        engine, gradients = self.setup.engine, []
        extra, engine.extra_loss = engine.extra_loss, None  # MIRO is no loss of a domain
        # A model may draw from any of the generators; `seeded` puts back those that are not torch's.
        with seeded(step), preserve_state(engine.algorithm):
            for block in batch.split():
                gradient, _ = engine.mean_gradient(block)
                gradients.append([g.float() if g.dtype.itemsize < 4 else g for g in gradient])
        engine.extra_loss = extra
        names = [self.domains.names[n] for n in batch.ids.tolist()]
        return step, names, gram_matrix(gradients), sign_agreement(gradients)

    def read(self) -> list[dict[str, Any]]:
        """What was measured since it was last read."""
        unread, self._unread = self._unread, []
        points = []
        for before, after in unread:
            points.append(_plain(before))
            if after is not None:
                again, names = _plain(after), ("mean_cosine", "mean_inner_product", "sign_agreement")
                points[-1]["after"] = {name: again[name] for name in names}
        return points


def _plain(measured: Measured) -> dict[str, Any]:
    """A measurement as plain data; what is not finite is ``None``."""
    step, names, gram, signs = measured
    gram = gram.cpu().double()
    matrix = cosines(gram)
    point: dict[str, Any] = {
        "step": step,
        "domains": list(names),
        "mean_cosine": _number(mean_of_pairs(matrix)),
        "mean_inner_product": _number(mean_of_pairs(gram)),
        "sign_agreement": _number(signs),
    }
    if len(matrix) <= LARGEST:
        point["matrix"] = [[_number(v) for v in row] for row in matrix.tolist()]
    return point


def _number(value: float | Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
