"""How many images per second are decoded and augmented, beside what a captured ResNet-50 trains on.

Run: python benchmarks/images.py [--workers N] [--seconds S] [--images N]. JPEGs of 500 × 375 pixels are read
at 224 × 224 with DomainBed's augmentation in batches of three domains of 32. Rows: torchvision's ImageFolder
with the same transforms in a plain DataLoader; ours; on a CUDA device also a step of ResNet-50 (compiled,
bf16, channels-last, captured as one CUDA graph), which is what the loader has to keep up with.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler

from shoal.data.images import MEAN, STD, image_data, read_folders, split_files
from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
from shoal.vision import load

S, B, SIZE = 3, 32, 224
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def photograph(rng: np.random.Generator, width: int = 500, height: int = 375) -> Image.Image:
    """Noise with less of it at finer scales, as photographs have, and a few sharp edges."""
    total = np.zeros((height, width, 3), np.float32)
    for cells in (3, 6, 12, 24, 48, 96, 192):
        grid = rng.normal(0, 1, (cells, cells, 3)).astype(np.float32)
        for c in range(3):
            plane = Image.fromarray(grid[..., c]).resize((width, height), Image.Resampling.BICUBIC)
            total[..., c] += np.asarray(plane) * 40 / np.sqrt(cells)
    for _ in range(12):
        x, y = rng.integers(0, width), rng.integers(0, height)
        total[y : y + height // 6, x : x + width // 6] += rng.normal(0, 25, 3)
    return Image.fromarray((total + 128).clip(0, 255).astype(np.uint8))


def plant(root: Path, count: int) -> int:
    """``count`` images in four domains and two classes; the mean size of their files."""
    rng, sizes = np.random.default_rng(0), []
    for n in range(count):
        place = root / f"domain {n % (S + 1)}" / f"class {n // (S + 1) % 2}"
        place.mkdir(parents=True, exist_ok=True)
        photograph(rng).save(place / f"{n}.jpg", quality=90)
        sizes.append((place / f"{n}.jpg").stat().st_size)
    return int(np.mean(sizes))


def plain(root: Path, workers: int) -> Iterator[int]:
    """What people write."""
    v2, folder = load("torchvision.transforms.v2", "images"), load("torchvision.datasets", "images")
    steps = [v2.RandomResizedCrop(SIZE, scale=(0.7, 1.0)), v2.RandomHorizontalFlip()]
    steps += [v2.ColorJitter(0.3, 0.3, 0.3, 0.3), v2.RandomGrayscale(), v2.PILToTensor()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    data = folder.ImageFolder(str(root), v2.Compose(steps))
    sampler = RandomSampler(data, replacement=True, num_samples=10**7)
    for x, _ in DataLoader(data, S * B, sampler=sampler, num_workers=workers):
        x.to(DEVICE)
        yield len(x)


def ours(root: Path, workers: int) -> Iterator[int]:
    files = read_folders(root)
    splits = split_files(files, None, 0)
    data = image_data(files, splits, options={"size": SIZE, "augment": True})
    sampler = DomainBatchSampler(splits["train"], B, S, steps=10**6)
    for batch in MetaBatchLoader(data.examples, sampler, workers=workers, device=DEVICE, stop=10**6):
        yield len(batch)


def rate(batches: Iterable[int], seconds: float) -> float:
    """Images per second, once the first batches are there."""
    each = iter(batches)
    for _ in range(5):
        next(each)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        done += next(each)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return done / (time.perf_counter() - began)


def resnet(seconds: float) -> Iterator[int]:
    """Steps of ResNet-50, captured."""
    network = (
        load("torchvision.models", "images")
        .resnet50(weights=None)
        .to(DEVICE, memory_format=torch.channels_last)
    )
    model, optimizer = (
        torch.compile(network),
        torch.optim.Adam(network.parameters(), fused=True, capturable=True),
    )
    x = torch.randn(S * B, 3, SIZE, SIZE, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.zeros(S * B, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    while True:
        graph.replay()
        yield S * B


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--images", type=int, default=2000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        size = plant(Path(folder), given.images)
        where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or "CPU"
        print(
            f"{given.images} JPEGs of 500 × 375, {size / 1000:.0f} kB each; {given.workers} workers; {where}"
        )
        rows = {"ImageFolder and a DataLoader": lambda: plain(Path(folder), given.workers)}
        rows["ours"] = lambda: ours(Path(folder), given.workers)
        if DEVICE.type == "cuda":
            rows["a captured step of ResNet-50"] = lambda: resnet(given.seconds)
        for name, batches in rows.items():
            print(f"{name:32} {rate(batches(), given.seconds):9,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
