"""Fish's meta-step against the S plain optimizer steps it consists of, and against a deep-copy Fish.

    python benchmarks/fish_step.py            # the CdSprites network; on CUDA also torchvision's ResNet-50
    python benchmarks/fish_step.py --device cpu

Each of 20 rounds times the versions (on CUDA four meta-steps of each) one after the other, in an order that
rotates, on the same batches. Ratios to the plain steps are taken within a round; "ratio" is their geometric
mean and "upper 95 %" its one-sided bound (t with 19 degrees of freedom). "plain again" is a second copy of
the plain steps: its bound shows the noise. The script fails if Fish's bound is above --limit.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from shoal.models import build
from shoal.optim import Fish

ROUNDS = 20
T_95 = 1.729


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, help="(default: 1.03 on CUDA, 1.05 on the CPU)")
    given = parser.parse_args()
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    limit = given.limit or (1.03 if cuda else 1.05)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'cpu'}")
    print(f"{'model':28} {'version':12} {'ms':>9} {'ratio':>7} {'upper 95 %':>11} {'extra MB':>9}")
    worst = 0.0
    sprite = build("sprite-cnn", input_shape=(3, 64, 64), classes=2, seed=0)
    worst = max(worst, compare("CdSprites CNN, 15×64", sprite, (3, 64, 64), 2, 15, 64, "adam", device))
    if cuda:
        from torchvision.models import resnet50

        worst = max(worst, compare("ResNet-50, 3×32", resnet50(), (3, 224, 224), 1000, 3, 32, "sgd", device))
    return int(worst > limit)


def compare(
    name: str,
    model: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    steps: int,
    batch: int,
    kind: str,
    device: torch.device,
) -> float:
    torch.manual_seed(0)
    batches = [
        (torch.randn(batch, *shape, device=device), torch.randint(classes, (batch,), device=device))
        for _ in range(steps)
    ]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": lambda p: torch.optim.Adam(p, 1e-4),
        "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    }
    make = makers[kind]
    loss = nn.functional.cross_entropy
    models = {
        version: copy.deepcopy(model).to(device) for version in ("plain", "plain again", "fish", "deep copy")
    }
    plain = make(models["plain"].parameters())
    again = make(models["plain again"].parameters())
    fish = Fish(make(models["fish"].parameters()), steps, meta_lr=0.5)
    carried: dict[str, object] = {}

    def walk(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()

    def deep_copy() -> None:
        """As published programs write it: a new network and optimizer a meta-step, state carried over."""
        net = models["deep copy"]
        inner = copy.deepcopy(net)
        optimizer = make(inner.parameters())
        if carried:
            optimizer.load_state_dict(carried["state"])  # type: ignore[arg-type]
        walk(inner, optimizer)
        carried["state"] = optimizer.state_dict()
        start, end = net.state_dict(), inner.state_dict()
        net.load_state_dict(
            {k: v + 0.5 * (end[k] - v) if v.is_floating_point() else v for k, v in start.items()}
        )

    versions: dict[str, Callable[[], None]] = {
        "plain": lambda: walk(models["plain"], plain),
        "plain again": lambda: walk(models["plain again"], again),
        "fish": lambda: walk(models["fish"], fish),
        "deep copy": deep_copy,
    }
    cuda = device.type == "cuda"
    repeats = 4 if cuda else 1

    def timed(run: Callable[[], None]) -> float:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    gc.collect()
    gc.disable()  # a collection in one version's turn would count against it
    memory = {}
    for version, run in versions.items():
        for _ in range(5 if cuda else 1):
            run()
        if cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            memory[version] = (torch.cuda.max_memory_allocated() - before) / 2**20
    times: dict[str, list[float]] = {version: [] for version in versions}
    names = list(versions)
    for round_ in range(ROUNDS):
        for i in range(len(names)):
            version = names[(round_ + i) % len(names)]
            times[version].append(timed(versions[version]))
    weights = sum(p.numel() * p.element_size() for p in fish._slow.values()) / 2**20
    bound = 0.0
    for version in names:
        logs = [math.log(a / b) for a, b in zip(times[version], times["plain"], strict=True)]
        mean = math.exp(statistics.mean(logs))
        upper = math.exp(statistics.mean(logs) + T_95 * statistics.stdev(logs) / ROUNDS**0.5)
        extra = weights if version == "fish" else memory.get(version, 0) - memory.get("plain", 0)
        milliseconds = 1000 * statistics.median(times[version])
        print(f"{name:28} {version:12} {milliseconds:9.2f} {mean:7.3f} {upper:11.3f} {extra:9.1f}")
        if version == "fish":
            bound = upper
    gc.enable()
    size = sum(p.numel() * p.element_size() for p in models["fish"].parameters()) / 2**20
    print(f"{'':28} the weights are {size:.1f} MB; Fish keeps {weights:.1f} MB between steps of a walk")
    return bound


if __name__ == "__main__":
    sys.exit(main())
