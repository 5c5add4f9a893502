"""RotatedMNIST: which digit is it, at a held-out angle?"""

from __future__ import annotations

import torch

from shoal.data.batch import DomainData
from shoal.data.digits import ANGLES, deal, turn
from shoal.data.mnist import DOWNLOAD, SIZE, ByteImages, shuffled_mnist, used
from shoal.settings import Count, Seed

SUMMARY = "The 70,000 digits of MNIST, rotated by 0°, 15°, …, 75° per domain. Reads the files of MNIST."
PAPER = "Ghifary et al., Domain Generalization for Object Recognition with Multi-task Autoencoders, ICCV 2015"

__all__ = ["DOMAINS", "DOWNLOAD", "PAPER", "SUMMARY", "load"]

DOMAINS = tuple(ANGLES)


def load(
    *,
    held_out: str | list[str] = "75°",
    seed: Seed = 0,
    folder: str | None = None,
    per_domain: Count | None = None,
) -> DomainData:
    """Shuffle MNIST, deal it to six angles and turn it counter-clockwise, as DomainBed does.

    Args:
        held_out: the held-out angle.
        seed: for the shuffle.
        folder: where MNIST's four files are, gzipped or not; ``$SHOAL_DATA/mnist`` by default.
        per_domain: use only this many images of each angle, the first ones.
    """
    images, digits = shuffled_mnist(folder, torch.Generator().manual_seed(seed))
    count = used(per_domain, len(digits), len(DOMAINS))
    splits = deal(DOMAINS, count, held_out)
    return DomainData(
        examples=ByteImages(turn(images[:count])[:, None], digits[:count]),
        splits=splits,
        classes=10,
        input_shape=(1, SIZE, SIZE),
        model="mnist-cnn",
        class_names=tuple(map(str, range(10))),
    )
