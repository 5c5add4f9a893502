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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal import models
from shoal.algorithms import build
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainBatch, Task
from shoal.paper.published import published, read
from shoal.training.capture import LoadedSteps, why_not
from shoal.training.engine import Engine
from shoal.training.processes import pick_device
from shoal.training.summary import environment

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

Step = Callable[[Sequence[DomainBatch]], None]
Network = Mapping[str, Any]
"""``shape`` of its input, ``classes``, ``domains`` per step, ``batch`` size and ``options``."""


def measure(
    name: str, network: Network, device: torch.device, size: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A row per method; on CUDA also captured in graphs, as in our training loop."""
    place: Any = {"device": device, "generator": torch.Generator(device=device).manual_seed(0)}
    shape, labels = (network["batch"], *network["shape"]), (network["batch"],)
    batches = [
        DomainBatch(torch.randn(shape, **place), torch.randint(network["classes"], labels, **place), d)
        for d in range(network["domains"])
    ]
    rows = []
    for captured in (False, True) if device.type == "cuda" else (False,):
        seconds = _rounds(_steps(name, network, device, captured), batches, device, size)
        for method, own in seconds.items():
            ratios = {
                f"ratio_to_{other.lower()}": statistics.median(
                    a / b for a, b in zip(own, seconds[other], strict=True)
                )
                for other in ("Fish", "ERM")
            }
            about = {"network": name, "how": "captured" if captured else "step by step", "method": method}
            about |= {"domains": network["domains"], "batch": network["batch"]}
            rows.append({**about, "milliseconds": 1000 * statistics.median(own), **ratios})
    return rows


def _steps(name: str, network: Network, device: torch.device, captured: bool) -> dict[str, Step]:
    """By method a function that takes its step."""
    return {
        method: _step(name, network, device, captured, **settings)
        for method, settings in read("presets/cost.yaml")["methods"].items()
    }


def _step(
    name: str, network: Network, device: torch.device, captured: bool, algorithm: str, **settings: Any
) -> Step:
    shape, classes, domains = network["shape"], network["classes"], network["domains"]
    options = network.get("options", {})
    model = models.build(name, input_shape=shape, classes=classes, seed=0, **options).to(device).train()
    trained = build(algorithm, model, nn.functional.cross_entropy, Task(domains, classes), **settings).to(
        device
    )
    optimizer = torch.optim.Adam(trained_parameters(trained, {}), 1e-4, fused=True)
    alone = algorithm == "erm"
    engine = Engine(trained.wrap(optimizer, 1 if alone else domains))
    trained.autocast = engine.autocast
    graph = LoadedSteps(trained, engine) if captured and why_not(trained, engine) is None else None

    def step(batches: Sequence[DomainBatch]) -> None:
        for part in [[b] for b in batches] if alone else [batches]:
            if graph is None:
                engine.step(trained, part)
            else:
                graph.run(part)

    return step


def _rounds(
    steps: Mapping[str, Step], batches: Sequence[DomainBatch], device: torch.device, size: Mapping[str, int]
) -> dict[str, list[float]]:
    """Seconds of every method in every round."""
    for step in steps.values():
        for _ in range(size["warm_up"]):
            step(batches)
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    for number in range(size["rounds"]):
        start = number % len(steps)
        for method in [*steps][start:] + [*steps][:start]:
            seconds[method].append(timed(steps[method], batches, device))
    return seconds


def timed(step: Step, batches: Sequence[DomainBatch], device: torch.device) -> float:
    """Seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step(batches)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def reproduce(request: Request) -> Reproduction:
    size = read("presets/cost.yaml")["quick" if request.quick else "full"]
    names = request.parts(size["networks"])
    if request.quick and not request.only:
        names = names[:1]
    device, rows = pick_device(request.device), []
    for name in names:
        if request.progress:
            print(f"timing steps of {name} …", file=sys.stderr, flush=True)
        rows += measure(name, size["networks"][name], device, size)
    claims = {(c["network"], c["method"]): f"about {c['value']} ×" for c in published("cost")}
    table = [
        {
            **{name: row[name] for name in ("network", "how", "method")},
            "ms per step": f"{row['milliseconds']:.1f}",
            "of Fish's": f"{row['ratio_to_fish']:.2f} ×",
            "the paper": claims.get((row["network"], row["method"]), "–"),
            "of S plain steps": f"{row['ratio_to_erm']:.2f} ×",
        }
        for row in rows
    ]
    where = environment(device)
    text = {"rounds": size["rounds"], "device": where["device"]}
    return request.result({"": table}, {"rows": rows, "environment": where}, text)
