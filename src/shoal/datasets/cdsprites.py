"""CdSprites-N: sprites whose colour gives away their shape in each training domain, not elsewhere.

The sprites are those of dSprites (Matthey et al., 2017, https://github.com/google-deepmind/dsprites-dataset):
3 shapes × 6 scales × 40 orientations × 32 × 32 positions, black and white on 64 × 64 pixels. The geometry was
fitted to original frames: of 258 distinct latents 246 are drawn bit for bit, the others within 4 pixels.
"""

from __future__ import annotations

import colorsys
import math
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.settings import Count, Seed

SHAPES = ("square", "ellipse", "heart")
LATENT_SIZES = (3, 6, 40, 32, 32)
"""Numbers of shapes, scales, orientations and positions in x and y."""

# Lengths in pixels at scale 1.
SQUARE_HALF_SIDE = 9.6
ELLIPSE_SEMI_AXES = (12.77, 7.23)
HEART_HALF_WIDTH, HEART_HEIGHT, HEART_OFFSET = 9.594, 0.66218, 1.436


def latent_grid(shapes: tuple[int, ...] = (0, 1)) -> Tensor:
    """All latents of the given shapes, (n, 5), in the order of the dSprites archive."""
    return torch.cartesian_prod(torch.tensor(shapes), *(torch.arange(n) for n in LATENT_SIZES[1:]))


def render(latents: Tensor, size: int = 64) -> Tensor:
    """Draw sprites: latents (n, 5) of class numbers → uint8 (n, size, size) of zeros and ones.

    A pixel is on if its centre lies inside the shape; there is no anti-aliasing. ``size`` 32 uses every
    second centre of the 64 × 64 grid, starting at the first: it is ``render(latents, 64)[:, ::2, ::2]``.
    """
    device = latents.device
    images = torch.empty(len(latents), size, size, dtype=torch.uint8, device=device)
    # One chunk's temporaries: 2 MB each on the CPU, where they stay in cache; 64 MB each on an accelerator.
    chunk = (2**18 if device.type == "cpu" else 2**23) // size**2
    centres = torch.arange(0, 64, 64 // size, dtype=torch.float64, device=device) + 0.5
    for shape, inside in enumerate((_in_square, _in_ellipse, _in_heart)):
        for rows in (latents[:, 0] == shape).nonzero().squeeze(1).split(chunk):
            _, scale, orientation, x, y = latents[rows].double().T
            scale, angle = 0.5 + scale / 10, 2 * math.pi / 39 * orientation
            # Pixel centres in the coordinates of the upright sprite of scale 1. Screen y points down and
            # sprites turn counter-clockwise. Each coordinate is a function of the column plus one of the row.
            dx = (centres - (16 + 32 / 31 * x)[:, None]) / scale[:, None]
            dy = (centres - (16 + 32 / 31 * y)[:, None]) / scale[:, None]
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            across = (dx * cos)[:, None, :] - (dy * sin)[:, :, None]
            down = (dx * sin)[:, None, :] + (dy * cos)[:, :, None]
            images[rows] = inside(across, down).to(torch.uint8)
    return images


def _in_square(across: Tensor, down: Tensor) -> Tensor:
    return torch.maximum(across.abs(), down.abs()) <= SQUARE_HALF_SIDE


def _in_ellipse(across: Tensor, down: Tensor) -> Tensor:
    a, b = ELLIPSE_SEMI_AXES
    return across**2 * (b / a) ** 2 + down**2 <= b**2


def _in_heart(across: Tensor, down: Tensor) -> Tensor:
    """The curve x = w sin³t, y = −h (13 cos t − 5 cos 2t − 2 cos 3t − cos 4t) − o.

    x fixes sin t, hence q = cos²t, and leaves the sign of cos t open: one boundary above, one below. As a
    polynomial in cos t the bracket is even + odd, with even = 4 − 2q − 8q² and odd = cos t (19 − 8q), so a
    point is inside if its own bracket is within |odd| of even. Beside the heart q < 0, the root is NaN and
    the comparison false.
    """
    q = 1 - (across.abs() / HEART_HALF_WIDTH) ** (2 / 3)
    bracket = (down + HEART_OFFSET) / -HEART_HEIGHT
    return (bracket - (4 - q * (2 + 8 * q))).abs() <= q.sqrt() * (19 - 8 * q)


class SpriteData(TensorData):
    """Coloured sprites, painted batch by batch from one byte per pixel and one colour per example.

    They are drawn when they are first needed, on the device they are on.
    """

    def __init__(self, latents: Tensor, size: int, colours: Tensor, palette: Tensor) -> None:
        self.latents, self.size, self.colours, self.palette = latents, size, colours, palette
        self.y, self.weight = latents[:, 0], None

    @cached_property
    def masks(self) -> Tensor:
        return render(self.latents, self.size)

    @property
    def x(self) -> Tensor:
        """All images, a twelfth of whose memory is held."""
        return self[torch.arange(len(self), device=self.device)][0]

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        """Images float32 (…, 3, size, size) in [0, 1] and labels at ``index``."""
        colours = self.palette[self.colours[index]][..., None, None]
        return self.masks[index].unsqueeze(-3) * colours, self.y[index]

    def to(self, device: torch.device | str) -> SpriteData:
        if self.device == torch.device(device):
            return self
        latents, colours, palette = (t.to(device) for t in (self.latents, self.colours, self.palette))
        return SpriteData(latents, self.size, colours, palette)


def load(
    *,
    domains: Count = 10,
    size: Literal[64, 32] = 64,
    palette: Literal["adjacent", "random"] = "adjacent",
    per_domain: Count | None = None,
    seed: Seed = 0,
) -> DomainData:
    """Make CdSprites-N with N = ``domains``.

    All squares and ellipses of dSprites (491,520) are shuffled and cut into N + 2 equal parts: N training
    domains, one for validation, one for test. Training domain i paints squares with colour 2i and ellipses
    with colour 2i + 1; validation and test images take any of the 2N colours, whatever their shape.

    Args:
        domains: number of training domains.
        size: 64, or 32 for every second pixel.
        palette: ``"adjacent"``: 2N hues evenly round the colour wheel, so a domain's two colours are
            neighbours; ``"random"``: 2N independent RGB colours. The choice decides what can be learned.
        per_domain: use only this many examples of each part, the first ones.
        seed: for the shuffle, the test colours and the random palette.
    """
    latents, generator = latent_grid(), torch.Generator().manual_seed(seed)
    part = len(latents) // (domains + 2)
    count = part if per_domain is None else per_domain
    if not 2 <= count <= part:
        each = f"each of {domains + 2} parts of {len(latents)} examples has {part}"
        raise InputError(f"{each}; it must have at least 2, and per_domain={per_domain} of them.")
    order = torch.randperm(len(latents), generator=generator)[: (domains + 2) * part].view(domains + 2, part)
    # Drawn for whole parts, so that `per_domain` only shortens them and changes nothing else.
    any_colours = torch.randint(2 * domains, (2, part), generator=generator)
    hues = [colorsys.hsv_to_rgb(i / (2 * domains), 1.0, 1.0) for i in range(2 * domains)]
    paints = torch.tensor(hues) if palette == "adjacent" else torch.rand(2 * domains, 3, generator=generator)
    latents = latents[order[:, :count].flatten()]
    own_colours = 2 * torch.arange(domains)[:, None] + latents[:, 0].view(domains + 2, count)[:domains]
    colours = torch.cat([own_colours, any_colours[:, :count]]).flatten()
    names = [*(f"domain {i}" for i in range(domains)), "validation", "test"]
    rows = dict(zip(names, torch.arange(len(latents)).view(-1, count).numpy(), strict=True))
    test, validation = {"test": rows.pop("test")}, {"validation": rows.pop("validation")}
    splits = {"train": rows, "validation": validation, "test": test}
    return DomainData(
        examples=SpriteData(latents, size, colours, paints),
        splits={split: Domains.from_indices(parts) for split, parts in splits.items()},
        classes=2,
        input_shape=(3, size, size),
        model="sprite-cnn",
        class_names=SHAPES[:2],
        notes={"validation": "sampled like the test domain, so that selection on it is oracle-like"},
    )


cdsprites = SimpleNamespace(load=load)
