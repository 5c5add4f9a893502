"""DomainNet: which of 345 things is it, in a style never seen?"""

from __future__ import annotations

from functools import partial

from shoal.data.images import load_published
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

# Read the six folders of DomainNet.
load = partial(load_published, LAYOUT, test="sketch")
