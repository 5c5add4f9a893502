"""What is watched in a training: losses and norms, whether they are finite, and lines of the log."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.tensors import widest
from shoal.training.callbacks import Point, State
from shoal.training.evaluate import class_labels
from shoal.training.setup import Setup
from shoal.training.stopping import Diverged

COLLAPSED = 20
"""Steps from which on a training that is worse than a constant guess is said to be."""


class Window:
    """Sums over some steps, in their order, so that they do not depend on when losses are read."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.domains: dict[int, tuple[float, int]] = {}

    def add(self, domains: list[int] | None, losses: list[float], more: Mapping[str, float]) -> None:
        self.steps += 1
        for name, value in {"loss": sum(losses) / len(losses), **more}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1
        for domain, loss in zip(domains or (), losses, strict=False):
            total, count = self.domains.get(domain, (0.0, 0))
            self.domains[domain] = (total + loss, count + 1)

    @property
    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Monitor:
    """Reads what steps have logged off the device, and stops where it is not finite."""

    def __init__(self, setup: Setup, state: State) -> None:
        self.setup, self.state = setup, state
        self.since_point, self.since_line = Window(), Window()
        self._unread: list[tuple[int, Tensor, dict[str, Tensor]]] = []
        self._line_began, self._line_step, self._pace = time.monotonic(), 0, 0.0
        self._losses: dict[str, float] = {}
        self._names = setup.data.splits["train"].names
        self._by_domain = setup.sampler.draw in ("domains", "one-domain")

    def begin(self) -> None:
        self._line_began, self._line_step = time.monotonic(), self.state.step

    def add(self, log: dict[str, Tensor]) -> None:
        """Keeps the log of a step, to be read later."""
        self._unread.append((self.state.step, self.state.ids, log))

    def read(self) -> None:
        """The one place that waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        every = torch.stack([log["losses"] for _, _, log in unread])
        (losses,) = self.setup.engine.average([every.to(widest(every.device))])
        rows = losses.tolist()
        domains: list[Any] = [None] * len(rows)
        if self._by_domain and len(unread[0][1]) == losses.shape[1]:
            domains = torch.stack([ids for _, ids, _ in unread]).tolist()
        more: list[dict[str, float]] = [{} for _ in rows]
        for name in dict.fromkeys(name for _, _, log in unread for name in log if name != "losses"):
            which = [n for n, (_, _, log) in enumerate(unread) if name in log]
            column = torch.stack([unread[n][2][name] for n in which]).tolist()
            for n, value in zip(which, column, strict=True):
                more[n][name] = value
        for (step, _, _), ids, row, values in zip(unread, domains, rows, more, strict=True):
            for place, loss in enumerate(row):
                if not math.isfinite(loss):
                    domain = self._names[ids[place]] if ids else None
                    raise self.diverged(step + 1, "loss", domain, f"became {loss}")
            if not math.isfinite(norm := values.get("norm", 0.0)):
                raise self.diverged(step + 1, "gradient", None, f"became {norm}")
            self.since_point.add(ids, row, values)
            self.since_line.add(ids, row, values)

    def check_weights(self) -> None:
        if not bool(torch.stack([p.isfinite().all() for p in self.setup.engine.params]).all()):
            raise self.diverged(self.state.step, "weights", None, "became non-finite")

    def diverged(self, step: int, what: str, domain: str | None, happened: str) -> Diverged:
        where = f" of domain {domain!r}" if domain is not None else ""
        message = (
            f"{self.setup.label}: the {what}{where} {happened} at step {step}; lower the learning rate "
            f"or the weight of the penalty, or clip gradients."
        )
        return Diverged(message, self.state.history, step, domain, what)

    def line(self) -> dict[str, Any]:
        """A line of the log, of the steps since the last."""
        window, self.since_line = self.since_line, Window()
        step, sampler = self.state.step, self.setup.sampler
        self._losses = {self._names[d]: total / n for d, (total, n) in sorted(window.domains.items())}
        now = time.monotonic()
        examples = (step - self._line_step) * sampler.domains_per_step * sampler.batch_size
        self._pace = examples / max(now - self._line_began, 1e-9)
        self._line_began, self._line_step = now, step
        means = window.means
        norm = means.pop("norm", None)
        return {
            "phase": self.setup.stage,
            "step": step,
            "loss": means.pop("loss", math.nan),
            "losses": self._losses,
            **means,
            "lr": self.setup.lr,
            **({} if norm is None else {"gradient_norm": norm}),
            "examples_per_second": round(self._pace, 1),
        }

    def note(self) -> str:
        """For the progress line."""
        from shoal.training.progress import losses_note, scores_note

        parts, history = [], self.state.history
        if self._losses:
            parts.append(losses_note(self._losses))
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
        setup, steps = self.setup, self.setup.options["steps"]
        if setup.stage != "train" or not setup.processes.main or "train" not in point.scores:
            return
        if (constant := self._constant_guess()) is None:
            return
        majority, margin, entropy = constant

        def below(point: Point, before: Point | None) -> bool:
            now = point.scores["train"]
            loss = math.inf if now.loss is None or math.isnan(now.loss) else now.loss
            last = before.scores["train"].loss if before else None
            stuck = (last is not None and loss >= last) or loss > 1.1 * point.loss
            worse = setup.options["loss"] is not None or loss > entropy
            begun = point.step >= max(COLLAPSED, steps / 10)
            return begun and stuck and worse and now.average < majority - margin

        every = [None, *self.state.history, point]
        *earlier, now = (below(p, before) for before, p in pairwise(every) if p is not None)
        if now and not any(earlier):
            warnings.warn(
                f"after {point.step:,} of {steps:,} steps the accuracy on the training domains "
                f"is {point.scores['train'].average:.1%}; always guessing the most frequent class gives "
                f"{majority:.1%}. Lower the learning rate ({setup.lr:g}), or check the labels.",
                stacklevel=2,
            )

    def _constant_guess(self) -> tuple[float, float, float] | None:
        """Of the training examples that are evaluated: how good the best constant guess is, two standard
        errors of that, and the classes' entropy. ``None`` where labels are not known without reading."""
        labels = class_labels(self.setup.examples) if self.setup.task.is_classification else None
        which = self.setup.evaluator.which["train"]
        if labels is None or (own := labels[which]).min() < 0:
            return None
        shares = np.bincount(own) / len(own)
        largest, some = float(shares.max()), shares[shares > 0]
        return largest, 2 * math.sqrt(largest * (1 - largest) / len(own)), -float((some * np.log(some)).sum())

    def state_dict(self) -> dict[str, Any]:
        return {"point": self.since_point.state_dict(), "line": self.since_line.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.since_point.load_state_dict(state["point"])
        self.since_line.load_state_dict(state["line"])
