"""What is watched in a training: losses and norms, whether they are finite, and lines of the log."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shoal.data.batch import widest
from shoal.training.callbacks import State
from shoal.training.evaluate import class_labels
from shoal.training.history import Point
from shoal.training.progress import losses_note, scores_note
from shoal.training.setup import Setup
from shoal.training.stepping import Taken
from shoal.training.stopping import Diverged

COLLAPSED = 20
"""Steps from which on a training that is worse than a constant guess is said to be."""
KNOWN = ("losses", "norms", "objective")


class Window:
    """Sums since the last time somebody looked, kept in step order so that they never depend on when."""

    def __init__(self) -> None:
        self.loss, self.steps, self.norm, self.norms = 0.0, 0, 0.0, 0
        self.domains: dict[int, tuple[float, int]] = {}
        self.more: dict[str, float] = {}

    def add(
        self, domains: list[int | None], losses: list[float], norms: list[float], more: Mapping[str, float]
    ) -> None:
        self.loss += sum(losses) / len(losses)
        self.steps += 1
        for name, value in more.items():
            self.more[name] = self.more.get(name, 0.0) + value
        if norms:
            self.norm += sum(norms) / len(norms)
            self.norms += 1
        if len(domains) == len(losses):
            for domain, loss in zip(domains, losses, strict=True):
                if domain is not None:
                    total, count = self.domains.get(domain, (0.0, 0))
                    self.domains[domain] = (total + loss, count + 1)

    @property
    def mean(self) -> float:
        return self.loss / self.steps if self.steps else math.nan

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Monitor:
    """Reads what steps have logged off the device, and stops where it is not finite."""

    def __init__(self, setup: Setup, state: State) -> None:
        self.setup, self.state = setup, state
        self.since_point, self.since_line = Window(), Window()
        self._line_began, self._line_step, self._pace = time.monotonic(), 0, 0.0
        self._losses: dict[str, float] = {}

    def begin(self) -> None:
        self._line_began, self._line_step = time.monotonic(), self.state.step

    def read(self, taken: Sequence[Taken]) -> None:
        """The one place that waits for the device."""
        if not taken:
            return
        engine = self.setup.engine
        every = torch.cat([t.log["losses"] for t in taken])
        (losses,) = engine.average([every.to(widest(every.device))])
        own = [k for k, v in taken[0].log.items() if k not in KNOWN and v.ndim == 1]
        logged = [k for k in (*own, "norms", "objective") if k in taken[0].log]
        columns = {k: torch.cat([t.log[k] for t in taken]).tolist() for k in logged}
        steps = [(t.first + u, domains) for t in taken for u, domains in enumerate(t.domains)]
        for n, ((step, domains), row) in enumerate(zip(steps, losses.tolist(), strict=True)):
            norms = columns["norms"][n] if "norms" in columns else []
            objective = [columns["objective"][n]] if "objective" in columns else []
            watched = {"losses": row, "norms": norms, "objective": objective}
            if bad := self._first_bad(domains, {k: watched[k] for k in engine.watched}):
                domain, what, value = bad
                raise self.diverged(step + 1, domain, what, f"became {value}")
            finite = [norm for norm in norms if math.isfinite(norm)]
            more = {k: columns[k][n] for k in own}
            self.since_point.add(domains, row, finite, more)
            self.since_line.add(domains, row, finite, more)
        if engine.scale is not None and not float(engine.scale.value) > 2.0**-20:
            raise self.diverged(
                self.state.step, None, "gradient", "was not finite with any loss scale (use bf16)"
            )

    def _first_bad(
        self, domains: list[int | None], watched: Mapping[str, list[float]]
    ) -> tuple[str | None, str, float] | None:
        for what, values in watched.items():
            for slot, value in enumerate(values):
                if not math.isfinite(value):
                    domain = domains[slot] if len(domains) == len(values) else None
                    name = None if domain is None else self.setup.data.splits["train"].names[domain]
                    return name, {"losses": "loss", "norms": "gradient"}.get(what, what), value
        return None

    def check_weights(self) -> None:
        if not bool(torch.stack([p.isfinite().all() for p in self.setup.engine.params]).all()):
            raise self.diverged(self.state.step, None, "weights", "became non-finite", applied=True)

    def diverged(
        self, step: int, domain: str | None, what: str, happened: str, applied: bool = False
    ) -> Diverged:
        where = f" of domain {domain!r}" if domain is not None else ""
        fate = "" if applied else ", which was not applied"
        message = (
            f"{self.setup.label}: the {what}{where} {happened} at step {step}{fate}; lower the learning rate "
            f"or the weight of the penalty, or clip gradients."
        )
        return Diverged(message, self.state.history, step, domain, what)

    def line(self) -> dict[str, Any]:
        """A line of the log, of the steps since the last."""
        window, self.since_line = self.since_line, Window()
        step, sampler = self.state.step, self.setup.sampler
        names = self.setup.data.splits["train"].names
        self._losses = {names[d]: total / n for d, (total, n) in sorted(window.domains.items())}
        now = time.monotonic()
        examples = (step - self._line_step) * sampler.domains_per_step * sampler.batch_size
        self._pace = examples / max(now - self._line_began, 1e-9)
        self._line_began, self._line_step = now, step
        return {
            "phase": self.setup.phase,
            "step": step,
            "loss": window.mean,
            "losses": self._losses,
            **{name: total / window.steps for name, total in window.more.items()},
            "lr": self.setup.lr,
            **({"gradient_norm": window.norm / window.norms} if window.norms else {}),
            "examples_per_second": round(self._pace, 1),
        }

    def note(self) -> str:
        """For the progress line."""
        parts, history = [], self.state.history
        if self._losses:
            parts.append(losses_note(self._losses, 30))
        elif history:
            parts.append(f"loss {history[-1].loss:.3f}")
        if self._pace:
            parts.append(f"{self._pace:,.0f} examples/s")
        if history:
            parts += [scores_note(split, s) for split, s in history[-1].scores.items()]
        return "  ".join(parts)

    def warn_of_collapse(self, point: Point) -> None:
        """Once, where after a tenth of the steps a constant guess would do better on the training domains.

        A healthy training may be that bad at its start, or with classes of very different size. So the loss
        too must be above that of a model which knows nothing but how frequent the classes are, and not on
        its way down: no lower than at the evaluation before, or well above what it was in training.
        """
        setup, options = self.setup, self.setup.options
        if setup.phase != "train" or not setup.processes.main or "train" not in point.scores:
            return
        if self.constant is None:
            return
        majority, margin, entropy = self.constant

        def below(point: Point, before: Point | None) -> bool:
            now = point.scores["train"]
            loss = math.inf if now.loss is None or math.isnan(now.loss) else now.loss
            last = before.scores["train"].loss if before else None
            stuck = (last is not None and loss >= last) or loss > 1.1 * point.loss
            worse = options["loss"] is not None or loss > entropy
            begun = point.step >= max(COLLAPSED, options["steps"] / 10)
            return begun and stuck and worse and now.average < majority - margin

        every = [None, *self.state.history, point]
        *earlier, now = (below(p, before) for before, p in pairwise(every) if p is not None)
        if now and not any(earlier):
            warnings.warn(
                f"after {point.step:,} of {options['steps']:,} steps the accuracy on the training domains "
                f"is {point.scores['train'].average:.1%}; always guessing the most frequent class gives "
                f"{majority:.1%}. Lower the learning rate ({setup.lr:g}), or check the labels.",
                stacklevel=2,
            )

    @cached_property
    def constant(self) -> tuple[float, float, float] | None:
        """On the training examples that are evaluated: how good the best constant guess is, two standard
        errors of that, and the classes' entropy. ``None`` where labels are not known without reading."""
        labels = class_labels(self.setup.examples) if self.setup.task.is_classification else None
        which = self.setup.evaluator.which["train"]
        if labels is None or (own := labels[which]).min() < 0:
            return None
        shares = np.bincount(own) / len(own)
        largest, some = float(shares.max()), shares[shares > 0]
        return largest, 2 * math.sqrt(largest * (1 - largest) / len(own)), -float((some * np.log(some)).sum())
