"""Office-Home: which object is it, in a kind of picture never seen?"""

from __future__ import annotations

from functools import partial

from shoal.data.download import Download, Source, drive
from shoal.data.images import load_published
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
    name="office-home",
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

DOWNLOAD = Download(
    home=LAYOUT.folders[0],
    sources=(
        Source(
            "OfficeHomeDataset_10072016.zip",
            urls=(drive("1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC"),),  # DomainBed's
            checksum="md5:b1c14819770c4448fd5b6d931031c91c",
            said_by="as several others recorded it; the authors publish none",
        ),
    ),
    layout=LAYOUT,
)

# Read Office-Home; the folder of the real-world pictures may be called ``Real World`` or ``Real``.
load = partial(load_published, LAYOUT, test="real")
