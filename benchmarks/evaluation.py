"""What evaluation costs: shoal.fit against a plain PyTorch loop with the same batches and evaluations.

ERM on 10,000 uint8 images of 3×128×128 pixels in four domains, with a small network of MobileNetV2's blocks.
Both train with Adam on the same examples and score the same samples of the same splits at the same steps, in
batches of the same size.

    python benchmarks/evaluation.py [--steps 600] [--device cuda]
"""

from __future__ import annotations

import argparse
import platform
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from shoal.data import DomainData, Domains, TensorData
from shoal.data.sampler import DomainBatchSampler
from shoal.training.loop import Training
from shoal.training.options import Options

CLASSES = 7


class Block(nn.Module):
    """An inverted residual."""

    def __init__(self, inside: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inside * expand
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.residual = stride == 1 and inside == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class Network(nn.Module):
    """Takes uint8 images."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(16, 24, 2, 6), Block(24, 24, 1, 6), Block(24, 32, 2, 6), Block(32, 64, 2, 6)]
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(), *blocks
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.float() / 255 - 0.5).mean((2, 3)))


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def images(count: int, size: int) -> DomainData:
    """Four domains, a tenth of each for validation and one domain for the test."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, size, size), generator=draw, dtype=torch.uint8)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    each = np.array_split(np.arange(count), 4)
    cut = [len(part) // 10 for part in each]
    train = {f"d{n}": part[c:] for n, (part, c) in enumerate(zip(each[:3], cut, strict=False))}
    held = {f"d{n}": part[:c] for n, (part, c) in enumerate(zip(each[:3], cut, strict=False))}
    splits = {
        "train": Domains.from_indices(train),
        "validation": Domains.from_indices(held),
        "test": Domains.from_indices({"d3": each[3]}),
    }
    return DomainData(TensorData(x, y), splits, CLASSES, (3, size, size), model="")


def by_shoal(data: DomainData, options: dict[str, Any]) -> float:
    model = network()
    began = time.perf_counter()
    run = shoal.fit("erm", model, data, **options)
    seconds = time.perf_counter() - began
    print(f"  evaluations at steps {[p.step for p in run.history]}, captured: {run.captured}")
    return seconds


def by_hand(data: DomainData, options: dict[str, Any], plan: Training) -> float:
    """As one writes it: everything on the device, a loss that is looked at when it is shown."""
    device = plan.device
    examples: Any = data.examples
    sampler = DomainBatchSampler(
        data.splits["train"],
        options["batch_size"],
        plan.sampler.domains_per_step,
        draw=plan.sampler.draw,
        seed=0,
        steps=options["steps"],
    )
    model = network()
    began = time.perf_counter()
    model.to(device)
    x, y = examples.x.to(device), examples.y.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options["lr"], fused=device.type == "cuda" or None)
    criterion = nn.CrossEntropyLoss()
    which = {
        name: torch.from_numpy(indices.astype(np.int64)).to(device)
        for name, indices in plan.evaluator.which.items()
    }
    for step in range(options["steps"]):
        _, (rows,) = sampler.plans(step, step + 1)
        batch = torch.from_numpy(rows).flatten().to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        if (step + 1) % plan.eval_every and step + 1 < options["steps"]:
            continue
        model.eval()
        with torch.inference_mode():
            for rows_ in which.values():
                right = torch.zeros((), device=device)
                total = torch.zeros((), device=device)
                for part in rows_.split(plan.eval_batch):
                    output = model(x[part])
                    total += criterion(output, y[part]) * len(part)
                    right += (output.argmax(-1) == y[part]).sum()
                (right / len(rows_)).item(), (total / len(rows_)).item()
        model.train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    data = images(given.images, given.size)
    options: dict[str, Any] = {
        **{"steps": given.steps, "batch_size": given.batch_size, "lr": 1e-3, "device": given.device},
        **{"progress": False, "select": "last"},
    }
    plan = Training("erm", network(), data, Options(**options))
    device = torch.cuda.get_device_name() if plan.device.type == "cuda" else "CPU"
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, shoal {shoal.__version__}, {device}"
    )
    sizes = {name: len(indices) for name, indices in plan.evaluator.which.items()}
    print(f"{given.steps} steps; evaluation every {plan.eval_every}, of {sizes}, {plan.eval_batch} per batch")
    if plan.device.type == "cuda":  # what libraries do once
        short = {**options, "steps": 5}
        by_hand(data, short, plan), by_shoal(data, short)
    ratios = []
    for _ in range(given.repeat):
        plain, ours = by_hand(data, options, plan), by_shoal(data, options)
        ratios.append(ours / plain)
        print(f"  plain PyTorch {plain:.2f} s, shoal.fit {ours:.2f} s, ratio {ratios[-1]:.2f}")
    print(f"ratio: {float(np.median(ratios)):.2f} (median of {given.repeat})")


if __name__ == "__main__":
    main()
