"""What the loop itself costs: ResNet-50, 3×32 images of 224², bf16, loaded by workers, beside the bare steps.

python benchmarks/loop_speed.py [--workers 12] [--steps 150] [--repeats 5]

Bare steps: forward, backward and optimizer step of the same algorithm on three batches that stay on the
device, in a Python loop of a few lines. The loop: `shoal.fit`, which also loads images (uint8, from worker
processes through pinned memory), checks every step for NaN and adds up losses by domain. Both alternate, and
the ratio is of medians, with each repeat's beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from shoal.optim import Fish

S, B, SIZE, CLASSES = 3, 32, 224, 7


class Images(Dataset):
    """Random pictures, each put together anew from a pool of noise, as decoding would."""

    def __init__(self, number: int, length: int = 100_000) -> None:
        draw = np.random.default_rng(number)
        self.pool = draw.integers(0, 256, (64, 3, SIZE, SIZE), dtype=np.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.roll(self.pool[i % 64], i % SIZE, axis=2)), i % CLASSES


class Scaled(nn.Module):
    """uint8 images as the network wants them; cheaper to load by a factor of four."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.float().div_(127.5).sub_(1).contiguous(memory_format=torch.channels_last))


def model() -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    return Scaled(resnet50(num_classes=CLASSES)).cuda().to(memory_format=torch.channels_last)


def bare(algorithm: str, steps: int) -> float:
    """Seconds for ``steps`` meta-steps, nothing loaded."""
    network = model().train()
    adam = torch.optim.Adam(network.parameters(), 1e-4, fused=True)
    optimizer: Any = Fish(adam, S, 0.5) if algorithm == "fish" else adam
    batches = [
        (torch.randint(0, 256, (B, 3, SIZE, SIZE), dtype=torch.uint8, device="cuda"),
         torch.randint(0, CLASSES, (B,), device="cuda"))
        for _ in range(S)
    ]  # fmt: skip
    if algorithm == "erm":
        batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]

    def step() -> None:
        for x, y in batches:
            with torch.autocast("cuda", torch.bfloat16):
                output = network(x)
            nn.functional.cross_entropy(output.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for _ in range(10):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def looped(algorithm: str, steps: int, workers: int) -> float:
    """Seconds for ``steps`` meta-steps of the loop, images loaded; start-up and evaluation left out."""
    times: dict[int, float] = {}

    def tell(step: int, note: str) -> None:
        torch.cuda.synchronize()
        times[step] = time.perf_counter()

    warm = 50
    shoal.fit(
        algorithm,
        model(),
        {f"domain {d}": Images(d) for d in range(S)},
        steps=warm + steps + 1,
        batch_size=B,
        lr=1e-4,
        precision="bf16",
        workers=workers,
        eval_every=warm + steps + 1,
        eval_limit=60,
        log_every=50,
        progress=tell,
    )
    return times[warm + steps] - times[warm]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=150, help="a multiple of 50")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 1
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {given.workers} workers")
    torch.backends.cudnn.benchmark = True
    failed = False
    for algorithm in ("erm", "fish"):
        ratios, bares, loops = [], [], []
        for _ in range(given.repeats):
            bares.append(1000 * bare(algorithm, given.steps) / given.steps)
            loops.append(1000 * looped(algorithm, given.steps, given.workers) / given.steps)
            ratios.append(loops[-1] / bares[-1])
        ratio = statistics.median(loops) / statistics.median(bares)
        failed |= ratio > 1.03
        each = ", ".join(f"{r:.3f}" for r in ratios)
        medians = f"bare {statistics.median(bares):6.2f} ms a step, loop {statistics.median(loops):6.2f} ms"
        print(f"  {algorithm:5} {medians}, ratio {ratio:.3f} (each: {each})", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
