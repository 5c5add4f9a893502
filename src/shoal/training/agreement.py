"""How well the gradients of the domains agree during a training.

Measured before a step, on one batch from each of a few domains: the step's own examples, if it takes one
batch per domain or regroups them, otherwise others. ``track_after`` measures the same batches again after the
step. With g_i the gradient of domain i's mean loss, that is

- ``mean_cosine`` and ``mean_inner_product`` over pairs i ≠ j (see :mod:`shoal.gradients`),
- ``sign_agreement``, the mean over parameters of |mean of signs|,
- ``matrix``, the cosines of all pairs.

No weight, buffer, gradient or random number of the training is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.data.batch import MetaBatch
from shoal.data.loader import seeded
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.files import finite
from shoal.gradients import cosines, gram_matrix, mean_of_pairs, sign_agreement
from shoal.replay import preserve_state
from shoal.training.callbacks import Callback, State
from shoal.training.setup import Setup

LARGEST = 50
"""Most domains that a measurement compares."""


class Tracking(Callback):
    """Measures every ``track_every`` steps; ``write_line`` writes a measurement to the log."""

    def __init__(self, setup: Setup, write_line: Callable[[Mapping[str, Any]], None]) -> None:
        self.setup, self.write_line = setup, write_line
        sampler, self.domains = setup.sampler, setup.data.splits["train"]
        if len(self.domains) < 2:
            only = self.domains.names[0]
            raise InputError(f"track_every compares domains, and there is only one to train on ({only!r}).")
        count = min(max(2, min(sampler.domains_per_step, LARGEST)), len(self.domains))
        # With the seed of the training, which gives its own batches where these are of single domains.
        self.sampler = DomainBatchSampler(
            self.domains, sampler.batch_size, count, seed=sampler.seed, steps=sampler.steps
        )
        self.measurements: list[dict[str, Any]] = []
        """Only the newest has its matrix; the log has all of them."""
        self._batch: MetaBatch | None = None

    def before_step(self, state: State) -> None:
        if state.step % (self.setup.options["track_every"] or 1):
            return
        self._batch = self.batch(state.step)
        for before in self.measurements[-1:]:
            before.pop("matrix", None)
        self.measurements.append({"step": state.step, **self.measure(state.step, self._batch)})

    def on_step(self, state: State) -> None:
        if self._batch is None:
            return
        if self.setup.options["track_after"]:
            after = self.measure(state.step - 1, self._batch)
            self.measurements[-1]["after"] = {
                k: v for k, v in after.items() if k not in ("domains", "matrix")
            }
        self._batch = None
        self.write_line({"phase": "agreement", **self.measurements[-1]})

    def batch(self, step: int) -> MetaBatch:
        """One batch of each domain that is measured at a step."""
        return next(iter(self.setup.loader(self.sampler, step, step + 1, workers=0)))

    def measure(self, step: int, batch: MetaBatch) -> dict[str, Any]:
        """How well the gradients of these blocks agree, as plain data; what is not finite is ``None``."""
        engine, gradients = self.setup.engine, []
        extra, engine.extra_loss = engine.extra_loss, None  # MIRO is no loss of a domain
        # A model may draw from any of the generators; `seeded` puts back those that are not torch's.
        with seeded(step), preserve_state(engine.algorithm):
            for block in batch.split():
                gradient, _ = engine.mean_gradient(block)
                gradients.append([g.float() if g.dtype.itemsize < 4 else g for g in gradient])
        engine.extra_loss = extra
        gram = gram_matrix(gradients).cpu().double()
        matrix = cosines(gram)
        found = {
            "domains": [self.domains.names[n] for n in batch.ids.tolist()],
            "mean_cosine": float(mean_of_pairs(matrix)),
            "mean_inner_product": float(mean_of_pairs(gram)),
            "sign_agreement": float(sign_agreement(gradients)),
            "matrix": matrix.tolist(),
        }
        return dict(finite(found))

    def state_dict(self) -> dict[str, Any]:
        return {"measurements": self.measurements}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measurements = [dict(point) for point in state["measurements"]]
