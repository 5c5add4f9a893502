"""VLCS: what is it, in a collection of photographs never seen?"""

from __future__ import annotations

from functools import partial

from shoal.data.download import Download, Source, drive
from shoal.data.images import load_published
from shoal.data.tree import Layout

SUMMARY = (
    "VLCS: 10,729 photographs of 5 things from Caltech101, LabelMe, SUN09 and VOC2007. Reads its folders."
)
PAPER = (
    "Fang et al., Unbiased Metric Learning: On the Utilization of Multiple Datasets and Web Images for "
    "Softening Bias, ICCV 2013; the collections: Torralba and Efros, Unbiased Look at Dataset Bias, CVPR 2011"
)

CLASSES = ("bird", "car", "chair", "dog", "person")
COUNTS = {
    "Caltech101": (237, 123, 118, 67, 870),
    "LabelMe": (80, 1209, 89, 43, 1235),
    "SUN09": (21, 933, 1036, 31, 1261),
    "VOC2007": (330, 699, 428, 420, 1499),
}

LAYOUT = Layout(
    title="VLCS",
    name="vlcs",
    folders=("VLCS",),
    domains={
        "Caltech101": ("CALTECH", "C"),
        "LabelMe": ("L",),
        "SUN09": ("SUN", "S"),
        "VOC2007": ("PASCAL", "VOC", "V"),
    },
    classes=5,
    counts={domain: sum(counts) for domain, counts in COUNTS.items()},
    by_class={domain: dict(zip(CLASSES, counts, strict=True)) for domain, counts in COUNTS.items()},
    source="DomainBed, 10,729 in all; by class as commonly given, of which only the sums were checked",
    page="DomainBed's download script, https://github.com/facebookresearch/DomainBed",
    parts=(("train", "crossval", "test"), ("full",)),
)
DOMAINS = tuple(LAYOUT.domains)

DOWNLOAD = Download(
    home=LAYOUT.folders[0],
    sources=(
        Source(
            "VLCS.tar.gz",
            urls=(drive("1skwblH1_okBwxWxmRsp9_qi15hyPpxg8"),),  # DomainBed's
            checksum="md5:8870171eba660927d9668f4e515928e4",
            said_by="as others recorded it; DomainBed publishes none",
            about=3_600_000_000,
        ),
    ),
    layout=LAYOUT,
)

# Read VLCS as DomainBed (``VOC2007/bird``) or Dassl (``PASCAL/train/0``) lays it out.
load = partial(load_published, LAYOUT, test="VOC2007")
