"""CdSprites-N: sprites whose colour gives away their shape in each training domain, not elsewhere."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.sprites import FULL_SIZE, latent_grid, read_archive, render
from shoal.errors import InputError
from shoal.settings import Count, Seed

SUMMARY = (
    "CdSprites-N: square or ellipse? Colour predicts the label in each of N training domains, not in the "
    "test domain."
)
PAPER = "Shi et al., Gradient Matching for Domain Generalization, ICLR 2022, https://arxiv.org/abs/2104.09937"

SHAPES_USED = (0, 1)  # square, ellipse: also the labels


def adjacent_hues(count: int, generator: torch.Generator) -> Tensor:
    """Fully saturated colours evenly round the colour wheel, (count, 3) RGB in [0, 1]; nothing is random."""
    return torch.tensor([colorsys.hsv_to_rgb(i / count, 1.0, 1.0) for i in range(count)])


def random_colours(count: int, generator: torch.Generator) -> Tensor:
    """Independent uniform RGB colours, (count, 3)."""
    return torch.rand(count, 3, generator=generator)


PALETTES = {"adjacent": adjacent_hues, "random": random_colours}


class SpriteData(TensorData):
    """Coloured sprites, painted batch by batch.

    Kept as one byte a pixel and one colour number an example: a twelfth of the images' memory.
    So there is no ``x`` attribute here; images come from indexing and from :meth:`batch`.

    ``masks`` may be a function that draws them on a device. It is called when they are first needed, so that
    what is trained on an accelerator is drawn there and never crosses the host's memory.
    """

    def __init__(
        self, masks: Tensor | Callable[[torch.device], Tensor], colours: Tensor, palette: Tensor, y: Tensor
    ) -> None:
        count = len(masks) if isinstance(masks, Tensor) else len(y)
        if not count == len(colours) == len(y):
            raise InputError(
                f"{count} masks, {len(colours)} colours and {len(y)} labels; the numbers must be equal."
            )
        self._masks = masks
        self.colours = colours
        self.palette = palette
        self.y = y

    @property
    def masks(self) -> Tensor:
        if not isinstance(self._masks, Tensor):
            self._masks = self._masks(self.device)
        return self._masks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.masks[index] * self.palette[self.colours[index]][:, None, None], self.y[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 (b, 3, size, size) in [0, 1] and labels at ``indices``, on the data's device."""
        colours = self.palette[self.colours[indices]]
        return self.masks[indices].unsqueeze(1) * colours[:, :, None, None], self.y[indices]

    def to(self, device: torch.device | str) -> Self:
        if self.device == torch.device(device):
            return self
        masks = self._masks.to(device) if isinstance(self._masks, Tensor) else self._masks
        return type(self)(masks, *(t.to(device) for t in (self.colours, self.palette, self.y)))


def load(
    *,
    domains: Count = 10,
    size: Literal[64, 32] = 64,
    palette: Literal["adjacent", "random"] = "adjacent",
    per_domain: Count | None = None,
    archive: str | Path | None = None,
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
        archive: an original dSprites ``.npz`` to take the images from; by default they are drawn.
        seed: for the shuffle, the test colours and the random palette.
    """
    latents, images_at = _drawn(size) if archive is None else _archived(archive, size)
    generator = torch.Generator().manual_seed(seed)
    parts = deal(len(latents), domains + 2, generator)
    count = parts.shape[1] if per_domain is None else per_domain
    if parts.shape[1] < 2:
        raise InputError(f"domains must leave 2 examples for each part of {len(latents)}; {domains} do not.")
    if not 2 <= count <= parts.shape[1]:
        raise InputError(
            f"per_domain must be from 2 to {parts.shape[1]}, one of {domains + 2} parts of "
            f"{len(latents)} examples; not {per_domain!r}."
        )
    # Drawn for whole parts, so that `per_domain` only shortens them and changes nothing else.
    any_colours = torch.randint(2 * domains, (2, parts.shape[1]), generator=generator)
    paints = PALETTES[palette](2 * domains, generator)
    chosen = parts[:, :count].flatten()
    y = latents[chosen, 0]
    own_colours = 2 * torch.arange(domains)[:, None] + y.view(domains + 2, count)[:domains]
    colours = torch.cat([own_colours, any_colours[:, :count]]).flatten()
    rows = torch.arange(len(chosen)).view(domains + 2, count).numpy()
    return DomainData(
        examples=SpriteData(images_at(chosen), colours, paints, y),
        splits={
            "train": Domains.from_indices({f"domain {i}": rows[i] for i in range(domains)}),
            "validation": Domains.from_indices({"validation": rows[domains]}),
            "test": Domains.from_indices({"test": rows[domains + 1]}),
        },
        classes=2,
        input_shape=(3, size, size),
        model="sprite-cnn",
        class_names=("square", "ellipse"),
        notes={"validation": "sampled like the test domain, so that selection on it is oracle-like"},
    )


def deal(available: int, parts: int, generator: torch.Generator) -> Tensor:
    """Shuffled example numbers as (parts, equal part); a remainder is left out."""
    part = available // parts
    return torch.randperm(available, generator=generator)[: parts * part].view(parts, part)


def _drawn(size: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
    latents = latent_grid(SHAPES_USED)
    return latents, lambda rows: partial(_draw_on, latents=latents[rows], size=size)


def _draw_on(device: torch.device, latents: Tensor, size: int) -> Tensor:
    # A CUDA device draws all 491,520 in a tenth of a second, and the same pixels.
    where = "cuda" if device.type == "cpu" and torch.cuda.is_available() else device
    return render(latents, size, device=where).to(device)


def _archived(path: str | Path, size: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
    images, latents = read_archive(path)
    used = torch.isin(latents[:, 0], torch.tensor(SHAPES_USED)).nonzero().squeeze(1)
    step = FULL_SIZE // size
    # The gather is put off until it is known which rows are wanted: all of them would be 2 GB.
    return latents[used], lambda rows: images[:, ::step, ::step][used[rows]]
