"""What is watched in a training: losses and norms, whether they are finite, and lines of the log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoal.tensors import widest
from shoal.training.callbacks import State
from shoal.training.options import learning_rate
from shoal.training.setup import Setup
from shoal.training.stopping import Diverged

Sums = dict[str, tuple[float, int]]
"""The sum and number of named values, added in the order of the steps, whenever these are read."""


def add(sums: Sums, name: str, value: float) -> None:
    total, count = sums.get(name, (0.0, 0))
    sums[name] = (total + value, count + 1)


def means(sums: Sums) -> dict[str, float]:
    """The means; nothing is summed then."""
    found = {name: total / count for name, (total, count) in sums.items()}
    sums.clear()
    return found


class Monitor:
    """Reads what steps have logged off the device, and stops where it is not finite.

    It takes means of the loss since the last evaluation, and of losses by domain and of what else is logged
    since the last line of the log.
    """

    def __init__(self, setup: Setup, state: State) -> None:
        self.setup, self.state = setup, state
        self.sums: dict[str, Sums] = {"point": {}, "line": {}, "domains": {}}
        self._unread: list[tuple[int, Tensor | None, dict[str, Tensor]]] = []
        self._began, self._first = time.monotonic(), state.step

    def add(self, log: dict[str, Tensor], domains: Tensor | None) -> None:
        """Notes the log of a step, to be read later, and the domains of its losses, if each is of one."""
        self._unread.append((self.state.step, domains, log))

    def read(self) -> None:
        """The one place that waits for the device."""
        unread, self._unread = self._unread, []
        every = torch.cat([value.reshape(-1) for _, _, log in unread for value in log.values()])
        (mean,) = self.setup.engine.average([every.to(widest(every.device))])
        numbers = iter(mean.tolist())
        by_domain = [ids for _, ids, log in unread if ids is not None and len(ids) == len(log["losses"])]
        domains = torch.stack(by_domain).tolist() if len(by_domain) == len(unread) else [[]] * len(unread)
        names = self.setup.data.splits["train"].names
        for (step, _, log), own in zip(unread, domains, strict=True):
            values = {name: list(islice(numbers, value.numel())) for name, value in log.items()}
            losses = values.pop("losses")
            for place, loss in enumerate(losses):
                if not math.isfinite(loss):
                    where = f" of domain {names[own[place]]!r}" if own else ""
                    raise self._diverged(step + 1, f"loss{where} became {loss}")
            for norm in values.get("norm", ()):
                if not math.isfinite(norm):
                    raise self._diverged(step + 1, f"gradient became {norm}")
            for sums in (self.sums["point"], self.sums["line"]):
                add(sums, "loss", sum(losses) / len(losses))
            for name, (value,) in values.items():
                add(self.sums["line"], "gradient_norm" if name == "norm" else name, value)
            for number, loss in zip(own, losses, strict=False):
                add(self.sums["domains"], names[number], loss)

    def check_weights(self) -> None:
        if not bool(torch.stack([p.isfinite().all() for p in self.setup.engine.params]).all()):
            raise self._diverged(self.state.step, "weights became non-finite")

    def _diverged(self, step: int, what: str) -> Diverged:
        return Diverged(
            f"{self.setup.label}: the {what} at step {step}; lower the learning rate or the weight of the "
            "penalty, or clip gradients.",
            self.state.history,
        )

    def mean_loss(self) -> float:
        """Since the last evaluation."""
        return means(self.sums["point"]).get("loss", math.nan)

    def line(self) -> dict[str, Any]:
        """A line of the log, of the steps since the last."""
        setup, step, now = self.setup, self.state.step, time.monotonic()
        examples = (step - self._first) * setup.sampler.domains_per_step * setup.sampler.batch_size
        pace, self._began, self._first = examples / max(now - self._began, 1e-9), now, step
        lr = learning_rate(setup.engine.optimizer.param_groups[0])
        line = {"phase": setup.stage, "step": step, **means(self.sums["line"])}
        losses = means(self.sums["domains"])
        return {**line, "losses": losses, "lr": lr, "examples_per_second": round(pace, 1)}

    def note(self) -> str:
        """For the progress line: the newest loss, pace and scores."""
        line, parts = self.state.line, list[str]()
        if "loss" in line:
            parts = [f"loss {line['loss']:.3g}", f"{line['examples_per_second']:,.0f} examples/s"]
        for split, scores in self.state.history[-1].scores.items() if self.state.history else ():
            parts.append(f"{split} {scores.selects or scores.metric} {scores.selection_score:.3g}")
        return "  ".join(parts)

    def state_dict(self) -> dict[str, Any]:
        return self.sums

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: dict(sums) for name, sums in state.items()}
        self._first = self.state.step
