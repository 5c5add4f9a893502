"""Handwritten digits, rotated or coloured by domain: MNIST's 70,000, and 1,797 that need no download.

The latter are those of scikit-learn, 8 × 8 (E. Alpaydin and C. Kaynak, UCI Optical Recognition of Handwritten
Digits, 1998). Here they are enlarged to 12 × 12 and framed by 2 empty pixels: like MNIST's, a digit then has
a margin and may be rotated without losing its corners.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
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
from shoal.settings import Count, Seed

ANGLES = {f"{angle}°": angle for angle in (0, 15, 30, 45, 60, 75)}
LABEL_NOISE = 0.25
COLOUR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
"""MNIST's files, and what torchvision says of each with .gz after its name."""
FILES = tuple(MD5)
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")


def _paths(folder: str | Path | None) -> list[Path]:
    inside, endings = (".", "raw", "MNIST/raw"), ("", ".gz")
    return find_files(FILES, folder=folder, home="mnist", inside=inside, endings=endings, get="rotated-mnist")


def _find(folder: Path) -> Path | None:
    for place in (folder / "mnist", folder):
        try:
            return _paths(place)[0].parent
        except InputError:
            continue
    return None


SOURCES = tuple(
    Source(f"{name}.gz", tuple(f"{m}{name}.gz" for m in MIRRORS), f"md5:{md5}", "torchvision")
    for name, md5 in MD5.items()
)
DOWNLOAD = Download("mnist", SOURCES, find=_find)


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
    paths = _paths(folder)
    images, labels = ([_read_idx(path, n) for path in paths[i::2]] for i, n in ((0, 3), (1, 1)))
    for path, x, y in zip(paths[1::2], images, labels, strict=True):
        if len(x) != len(y) or (y > 9).any() or x.shape[1:] != (28, 28):
            raise _wrong(path, f"has {len(y)} labels up to {y.max(initial=0)} for images of shape {x.shape}")
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels).astype(np.int64))


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The bytes of an idx file of so many dimensions, gzipped or not."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        magic, *sizes = np.frombuffer(content, ">u4", 1 + dimensions).tolist()
        if magic != 0x0800 + dimensions:
            raise ValueError(f"it starts with the number {magic}, not {0x0800 + dimensions}")
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(sizes)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise _wrong(path, f"cannot be read ({error})") from error


def _wrong(path: Path, what: str) -> InputError:
    return InputError(f"{str(path)!r} {what}. Download it again; {SAY_WHERE} to look.")


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images (n, h, w) rotated counter-clockwise about their middle, interpolated bilinearly."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # From a pixel of the rotated image to where it is looked up; y points down.
    grid = F.affine_grid(
        torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(images), 2, 3),
        [len(images), 1, *images.shape[1:]],
        align_corners=False,
    )
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def rotate_by_domain(images: Tensor) -> Tensor:
    """Images (n, h, w), each rotated by the angle of its domain, i mod 6; bytes are rounded to bytes."""
    x = torch.empty_like(images)
    for i, angle in enumerate(ANGLES.values()):
        for rows in torch.arange(i, len(images), len(ANGLES)).split(2000):  # bounds the memory
            values = rotate(images[rows].float(), angle)
            x[rows] = values if images.is_floating_point() else values.round().to(images.dtype)
    return x


def noisy_colours(digits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels and colours, both boolean.

    The label is (digit < 5), flipped with probability 0.25. The colour is the label, flipped with probability
    0.1, 0.2, 0.9 by domain, i mod 3.
    """
    noise = torch.tensor(list(COLOUR_NOISE.values()))[torch.arange(len(digits)) % len(COLOUR_NOISE)]
    label = (digits < 5) ^ (torch.rand(len(digits), generator=generator) < LABEL_NOISE)
    colour = label ^ (torch.rand(len(digits), generator=generator) < noise)
    return label, colour


def _rotated(
    images: Tensor, digits: Tensor, held_out: str | list[str], seed: int, per_domain: int | None = None
) -> DomainData:
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    order = order[: _used(per_domain, len(digits), len(ANGLES))]
    x = rotate_by_domain(images[order])[:, None]
    return _data(x, digits[order], list(ANGLES), held_out, tuple(map(str, range(10))))


def _coloured(
    images: Tensor, digits: Tensor, held_out: str | list[str], seed: int, per_domain: int | None = None
) -> DomainData:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits), generator=generator)
    # Drawn for all images, so that `per_domain` only shortens the domains.
    label, colour = noisy_colours(digits[order], generator)
    order = order[: _used(per_domain, len(digits), len(COLOUR_NOISE))]
    images, lit = images[order], colour[: len(order), None, None]
    x = torch.stack([images * ~lit, images * lit], dim=1)  # colour c lights channel c
    return _data(x, label[: len(order)].long(), list(COLOUR_NOISE), held_out, ("5 or more", "under 5"))


def _data(
    x: Tensor, y: Tensor, names: list[str], held_out: str | list[str], class_names: Sequence[str]
) -> DomainData:
    """Example i is in domain i mod their number; a fifth of each training domain is its validation split."""
    of = {name: torch.arange(i, len(y), len(names)).numpy() for i, name in enumerate(names)}
    test = {name: of.pop(name) for name in held_out_names(held_out, names)}
    parts = {
        "train": {name: rows[len(rows) // 5 :] for name, rows in of.items()},
        "validation": {name: rows[: len(rows) // 5] for name, rows in of.items()},
        **({"test": test} if test else {}),
    }
    return DomainData(
        examples=TensorData(x, y) if x.is_floating_point() else ByteImages(x, y),
        splits={split: Domains.from_indices(domains) for split, domains in parts.items()},
        classes=len(class_names),
        input_shape=tuple(x.shape[1:]),
        model="small-cnn" if x.is_floating_point() else "mnist-cnn",
        class_names=tuple(class_names),
    )


def _used(per_domain: int | None, available: int, domains: int) -> int:
    """How many of the shuffled images are used, so that each domain gets ``per_domain`` (all, by default)."""
    if per_domain is None:
        return available
    most = available // domains
    if not 5 <= per_domain <= most:  # of fewer none would be left for validation
        raise InputError(f"must be from 5 to {most} of {available} images, not {per_domain}.", "per_domain")
    return per_domain * domains


def load_rotated_digits(*, held_out: str | list[str] = "75°", seed: Seed = 0) -> DomainData:
    """The digits of scikit-learn, shuffled, and rotated by one of six angles each."""
    return _rotated(*read_digits(), held_out, seed)


def load_rotated_mnist(
    *,
    held_out: str | list[str] = "75°",
    seed: Seed = 0,
    folder: str | None = None,
    per_domain: Count | None = None,
) -> DomainData:
    """MNIST, shuffled, and rotated counter-clockwise by one of six angles each, as DomainBed does.

    Args:
        held_out: the held-out angle, or a list of them.
        seed: for the shuffle.
        folder: where MNIST's four files are, gzipped or not; ``$SHOAL_DATA/mnist`` by default.
        per_domain: use only this many images of each angle, the first ones.
    """
    return _rotated(*read_mnist(folder), held_out, seed, per_domain)


def load_coloured_digits(*, held_out: str | list[str] = "-90%", seed: Seed = 0) -> DomainData:
    """The digits of scikit-learn, shuffled, in three domains, and coloured as :func:`load_coloured_mnist`."""
    return _coloured(*read_digits(), held_out, seed)


def load_coloured_mnist(
    *,
    held_out: str | list[str] = "-90%",
    seed: Seed = 0,
    folder: str | None = None,
    per_domain: Count | None = None,
) -> DomainData:
    """MNIST, shuffled, in three domains, and coloured as DomainBed does; see :func:`noisy_colours`.

    Colour c lights channel c and leaves the other dark.

    Args:
        held_out: the held-out domain, or a list of them.
        seed: for the shuffle and both kinds of noise.
        folder: where MNIST's four files are, gzipped or not; ``$SHOAL_DATA/mnist`` by default.
        per_domain: use only this many images of each domain, the first ones.
    """
    return _coloured(*read_mnist(folder), held_out, seed, per_domain)


rotated_digits = SimpleNamespace(load=load_rotated_digits, DOMAINS=tuple(ANGLES))
rotated_mnist = SimpleNamespace(load=load_rotated_mnist, DOMAINS=tuple(ANGLES), DOWNLOAD=DOWNLOAD)
coloured_digits = SimpleNamespace(load=load_coloured_digits, DOMAINS=tuple(COLOUR_NOISE))
coloured_mnist = SimpleNamespace(load=load_coloured_mnist, DOMAINS=tuple(COLOUR_NOISE), DOWNLOAD=DOWNLOAD)
