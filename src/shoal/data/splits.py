"""Splits are by example, never by (domain, example): no example is ever on both sides."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.domains import Domains
from shoal.data.sampler import key, permute
from shoal.errors import InputError, listed, shown, unknown_name
from shoal.settings import Range, checked

SHARE = 0.2
"""Of every training domain, for validation."""
Names = str | float | bool | Iterable[str | float | bool] | None
"""Of domains; numbers as they are in the data."""
Share = Annotated[float, Range(above=0, below=1)]
HOLD_OUT, ORDER = 11, 12  # what a key is for


def hold_out_domains(domains: Domains, names: str | int | Iterable[str | int]) -> tuple[Domains, Domains]:
    """Hold out whole domains: return the training and the held-out domains.

    Examples of held-out domains are removed from the training domains. Training domains without any remaining
    example are removed, so that they may be renumbered: compare domains by name.

    >>> from shoal.data import Domains
    >>> train, test = hold_out_domains(Domains.from_labels(["oslo", "rome", "rome"]), "oslo")
    >>> train.names, test.names
    (('rome',), ('oslo',))

    Args:
        domains: all domains.
        names: names or numbers of the held-out domains.
    """
    numbers = domains.numbers(names)
    if not 0 < len(numbers) < len(domains):
        raise InputError(f"{len(numbers)} of {len(domains)} domains are held out; hold out some, not all.")
    test = domains.select(numbers)
    keep = ~np.isin(domains.indices, test.examples())
    if not keep.any():
        raise InputError(
            f"holding out {', '.join(map(repr, test.names[:5]))} leaves nothing to train on: "
            "every example of the other domains is also in these."
        )
    return domains.filter(keep), test


@checked
def hold_out_examples(domains: Domains, share: Share, seed: int) -> tuple[Domains, Domains]:
    """Hold out a fraction of the examples of every domain: return the remaining and the held-out examples.

    An example in several domains is assigned by the smallest of them, which holds out its fraction (to within
    one example) of the examples it assigns, by a keyed permutation, so that the split depends only on
    ``seed``. Fractions of an example carry over from domain to domain, so that a share of 0.1 also holds out
    a tenth of many domains of three examples. Every domain keeps at least one example; domains without
    held-out examples are missing in the second, so match the two by name.

    >>> from shoal.data import Domains
    >>> rest, held = hold_out_examples(Domains.from_labels(["oslo"] * 10), share=0.2, seed=0)
    >>> rest.sizes.tolist(), held.sizes.tolist()
    ([8], [2])

    Args:
        domains: domains to split.
        share: fraction of examples to hold out.
        seed: random seed.
    """
    assigning = assigning_entries(domains)
    counts = np.add.reduceat(assigning, domains.offsets[:-1], dtype=np.int64)
    order = permute(key(seed, ORDER), len(domains), np.arange(len(domains)))
    total = np.floor(np.cumsum(share * counts[order]) + 0.5).astype(np.int64)
    wanted = np.empty_like(counts)
    wanted[order] = np.diff(total, prepend=0)
    wanted = np.minimum(wanted, np.maximum(counts - 1, 0))
    d = np.repeat(np.arange(len(domains)), counts)
    place = np.arange(len(d)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = np.zeros(len(assigning), dtype=bool)
    held[np.flatnonzero(assigning)] = permute(key(seed, HOLD_OUT, d), counts[d], place) < wanted[d]
    if not assigning.all():
        held = np.isin(domains.indices, domains.indices[held])
        # Where overlaps took all of a domain, its first example is given back, in all domains.
        emptied = np.logical_and.reduceat(held, domains.offsets[:-1])
        held &= ~np.isin(domains.indices, domains.indices[domains.offsets[:-1][emptied]])
    if not held.any():
        few = f"the {len(domains):,} domains have {len(domains.indices):,} examples, too few"
        raise InputError(f"{few} to hold out a share of {share} for validation.")
    return domains.filter(~held), domains.filter(held)


def assigning_entries(domains: Domains) -> NDArray[np.bool_]:
    """For each entry of ``indices``, whether its domain is the smallest that has the example.

    Of domains of the same size it is the first, so that each example has exactly one such entry.
    """
    rank = np.empty(len(domains), dtype=np.int64)
    rank[np.argsort(domains.sizes, kind="stable")] = np.arange(len(domains))
    order = np.lexsort((np.repeat(rank, domains.sizes), domains.indices))
    assigning = np.empty(len(order), dtype=bool)
    assigning[order] = np.diff(domains.indices[order], prepend=-1) > 0
    return assigning


def split(
    domains: Domains, held_out: Names, share: float, seed: int, entities: NDArray[Any] | None = None
) -> dict[str, Domains]:
    """The domains ``held_out`` as test, and a ``share`` of every other one as validation.

    ``entities`` says which entity each example is of: all examples of one are on the same side, and none that
    is in a held-out domain too is trained on.
    """
    rest, result = domains, {}
    if names := held_out_names(held_out, domains.names):
        rest, result["test"] = hold_out_domains(domains, names)
    if entities is None:
        train, validation = hold_out_examples(rest, share, seed)
        return {"train": train, "validation": validation, **result}
    if result:
        lost = np.isin(entities[rest.indices], entities[result["test"].examples()])
        if lost.all():
            raise InputError("every entity is also in the held-out domain; nothing is left to train on.")
        counts = np.add.reduceat(lost, rest.offsets[:-1], dtype=np.int64)
        if each := [f"{counts[d]:,} of {rest.sizes[d]:,} of {rest.names[d]}" for d in counts.nonzero()[0]]:
            message = "not used, because the same entity (group) is in the held-out domain"
            warnings.warn(f"{message}: {_some(each)}", stacklevel=3)
        rest = rest.filter(~lost)
    # The same domains of entities instead of examples, each entity once.
    pairs = np.stack([np.repeat(np.arange(len(rest)), rest.sizes), entities[rest.indices]])
    of, members = np.unique(pairs, axis=1)
    offsets = np.concatenate([[0], np.bincount(of).cumsum()])
    _, held = hold_out_examples(Domains(rest.names, offsets, members), share, seed)
    away = np.isin(entities[rest.indices], held.examples())
    return {"train": rest.filter(~away), "validation": rest.filter(away), **result}


def split_notes(
    splits: Mapping[str, Domains], labels: NDArray[Any] | None, class_names: Sequence[str]
) -> dict[str, str]:
    """What a reader of the results must know; ``labels`` are numbers of classes, if they are known."""
    notes = {}
    if small := [n for n in splits["train"].names if n not in splits["validation"].names]:
        notes["domains"] = f"too small for validation examples: {_some(map(repr, small))}"
    if "test" in splits and class_names and labels is not None:
        seen, tested = (set(labels[splits[name].indices].tolist()) for name in ("train", "test"))
        if unseen := [repr(class_names[c]) for c in sorted(tested - seen)]:
            notes["test"] = f"it has classes without training examples: {_some(unseen)}"
    return notes


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:5]) + (", …" if len(first) > 5 else "")


def held_out_names(names: Names, known: Sequence[str]) -> list[str]:
    """The domains to hold out, none, one or several, by name: 3.0 is the domain 3."""
    one = isinstance(names, (str, int, float, np.number))
    several = [names] if one else listed(() if names is None else names, "held_out")
    chosen = []
    for name in several:
        if not isinstance(name, (str, int, float, np.number, np.bool_)) or name != name:
            raise InputError(f"must be names of domains, got {shown(names)}.", "held_out")
        whole = isinstance(name, (float, np.floating)) and name == name // 1
        chosen.append(str(int(name)) if whole else str(name))
    chosen = list(dict.fromkeys(chosen))
    if unknown := [name for name in chosen if name not in known]:
        raise unknown_name("domain", unknown[0], known, "held_out")
    if len(chosen) == len(known):
        which = f"all {len(known)} domains are held out"
        which = f"there is only one domain, {known[0]!r}" if len(known) == 1 else which
        raise InputError(f"{which}; nothing is left to train on.", "held_out")
    return chosen


def last_domain(names: Iterable[str]) -> str:
    """The domain that is held out by default: the last in natural order, where numbers count by their value.

    >>> last_domain(["1", "10", "9"]), last_domain(["site9", "site10"]), last_domain(["oslo", "rome"])
    ('10', 'site10', 'rome')
    """
    return max(names, key=natural_key)


def natural_key(name: str) -> list[str | int]:
    """What sorts names in natural order; a sign counts at the start only."""
    pieces = re.split(r"(^[+-]?[0-9]+|[0-9]+)", name)  # texts and numbers alternate
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)]
