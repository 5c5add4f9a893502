"""What a step of direct gradient matching costs beside one of Fish; the paper says about ten times.

Every round trains each method for a few steps on the same random batches, in an order that rotates; a ratio
is the median over rounds of the ratios within a round. Fish's inner loop takes S batches; ERM's row is S
plain steps on them, one batch each; IDGM's step needs the gradients of all S and their inner products.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch

import shoal
from shoal import models
from shoal.paper import read
from shoal.paper.reproduce import Reproduction, Request
from shoal.training.callbacks import Callback, State
from shoal.training.processes import pick_device
from shoal.training.summary import environment

Network = Mapping[str, Any]
"""``shape`` of its input, ``classes``, ``domains`` per step, ``batch`` size and ``options``."""


class Clock(Callback):
    """When every step ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def on_step(self, state: State) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())


def step_seconds(name: str, network: Network, method: Mapping[str, Any], size: Any, **options: Any) -> float:
    """Seconds of a step of a method in the training loop, without the first ones."""
    shape, labels, domains = (network["batch"], *network["shape"]), (network["batch"],), network["domains"]
    numbers = torch.Generator().manual_seed(0)
    train = {
        f"domain {d}": (
            torch.randn(shape, generator=numbers),
            torch.randint(network["classes"], labels, generator=numbers),
        )
        for d in range(domains)
    }
    arguments: dict[str, Any] = {"input_shape": network["shape"], "classes": network["classes"], "seed": 0}
    model = models.build(name, **arguments, **network.get("options", {}))
    plain = domains if method["algorithm"] == "erm" else 1  # steps that are counted as one
    clock = Clock(torch.device(options["device"]))
    options |= {"batch_size": network["batch"], "domains_per_step": domains // plain, "lr": 1e-4}
    options |= {"settings": method.get("settings", {}), "callbacks": [clock], "progress": False}
    steps = plain * (size["warm_up"] + size["steps"])
    shoal.fit(method["algorithm"], model, train, steps=steps, eval_every=steps, **options)
    ends = clock.times[plain * size["warm_up"] - 1 :: plain]
    return median(after - before for before, after in pairwise(ends))


def measure(
    name: str, network: Network, device: torch.device, size: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row per method; on CUDA also captured in graphs, as our training loop does by default."""
    methods, rows = read("presets/cost.yaml")["methods"], []
    for how, capture in {"step by step": False, "captured": None}.items():
        if capture is None and device.type != "cuda":
            continue
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        for number in range(size["rounds"]):
            start = number % len(methods)
            for method in [*methods][start:] + [*methods][:start]:
                options = {"device": str(device), "capture": capture}
                seconds[method].append(step_seconds(name, network, methods[method], size, **options))
        for method, own in seconds.items():
            row = {"network": name, "how": how, "method": method, "milliseconds": 1000 * median(own)}
            for other in ("Fish", "ERM"):
                ratios = [a / b for a, b in zip(own, seconds[other], strict=True)]
                row[f"ratio_to_{other.lower()}"] = median(ratios)
            rows.append(row)
    return rows


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
    claims = {(c["network"], c["method"]): c["value"] for c in read("published/cost.yaml")}
    table = []
    for row in rows:
        paper = claims.get((row["network"], row["method"]))
        cells = {name: row[name] for name in ("network", "how", "method")}
        cells |= {"ms per step": f"{row['milliseconds']:.1f}", "of Fish's": f"{row['ratio_to_fish']:.2f} ×"}
        cells |= {"the paper": f"about {paper} ×" if paper else "–"}
        table.append({**cells, "of S plain steps": f"{row['ratio_to_erm']:.2f} ×"})
    where = environment(device)
    text = {"rounds": size["rounds"], "device": where["device"]}
    return request.result({"": table}, {"rows": rows, "environment": where}, text)
