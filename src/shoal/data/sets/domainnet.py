"""DomainNet: which of 345 things is it, in a style never seen?"""

from __future__ import annotations

from shoal.data.batch import DomainData
from shoal.data.images import SIZE, load_published
from shoal.data.tree import Layout

SUMMARY = "DomainNet: 586,575 pictures of 345 things in six styles, from real to sketch. Reads its folders."
PAPER = (
    "Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019, "
    "https://arxiv.org/abs/1812.01754"
)


LAYOUT = Layout(
    title="DomainNet",
    folders=("domain_net", "DomainNet"),
    domains=dict.fromkeys(("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), ()),
    classes=345,
    counts={
        "clipart": 48_129,
        "infograph": 51_605,
        "painting": 72_266,
        "quickdraw": 172_500,
        "real": 172_947,
        "sketch": 69_128,
    },
    source="the cleaned version without the duplicates that DomainBed removes, 586,575 in all",
    other_counts={
        "Peng et al. 2019, 596,010 in all": {
            "clipart": 48_837,
            "infograph": 53_201,
            "painting": 75_759,
            "quickdraw": 172_500,
            "real": 175_327,
            "sketch": 70_386,
        }
    },
    page="the authors' page, http://ai.bu.edu/M3SDA/",
)
DOMAINS = tuple(LAYOUT.domains)


def load(
    *,
    test: str = "sketch",
    folder: str | None = None,
    seed: int = 0,
    size: int = SIZE,
    augment: bool = True,
    bad: str = "stop",
    cache: bool | None = None,
) -> DomainData:
    """Read the six folders of DomainNet.

    A fifth of every training domain is held out for validation, under the same name. The default model is a
    small network that takes pictures of any size; published results are those of a pretrained ResNet-50.

    Args:
        test: the style left out.
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
