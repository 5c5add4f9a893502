"""What a step of direct gradient matching (IDGM) costs beside one of Fish; the paper says about ten times.

    python benchmarks/idgm_cost.py [--device cuda] [--networks sprite-cnn resnet50] > results.md

Every round trains each method for a few steps on the same random batches, in an order that rotates; a ratio
is the median over rounds of the ratios within a round. Fish's inner loop takes S batches; ERM's row is S
plain steps on them, one batch each; IDGM's step needs the gradients of all S and their inner products.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch

import shoal
from shoal import models
from shoal.report.tables import Table

NETWORKS: dict[str, dict[str, Any]] = {
    "sprite-cnn": {"shape": (3, 64, 64), "classes": 2, "domains": 10, "batch": 64, "options": {}},
    "resnet50": {
        **{"shape": (3, 224, 224), "classes": 7, "domains": 3, "batch": 32},
        "options": {"freeze_batchnorm": True},
    },
}
"""The paper's network for CdSprites with ten domains per step, and DomainBed's backbone with three."""
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ERM": ("erm", {}),
    "Fish": ("fish", {}),
    "IDGM, exact": ("idgm", {}),
    "IDGM, finite differences": ("idgm", {"method": "finite-difference"}),
}
PAPER = {("sprite-cnn", "IDGM, exact"): "about 10 ×"}
"""Shi et al. 2021, section 4.1: "Fish is about 10 times faster than directly optimizing IDGM"."""


class Clock(shoal.Callback):
    """When every step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, state: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def step_seconds(name: str, method: str, steps: int, warm_up: int, **options: Any) -> float:
    """Seconds of a step of a method in the training loop, without the first ones."""
    network, numbers = NETWORKS[name], torch.Generator().manual_seed(0)
    shape, classes, domains, batch = (network[k] for k in ("shape", "classes", "domains", "batch"))
    train = {
        f"domain {d}": (
            torch.randn((batch, *shape), generator=numbers),
            torch.randint(classes, (batch,), generator=numbers),
        )
        for d in range(domains)
    }
    model = models.build(name, input_shape=shape, classes=classes, seed=0, **network["options"])
    algorithm, settings = METHODS[method]
    plain, clock = domains if algorithm == "erm" else 1, Clock()  # steps that are counted as one
    options |= {"batch_size": batch, "domains_per_step": domains // plain, "lr": 1e-4, "settings": settings}
    whole = plain * (warm_up + steps)
    shoal.fit(
        algorithm, model, train, steps=whole, eval_every=whole, callbacks=[clock], progress=False, **options
    )
    ends = clock.times[plain * warm_up - 1 :: plain]
    return median(after - before for before, after in pairwise(ends))


def measure(name: str, rounds: int, options: Mapping[str, Any]) -> dict[str, list[float]]:
    """The seconds of every method in every round."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for number in range(rounds):
        start = number % len(METHODS)
        for method in [*METHODS][start:] + [*METHODS][:start]:
            seconds[method].append(step_seconds(name, method, **options))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    versions = f"shoal {shoal.__version__}, torch {torch.__version__}"
    print(f"Medians over {args.rounds} rounds on {device}; {versions}.\n")
    table = Table(["network", "how", "method", "ms per step", "of Fish's", "the paper", "of S plain steps"])
    for name in args.networks:
        for how, capture in {"step by step": False, "captured": None}.items():
            if capture is None and not args.device.startswith("cuda"):
                continue
            options = {
                "steps": args.steps,
                "warm_up": args.warm_up,
                "device": args.device,
                "capture": capture,
            }
            seconds = measure(name, args.rounds, options)
            for method, own in seconds.items():
                fish, plain = (
                    f"{median(a / b for a, b in zip(own, seconds[other], strict=True)):.2f} ×"
                    for other in ("Fish", "ERM")
                )
                milliseconds = f"{1000 * median(own):.1f}"
                table.add(name, how, method, milliseconds, fish, PAPER.get((name, method), "–"), plain)
    print(table.markdown())


if __name__ == "__main__":
    main()
