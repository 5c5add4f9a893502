"""Rotated digits: which digit is it, at a held-out angle?"""

from __future__ import annotations

import torch

from shoal.data.batch import DomainData, TensorData
from shoal.data.digits import ANGLES, SIZE, deal, shuffled_digits, turn
from shoal.settings import Seed

SUMMARY = "The 1,797 digits of scikit-learn, rotated by 0°, 15°, …, 75° per domain. A small RotatedMNIST."
PAPER = "Ghifary et al., Domain Generalization for Object Recognition with Multi-task Autoencoders, ICCV 2015"

DOMAINS = tuple(ANGLES)


def load(*, held_out: str | list[str] = "75°", seed: Seed = 0) -> DomainData:
    """Shuffle the digits, deal them to six angles and turn them; ``held_out`` is the held-out angle."""
    images, digits = shuffled_digits(torch.Generator().manual_seed(seed))
    splits = deal(DOMAINS, len(digits), held_out)
    return DomainData(
        examples=TensorData(turn(images)[:, None], digits),
        splits=splits,
        classes=10,
        input_shape=(1, SIZE, SIZE),
        model="small-cnn",
        class_names=tuple(map(str, range(10))),
    )
