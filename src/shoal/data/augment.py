"""DomainBed's random changes of training images, without torchvision.

Random numbers come from torch's own generator, all at once, so that what becomes of an example is a function
of its seed, whichever file or process it is read from. Colours change by Pillow, an image at a time
(:meth:`Augment.recolour`), or a batch at a time on any device (:func:`recolour_batch`), without rounding to
whole numbers in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

TRIES = 10
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Chances(NamedTuple):
    """Numbers in [0, 1), and the order of the four changes of colour."""

    crops: list[list[float]]
    colours: list[float]
    order: list[int]
    flip: float
    grey: float


@dataclass(frozen=True)
class Augment:
    """A crop, a mirror image, other colours and now and then no colours, as in DomainBed.

    The crop has between ``scale[0]`` and ``scale[1]`` of the area and sides of a ratio between ``ratio[0]``
    and ``ratio[1]``. Brightness, contrast, saturation and hue change by up to ``jitter`` in random order.

    Reference: Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021.
    """

    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    jitter: float = 0.3
    flip: float = 0.5
    grey: float = 0.1

    def draw(self, generator: torch.Generator | None = None) -> Chances:
        """What one example will need."""
        numbers = torch.rand(TRIES * 4 + 6, generator=generator).tolist()
        crops = [numbers[4 * i : 4 * i + 4] for i in range(TRIES)]
        *colours, flip, grey = numbers[4 * TRIES :]
        return Chances(crops, colours, torch.randperm(4, generator=generator).tolist(), flip, grey)

    def box(self, chances: Chances, width: int, height: int) -> Box:
        """Where to crop; the middle if no try fits into the image."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for area, shape, across, down in chances.crops:
            pixels = width * height * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + shape * (high - low))
            w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
                return left, top, left + w, top + h
        w = min(width, round(height * self.ratio[1]))
        h = min(height, round(width / self.ratio[0]))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h

    def recolour(self, chances: Chances, image: Image) -> Image:
        """The cropped image as it will be trained on."""
        from PIL import Image, ImageEnhance

        if chances.flip < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for which in chances.order if self.jitter else ():
            change = self.jitter * (2 * chances.colours[which] - 1)
            image = enhancers[which](image).enhance(1 + change) if which < 3 else turn_hue(image, change)
        return image.convert("L").convert("RGB") if chances.grey < self.grey else image

    def changes(self, chances: Chances) -> list[float]:
        """What :func:`recolour_batch` does to one image.

        Whether it is mirrored and without colours, the turn of its hue and how many other changes come before
        that, and of each of these which it is (0 brightness, 1 contrast, 2 saturation) and the factor.
        """
        by = [self.jitter * (2 * c - 1) for c in chances.colours]
        others = [which for which in chances.order if which < 3]
        found: list[float] = [
            chances.flip < self.flip,
            chances.grey < self.grey,
            by[3],
            chances.order.index(3),
        ]
        return found + [number for which in others for number in (which, 1 + by[which])]


UNCHANGED = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 1.0)
"""The changes of an image that stays as it is."""
GREY = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in what is left without colours."""


def recolour_batch(pixels: Tensor, changes: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w), changed as :meth:`Augment.changes` (B, 10) say, as floats from 0 to 255."""
    flip, grey, turn, before, *others = changes[:, :, None, None, None].unbind(1)
    kinds, factors = others[::2], others[1::2]
    x = pixels.to(changes.dtype)
    x = torch.where(flip > 0, x.flip(3), x)
    for place in range(3):
        x = _blended(x, kinds[place], torch.where(before > place, factors[place], 1.0))
    x = _turned(x, turn)
    for place in range(3):
        x = _blended(x, kinds[place], torch.where(before > place, 1.0, factors[place]))
    return torch.where(grey > 0, _without_colours(x), x)


def _without_colours(x: Tensor) -> Tensor:
    red, green, blue = x.split(1, 1)
    return GREY[0] * red + GREY[1] * green + GREY[2] * blue


def _blended(x: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Away from black, from the mean grey, or from each pixel's grey by ``factor``, within 0..255."""
    own = _without_colours(x)
    away_from = torch.where(kind == 2, own, torch.where(kind == 1, own.mean((2, 3), keepdim=True), 0.0))
    return torch.lerp(away_from, x, factor).clamp(0, 255)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """All hues moved by a part ``turn`` of the colour circle; lightness and saturation stay."""
    red, green, blue = x.split(1, 1)
    value, range_ = x.amax(1, keepdim=True), x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    safe = torch.where(range_ == 0, 1.0, range_)
    hue = torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4)
    hue = torch.where(value == red, (green - blue) / safe, hue) + 6 * turn
    parts = [(start + hue) % 6 for start in (5, 3, 1)]
    return torch.cat([value - range_ * torch.minimum(k, 4 - k).clamp(0, 1) for k in parts], 1)


def turn_hue(image: Image, turn: float) -> Image:
    """All hues moved by a part ``turn`` of the colour circle.

    The way back from HSV is Pillow's to the last bit, at a third of its time: it is half of all changes.
    """
    from PIL import Image

    hsv = np.asarray(image.convert("HSV"))
    hue = hsv[..., 0] + np.uint8(int(255 * turn) % 256)
    place = (hsv[..., 1].astype(np.intp) << 8) | hue
    value = hsv[..., 2].astype(np.float32)
    colours = np.empty_like(hsv)
    for channel, left in enumerate(_left()):
        colours[..., channel] = left.take(place) * value + np.float32(0.5)
    return Image.fromarray(colours)


@cache
def _left() -> NDArray[np.float32]:
    """What is left of the value in red, green and blue, by 256 × saturation + hue."""
    around, saturation = np.arange(256) * 6 / 255, np.arange(256)[:, None] / 255
    from_peak = [(start + around) % 6 for start in (5, 3, 1)]
    away = [np.minimum(k, 4 - k).clip(0, 1) for k in from_peak]
    return np.stack([(1 - saturation * a).reshape(-1) for a in away]).astype(np.float32)
