"""A domain is a list of example indices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, listed, shown, unknown_name


class Domains:
    """The examples of each domain, in three flat arrays.

    Domain ``d`` consists of the examples ``indices[offsets[d]:offsets[d + 1]]``, so that one example may be
    in several domains, and a million domains cost three arrays. Usually created with :meth:`from_labels`,
    :meth:`from_sizes` or :meth:`from_indices`:

    >>> domains = Domains.from_labels(["paris", "oslo", "paris"])
    >>> domains.names, domains.indices_of(1)
    (('oslo', 'paris'), array([0, 2], dtype=int32))

    Args:
        names: names of the domains.
        offsets: start of each domain in ``indices``, and its end.
        indices: indices of examples.
    """

    def __init__(self, names: Iterable[Any], offsets: NDArray[Any], indices: NDArray[Any]) -> None:
        self.names = tuple(map(str, names))
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.sizes = np.diff(self.offsets)
        if not self.names:
            raise InputError("there are no domains; at least one example is needed.")
        if len(set(self.names)) < len(self.names):
            twice = Counter(self.names).most_common(1)[0][0]
            raise InputError(f"two domains have the name {twice!r}; rename one.")
        if self.sizes.min() < 1:
            raise InputError(f"domain {self.names[self.sizes.argmin()]!r} has no examples; remove it.")
        if (lowest := int(indices.min())) < 0:
            name = self.names[self.domain_at(int(indices.argmin()))]
            raise InputError(f"domain {name!r} has index {lowest}; indices count from 0.")
        small = int(indices.max()) < 2**31
        self.indices: NDArray[Any] = indices.astype(np.int32 if small else np.int64, copy=False)

    @classmethod
    def from_labels(cls, labels: Any) -> Domains:
        """Create domains from one label (integer or string) per example; domains are in sorted order."""
        values = _label_values(labels)
        names = sorted(set(values))
        number = {name: d for d, name in enumerate(names)}
        codes = np.fromiter((number[value] for value in values), np.int64, len(values))
        offsets = np.concatenate([[0], np.bincount(codes).cumsum()])
        return cls(names, offsets, codes.argsort(kind="stable"))

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int]) -> Domains:
        """Create domains of consecutive examples from the number of examples of each domain by name."""
        for name, size in sizes.items():
            if not isinstance(size, (int, np.integer)) or not 1 <= size < 2**48:
                raise InputError(f"domain {str(name)!r} has {shown(size)} examples; it needs at least one.")
        offsets = np.cumsum([0, *sizes.values()], dtype=np.int64)
        return cls(sizes, offsets, np.arange(offsets[-1]))

    @classmethod
    def from_indices(cls, indices: Mapping[str, Any]) -> Domains:
        """Create domains, which may overlap, from the indices of the examples of each by name."""
        parts = [_index_array(name, part) for name, part in indices.items()]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(indices, offsets, np.concatenate([np.empty(0, np.int64), *parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        each = [f"{name}: {size:,}" for name, size in zip(self.names[:5], self.sizes, strict=False)]
        more = [f"… {len(self) - 5:,} more"] if len(self) > 5 else []
        return f"Domains({len(self):,} domains, {len(self.indices):,} entries: {', '.join(each + more)})"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: d for d, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        """Return the number of the domain of this name."""
        if (d := self._numbers.get(str(name))) is None:
            raise unknown_name("domain", name, self.names)
        return d

    def numbers(self, names_or_numbers: str | int | Iterable[str | int]) -> list[int]:
        """Convert one name or number of a domain, or several, to a list of numbers."""
        if isinstance(names_or_numbers, (str, int, np.integer)):
            names_or_numbers = [names_or_numbers]
        chosen: list[int] = []
        for d in listed(names_or_numbers, "names or numbers of domains"):
            number = self.number(d) if isinstance(d, str) else d
            if not isinstance(number, (int, np.integer)) or not 0 <= number < len(self):
                raise InputError(f"domain number {shown(d)} must be from 0 to {len(self) - 1}.")
            chosen.append(int(number))
        if len(set(chosen)) < len(chosen):
            twice = self.names[Counter(chosen).most_common(1)[0][0]]
            raise InputError(f"domain {twice!r} is listed twice; list each domain once.")
        return chosen

    def domain_at(self, position: int) -> int:
        """Return the domain that the entry of ``indices`` at this position belongs to."""
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def indices_of(self, d: int) -> NDArray[Any]:
        """Return the example indices of the domain of this number, as a view."""
        (d,) = self.numbers([d])
        return self.indices[self.offsets[d] : self.offsets[d + 1]]

    def examples(self) -> NDArray[Any]:
        """Return all examples that are in some domain, without duplicates, in increasing order."""
        ordered = np.sort(self.indices)  # np.unique takes 25 times as long
        return ordered[np.diff(ordered, prepend=-1) > 0]

    def select(self, names_or_numbers: str | int | Iterable[str | int]) -> Domains:
        """Return only the domains of these names or numbers, in this order, renumbered from 0."""
        chosen = np.asarray(self.numbers(names_or_numbers), dtype=np.int64)
        sizes = self.sizes[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], sizes)
        return Domains([self.names[d] for d in chosen], offsets, self.indices[places])

    def filter(self, keep: NDArray[np.bool_]) -> Domains:
        """Keep only entries of ``indices``, by a mask over all of them; empty domains are removed."""
        sizes = np.add.reduceat(keep, self.offsets[:-1], dtype=np.int64)
        left = np.flatnonzero(sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes[left])])
        return Domains([self.names[d] for d in left], offsets, self.indices[keep])


def _as_array(values: Any, name: str) -> NDArray[Any]:
    """What a user has as an array; an error calls it ``name``."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except Exception as error:  # of whatever library or class of the user's
        raise InputError(f"{name} cannot be made an array: {shown(values)}.") from error


def _label_values(labels: Any) -> list[Any]:
    """Labels as a list of integers, or else of strings."""
    array = _as_array(labels, "labels")
    if array.ndim != 1 or len(array) == 0:
        raise InputError(f"labels have shape {array.shape}; there must be one label per example.")
    # A NaN among strings is a string in their array.
    own = array.dtype.kind in "US" and not isinstance(labels, np.ndarray)
    values: list[Any] = list(labels) if own else array.tolist()
    if array.dtype.kind in "iu":
        return values
    for position, value in enumerate(values):
        # pandas' NA cannot be compared, so it is known by its type's name
        missing = value is None or type(value).__name__ == "NAType" or value != value
        if missing or (isinstance(value, float) and not value.is_integer()):
            place = f"the domain label at position {position} is {value}"
            raise InputError(f"{place}; every example needs an integer or a string.")
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return [int(value) if numbers else str(value) for value in values]


def _index_array(name: str, indices: Any) -> NDArray[np.int64]:
    """A domain's list of indices as integers."""
    array = _as_array(indices, f"the indices of domain {str(name)!r}")
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        form = f"indices of shape {array.shape} and type {array.dtype}"
        raise InputError(
            f"domain {str(name)!r} has {form}; it must be a flat list of integers (of a mask: np.nonzero)."
        )
    return array.astype(np.int64, copy=False)
