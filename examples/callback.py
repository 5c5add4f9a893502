"""A callback of your own: it looks at every evaluation, and its list survives a resume.

python examples/callback.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import shoal


class Spread(shoal.Callback):
    """Prints after every evaluation how far apart the training domains are."""

    def __init__(self) -> None:
        self.spreads: list[float] = []

    def on_evaluate(self, state: Any) -> None:
        accuracies = state.point.scores["train"].values
        self.spreads.append(max(accuracies) - min(accuracies))
        print(f"step {state.step}: {self.spreads[-1]:.1%} between the best and the worst domain")

    def state_dict(self) -> dict[str, Any]:
        return {"spreads": self.spreads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.spreads = list(state["spreads"])


def hospital(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(200) % 2
    return torch.randn(200, 4, generator=draw) + number + y[:, None], y


def main() -> Spread:
    spread = Spread()
    train = {f"hospital {n}": hospital(n) for n in range(3)}
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    shoal.fit(
        "fish", model, train, steps=100, eval_every=25, device="cpu", progress=False, callbacks=[spread]
    )
    return spread


if __name__ == "__main__":
    main()
