"""Drawing dSprites from their latents.

dSprites (Matthey et al., 2017, https://github.com/google-deepmind/dsprites-dataset) is every combination of
3 shapes × 6 scales × 40 orientations × 32 × 32 positions, drawn in black and white on 64 × 64 pixels. The
geometry here was fitted to original frames: of 258 distinct latents 246 come out bit for bit, the others
within 4 pixels.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.files import check_zip

SHAPES = ("square", "ellipse", "heart")
LATENTS = ("shape", "scale", "orientation", "x", "y")
LATENT_SIZES = (3, 6, 40, 32, 32)
FULL_SIZE = 64

# Lengths in pixels at scale 1.
SQUARE_HALF_SIDE = 9.6
ELLIPSE_SEMI_AXES = (12.77, 7.23)
HEART_HALF_WIDTH, HEART_HEIGHT, HEART_OFFSET = 9.594, 0.66218, 1.436


def latent_grid(shapes: Iterable[int]) -> Tensor:
    """All latents of the given shapes, (n, 5), in the order of the dSprites archive."""
    axes = [torch.tensor(list(shapes)), *(torch.arange(n) for n in LATENT_SIZES[1:])]
    return torch.cartesian_prod(*axes)


def render(latents: Tensor, size: int = FULL_SIZE, device: torch.device | str | None = None) -> Tensor:
    """Draw sprites: latents (n, 5) of class numbers → uint8 (n, size, size) of zeros and ones.

    A pixel is on if its centre lies inside the shape; there is no anti-aliasing. ``size`` 32 looks at every
    second centre of the 64 × 64 grid, starting at the first: it is ``render(latents, 64)[:, ::2, ::2]``.
    Drawn on ``device`` (the latents' own by default), which must know float64.
    """
    if size not in (32, 64):
        raise InputError(f"size must be 32 or 64, not {size!r}.")
    latents = _checked(latents)
    device = latents.device if device is None else torch.device(device)
    latents = latents.to(device)
    images = torch.empty(len(latents), size, size, dtype=torch.uint8, device=device)
    # One chunk's temporaries: 2 MB each on the CPU, where they stay in cache; 64 MB each on an accelerator.
    chunk = (2**18 if device.type == "cpu" else 2**23) // size**2
    centres = torch.arange(0, FULL_SIZE, FULL_SIZE // size, dtype=torch.float64, device=device) + 0.5
    for shape, inside in enumerate((_in_square, _in_ellipse, _in_heart)):
        for rows in (latents[:, 0] == shape).nonzero().squeeze(1).split(chunk):
            images[rows] = _draw(latents[rows], centres, inside).to(torch.uint8)
    return images


def read_archive(path: str | Path) -> tuple[Tensor, Tensor]:
    """The images (n, 64, 64) uint8 and latents (n, 5) of an original dSprites ``.npz`` file."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no dSprites archive at {str(path)!r}.")
    try:
        # The archive also holds a pickled `metadata`; arrays are read one by one, and that one never is.
        check_zip(path)
        with np.load(path, allow_pickle=False) as archive:
            missing = {"imgs", "latents_classes"} - set(archive.files)
            if missing:
                raise InputError(
                    f"{str(path)!r} is not a dSprites archive: it lacks {', '.join(sorted(missing))}."
                )
            images, classes = archive["imgs"], archive["latents_classes"]
    except (zipfile.BadZipFile, ValueError, AttributeError, TypeError, EOFError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} is not a readable .npz file: {error}") from error
    if images.ndim != 3 or images.shape[1:] != (FULL_SIZE, FULL_SIZE) or images.dtype != np.uint8:
        raise InputError(
            f"imgs in {str(path)!r} must be uint8 (n, 64, 64), not {images.dtype} {images.shape}."
        )
    if classes.shape != (len(images), 6) or classes.dtype.kind not in "iu":
        raise InputError(
            f"latents_classes in {str(path)!r} must be integers ({len(images)}, 6), "
            f"not {classes.dtype} {classes.shape}."
        )
    # The first column is the colour, which is always white.
    return torch.from_numpy(images), _checked(torch.from_numpy(classes[:, 1:].astype(np.int64)))


def _checked(latents: Tensor) -> Tensor:
    if latents.ndim != 2 or latents.shape[1] != 5 or latents.is_floating_point() or latents.is_complex():
        raise InputError(
            f"latents must be integers (n, 5), {', '.join(LATENTS)}; "
            f"not {latents.dtype} {tuple(latents.shape)}."
        )
    latents = latents.long()
    for name, column, count in zip(LATENTS, latents.T, LATENT_SIZES, strict=True):
        wrong = column[(column < 0) | (column >= count)]
        if len(wrong):
            raise InputError(f"latent {name} must be 0 to {count - 1}, not {wrong[0].item()}.")
    return latents


def _draw(latents: Tensor, centres: Tensor, inside: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    _, scale, orientation, x, y = latents.double().T
    scale = 0.5 + scale / 10
    angle = 2 * math.pi / 39 * orientation
    # Pixel centres as the upright sprite of scale 1 sees them. Screen y points down and sprites turn
    # counter-clockwise. Each coordinate is a function of the column plus one of the row: one full-size sum.
    dx = (centres - (16 + 32 / 31 * x)[:, None]) / scale[:, None]
    dy = (centres - (16 + 32 / 31 * y)[:, None]) / scale[:, None]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    across = (dx * cos)[:, None, :] - (dy * sin)[:, :, None]
    down = (dx * sin)[:, None, :] + (dy * cos)[:, :, None]
    return inside(across, down)


# These work in place: each owns its two arguments, and memory traffic is what drawing costs.


def _in_square(across: Tensor, down: Tensor) -> Tensor:
    return torch.maximum(across.abs_(), down.abs_()) <= SQUARE_HALF_SIDE


def _in_ellipse(across: Tensor, down: Tensor) -> Tensor:
    a, b = ELLIPSE_SEMI_AXES
    return across.square_().mul_((b / a) ** 2).add_(down.square_()) <= b**2


def _in_heart(across: Tensor, down: Tensor) -> Tensor:
    """The curve x = w sin³t, y = −h (13 cos t − 5 cos 2t − 2 cos 3t − cos 4t) − o.

    x fixes sin t, hence q = cos²t, and leaves the sign of cos t open: one boundary above, one below. As a
    polynomial in cos t the bracket is even + odd, with even = 4 − 2q − 8q² and odd = cos t (19 − 8q), so a
    point is inside if its own bracket is within |odd| of even. Beside the heart q < 0, the root is NaN and
    the comparison false.
    """
    q = 1 - across.abs_().div_(HEART_HALF_WIDTH).pow_(2 / 3)
    bracket = down.add_(HEART_OFFSET).div_(-HEART_HEIGHT)
    even = 4 - q * (2 + 8 * q)
    odd = q.sqrt() * (19 - 8 * q)
    return bracket.sub_(even).abs_() <= odd
