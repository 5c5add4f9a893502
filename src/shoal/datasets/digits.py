"""Handwritten digits, rotated or coloured by domain: MNIST's 70,000, and 1,797 that need no download.

The latter are those of scikit-learn, 8 × 8 (E. Alpaydin and C. Kaynak, UCI Optical Recognition of Handwritten
Digits, 1998). Here they are enlarged to 12 × 12 and framed by 2 empty pixels: like MNIST's, a digit then has
a margin and may be rotated without losing its corners.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.download import SAY_WHERE, Download, Source, find_files
from shoal.data.splits import held_out_names
from shoal.errors import InputError
from shoal.files import read_yaml
from shoal.settings import Seed

Change = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
ANGLES = {f"{angle}°": angle for angle in (0, 15, 30, 45, 60, 75)}
COLOUR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}
SOURCES = [Source(**each) for each in read_yaml(Path(__file__).with_name("mnist.yaml"))["download"]]
FILES = [source.file.removesuffix(".gz") for source in SOURCES]
"""Images and labels of the training set, then those of the test set."""


def _paths(folder: str | Path | None) -> list[Path]:
    inside, endings = (".", "mnist", "raw", "MNIST/raw"), ("", ".gz")
    return find_files(FILES, folder=folder, home="mnist", inside=inside, endings=endings, get="rotated-mnist")


DOWNLOAD = Download("mnist", SOURCES, find=lambda folder: _paths(folder)[0].parent)


class ByteImages(TensorData):
    """Images kept as bytes, a quarter of the memory; they become float32 in [0, 1] batch by batch."""

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.x[index].float() / 255, self.y[index]


def read_digits() -> tuple[Tensor, Tensor]:
    """Images float32 (1797, 16, 16) in [0, 1] and digits int64."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float()[:, None] / 16
    framed = F.pad(F.interpolate(small, size=(12, 12), mode="bilinear"), (2, 2, 2, 2))
    return framed[:, 0], torch.from_numpy(bunch.target).long()


def read_mnist(folder: str | Path | None) -> tuple[Tensor, Tensor]:
    """Images uint8 (70000, 28, 28) and digits int64 in the order of the files, training before test."""
    train_x, train_y, test_x, test_y = map(_read_idx, _paths(folder))
    for x, y in ((train_x, train_y), (test_x, test_y)):
        if x.shape != (len(y), 28, 28) or y.ndim != 1 or y.max(initial=0) > 9:
            what = f"labels {y.shape} up to {y.max(initial=0)} for images {x.shape}, not (n, 28, 28)"
            raise InputError(f"MNIST's files have {what}. Download them again; {SAY_WHERE} to look.")
    images, labels = np.concatenate([train_x, test_x]), np.concatenate([train_y, test_y])
    return torch.from_numpy(images), torch.from_numpy(labels).long()


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """The bytes in an idx file, gzipped or not."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        dimensions = content[3]
        sizes = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(sizes)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        again = f"Download it again; {SAY_WHERE} to look."
        raise InputError(f"{str(path)!r} cannot be read ({error}). {again}") from error


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images (n, h, w) rotated counter-clockwise about their middle, interpolated bilinearly."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # From a pixel of the rotated image to its position in the original one; y points down.
    matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(matrix, [len(images), 1, *images.shape[1:]], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def rotated(images: Tensor, digits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (n, 1, h, w), each rotated by the angle of its domain, i mod 6, and their digits."""
    x = torch.empty_like(images)
    for i, angle in enumerate(ANGLES.values()):
        for rows in torch.arange(i, len(images), len(ANGLES)).split(2000):  # bounds the memory
            values = rotate(images[rows].float(), angle)
            x[rows] = values if images.is_floating_point() else values.round().to(images.dtype)
    return x[:, None], digits


def coloured(images: Tensor, digits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (n, 2, h, w), of which colour c lights channel c, and their labels.

    The label is (digit < 5), flipped with probability 0.25. The colour is the label, flipped with probability
    0.1, 0.2, 0.9 by domain, i mod 3.
    """
    noise = torch.tensor(list(COLOUR_NOISE.values()))[torch.arange(len(digits)) % len(COLOUR_NOISE)]
    label = (digits < 5) ^ (torch.rand(len(digits), generator=generator) < 0.25)
    lit = (label ^ (torch.rand(len(digits), generator=generator) < noise))[:, None, None]
    return torch.stack([images * ~lit, images * lit], dim=1), label.long()


def _dataset(domains: list[str], change: Change, default: str, classes: tuple[str, ...], mnist: bool) -> Any:
    def load(*, held_out: str | list[str] = default, seed: Seed = 0, folder: str | None = None) -> DomainData:
        """Shuffled digits, rotated or coloured as DomainBed does.

        Example i is in domain i mod their number, and a fifth of each training domain is held out for
        validation.

        Args:
            held_out: the held-out domain, or a list of them.
            seed: for the shuffle, and the noise in labels and colours.
            folder: where MNIST's four files are, gzipped or not; ``$SHOAL_DATA/mnist`` by default.
        """
        if folder is not None and not mnist:
            raise InputError("is for datasets of MNIST; these digits are scikit-learn's.", "folder")
        images, digits = read_mnist(folder) if mnist else read_digits()
        tested, generator = held_out_names(held_out, domains), torch.Generator().manual_seed(seed)
        order = torch.randperm(len(digits), generator=generator)
        x, y = change(images[order], digits[order], generator)
        splits: dict[str, dict[str, Any]] = {"train": {}, "validation": {}, "test": {}}
        for i, name in enumerate(domains):
            rows = np.arange(i, len(x), len(domains))
            if name in tested:
                splits["test"][name] = rows
            else:
                splits["validation"][name], splits["train"][name] = np.split(rows, [len(rows) // 5])
        return DomainData(
            examples=ByteImages(x, y) if mnist else TensorData(x, y),
            splits={split: Domains.from_indices(parts) for split, parts in splits.items() if parts},
            classes=len(classes),
            input_shape=tuple(x.shape[1:]),
            model="mnist-cnn" if mnist else "small-cnn",
            class_names=classes,
        )

    return SimpleNamespace(load=load, DOMAINS=tuple(domains), **({"DOWNLOAD": DOWNLOAD} if mnist else {}))


_ROTATED = list(ANGLES), rotated, "75°", tuple("0123456789")
_COLOURED = list(COLOUR_NOISE), coloured, "-90%", ("5 or more", "under 5")
rotated_digits, rotated_mnist = (_dataset(*_ROTATED, mnist) for mnist in (False, True))
coloured_digits, coloured_mnist = (_dataset(*_COLOURED, mnist) for mnist in (False, True))
