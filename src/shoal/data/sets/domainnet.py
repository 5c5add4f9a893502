"""DomainNet: which of 345 things is it, in a style never seen?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shoal.data.download import Download, Source
from shoal.data.images import load_published
from shoal.data.tree import Layout
from shoal.data.unpack import stays_inside
from shoal.files import read_text

SUMMARY = "DomainNet: 586,575 pictures of 345 things in six styles, from real to sketch. Reads its folders."
PAPER = (
    "Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019, "
    "https://arxiv.org/abs/1812.01754"
)


LAYOUT = Layout(
    title="DomainNet",
    name="domainnet",
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
DOMAINBED = {"eval_every": 1000, "batch": {"batch_size": {"default": 32, "log2": [3, 5], "whole": True}}}
"""Where DomainBed treats it otherwise than other large images."""

COPIES = "domain_net_duplicates.txt"


def leave_out_copies(folder: Path) -> str:
    """Removes the pictures that DomainBed lists as copies of others, and the list."""
    listed = read_text(folder / COPIES, errors="replace").splitlines()
    names = [name for line in listed if stays_inside(name := line.strip())]
    there = [path for name in dict.fromkeys(names) if (path := folder / name).is_file()]
    for path in there:
        path.unlink()
    (folder / COPIES).unlink(missing_ok=True)
    return f"{len(there):,} pictures that DomainBed lists as copies are left out"


SERVER = "http://csr.bu.edu/ftp/visda/2019/multi-source"
ARCHIVES = {  # clipart and painting are the cleaned ones
    "groundtruth/clipart.zip": (1_300_000_000, "cd0d8f2d77a4e181449b78ed62bccf1e"),
    "infograph.zip": (4_000_000_000, "720380b86f9e6ab4805bb38b6bd135f8"),
    "groundtruth/painting.zip": (3_700_000_000, "1ae32cdb4f98fe7ab5eb0a351768abfd"),
    "quickdraw.zip": (439_000_000, "bdc1b6f09f277da1a263389efe0c7a66"),
    "real.zip": (5_600_000_000, "dcc47055e8935767784b7162e7c7cca6"),
    "sketch.zip": (2_500_000_000, "658d8009644040ff7ce30bb2e820850f"),
}
DOWNLOAD = Download(
    home=LAYOUT.folders[0],
    sources=(
        *(
            Source(
                path.rpartition("/")[2],
                urls=(f"{SERVER}/{path}",),
                checksum=f"md5:{md5}",
                said_by="as two others recorded it; the authors publish none",
                about=about,
            )
            for path, (about, md5) in ARCHIVES.items()
        ),
        Source(
            COPIES,
            urls=(
                f"https://raw.githubusercontent.com/facebookresearch/DomainBed/main/domainbed/misc/{COPIES}",
            ),
            about=366_000,
        ),
    ),
    layout=LAYOUT,
    arrange=leave_out_copies,
)

# Read the six folders of DomainNet.
load = partial(load_published, LAYOUT, test="sketch")
