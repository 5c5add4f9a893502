"""What a step of direct gradient matching costs beside one of Fish; the paper says about ten times.

Every round times one step of each method on the same random batches, in an order that rotates; a ratio is the
median over rounds of the ratios within a round. Fish's inner loop takes S batches; ERM's row is S plain steps
on them, one batch each; IDGM takes one step that needs the gradients of all S and their inner products.
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
from shoal.report.tables import Table
from shoal.training.capture import LoadedSteps, why_not
from shoal.training.engine import Engine
from shoal.training.processes import pick_device
from shoal.training.summary import environment


class Network(NamedTuple):
    shape: tuple[int, int, int]
    classes: int
    domains: int
    batch: int
    options: Mapping[str, Any] = {}


NETWORKS = {
    "sprite-cnn": Network((3, 64, 64), 2, 10, 64),
    "resnet50": Network((3, 224, 224), 7, 3, 32, {"freeze_batchnorm": True}),
}
"""The paper's network for CdSprites with ten domains per step, and DomainBed's backbone with three."""
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ERM": ("erm", {}),
    "Fish": ("fish", {}),
    "IDGM, exact": ("idgm", {}),
    "IDGM, finite differences": ("idgm", {"method": "finite-difference"}),
}
WARM_UP = 5


def measure(
    networks: Sequence[str], device: str | None, rounds: int, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Rows for each network and method: step by step and, on CUDA, captured in graphs as in our loop."""
    where = pick_device(device)
    rows: list[dict[str, Any]] = []
    for name in networks:
        for captured in (False, True) if where.type == "cuda" else (False,):
            tell(f"{name}, {'captured' if captured else 'step by step'}")
            rows += _compared(name, NETWORKS[name], where, rounds, captured)
            if where.type == "cuda":
                torch.cuda.empty_cache()
    return {"environment": environment(where), "rows": rows}


def _compared(
    name: str, network: Network, device: torch.device, rounds: int, captured: bool
) -> list[dict[str, Any]]:
    place: Any = {"device": device, "generator": torch.Generator(device=device).manual_seed(0)}
    size, shape = network.batch, network.shape
    batches = [
        DomainBatch(torch.randn(size, *shape, **place), torch.randint(network.classes, (size,), **place), d)
        for d in range(network.domains)
    ]
    steps = {m: _stepper(name, network, *METHODS[m], device, captured) for m in METHODS}
    for step in steps.values():
        for _ in range(WARM_UP):
            step(batches)
    seconds: dict[str, list[float]] = {m: [] for m in METHODS}
    for number in range(rounds):
        start = number % len(METHODS)
        for method in [*METHODS][start:] + [*METHODS][:start]:
            seconds[method].append(_timed(lambda m=method: steps[m](batches), device))  # type: ignore[misc]
    ratios = {
        (m, other): [a / b for a, b in zip(seconds[m], seconds[other], strict=True)]
        for m in METHODS
        for other in ("Fish", "ERM")
    }
    return [
        {
            "network": name,
            "how": "captured" if captured else "step by step",
            "method": method,
            "domains": network.domains,
            "batch": network.batch,
            "milliseconds": 1000 * statistics.median(seconds[method]),
            "ratio_to_fish": statistics.median(ratios[method, "Fish"]),
            "ratio_to_erm": statistics.median(ratios[method, "ERM"]),
            "rounds": ratios[method, "Fish"],
        }
        for method in METHODS
    ]


def _stepper(
    name: str, network: Network, algorithm: str, settings: Any, device: torch.device, captured: bool
) -> Callable[[Sequence[DomainBatch]], None]:
    shape, classes = network.shape, network.classes
    model = models.build(name, input_shape=shape, classes=classes, seed=0, **network.options)
    model = model.to(device).train()
    alone = algorithm == "erm"
    task = Task(network.domains, network.classes)
    trained = build(algorithm, model, nn.functional.cross_entropy, task, **settings).to(device)
    optimizer = torch.optim.Adam(trained_parameters(trained, {}), 1e-4, fused=True)
    engine = Engine(trained.wrap(optimizer, 1 if alone else network.domains))
    trained.autocast = engine.autocast
    graph = LoadedSteps(trained, engine) if captured and why_not(trained, engine) is None else None

    def step(batches: Sequence[DomainBatch]) -> None:
        for part in [[b] for b in batches] if alone else [batches]:
            if graph is None:
                engine.step(trained, part)
            else:
                graph.run(part)

    return step


def _timed(work: Callable[[], None], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    result = Table(["network", "how", "method", "ms per step", "of Fish's", "of S plain steps"])
    for row in rows:
        ratios = (f"{row[r]:.2f} ×" for r in ("ratio_to_fish", "ratio_to_erm"))
        result.add(row["network"], row["how"], row["method"], f"{row['milliseconds']:.2f}", *ratios)
    return result
