"""CivilComments-WILDS: is a comment toxic, whichever people it mentions?"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.text import DISTILBERT, MULTIPLE, read_table
from shoal.data.wilds import SPLITS, find, published, text_data
from shoal.errors import InputError, check_names
from shoal.settings import Count

SUMMARY = (
    "CivilComments-WILDS: 448,000 comments, toxic or not, with mentions of 8 identities. Reads the file "
    "of WILDS."
)
PAPER = "Koh et al., WILDS, ICML 2021, https://arxiv.org/abs/2012.07421; Borkan et al. 2019, arXiv:1903.04561"

PUBLISHED = published("civilcomments")
IDENTITIES = ("male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white")
OTHERS = (
    *("identity_any", "severe_toxicity", "obscene", "threat", "insult"),
    *("identity_attack", "sexual_explicit"),
)
GROUP_BY = ("identity", "black")
NONE = "none"
TOXIC = ("not toxic", "toxic")
UNCOUNTED = frozenset(f"{NONE}, {toxic}" for toxic in TOXIC)


def load(
    *,
    folder: str | None = None,
    version: str | None = None,
    group_by: str = "identity",
    tokenizer: str = DISTILBERT,
    max_tokens: Count = 300,
    pad_to: int | str = MULTIPLE,
) -> DomainData:
    """Read the comments. Domains and groups are 18: the eight identities and none, each toxic or not.

    A comment that mentions several identities is in several domains. An identity or a label is what at least
    half of those who were asked said. The two groups that mention none are trained on, as the authors of Fish
    do, and are never the worst: WILDS judges by the other 16.

    Args:
        folder: ``civilcomments_v1.0`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.0.
        group_by: what a training domain is: ``identity``, or ``black``, as for WILDS' own baselines: whether
            black people are mentioned, toxic or not.
        tokenizer: the model's whose tokens texts become, by name or by folder.
        max_tokens: what is longer is cut off.
        pad_to: batches are padded to a multiple of this, or with ``max`` all to ``max_tokens``.
    """
    check_names("group_by", [group_by], GROUP_BY)
    place = find(PUBLISHED, folder, version)
    path = place.folder / PUBLISHED.table
    table = read_table(path, ("split", "toxicity", *IDENTITIES, *OTHERS))
    toxic = table.columns["toxicity"].numbers(f"{str(path)!r}: toxicity") >= 0.5
    shares = {
        name: table.columns[name].numbers(f"{str(path)!r}: {name}", missing=0.0)
        for name in (*IDENTITIES, *OTHERS)
    }
    metadata: dict[str, NDArray[Any]] = {n: (share >= 0.5).astype(np.int64) for n, share in shares.items()}
    metadata["y"] = toxic.astype(np.int64)
    split = table.columns["split"]
    if unknown := sorted(set(split.values) - set(SPLITS)):
        raise InputError(f"{str(path)!r}: split is {unknown[0]!r}; it must be one of {', '.join(SPLITS)}.")
    mentioned = np.stack([metadata[name] for name in IDENTITIES]).astype(bool)
    splits = {
        SPLITS[name]: groups(mentioned, toxic, split.codes == split.values.index(name))
        for name in SPLITS
        if name in split.values
    }
    if group_by == "black" and "train" in splits:
        splits["train"] = by_black(metadata["black"], metadata["y"], splits["train"].examples())
    return text_data(
        PUBLISHED,
        place,
        table,
        "comment_text",
        metadata,
        splits,
        options={"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to},
        classes=2,
        class_names=TOXIC,
        measures=("worst-group accuracy", "accuracy"),
        uncounted=UNCOUNTED,
    )


def groups(mentioned: NDArray[np.bool_], toxic: NDArray[np.bool_], where: NDArray[np.bool_]) -> Domains:
    """The comments at which ``where`` is true by identity (of which some are in several) and toxicity."""
    who = dict(zip(IDENTITIES, mentioned, strict=True)) | {NONE: ~mentioned.any(axis=0)}
    result = {
        f"{name}, {TOXIC[label]}": np.flatnonzero(where & is_mentioned & (toxic == label))
        for (name, is_mentioned), label in product(who.items(), (0, 1))
    }
    return Domains.from_indices({name: rows for name, rows in result.items() if len(rows)})


def by_black(black: NDArray[Any], y: NDArray[Any], rows: NDArray[Any]) -> Domains:
    """Four groups that do not overlap."""
    result = {
        f"{('not black', 'black')[who]}, {TOXIC[label]}": rows[(black[rows] == who) & (y[rows] == label)]
        for who, label in product((0, 1), (0, 1))
    }
    return Domains.from_indices({name: own for name, own in result.items() if len(own)})
