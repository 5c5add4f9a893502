"""PACS: what is it, in a style never seen?"""

from __future__ import annotations

from functools import partial

from shoal.data.download import Download, Source, drive
from shoal.data.images import load_published
from shoal.data.tree import Layout

SUMMARY = "PACS: 9,991 pictures of 7 things as art painting, cartoon, photo and sketch. Reads its folders."
PAPER = (
    "Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017, https://arxiv.org/abs/1710.03077"
)

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
COUNTS = {
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}

LAYOUT = Layout(
    title="PACS",
    name="pacs",
    folders=("PACS", "kfold", "pacs_data", "PACS_dataset"),
    domains={"art_painting": ("art",), "cartoon": (), "photo": (), "sketch": ()},
    classes=7,
    counts={domain: sum(counts) for domain, counts in COUNTS.items()},
    by_class={domain: dict(zip(CLASSES, counts, strict=True)) for domain, counts in COUNTS.items()},
    source="Li et al. 2017, 9,991 in all; by class as commonly given, of which only the sums were checked",
    page="the authors' group, https://sketchx.eecs.qmul.ac.uk/downloads/",
)
DOMAINS = tuple(LAYOUT.domains)

DOWNLOAD = Download(
    home=LAYOUT.folders[0],
    sources=(
        Source(
            "PACS.zip",
            urls=(drive("1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd"),),  # DomainBed's
            checksum="md5:fd5db817f7cdafeef3bfd525aaf9b42e",
            said_by="as others recorded it; DomainBed publishes none",
        ),
    ),
    layout=LAYOUT,
)

# Read PACS as its authors, DomainBed (``PACS``) and Dassl (``kfold``) lay it out.
load = partial(load_published, LAYOUT, test="sketch")
