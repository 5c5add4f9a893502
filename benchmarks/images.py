"""Images a second and a core beside torchvision's ImageFolder and a DataLoader, and what many paths cost.

Run: python benchmarks/images.py [--seconds S] [--rounds N]. Both read the same JPEGs in batches of 32, with
DomainBed's transforms, in turn. Exits with 1 if small images are read slower, or large ones not 1.5 times
as fast. Pixels are compared at 224 × 224 in 0..255, in training by torchvision's functions with our random
numbers.

Run: python benchmarks/images.py --paths 600000. Makes a tree of so many files as DomainNet has, reads it, and
measures memory while two worker processes load batches of it. Exits with 1 if ours grows by a tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from shoal.data.augment import Augment
from shoal.data.tree import read_tree
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler

from shoal.data.domains import Domains
from shoal.data.images import DEVIATION, MEAN, TRAIN, ImageFiles, image_data, split_files
from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
from shoal.vision import allow_torchvision

SIZES = {"227 × 227": (227, 227, 64), "1600 × 1200": (1600, 1200, 16)}
LEAST = {"227 × 227": 1.0, "1600 × 1200": 1.5}
SIZE, BATCH = 224, 32
WORKERS = (0, 2)


def torchvision() -> Any:
    """torchvision, also beside a torch that it was not built for."""
    allow_torchvision()
    import torchvision.datasets
    import torchvision.transforms.functional

    return torchvision


def photograph(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Noise with less of it at finer scales, as photographs have, and a few sharp edges."""
    total = np.zeros((height, width, 3), np.float32)
    cells = 3
    while cells < max(width, height):
        grid = rng.normal(0, 1, (cells, cells, 3)).astype(np.float32)
        for c in range(3):
            plane = Image.fromarray(grid[..., c]).resize((width, height), Image.Resampling.BICUBIC)
            total[..., c] += np.asarray(plane) * 40 / np.sqrt(cells)
        cells *= 2
    for _ in range(12):
        x, y = rng.integers(0, width), rng.integers(0, height)
        total[y : y + height // 6, x : x + width // 6] += rng.normal(0, 25, 3)
    return Image.fromarray((total + 128).clip(0, 255).astype(np.uint8))


# Speed


def plain_folder(root: str | Path, train: bool, size: int = SIZE) -> Dataset[Any]:
    """What people write."""
    T = torchvision().transforms
    end = [T.ToTensor(), T.Normalize(MEAN, DEVIATION)]
    change = [T.Resize((size, size))]
    if train:
        change = [T.RandomResizedCrop(size, scale=(0.7, 1.0)), T.RandomHorizontalFlip()]
        change += [T.ColorJitter(0.3, 0.3, 0.3, 0.3), T.RandomGrayscale()]
    folder: Dataset[Any] = torchvision().datasets.ImageFolder(str(root), T.Compose([*change, *end]))
    return folder


def plain_batches(folder: Any, workers: int) -> Iterator[Tensor]:
    sampler = RandomSampler(folder, replacement=True, num_samples=10**7)
    for x, _ in DataLoader(folder, BATCH, sampler=sampler, num_workers=workers):
        yield x


def our_batches(examples: Any, domains: Domains, workers: int) -> Iterator[Tensor]:
    sampler = DomainBatchSampler(domains, BATCH, 1, steps=10**6)
    for ((x, _, _),) in MetaBatchLoader(examples, sampler, workers=workers, stop=10**6):
        yield x


def rate(batches: Iterable[Tensor], seconds: float) -> float:
    """Images a second of a core's time, that of workers too, once the first batches are there."""
    each = iter(batches)
    for _ in range(3):
        next(each)
    began, spent, done = time.perf_counter(), core_seconds(), 0
    while time.perf_counter() - began < seconds:
        done += len(next(each))
    return done / (core_seconds() - spent)


def core_seconds() -> float:
    """What this process and its workers have used; others on the machine do not count."""
    ticks = 0
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user and in system mode
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def rates(
    ours: Callable[[], Iterator[Tensor]], plain: Callable[[], Iterator[Tensor]], seconds: float, rounds: int
) -> list[tuple[float, float]]:
    """In turn, now one and now the other first."""
    found = []
    for n in range(rounds):
        order = (plain, ours) if n % 2 else (ours, plain)
        pair = {make: rate(make(), seconds) for make in order}
        found.append((pair[ours], pair[plain]))
    return found


def same_by_torchvision(path: str, augment: Augment | None) -> Image.Image:
    """The image as torchvision's functions make it, with our random numbers."""
    F = torchvision().transforms.functional
    image = Image.open(path).convert("RGB")
    if augment is None:
        return F.resize(image, [SIZE, SIZE])
    chances = augment.draw()
    left, top, right, bottom = map(int, augment.box(chances, *image.size))
    image = F.resized_crop(image, top, left, bottom - top, right - left, [SIZE, SIZE])
    image = F.hflip(image) if chances.flip < augment.flip else image
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for which in chances.order:
        change = augment.jitter * (2 * chances.colours[which] - 1)
        image = adjust[which](image, change if which == 3 else 1 + change)
    return F.rgb_to_grayscale(image, 3) if chances.grey < augment.grey else image


def difference(ours: ImageFiles) -> tuple[float, float]:
    """The mean and the largest difference of pixels."""
    gaps = []
    for i in range(len(ours)):
        torch.default_generator.manual_seed(i)
        a = (ours[i][0] - ours.to_tensor.shift) / ours.to_tensor.scale
        torch.default_generator.manual_seed(i)
        b = np.array(same_by_torchvision(ours.files.path(i), ours.augment))
        gaps.append((a - torch.from_numpy(b).permute(2, 0, 1).float()).abs())
    stacked = torch.stack(gaps)
    return float(stacked.mean()), float(stacked.max())


def speed(seconds: float, rounds: int) -> bool:
    rng, failed = np.random.default_rng(0), False
    print("images a second of a core's time; the ratio's median and range over rounds; how pixels differ\n")
    print("images       for         workers  ours  torchvision  ratio                 mean  most")
    with tempfile.TemporaryDirectory() as folder:
        for name, (width, height, count) in SIZES.items():
            place = Path(folder, name.replace(" ", ""), "photo", "thing")
            place.mkdir(parents=True)
            for i in range(count):
                photograph(rng, width, height).save(place / f"{i:03}.jpg", quality=90)
            files = read_tree(place.parent.parent)
            domains = Domains.from_indices(files.indices())
            for what, augment in (("evaluation", None), ("training", Augment())):
                split = np.full(len(files), TRAIN, np.uint8)
                ours = ImageFiles(files, split, size=SIZE, augment=augment, cache=False)
                plain = plain_folder(place.parent, augment is not None)
                mean, most = difference(ours)
                for workers in WORKERS:
                    both = rates(
                        lambda w=workers, o=ours, d=domains: our_batches(o, d, w),
                        lambda w=workers, p=plain: plain_batches(p, w),
                        seconds,
                        rounds,
                    )
                    ratios = sorted(a / b for a, b in both)
                    middle = statistics.median(ratios)
                    fast, slow = (statistics.median(r) for r in zip(*both, strict=True))
                    failed |= middle < LEAST[name]
                    print(
                        f"{name:<12} {what:<11} {workers:>7} {fast:>5.0f} {slow:>12.0f}  {middle:.2f} "
                        f"({ratios[0]:.2f} to {ratios[-1]:.2f}) {mean:>6.2f} {most:>5.0f}",
                        flush=True,
                    )
    return failed


# Memory


def plant(root: Path, paths: int) -> None:
    """Files as DomainNet has them: hard links to a few small images."""
    names = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    folders = [root / "tree" / name / f"class_of_things_{label:03}" for name in names for label in range(345)]
    for folder in folders:
        folder.mkdir(parents=True)
    for n in range(paths):
        source = root / f"source{n // 50_000}.jpg"  # a file takes 65,000 links on ext4
        if n % 50_000 == 0:
            photograph(np.random.default_rng(n), 72, 72).save(source, quality=90)
        folder = folders[n % len(folders)]
        os.link(source, folder / f"{folder.parent.name}_{folder.name[-3:]}_{n:06}.jpg")


def megabytes(processes: Iterable[int]) -> tuple[float, float]:
    """Memory of processes, without files: what they have together, and what workers alone have written to.

    Pages that several have count once.
    """
    total, own = 0, 0
    for n, process in enumerate(processes):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines}
        total += kilobytes["Pss_Anon:"]
        own += kilobytes["Private_Dirty:"] if n else 0
    return total / 1024, own / 1024


def own_memory() -> float:
    return megabytes([os.getpid()])[0]


def many(who: str, root: str, batches: int) -> None:
    """In a process of its own: reads the tree, then loads batches in two workers and looks at memory."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # a spawned process would spawn its workers too
    warnings.simplefilter("ignore")
    torchvision()
    torch.rand(8, 3, 32, 32).mean()
    before, began = own_memory(), time.perf_counter()
    if who == "ours":
        files = read_tree(root)
        read = time.perf_counter() - began
        arrays = (files.letters, files.offsets, files.labels, files.groups)
        held = own_memory() - before
        data = image_data(files, split_files(files, "sketch", 0), size=32, bad="skip")
        more, list_of = time.perf_counter() - began - read, sum(a.nbytes for a in arrays) / 2**20
        print(
            f"ours: {len(files):,} paths, tree {read:.1f} s, splits and data {more:.1f} s; the list "
            f"{list_of:.0f} MB in arrays, {held:.0f} MB more in the process"
        )
        loaded = our_batches(data.examples, data.splits["train"], 2)
    else:
        folders = [plain_folder(p, True, 32) for p in sorted(Path(root).iterdir())]
        read, held = time.perf_counter() - began, own_memory() - before
        plain: ConcatDataset[Any] = ConcatDataset(folders)
        print(f"torchvision: {len(plain):,} paths, tree {read:.1f} s; {held:.0f} MB more in the process")
        loaded = plain_batches(plain, 2)
    first = None
    for n, _ in enumerate(loaded):
        if n in (50, batches // 4, batches // 2, batches):
            total, own = megabytes(
                [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid)]
            )
            first = first or (total, own)
            print(
                f"  after {n:>6,} batches of {BATCH}: {total:>6.0f} MB in all ({total - first[0]:+.0f}), "
                f"{own:>5.0f} MB written by workers ({own - first[1]:+.0f})",
                flush=True,
            )
        if n == batches:
            break
    if who == "ours" and first and total > 1.1 * first[0]:
        sys.exit(1)


def memory(paths: int, batches: int) -> bool:
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        plant(Path(folder), paths)
        print(f"{paths:,} files made in {time.perf_counter() - began:.0f} s", flush=True)
        for who in ("ours", "torchvision"):
            process = multiprocessing.get_context("spawn").Process(
                target=many, args=(who, f"{folder}/tree", batches)
            )
            process.start()
            process.join()
            failed |= process.exitcode != 0
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--paths", type=int, help="look at memory instead, with so many files")
    parser.add_argument("--batches", type=int, default=4000, help="with --paths (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, torchvision "
        f"{torchvision().__version__}, Pillow {PIL.__version__}, numpy {np.__version__}"
    )
    return int(memory(args.paths, args.batches) if args.paths else speed(args.seconds, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
