"""What a step of direct gradient matching costs beside one of Fish; the paper says about ten times.

Every round times one step of each method on the same random batches, in an order that rotates; a ratio is the
median over rounds of the ratios within a round. Fish's inner loop takes S batches; ERM's row is S plain steps
on them, one batch each; IDGM takes one step that needs the gradients of all S and their inner products.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shoal import models
from shoal.algorithms import build
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainBatch, Task
from shoal.paper.published import published
from shoal.report.tables import Table
from shoal.training.capture import LoadedSteps, why_not
from shoal.training.engine import Engine
from shoal.training.processes import pick_device
from shoal.training.summary import environment

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request


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
QUICK = {"sprite-cnn": NETWORKS["sprite-cnn"], "resnet50": Network((3, 64, 64), 7, 3, 4)}
Step = Callable[[Sequence[DomainBatch]], None]
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ERM": ("erm", {}),
    "Fish": ("fish", {}),
    "IDGM, exact": ("idgm", {}),
    "IDGM, finite differences": ("idgm", {"method": "finite-difference"}),
}
WARM_UP, ROUNDS = 5, 15
QUICK_WARM_UP, QUICK_ROUNDS = 1, 3
LEFT_OUT = (
    "3 rounds in place of 15; without `only`, no ResNet-50, which with `only` has small images and batches. "
    "Ratios depend on the network and the device: these must not be taken for those of another one."
)


def measure(
    name: str, network: Network, device: torch.device, rounds: int, warm_up: int
) -> list[dict[str, Any]]:
    """A row per method; on CUDA also captured in graphs, as in our training loop."""
    place: Any = {"device": device, "generator": torch.Generator(device=device).manual_seed(0)}
    size, shape = network.batch, network.shape
    batches = [
        DomainBatch(torch.randn(size, *shape, **place), torch.randint(network.classes, (size,), **place), d)
        for d in range(network.domains)
    ]
    rows = []
    for captured in (False, True) if device.type == "cuda" else (False,):
        steps = {m: _stepper(name, network, *METHODS[m], device, captured) for m in METHODS}
        for step in steps.values():
            for _ in range(warm_up):
                step(batches)
        seconds: dict[str, list[float]] = {m: [] for m in METHODS}
        for number in range(rounds):
            start = number % len(METHODS)
            for method in [*METHODS][start:] + [*METHODS][:start]:
                seconds[method].append(_timed(steps[method], batches, device))
        for method in METHODS:
            row: dict[str, Any] = {
                "network": name,
                "how": "captured" if captured else "step by step",
                "method": method,
            }
            row |= {"domains": network.domains, "batch": network.batch}
            row["milliseconds"] = 1000 * statistics.median(seconds[method])
            for other in ("Fish", "ERM"):
                ratios = [a / b for a, b in zip(seconds[method], seconds[other], strict=True)]
                row[f"ratio_to_{other.lower()}"] = statistics.median(ratios)
            rows.append(row)
    return rows


def _stepper(
    name: str, network: Network, algorithm: str, settings: Any, device: torch.device, captured: bool
) -> Step:
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


def _timed(step: Step, batches: Sequence[DomainBatch], device: torch.device) -> float:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    step(batches)
    wait()
    return time.perf_counter() - began


def reproduce(request: Request) -> Reproduction:
    names = request.parts(list(NETWORKS))
    if request.quick and not request.only:
        names = ["sprite-cnn"]
    networks = QUICK if request.quick else NETWORKS
    rounds, warm_up = (QUICK_ROUNDS, QUICK_WARM_UP) if request.quick else (ROUNDS, WARM_UP)
    device = pick_device(request.device)
    rows = []
    for name in names:
        if request.progress:
            print(f"timing steps of {name} …", file=sys.stderr, flush=True)
        rows += measure(name, networks[name], device, rounds, warm_up)
    said = {c["method"]: f"about {c['value']} ×" for c in published("cost")}
    table = Table(["network", "how", "method", "ms per step", "of Fish's", "the paper", "of S plain steps"])
    for row in rows:
        paper = said.get(row["method"], "–") if row["network"] == "sprite-cnn" else "–"
        fish, erm = (f"{row[r]:.2f} ×" for r in ("ratio_to_fish", "ratio_to_erm"))
        table.add(row["network"], row["how"], row["method"], f"{row['milliseconds']:.1f}", fish, paper, erm)
    where = environment(device)
    text = f"Medians over {rounds} rounds on {where['device']}; every step uses the same examples."
    data = {"rows": rows, "environment": where}
    return request.result({"": table}, text, data, left_out=LEFT_OUT)
