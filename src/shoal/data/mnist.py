"""MNIST from its four original files (Y. LeCun, C. Cortes and C. Burges), and images kept as bytes."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import TensorData
from shoal.data.download import Download, Source
from shoal.data.folders import SAY_WHERE, find_files
from shoal.errors import InputError
from shoal.files import LARGEST, read_bytes

SIZE = 28
FILES = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
INSIDE = (".", "raw", "MNIST/raw")  # the last two are torchvision's
GZIP = b"\x1f\x8b"
LEAST = 5  # of fewer images none would be left for validation
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
GZIPPED = {
    "train-images-idx3-ubyte.gz": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train-labels-idx1-ubyte.gz": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    "t10k-images-idx3-ubyte.gz": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    "t10k-labels-idx1-ubyte.gz": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
}
DOWNLOAD = Download(
    home="mnist",
    sources=tuple(
        Source(
            name,
            urls=tuple(f"{mirror}{name}" for mirror in MIRRORS),
            checksum=f"md5:{md5}",
            said_by="torchvision",
            size=size,
        )
        for name, (size, md5) in GZIPPED.items()
    ),
    files=FILES,
    inside=INSIDE,
    endings=("", ".gz"),
)


class ByteImages(TensorData):
    """Images kept as bytes, a quarter of the memory; they become float32 in [0, 1] batch by batch."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].float() / 255, self.y[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 in [0, 1] and labels at ``indices``, on the data's device."""
        return self.x[indices].float() / 255, self.y[indices]


def shuffled_mnist(folder: str | Path | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images uint8 (70000, 28, 28) and digits int64: the training images, then the test images, shuffled."""
    images, digits = read_mnist(folder)
    order = torch.randperm(len(digits), generator=generator)
    return images[order], digits[order]


def read_mnist(folder: str | Path | None) -> tuple[Tensor, Tensor]:
    """Images uint8 (70000, 28, 28) and digits int64 in the order of the files, training before test."""
    paths = find_files(
        FILES, folder=folder, home="mnist", inside=INSIDE, endings=("", ".gz"), get="rotated-mnist"
    )
    parts = [_read_pair(*pair) for pair in (paths[:2], paths[2:])]
    images, digits = (np.concatenate(both) for both in zip(*parts, strict=True))
    return torch.from_numpy(images), torch.from_numpy(digits.astype(np.int64))


def _read_pair(images_at: Path, labels_at: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images, labels = read_idx(images_at, 3), read_idx(labels_at, 1)
    if images.shape[1:] != (SIZE, SIZE):
        size = " × ".join(map(str, images.shape[1:]))
        raise _wrong(images_at, f"contains images of {size} pixels, not {SIZE} × {SIZE}")
    if len(images) != len(labels):
        raise _wrong(labels_at, f"contains {len(labels)} labels for {len(images)} images")
    if len(labels) and labels.max() > 9:
        raise _wrong(labels_at, f"contains the label {labels.max()}, which is not a digit")
    return images, labels


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The bytes of an idx file of so many dimensions, gzipped or not."""
    content = _content(path)
    header = 4 * (1 + dimensions)
    if len(content) < header:
        raise _wrong(path, f"is truncated: {len(content)} bytes are less than its header")
    magic, *sizes = np.frombuffer(content, ">u4", 1 + dimensions).tolist()
    expected = 0x0800 + dimensions
    if magic != expected:
        raise _wrong(path, f"starts with the number {magic}, not {expected}: it is a different kind of file")
    if len(content) - header != math.prod(sizes):
        size = " × ".join(map(str, sizes))
        raise _wrong(path, f"contains {len(content) - header} bytes of data, but its header specifies {size}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _content(path: Path) -> bytes:
    try:
        content = read_bytes(path)
        if not content.startswith(GZIP):
            return content
        result = gzip.GzipFile(fileobj=io.BytesIO(content)).read(LARGEST + 1)
        if len(result) > LARGEST:
            raise _wrong(path, f"unpacks to more than {LARGEST:,} bytes")
        return result
    except (OSError, EOFError, zlib.error) as error:
        raise _wrong(path, f"cannot be read ({error})") from error


def _wrong(path: Path, what: str) -> InputError:
    return InputError(f"{str(path)!r} {what}. Download it again; {SAY_WHERE} to look.")


def used(per_domain: int | None, available: int, domains: int) -> int:
    """How many of the shuffled images to deal, so that each domain gets ``per_domain`` (all, by default)."""
    if per_domain is None:
        return available
    most = available // domains
    if not isinstance(per_domain, int) or not LEAST <= per_domain <= most:
        raise InputError(
            f"per_domain must be a whole number from {LEAST} to {most}, one of {domains} parts of "
            f"{available} images; not {per_domain!r}."
        )
    return per_domain * domains
