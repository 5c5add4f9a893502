"""TerraIncognita: which animal is it, before a camera never seen?"""

from __future__ import annotations

from shoal.data.batch import DomainData
from shoal.data.images import SIZE, load_published
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


def load(
    *,
    test: str = "L46",
    folder: str | None = None,
    seed: int = 0,
    size: int = SIZE,
    augment: bool = True,
    bad: str = "stop",
    cache: bool | None = None,
) -> DomainData:
    """Read the four cameras that DomainBed chose, in folders such as ``location_46``.

    A fifth of every training domain is held out for validation, under the same name. The default model is a
    small network that takes pictures of any size; published results are those of a pretrained ResNet-50.

    Args:
        test: the camera left out.
        folder: where it is, the folder itself or the one it is in; ``$SHOAL_DATA`` by default.
        seed: for the choice of the validation examples.
        size: of the pictures, in pixels each way.
        augment: whether training pictures are cropped, mirrored and recoloured at random.
        bad: ``stop`` at a picture that cannot be read, or ``skip`` it.
        cache: whether decoded pictures are kept in memory; small ones are by default.
    """
    return load_published(
        LAYOUT, test=test, folder=folder, seed=seed, size=size, augment=augment, bad=bad, cache=cache
    )
