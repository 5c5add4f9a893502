"""Coloured digits: colour predicts the label better than the digit does, until it turns round."""

from __future__ import annotations

import torch

from shoal.data.batch import DomainData, TensorData
from shoal.data.digits import COLOUR_NOISE, SIZE, deal, noisy_colours, paint, shuffled_digits
from shoal.settings import Seed

SUMMARY = "The 1,797 digits of scikit-learn, below 5 or not, coloured by a noisy label. A small ColoredMNIST."
PAPER = "Arjovsky et al., Invariant Risk Minimization, 2019, https://arxiv.org/abs/1907.02893"

DOMAINS = tuple(COLOUR_NOISE)


def load(*, held_out: str | list[str] = "-90%", seed: Seed = 0) -> DomainData:
    """Shuffle the digits, deal them to three domains and colour them; ``held_out`` is the held-out domain.

    The label is (digit < 5), flipped with probability 0.25. The colour is the label, flipped with
    probability 0.1, 0.2, 0.9 by domain. Colour c lights channel c and leaves the other dark.
    """
    generator = torch.Generator().manual_seed(seed)
    images, digits = shuffled_digits(generator)
    splits = deal(DOMAINS, len(digits), held_out)
    label, colour = noisy_colours(digits, generator)
    return DomainData(
        examples=TensorData(paint(images, colour), label.long()),
        splits=splits,
        classes=2,
        input_shape=(2, SIZE, SIZE),
        model="small-cnn",
        class_names=("5 or more", "under 5"),
    )
