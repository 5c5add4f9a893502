"""A domain is a list of example indices."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, listed, unknown_name
from shoal.settings import checked, shown

MANY = 50  # an error lists the known names up to this many domains


class Domains:
    """The examples of each domain, in three flat arrays.

    Domain ``d`` consists of the examples ``indices[offsets[d]:offsets[d + 1]]``, so that one example may be
    in several domains, and a million domains cost three arrays. Usually created with :meth:`from_labels`,
    :meth:`from_sizes` or :meth:`from_indices`:

    >>> domains = Domains.from_labels(["paris", "oslo", "paris"])
    >>> domains.names, domains.indices_of(1)
    (('oslo', 'paris'), array([0, 2], dtype=int32))

    Args:
        names: names of the domains; an integer array is converted to strings only when needed.
        offsets: start of each domain in ``indices``, and its end.
        indices: indices of examples.
    """

    def __init__(
        self, names: Sequence[str] | NDArray[Any], offsets: NDArray[Any], indices: NDArray[Any]
    ) -> None:
        self._labels = names if isinstance(names, np.ndarray) else tuple(names)
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.sizes = np.diff(self.offsets)
        if len(self._labels) == 0:
            raise InputError("there are no domains; at least one example is needed.")
        if len(self._labels) != len(self.sizes) or self.offsets[0] != 0 or self.offsets[-1] != len(indices):
            raise InputError(
                f"{len(self._labels)} names, {len(self.offsets)} offsets and {len(indices)} indices do not "
                "fit; offsets must be one more than names and run from 0 to the number of indices."
            )
        if isinstance(self._labels, tuple) and len(set(self._labels)) < len(self._labels):
            raise InputError(
                f"two domains have the name {Counter(self._labels).most_common(1)[0][0]!r}; rename one."
            )
        if self.sizes.min() < 1:
            empty = self._labels[int(np.argmax(self.sizes < 1))]
            raise InputError(f"domain {str(empty)!r} has no examples; remove it.")
        if (lowest := int(indices.min())) < 0:
            d = self.domain_at(int(indices.argmin()))
            raise InputError(f"domain {str(self._labels[d])!r} has index {lowest}; indices count from 0.")
        small = int(indices.max()) < 2**31
        self.indices: NDArray[Any] = indices.astype(np.int32 if small else np.int64, copy=False)

    @classmethod
    def from_labels(cls, labels: Any) -> Domains:
        """Create domains from one label (integer or string) per example; domains are in sorted order.

        Args:
            labels: domain of each example.
        """
        values = _label_values(labels)
        if values.dtype.kind == "O":
            names = sorted(set(values))
            number = {name: d for d, name in enumerate(names)}
            codes = np.fromiter((number[v] for v in values), np.int64, len(values))
            _, offsets, indices = _grouped(codes)
            return cls(names, offsets, indices)
        return cls(*_grouped(values))

    @classmethod
    @checked
    def from_sizes(cls, sizes: Mapping[str, int]) -> Domains:
        """Create domains of consecutive examples.

        Args:
            sizes: number of examples of each domain by name; the first has examples 0 to n - 1, and so on.
        """
        for name, size in sizes.items():
            if not isinstance(size, (int, np.integer)) or not 1 <= size < 2**48:
                raise InputError(f"domain {str(name)!r} has {shown(size)} examples; it needs at least one.")
        offsets = np.cumsum([0, *sizes.values()], dtype=np.int64)
        dtype = np.int32 if offsets[-1] < 2**31 else np.int64
        return cls([str(name) for name in sizes], offsets, np.arange(offsets[-1], dtype=dtype))

    @classmethod
    @checked
    def from_indices(cls, indices: Mapping[str, Any]) -> Domains:
        """Create domains from the indices of their examples.

        Args:
            indices: indices of the examples of each domain by name; domains may overlap.
        """
        parts = [_index_array(name, part) for name, part in indices.items()]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls([str(name) for name in indices], offsets, np.concatenate([np.empty(0, np.int64), *parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        shown = [f"{self._labels[d]!s}: {self.sizes[d]:,}" for d in range(min(len(self), 5))]
        more = [f"… {len(self) - 5:,} more"] if len(self) > 5 else []
        return f"Domains({len(self):,} domains, {len(self.indices):,} entries: {', '.join(shown + more)})"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the domains, in order."""
        return (
            tuple(map(str, self._labels.tolist())) if isinstance(self._labels, np.ndarray) else self._labels
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: d for d, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        """Return the number of a domain.

        Args:
            name: name of the domain.
        """
        if (d := self._numbers.get(str(name))) is not None:
            return d
        if len(self) <= MANY:
            raise unknown_name("domain", name, self.names)
        near = difflib.get_close_matches(str(name), self.names[:20_000], n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown domain {name!r}.{hint} There are {len(self):,} domains: see `names`.")

    def domain_at(self, position: int) -> int:
        """Return the domain that an entry of ``indices`` belongs to.

        Args:
            position: position of the entry.
        """
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def indices_of(self, d: int) -> NDArray[Any]:
        """Return the example indices of a domain, as a view.

        Args:
            d: number of the domain.
        """
        (d,) = self.numbers([d])
        return self.indices[self.offsets[d] : self.offsets[d + 1]]

    def examples(self) -> NDArray[Any]:
        """Return all examples that are in some domain, without duplicates, in increasing order."""
        bound = int(self.indices.max()) + 1
        if bound > 16 * len(self.indices):  # few indices far apart: a table over all would waste memory
            return np.unique(self.indices)
        seen = np.zeros(bound, dtype=bool)
        seen[self.indices] = True
        return np.flatnonzero(seen).astype(self.indices.dtype)

    def select(self, names_or_numbers: str | int | Iterable[str | int]) -> Domains:
        """Return only some domains, in the given order, renumbered from 0.

        Args:
            names_or_numbers: names or numbers of the domains.
        """
        chosen = np.asarray(self.numbers(names_or_numbers), dtype=np.int64)
        sizes = self.sizes[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], sizes)
        return Domains(self._labels_of(chosen), offsets, self.indices[places])

    def numbers(self, names_or_numbers: str | int | Iterable[str | int]) -> list[int]:
        """Convert names or numbers of domains to a list of numbers.

        Args:
            names_or_numbers: one name or number, or several.
        """
        if isinstance(names_or_numbers, (str, int, np.integer)) or not isinstance(names_or_numbers, Iterable):
            names_or_numbers = [names_or_numbers]
        several = listed(names_or_numbers, "names or numbers of domains")
        chosen = [self.number(d) if isinstance(d, str) else self._existing(d) for d in several]
        if len(set(chosen)) < len(chosen):
            twice = Counter(chosen).most_common(1)[0][0]
            raise InputError(f"domain {str(self._labels[twice])!r} is listed twice; list each domain once.")
        return chosen

    def _existing(self, d: Any) -> int:
        number = int(d) if isinstance(d, (int, np.integer)) else -1
        if not 0 <= number < len(self):
            raise InputError(
                f"domain number {shown(d)} does not exist; numbers run from 0 to {len(self) - 1}."
            )
        return number

    def filter(self, keep: NDArray[np.bool_]) -> Domains:
        """Keep only some entries of ``indices``; empty domains are removed.

        Args:
            keep: mask over the entries of ``indices``.
        """
        sizes = np.add.reduceat(keep, self.offsets[:-1], dtype=np.int64)
        left = np.flatnonzero(sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes[left])])
        return Domains(self._labels_of(left), offsets, self.indices[keep])

    def _labels_of(self, chosen: NDArray[np.int64]) -> Sequence[str] | NDArray[Any]:
        if isinstance(self._labels, np.ndarray):
            return self._labels[chosen]
        return [self._labels[d] for d in chosen]


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Whatever a user has as an array; an error calls it ``name``."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except Exception as error:  # of whatever library or class of the user's
        raise InputError(f"{name} cannot be made an array ({shown(values)}): {_first(error)}") from error


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _label_values(labels: Any) -> NDArray[Any]:
    """Labels as an integer array, or as an object array of strings."""
    values = as_array(labels, "labels")
    if values.dtype.kind in "US" and not isinstance(labels, np.ndarray):
        # numpy has turned a None or NaN among strings into the string "None" or "nan"
        values = np.asarray(labels, dtype=object)
    if values.ndim != 1 or len(values) == 0:
        raise InputError(f"labels have shape {values.shape}; there must be one label per example.")
    if values.dtype.kind in "iu":
        return values
    if values.dtype.kind == "f":
        if not (finite := np.isfinite(values)).all():
            where = int(np.argmin(finite))
            raise InputError(
                f"the domain label at position {where} is {values[where]}; every example needs one."
            )
        if not (whole := values == np.floor(values)).all():
            where = int(np.argmin(whole))
            raise InputError(
                f"the domain label at position {where} is {values[where]}; use integers or strings."
            )
        return values.astype(np.int64)
    strings = np.empty(len(values), dtype=object)
    for where, value in enumerate(values.tolist()):
        # pandas' NA cannot be compared, so it is known by its type's name
        if (
            value is None
            or type(value).__name__ == "NAType"
            or (not isinstance(value, str) and value != value)
        ):
            raise InputError(f"the domain label at position {where} is {value}; every example needs one.")
        strings[where] = value if isinstance(value, str) else str(value)
    if values.dtype.kind == "O" and all(type(v) is int for v in values):
        return strings if any(abs(v) >= 2**63 for v in values) else values.astype(np.int64)
    return strings


def _grouped(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]:
    """Distinct labels, offsets and example indices, by one sort of (label, position) packed in 64-bit words.

    Sorting plain words is several times faster than an indirect sort and needs no second array of indices.
    """
    n = len(labels)
    low, high = int(labels.min()), int(labels.max())
    bits = max(1, (n - 1).bit_length())
    if (high - low).bit_length() + bits > 64:  # labels such as hashes: number them first
        distinct, codes = np.unique(labels, return_inverse=True)
        _, offsets, indices = _grouped(codes)
        return distinct, offsets, indices
    words = labels.astype(np.uint64)  # negative labels wrap around; subtracting `low` wraps them back
    words -= np.uint64(low % 2**64)
    words <<= np.uint64(bits)
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    indices = (words & np.uint64(2**bits - 1)).astype(np.int32 if n <= 2**31 else np.int64)
    words >>= np.uint64(bits)
    starts = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1]]))
    distinct = (words[starts] + np.uint64(low % 2**64)).astype(labels.dtype)
    return distinct, np.append(starts, n).astype(np.int64), indices


def _index_array(name: str, indices: Any) -> NDArray[np.int64]:
    """A domain's list of indices as integers."""
    array = as_array(indices, f"the indices of domain {str(name)!r}")
    if array.dtype.kind == "b":
        raise InputError(f"domain {str(name)!r} is a mask; pass indices instead: `mask.nonzero()[0]`.")
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(
            f"domain {str(name)!r} has indices of shape {array.shape} and type {array.dtype}; "
            "it must be a flat list of integers."
        )
    return array.astype(np.int64, copy=False)
