"""What a step of every algorithm costs, in time and memory, beside a step of ERM on the same examples.

    python benchmarks/algorithms.py                    # ResNet-50, 3 domains × 32 images, on CUDA
    python benchmarks/algorithms.py --device cpu --model small   # a few seconds, to try the script
    python benchmarks/algorithms.py --write FILE       # the table for `shoal list algorithms`
    python benchmarks/algorithms.py eqrm sagm --write FILE   # these alone; others in FILE stay

Every round times one step of each algorithm, in an order that rotates, and takes its ratio to ERM's step of
the same round; "ratio" is the median over rounds. Memory is the most that a step holds on top of weights,
optimizer state and data, as torch's allocator counts it, and its ratio to ERM's. All train with Adam on the
same batches; penalties are at their full weight (start=0).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from shoal.algorithms import algorithm_class, build, registry, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data import MetaBatch, Task
from shoal.models import FeatureModel
from shoal.models import build as build_model
from shoal.training.engine import Engine

S, B, T, CLASSES = 3, 32, 3, 7
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "idgm, by differences": ("idgm", {"method": "finite-difference"}),
    "iga, by differences": ("iga", {"method": "finite-difference"}),
    "mldg, exact": ("mldg", {"order": "exact"}),
}
SETTINGS = {"gga": {"length": 2.0, "trials": 4}}
"""By default GGA tries 250 perturbations in 2 % of the steps: 5 measurements of agreement a step, as here."""


class Stepper:
    """An algorithm with a model, an optimizer and an engine of its own."""

    def __init__(self, name: str, settings: dict[str, Any], given: Any) -> None:
        torch.manual_seed(0)
        model, width = make_model(given.model)
        model = model.to(given.device)
        if "start" in settings_of(algorithm_class(name)):
            settings = {"start": 0, **settings}
        algorithm = build(
            name, model, nn.functional.cross_entropy, Task(T, CLASSES, features=width), **settings
        )
        self.algorithm = algorithm.to(given.device).train()
        auxiliary = self.algorithm.auxiliary_optimizers()
        optimizer = torch.optim.Adam(trained_parameters(self.algorithm, auxiliary), 5e-5)
        self.algorithm.prepare(optimizer, 5e-5)
        self.engine = Engine(self.algorithm, optimizer, precision=given.precision, auxiliary=auxiliary)

    def step(self, batch: MetaBatch) -> None:
        self.engine.step(batch, 1)


def make_model(name: str) -> tuple[FeatureModel, int]:
    if name == "small":
        model = build_model("small-cnn", input_shape=(3, 32, 32), classes=CLASSES, seed=0)
        return model, 64
    from torchvision.models import resnet50

    network: Any = resnet50()
    width = network.fc.in_features
    network.fc = nn.Identity()
    return FeatureModel(network, nn.Linear(width, CLASSES)), width


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *registry.names()], help="by default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet50", choices=["resnet50", "small"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    side = 32 if given.model == "small" else 224
    draw = torch.Generator(device=given.device).manual_seed(1)
    batch = MetaBatch(
        torch.randn(S * B, 3, side, side, device=given.device, generator=draw),
        torch.randint(CLASSES, (S * B,), device=given.device, generator=draw),
        torch.arange(S, device=given.device).repeat_interleave(B),
        (B,) * S,
    )
    ways = {name: (name, SETTINGS.get(name, {})) for name in registry.names()} | VARIANTS
    ways = {n: way for n, way in ways.items() if not given.names or n in ("erm", *given.names)}
    times: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu"
    title = f"{given.model}, {S}×{B} at {side}², Adam, {given.precision}"
    print(f"{title}; {where}, torch {torch.__version__}, {given.rounds} rounds", flush=True)
    # Few at a time, with ERM among them: all of them at once would not leave room for the second-order ones.
    names = [n for n in ways if n != "erm"]
    for first in range(0, len(names), 4):
        group = ["erm", *names[first : first + 4]]
        steppers = {n: Stepper(*ways[n], given) for n in group}
        for name, stepper in steppers.items():
            memory[name] = held(stepper, batch, given.device)
        for number in range(given.rounds):
            order = group[number % len(group) :] + group[: number % len(group)]
            found = {n: timed(steppers[n], batch, given.device) for n in order}
            for n, seconds in found.items():
                times.setdefault(n, []).append(seconds)
                ratios.setdefault(n, []).append(seconds / found["erm"])
        del steppers
        gc.collect()
        if given.device.startswith("cuda"):
            torch.cuda.empty_cache()
    print(f"{'algorithm':22} {'ms':>8} {'ratio':>7} {'MB':>8} {'ratio':>7}")
    for n in sorted(ways, key=lambda n: statistics.median(ratios[n])):
        base = memory["erm"] or 1
        ms, ratio = 1000 * statistics.median(times[n]), statistics.median(ratios[n])
        print(f"{n:22} {ms:8.1f} {ratio:7.2f} {memory[n] / 1e6:8.0f} {memory[n] / base:7.2f}")
    if given.write:
        content = {
            "measured": f"{datetime.now(UTC):%Y-%m-%d}: {title}; {where}, torch {torch.__version__}",
            "step": {n: round(statistics.median(ratios[n]), 2) for n in ways},
            "memory": {n: round(memory[n] / (memory["erm"] or 1), 2) for n in ways},
        }
        if given.names:
            before = yaml.safe_load(given.write.read_text())
            content = {
                "measured": f"{before['measured']}; {', '.join(given.names)} {content['measured']}",
                "step": {**before["step"], **{n: content["step"][n] for n in given.names}},
                "memory": {**before["memory"], **{n: content["memory"][n] for n in given.names}},
            }
        given.write.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def held(stepper: Stepper, batch: MetaBatch, device: str) -> float:
    """Bytes that a step holds at its fullest, beyond what is there before and after; warms up, too."""
    for _ in range(2):
        stepper.step(batch)
    wait(device)
    if not device.startswith("cuda"):
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stepper.step(batch)
    wait(device)
    return float(torch.cuda.max_memory_allocated() - before)


def timed(stepper: Stepper, batch: MetaBatch, device: str) -> float:
    wait(device)
    began = time.perf_counter()
    stepper.step(batch)
    wait(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
