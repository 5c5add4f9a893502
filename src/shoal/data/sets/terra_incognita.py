"""TerraIncognita: which animal is it, before a camera never seen?"""

from __future__ import annotations

from functools import partial

from shoal.data.images import load_published
from shoal.data.tree import Layout

SUMMARY = "TerraIncognita: 24,330 pictures of 9 animals or none by four camera traps. Reads its folders."
PAPER = (
    "Beery et al., Recognition in Terra Incognita, ECCV 2018, https://arxiv.org/abs/1807.04975; these four "
    "cameras: Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021"
)


LAYOUT = Layout(
    title="TerraIncognita",
    folders=("terra_incognita", "TerraIncognitaDataset", "terra"),
    domains={name: (f"location_{name[1:]}", name[1:]) for name in ("L100", "L38", "L43", "L46")},
    classes=10,
    # DomainBed's paper says 24,788 in all. Its download script takes labels that were revised since.
    counts={"L100": 4741, "L38": 9736, "L43": 3970, "L46": 5883},
    source="what DomainBed's download script makes, 24,330 in all; its paper says 24,788",
    page="Caltech Camera Traps, https://lila.science/datasets/caltech-camera-traps, by DomainBed's script",
)
DOMAINS = tuple(LAYOUT.domains)

# Read the four cameras that DomainBed chose, in folders such as ``location_46``.
load = partial(load_published, LAYOUT, test="L46")
