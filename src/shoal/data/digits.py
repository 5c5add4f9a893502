"""Handwritten digits as domains: dealt, turned and coloured; and some that need no download.

Those are the 1,797 of scikit-learn, 8 × 8 (E. Alpaydin and C. Kaynak, UCI Optical Recognition of Handwritten
Digits, 1998). Here they are enlarged to 12 × 12 and framed by 2 empty pixels, 16 × 16 in all: like MNIST's, a
digit then has a margin and may be turned without losing its corners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.data.domains import Domains
from shoal.data.splits import held_out_names
from shoal.errors import InputError

SIZE = 16
ANGLES = {f"{angle}°": angle for angle in (0, 15, 30, 45, 60, 75)}
LABEL_NOISE = 0.25
COLOUR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}
CHUNK = 2000  # images turned together: bounds the memory for temporaries


def shuffled_digits(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images float32 (1797, 16, 16) in [0, 1] and digits int64, in random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the digits dataset needs scikit-learn: pip install 'shoal[digits]'") from error
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=generator)
    small = torch.from_numpy(bunch.images).float()[order] / 16
    framed = F.pad(F.interpolate(small[:, None], size=(12, 12), mode="bilinear"), (2, 2, 2, 2))
    return framed[:, 0], torch.from_numpy(bunch.target).long()[order]


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images (n, h, w) turned counter-clockwise about their middle, interpolated bilinearly."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # From a pixel of the turned image to where it is looked up; y points down.
    look_up = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(look_up, [len(images), 1, *images.shape[1:]], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def deal(names: Sequence[str], count: int, held_out: str | list[str]) -> dict[str, Domains]:
    """Deal ``count`` shuffled examples round-robin to the named domains and hold out ``held_out``.

    A fifth of every training domain is held out for validation, under the same name.
    """
    dealt = {name: torch.arange(i, count, len(names)).numpy() for i, name in enumerate(names)}
    test = {name: dealt.pop(name) for name in held_out_names(held_out, names)}
    return {
        "train": Domains.from_indices({name: rows[len(rows) // 5 :] for name, rows in dealt.items()}),
        "validation": Domains.from_indices({name: rows[: len(rows) // 5] for name, rows in dealt.items()}),
        "test": Domains.from_indices(test),
    }


# Example i is in domain i mod the number of domains: the order in which `deal` goes round.


def turn(images: Tensor) -> Tensor:
    """Images (n, h, w), each turned by the angle of the domain it is dealt to; bytes are rounded to bytes."""
    x = torch.empty_like(images)
    for i, angle in enumerate(ANGLES.values()):
        before, after = (t[i :: len(ANGLES)].split(CHUNK) for t in (images, x))
        for upright, turned in zip(before, after, strict=True):
            values = rotate(upright.float(), angle)
            turned.copy_(values if images.is_floating_point() else values.round())
    return x


def noisy_colours(digits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels and colours, both boolean.

    The label is (digit < 5), flipped with probability 0.25. The colour is the label, flipped with
    probability 0.1, 0.2, 0.9 by domain.
    """
    noise = torch.tensor(list(COLOUR_NOISE.values()))[torch.arange(len(digits)) % len(COLOUR_NOISE)]
    label = (digits < 5) ^ (torch.rand(len(digits), generator=generator) < LABEL_NOISE)
    colour = label ^ (torch.rand(len(digits), generator=generator) < noise)
    return label, colour


def paint(images: Tensor, colour: Tensor) -> Tensor:
    """Images (n, h, w) as (n, 2, h, w): colour c lights channel c and leaves the other dark."""
    return torch.stack([images * ~colour[:, None, None], images * colour[:, None, None]], dim=1)
