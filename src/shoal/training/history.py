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
