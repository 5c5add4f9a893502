"""Fish in a plain loop, with BatchNorm, interrupted within an inner loop and resumed.

python examples/plain_loop.py
"""

from __future__ import annotations

import io

import torch
from hospitals import INNER_STEPS, dataset, difference, fish, network, ours, sampler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(nn.BatchNorm1d(16))
    return model, fish(model)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, done: int = 0, stop_at: int | None = None
) -> None:
    """From batch number ``done`` to the end, or to ``stop_at``."""
    order = sampler()
    order.set_step(*divmod(done, INNER_STEPS))
    loader = DataLoader(dataset(), batch_sampler=order)
    model.train()
    for number, (x, y) in enumerate(loader, done):
        if number == stop_at:
            return
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def main(stop_at: int | None = 10) -> nn.Module:
    """Stops after so many batches (10 is within an inner loop), saves, and resumes in new objects."""
    model, optimizer = start()
    train(model, optimizer, stop_at=stop_at)
    if stop_at is not None:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, optimizer = start()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, done=stop_at)
    return model.eval()


if __name__ == "__main__":
    own = ours(network(nn.BatchNorm1d(16)))
    print(f"largest difference from shoal.fit: {difference(main(), own):.1e}")
