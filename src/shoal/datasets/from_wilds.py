"""Subsets of the `wilds` package as domains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.datasets.wilds import SPLITS, by_group
from shoal.errors import InputError, shown, unknown_name

if TYPE_CHECKING:
    import pandas as pd


class _Subsets(Examples):
    """Subsets one after the other, without the third part of every item."""

    def __init__(self, subsets: Sequence[Any], metadata: Mapping[str, NDArray[Any]], is_class: bool) -> None:
        self.joined: ConcatDataset[Any] = ConcatDataset(subsets)
        self.metadata = metadata
        self.dtype = torch.int64 if is_class else torch.float32
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
            grouper of the package, whose groups are the domains.
        scored_by: the same for the groups by which splits other than train are scored.
        model: name of the default model.
        input_shape: shape of an input (default: that of the first example).
        measures: metrics of the dataset (see :mod:`shoal.training.metrics`).
        uncounted: names of groups that are not considered for the worst group.
    """
    if not isinstance(subsets, Mapping) or "train" not in subsets:
        raise InputError(f"subsets must be a mapping such as {{'train': subset}}, got {shown(subsets)}.")
    tables = {name: _metadata(name, subset) for name, subset in subsets.items()}
    parts, splits, start = list(subsets.values()), dict[str, Domains](), 0
    for name, subset in subsets.items():
        split = SPLITS.get(name, name)
        if split in splits:
            raise InputError(f"subsets has split {split!r} twice, under WILDS' name and ours; remove one.")
        by, argument = (
            (grouper, "grouper") if name == "train" or scored_by is None else (scored_by, "scored_by")
        )
        found = _domains(name, subset, tables[name], by, argument)
        splits[split] = Domains(found.names, found.offsets, found.indices + start)
        start += len(subset)
    fields = [field for field in tables["train"] if all(field in table for table in tables.values())]
    metadata = {field: np.concatenate([table[field] for table in tables.values()]) for field in fields}
    classes = parts[0].n_classes
    examples = _Subsets(parts, metadata, classes is not None)
    if input_shape is None and not isinstance(examples[0][0], Tensor):
        raise InputError(
            f"an example of the subset is a {type(examples[0][0]).__name__}; give get_subset a transform "
            "that "
            "makes a tensor of it, and input_shape= where x is a nest of tensors."
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


def _metadata(name: str, subset: Any) -> pd.DataFrame:
    """The columns of a subset's metadata by field."""
    import pandas as pd

    needed = ("metadata_array", "metadata_fields", "y_array", "n_classes", "__len__", "__getitem__")
    if missing := [attribute for attribute in needed if not hasattr(subset, attribute)]:
        raise InputError(
            f"subset {name!r} is a {type(subset).__name__} without {missing[0]}; it must be a subset of the "
            "wilds package, as get_subset returns it."
        )
    if not len(subset):
        raise InputError(f"subset {name!r} is empty; remove it.")
    table, fields = np.asarray(subset.metadata_array), list(subset.metadata_fields or ())
    targets = np.asarray(subset.y_array)
    if not fields or table.shape != (len(subset), len(fields)) or targets.size != len(subset):
        raise InputError(
            f"subset {name!r} has {len(subset):,} examples, {len(fields)} metadata fields, metadata of shape "
            f"{table.shape} and targets of shape {targets.shape}; it must have a row of metadata and one "
            "number "
            "for each example, and a column for each field."
        )
    return pd.DataFrame(table, columns=fields)


def _domains(name: str, subset: Any, table: pd.DataFrame, grouper: Any, argument: str) -> Domains:
    """A subset's groups."""
    own = getattr(grouper, "groupby_fields", None)
    if own is None and hasattr(grouper, "metadata_to_group") and hasattr(grouper, "group_str"):
        codes = np.asarray(grouper.metadata_to_group(subset.metadata_array))
        if codes.shape != (len(subset),) or codes.dtype.kind not in "iu":
            raise InputError(
                f"{argument}'s metadata_to_group gives {codes.dtype} of shape {codes.shape} for subset "
                f"{name!r}; "
                f"it must give a whole number for each of {len(subset):,} examples."
            )
        return by_group(codes, grouper.group_str, np.ones(len(codes), bool))
    fields = list(own or grouper) if isinstance(own or grouper, (list, tuple)) else []
    if not fields or len(set(fields)) < len(fields):
        raise InputError(
            f"{argument} must be a list of different metadata fields, such as ['year', 'region'], or a "
            "grouper of "
            f"the wilds package; got {shown(grouper)}."
        )
    if lacking := [field for field in fields if field not in table]:
        raise unknown_name(f"metadata field of subset {name!r}:", str(lacking[0]), table.columns)
    if own is not None:  # not group_str, which mixes fields up where their order is not the metadata's
        fields = [field for field in reversed(list(table)) if field in fields]
    values = table[fields]
    wrong = ~(np.isfinite(values) & (values >= 0) & (values == np.floor(values)))
    for field in fields:
        if wrong[field].any():
            raise InputError(
                f"subset {name!r} has {int(wrong[field].sum()):,} examples whose metadata field {field!r} "
                "is no "
                f"whole number of at least 0, the first {values[field][wrong[field]].iloc[0]}; leave the "
                "field or "
                "them out."
            )
    groups = values.astype(np.int64).groupby(fields, sort=True)
    first, texts = groups.head(1).to_dict("index"), getattr(subset, "metadata_map", None) or {}
    codes = groups.ngroup().to_numpy()
    row_of = {int(codes[row]): cells for row, cells in first.items()}

    def label(group: int) -> str:
        cells = row_of[group]
        known = {f: list(texts.get(f, ())) for f in fields}
        words = (known[f][cells[f]] if cells[f] < len(known[f]) else cells[f] for f in fields)
        return ", ".join(f"{field} = {word}" for field, word in zip(fields, words, strict=True))

    return by_group(codes, label, np.ones(len(codes), bool))
