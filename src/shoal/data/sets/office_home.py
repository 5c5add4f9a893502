"""Office-Home: which object is it, in a kind of picture never seen?"""

from __future__ import annotations

from shoal.data.batch import DomainData
from shoal.data.images import SIZE, load_published
from shoal.data.tree import Layout

SUMMARY = (
    "Office-Home: 15,588 pictures of 65 objects as art, clipart, product and real-world. Reads its folders."
)
PAPER = (
    "Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017, "
    "https://arxiv.org/abs/1706.07522"
)


LAYOUT = Layout(
    title="Office-Home",
    folders=("office_home", "OfficeHomeDataset", "OfficeHomeDataset_10072016", "OfficeHome_dg"),
    domains={
        "art": ("A",),
        "clipart": ("C",),
        "product": ("P",),
        "real": ("Real World", "R"),
    },
    classes=65,
    counts={"art": 2427, "clipart": 4365, "product": 4439, "real": 4357},
    source="DomainBed, 15,588 in all; its authors say around 15,500",
    page="the authors' page, http://hemanthdv.org/OfficeHome-Dataset/",
)
DOMAINS = tuple(LAYOUT.domains)


def load(
    *,
    test: str = "real",
    folder: str | None = None,
    seed: int = 0,
    size: int = SIZE,
    augment: bool = True,
    bad: str = "stop",
    cache: bool | None = None,
) -> DomainData:
    """Read Office-Home; the folder of the real-world pictures may be called ``Real World`` or ``Real``.

    A fifth of every training domain is held out for validation, under the same name. The default model is a
    small network that takes pictures of any size; published results are those of a pretrained ResNet-50.

    Args:
        test: the kind of picture left out.
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
