"""What a step of direct gradient matching costs beside one of Fish; the paper says about ten times.

Every round times one step of each method on the same random batches, in an order that rotates; a ratio is the
median over rounds of the ratios within a round. Fish walks through S batches; ERM's row is S plain steps on
them, one batch each; IDGM takes one step that needs the gradients of all S and their inner products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal import models
from shoal.algorithms import build
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainBatch, Task
from shoal.training.capture import LoadedSteps, why_not
from shoal.training.engine import Engine
from shoal.training.processes import pick_device
from shoal.training.summary import environment


class Network(NamedTuple):
    shape: tuple[int, int, int]
    classes: int
    domains: int
    batch: int


NETWORKS = {"sprite-cnn": Network((3, 64, 64), 2, 10, 64), "resnet50": Network((3, 224, 224), 7, 3, 32)}
"""The paper's network for CdSprites with ten domains a step, and DomainBed's backbone with three."""
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ERM": ("erm", {}),
    "Fish": ("fish", {}),
    "IDGM, exact": ("idgm", {}),
    "IDGM, finite differences": ("idgm", {"method": "finite-difference"}),
}
ROUNDS = 15
WARM_UP = 5

Row = dict[str, Any]


def measure(
    networks: Sequence[str] = tuple(NETWORKS),
    device: str | None = None,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Rows for each network and method: step by step and, on CUDA, captured in graphs as in our loop."""
    where = pick_device(device)
    rows: list[Row] = []
    for name in networks:
        for captured in (False, True) if where.type == "cuda" else (False,):
            tell(f"{name}, {'captured' if captured else 'step by step'}")
            rows += _compared(name, NETWORKS[name], where, rounds, captured)
            if where.type == "cuda":
                torch.cuda.empty_cache()
    return {"environment": environment(where), "rows": rows}


def _compared(name: str, network: Network, device: torch.device, rounds: int, captured: bool) -> list[Row]:
    batches = _batches(network, device)
    steps = {m: _stepper(name, network, *METHODS[m], device, captured) for m in METHODS}
    for step in steps.values():
        for _ in range(WARM_UP):
            step(batches)
    seconds: dict[str, list[float]] = {m: [] for m in METHODS}
    for number in range(rounds):
        start = number % len(METHODS)
        for method in [*METHODS][start:] + [*METHODS][:start]:
            seconds[method].append(_timed(lambda m=method: steps[m](batches), device))  # type: ignore[misc]
    return [
        {
            "network": name,
            "how": "captured" if captured else "step by step",
            "method": method,
            "domains": network.domains,
            "batch": network.batch,
            "milliseconds": 1000 * statistics.median(seconds[method]),
            "ratio_to_fish": _ratio(seconds[method], seconds["Fish"]),
            "ratio_to_erm": _ratio(seconds[method], seconds["ERM"]),
            "rounds": [a / b for a, b in zip(seconds[method], seconds["Fish"], strict=True)],
        }
        for method in METHODS
    ]


def _ratio(mine: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def _batches(network: Network, device: torch.device) -> list[DomainBatch]:
    draw = torch.Generator(device=device).manual_seed(0)
    place: dict[str, Any] = {"device": device, "generator": draw}
    return [
        DomainBatch(
            torch.randn(network.batch, *network.shape, **place),
            torch.randint(network.classes, (network.batch,), **place),
            d,
        )
        for d in range(network.domains)
    ]


def _stepper(
    name: str,
    network: Network,
    algorithm: str,
    settings: dict[str, Any],
    device: torch.device,
    captured: bool,
) -> Callable[[Sequence[DomainBatch]], None]:
    model = models.build(name, input_shape=network.shape, classes=network.classes, seed=0).to(device).train()
    alone = algorithm == "erm"
    walk = 1 if alone else network.domains
    task = Task(network.domains, network.classes)
    trained = build(algorithm, model, nn.functional.cross_entropy, task, **settings).to(device)
    optimizer = torch.optim.Adam(trained_parameters(trained, {}), 1e-4, fused=True)
    engine = Engine(trained.wrap(optimizer, walk))
    trained.autocast = engine.autocast
    if captured and why_not(trained, engine) is None:
        one = LoadedSteps(trained, engine).run
    else:

        def one(batches: Sequence[DomainBatch]) -> Any:
            return engine.step(trained, batches)

    def step(batches: Sequence[DomainBatch]) -> None:
        for part in [[b] for b in batches] if alone else [batches]:
            one(part)

    return step


def _timed(work: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
