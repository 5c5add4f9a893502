"""Subsets of the `wilds` package as domains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.datasets.wilds import SPLITS, domains_of
from shoal.errors import InputError, check_names, shown


class _Subsets(Examples):
    """Subsets one after the other, without the third part of every item."""

    def __init__(self, subsets: Sequence[Any], dtype: torch.dtype) -> None:
        self.joined: ConcatDataset[Any] = ConcatDataset(subsets)
        self.dtype = dtype
        self.labels = np.concatenate([np.asarray(subset.y_array).reshape(-1) for subset in subsets])

    def __len__(self) -> int:
        return len(self.joined)

    def known_labels(self) -> NDArray[Any]:
        return self.labels

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        x, y, _ = self.joined[index]
        return x, torch.as_tensor(y, dtype=self.dtype).reshape(())


def from_wilds(
    subsets: Mapping[str, Any],
    grouper: Any,
    *,
    scored_by: Any = None,
    model: str = "small-cnn",
    input_shape: Sequence[int] | None = None,
    measures: Sequence[str] = (),
    uncounted: Iterable[str] = (),
) -> DomainData:
    """Convert subsets of the `wilds` package to domains, for :func:`shoal.fit`. ::

        data = from_wilds({name: dataset.get_subset(name, transform=t) for name in ("train", "val", "test")},
                          ["hospital"])

    Domains have the names of WILDS, such as ``"year = 3, region = Asia"``.

    Args:
        subsets: subsets by split, under the names of WILDS or of Shoal; each requires a transform that
            returns tensors.
        grouper: metadata fields, such as ``["year", "region"]``, of which every combination is a domain; or a
            ``CombinatorialGrouper`` of the package, for its fields.
        scored_by: the same for the groups by which splits other than train are scored.
        model: name of the default model.
        input_shape: shape of an input (default: that of the first example).
        measures: metrics of the dataset (see :mod:`shoal.training.metrics`).
        uncounted: names of groups that are not considered for the worst group.
    """
    if not isinstance(subsets, Mapping) or "train" not in subsets:
        raise InputError(f"subsets must be a mapping such as {{'train': subset}}, got {shown(subsets)}.")
    splits, start = dict[str, Domains](), 0
    for name, subset in subsets.items():
        if (split := SPLITS.get(name, name)) in splits:
            raise InputError(f"subsets has split {split!r} twice, under WILDS' name and ours; remove one.")
        train = name == "train" or scored_by is None
        found = _domains(name, subset, *((grouper, "grouper") if train else (scored_by, "scored_by")))
        splits[split] = Domains(found.names, found.offsets, found.indices + start)
        start += len(subset)
    parts = list(subsets.values())
    classes = parts[0].n_classes
    examples = _Subsets(parts, torch.float32 if classes is None else torch.int64)
    if input_shape is None and not isinstance(examples[0][0], Tensor):
        raise InputError(
            f"an example is a {type(examples[0][0]).__name__}; give get_subset a transform that makes a "
            "tensor of it, and input_shape= where x is a nest of tensors."
        )
    return DomainData(
        examples=examples,
        splits=splits,
        classes=None if classes is None else int(classes),
        input_shape=tuple(examples[0][0].shape if input_shape is None else input_shape),
        model=model,
        measures=tuple(measures),
        uncounted=frozenset(uncounted),
    )


def _domains(name: str, subset: Any, grouper: Any, argument: str) -> Domains:
    """The combinations of fields that a subset has, in the order of their values."""
    import pandas as pd

    fields = getattr(grouper, "groupby_fields", grouper)
    if not isinstance(fields, list | tuple) or not fields:
        raise InputError(
            f"{argument} must be a list of metadata fields, such as ['year', 'region'], or a grouper of the "
            f"wilds package; got {shown(grouper)}."
        )
    known = list(getattr(subset, "metadata_fields", None) or ())
    table = np.asarray(getattr(subset, "metadata_array", None))
    if not known or table.shape != (len(subset), len(known)) or not len(subset):
        raise InputError(
            f"subset {name!r} must be a subset of the wilds package, as get_subset returns it, with a row of "
            "metadata for each of one or more examples."
        )
    check_names(f"metadata field of subset {name!r}:", fields, known)
    values = pd.DataFrame(table, columns=known)[list(fields)]
    if not ((values >= 0) & (values % 1 == 0)).all(axis=None):
        raise InputError(f"{', '.join(fields)} of subset {name!r} must be whole numbers from 0 on.")
    texts = getattr(subset, "metadata_map", None) or {}

    def label(cells: Sequence[int]) -> str:
        pairs = [(field, cell, texts.get(field, ())) for field, cell in zip(fields, cells, strict=True)]
        return ", ".join(f"{field} = {words[c] if c < len(words) else c}" for field, c, words in pairs)

    groups = values.astype(np.int64).groupby(list(fields), sort=True)
    names = [label(cells) for cells in groups.size().reset_index()[list(fields)].to_numpy().tolist()]
    return domains_of(pd.Categorical.from_codes(groups.ngroup(), names), np.arange(len(subset)))
