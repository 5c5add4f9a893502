"""ColoredMNIST: colour predicts the label better than the digit does, until it turns round."""

from __future__ import annotations

import torch

from shoal.data.batch import DomainData
from shoal.data.digits import COLOUR_NOISE, deal, noisy_colours, paint
from shoal.data.mnist import DOWNLOAD, SIZE, ByteImages, shuffled_mnist, used
from shoal.settings import Count, Seed

SUMMARY = "The 70,000 digits of MNIST, below 5 or not, coloured by a noisy label. Reads the files of MNIST."
PAPER = "Arjovsky et al., Invariant Risk Minimization, 2019, https://arxiv.org/abs/1907.02893"

__all__ = ["DOMAINS", "DOWNLOAD", "PAPER", "SUMMARY", "load"]

DOMAINS = tuple(COLOUR_NOISE)


def load(
    *,
    held_out: str | list[str] = "-90%",
    seed: Seed = 0,
    folder: str | None = None,
    per_domain: Count | None = None,
) -> DomainData:
    """Shuffle MNIST, deal it to three domains and colour it, as DomainBed does.

    The label is (digit < 5), flipped with probability 0.25. The colour is the label, flipped with
    probability 0.1, 0.2, 0.9 by domain. Colour c lights channel c and leaves the other dark.

    Args:
        held_out: the held-out domain.
        seed: for the shuffle and both kinds of noise.
        folder: where MNIST's four files are, gzipped or not; ``$SHOAL_DATA/mnist`` by default.
        per_domain: use only this many images of each domain, the first ones.
    """
    generator = torch.Generator().manual_seed(seed)
    images, digits = shuffled_mnist(folder, generator)
    # Drawn for all images, so that `per_domain` changes none of those it keeps.
    label, colour = noisy_colours(digits, generator)
    count = used(per_domain, len(digits), len(DOMAINS))
    splits = deal(DOMAINS, count, held_out)
    return DomainData(
        examples=ByteImages(paint(images[:count], colour[:count]), label[:count].long()),
        splits=splits,
        classes=2,
        input_shape=(2, SIZE, SIZE),
        model="mnist-cnn",
        class_names=("5 or more", "under 5"),
    )
