"""What is measured along the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.training.evaluate import Scores


@dataclass(frozen=True)
class Point:
    """What was measured at one step: the mean loss since the point before, and scores by split.

    ``passes`` counts the minibatches passed forward and backward so far, in which methods with different
    numbers of batches a step are to be compared.
    """

    step: int
    passes: int
    loss: float
    scores: Mapping[str, Scores]

    def to_dict(self) -> dict[str, Any]:
        scores = {split: s.to_dict() for split, s in self.scores.items()}
        loss = self.loss if math.isfinite(self.loss) else None  # every step since the last one was left out
        return {"step": self.step, "passes": self.passes, "loss": loss, "scores": scores}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Point:
        scores = {split: Scores.from_dict(s) for split, s in content["scores"].items()}
        loss = math.nan if content["loss"] is None else content["loss"]
        return cls(content["step"], content["passes"], loss, scores)


class Window:
    """Sums since the last time somebody looked, kept in step order so that they never depend on when."""

    def __init__(self) -> None:
        self.loss, self.steps, self.norm, self.norms = 0.0, 0, 0.0, 0
        self.domains: dict[int, tuple[float, int]] = {}
        self.more: dict[str, float] = {}

    def add(
        self,
        domains: list[int | None],
        losses: list[float],
        norms: list[float],
        more: Mapping[str, float],
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
