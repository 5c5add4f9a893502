"""What is watched in a training: losses and norms, whether they are finite, and lines of the log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.tensors import widest
from shoal.training.callbacks import State
from shoal.training.setup import Setup
from shoal.training.stopping import Diverged


class Window:
    """Means over some steps, summed in their order, so that they do not depend on when losses are read."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[float, int]] = {}
        self.domains: dict[int, tuple[float, int]] = {}

    def add(self, domains: list[int] | None, losses: list[float], more: Mapping[str, float]) -> None:
        for name, value in {"loss": sum(losses) / len(losses), **more}.items():
            total, count = self.values.get(name, (0.0, 0))
            self.values[name] = (total + value, count + 1)
        for domain, loss in zip(domains or (), losses, strict=False):
            total, count = self.domains.get(domain, (0.0, 0))
            self.domains[domain] = (total + loss, count + 1)

    @property
    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self.values.items()}


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

    def start(self) -> None:
        self._line_began, self._line_step = time.monotonic(), self.state.step

    def add(self, log: dict[str, Tensor]) -> None:
        """Notes the log of a step, to be read later."""
        self._unread.append((self.state.step, self.state.ids, log))

    def read(self) -> None:
        """The one place that waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        every = torch.stack([log["losses"] for _, _, log in unread])
        (losses,) = self.setup.engine.average([every.to(widest(every.device))])
        domains: list[Any] = [None] * len(unread)
        if self._by_domain and len(unread[0][1]) == losses.shape[1]:
            domains = torch.stack([ids for _, ids, _ in unread]).tolist()
        more: list[dict[str, float]] = [{} for _ in unread]
        for name in dict.fromkeys(name for _, _, log in unread for name in log if name != "losses"):
            which = [n for n, (_, _, log) in enumerate(unread) if name in log]
            column = torch.stack([unread[n][2][name] for n in which]).tolist()
            for n, value in zip(which, column, strict=True):
                more[n][name] = value
        for (step, _, _), ids, row, values in zip(unread, domains, losses.tolist(), more, strict=True):
            for place, loss in enumerate(row):
                if not math.isfinite(loss):
                    where = f" of domain {self._names[ids[place]]!r}" if ids else ""
                    raise self._diverged(step + 1, f"loss{where} became {loss}")
            if not math.isfinite(norm := values.get("norm", 0.0)):
                raise self._diverged(step + 1, f"gradient became {norm}")
            self.since_point.add(ids, row, values)
            self.since_line.add(ids, row, values)

    def check_weights(self) -> None:
        if not bool(torch.stack([p.isfinite().all() for p in self.setup.engine.params]).all()):
            raise self._diverged(self.state.step, "weights became non-finite")

    def _diverged(self, step: int, what: str) -> Diverged:
        return Diverged(
            f"{self.setup.label}: the {what} at step {step}; lower the learning rate or the weight of the "
            "penalty, or clip gradients.",
            self.state.history,
        )

    def line(self) -> dict[str, Any]:
        """A line of the log, of the steps since the last."""
        window, self.since_line = self.since_line, Window()
        step, sampler, now = self.state.step, self.setup.sampler, time.monotonic()
        self._losses = {self._names[d]: total / n for d, (total, n) in sorted(window.domains.items())}
        examples = (step - self._line_step) * sampler.domains_per_step * sampler.batch_size
        self._pace = examples / max(now - self._line_began, 1e-9)
        self._line_began, self._line_step = now, step
        means = window.means
        norm = {"gradient_norm": means.pop("norm")} if "norm" in means else {}
        line = {"phase": self.setup.stage, "step": step, "loss": means.pop("loss", math.nan)}
        line |= {"losses": self._losses, **means, "lr": self.setup.lr, **norm}
        return {**line, "examples_per_second": round(self._pace, 1)}

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

    def state_dict(self) -> dict[str, Any]:
        return {"point": dict(vars(self.since_point)), "line": dict(vars(self.since_line))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self.since_point).update(state["point"])
        vars(self.since_line).update(state["line"])
