"""DomainBed's protocol: how any dataset is split, and every run of a sweep.

As published (Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021): each domain is cut
into 80 % in and 20 % out; one domain is held out, training takes the in-splits of the others, a batch of each
domain in every step, for ERM too; each seed has a split of its own and tries the default hyperparameters and
those of a random search.
:mod:`shoal.experiments.selection` chooses among them afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal import models
from shoal.algorithms import algorithm_class
from shoal.data import sets
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.sampler import key, permute
from shoal.data.splits import hold_out_domains
from shoal.errors import InputError, check_names
from shoal.experiments.config import SAME_AS_NONE, RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.search import RATES, Space, changed, draw
from shoal.settings import Size, search_space

OUT = 0.2
"""The share of a domain in its out-split."""
SPLIT = 31  # what a key is for
STEPS = 5001
TRIALS, DRAWS = 3, 20
"""Seeds, each with a split of its own, and hyperparameters that each tries, the defaults first."""


@dataclass(frozen=True)
class Sizes:
    """What DomainBed tries and how often it evaluates, by the size of the images."""

    optimizer: Space
    batch: Space
    eval_every: int
    model: Space = field(default_factory=dict)
    network: str | None = None
    """The model, by a name that says its pretrained weights; ``None``: the dataset's own."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Options of the dataset that are not its defaults."""
    size: Size = "small"
    """For which algorithms draw their settings."""


SMALL = Sizes(RATES[False], {"batch_size": {"default": 64, "log2": [3, 9], "whole": True}}, 100)
LARGE = Sizes(
    {**RATES[True], "weight_decay": {"default": 0.0, "log10": [-6, -2]}},
    {"batch_size": {"default": 32, "log2": [3, 5.5], "whole": True}},
    300,
    {"dropout": {"default": 0.0, "choice": [0.0, 0.1, 0.5]}},
    size="large",
)
LARGE_SIDE = 128
"""Images are large if both sides have so many pixels."""


def sizes_of(dataset: str, input_shape: Sequence[int]) -> Sizes:
    """By the size of the images, and what the dataset's own module says of it in ``DOMAINBED``."""
    usual = LARGE if len(input_shape) == 3 and min(input_shape[1:]) >= LARGE_SIDE else SMALL
    own = getattr(sets.registry.module(dataset), "DOMAINBED", {})
    return replace(usual, **own) if own else usual


def resplit(data: DomainData, held_out: Sequence[str], trial: int) -> DomainData:
    """``data`` with the domains ``held_out`` as test and every domain cut by ``trial``.

    ``train`` and ``validation`` are the in- and out-splits of the other domains, ``test`` and ``oracle``
    those of the held-out domains. An example of a held-out domain is in no other, as in
    :func:`~shoal.data.splits.hold_out_domains`. Notes on the splits the dataset came with are dropped;
    others, such as one on how its examples were prepared, stay.
    """
    every = all_domains(data)
    rest, test = hold_out_domains(every, list(held_out))
    out = out_splits(every, trial)
    splits = {}
    for domains, names_of in ((rest, ("train", "validation")), (test, ("test", "oracle"))):
        for name, keep in zip(names_of, (~out[domains.indices], out[domains.indices]), strict=True):
            if not keep.any():
                which = "in" if name in ("train", "test") else "out"
                raise InputError(f"nothing is left for the {which}-splits of {', '.join(domains.names[:5])}.")
            splits[name] = domains.filter(keep)
    notes = {name: note for name, note in data.notes.items() if name not in data.splits}
    return data.split_as(splits, notes)


def all_domains(data: DomainData) -> Domains:
    """Every domain with all its examples in any split, in increasing order."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for domains in data.splits.values():
        for number, name in enumerate(domains.names):
            parts.setdefault(name, []).append(domains.indices_of(number))
    return Domains.from_indices({name: np.unique(np.concatenate(part)) for name, part in parts.items()})


def out_splits(domains: Domains, trial: int) -> NDArray[np.bool_]:
    """For each example, whether it is in out-splits: a fifth of each domain, by the trial and the name alone.

    An example in several domains is on the same side in all: the smallest of them decides (of equals the
    first), and takes a fifth of those it decides on.
    """
    decided, out = np.zeros((2, int(domains.indices.max()) + 1), dtype=bool)
    for number in np.argsort(domains.sizes, kind="stable"):
        name, own = domains.names[number], domains.indices_of(int(number))
        free = own[~decided[own]]
        if len(free):
            letters = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            place = permute(key(SPLIT, trial, letters), len(free), np.arange(len(free)))
            out[free] = place < max(1, int(OUT * len(free)))
            decided[free] = True
        if out[own].all() or not out[own].any():
            raise InputError(
                f"domain {name!r} cannot be split into 80 % and 20 %: it has {len(own)} examples, "
                f"{len(free)} of them in no smaller domain."
            )
    return out


def plan(
    datasets: Mapping[str, Mapping[str, Any]],
    algorithms: Sequence[str],
    *,
    trials: int = TRIALS,
    draws: int = DRAWS,
    pairs: bool = False,
    held_out: Mapping[str, Sequence[str]] | None = None,
    steps: int = STEPS,
    eval_every: int | None = None,
    **common: Any,
) -> list[RunConfig]:
    """Every run of a sweep; of equal arguments equal runs, and with more trials or draws some more.

    ``datasets`` maps names to options. Every domain is held out in turn, or those that ``held_out`` names
    for a dataset; ``pairs`` adds what leave-one-domain-out selection needs: each of these together with every
    other domain. An algorithm may name its way of sampling, as in ``fish:regrouped``. ``common`` are further
    fields of every configuration. All algorithms try the same learning rates and batch sizes. Where no model
    is given, and for options that are not, a dataset may have what DomainBed takes (``DOMAINBED``).
    """
    for name in algorithms:
        algorithm_class(name.partition(":")[0])
    for name in datasets:
        sets.registry.module(name)
    found = []
    for dataset, options in datasets.items():
        data, names = look(dataset, options)
        chosen = list((held_out or {}).get(dataset, names))
        check_names("domain to hold out:", chosen, names)
        sizes = sizes_of(dataset, data.input_shape)
        given = {"eval_every": eval_every or sizes.eval_every, "select": "last", **common}
        given["model"] = given.get("model") or sizes.network
        given |= {
            name: given.get(name) or usual for name, usual in SAME_AS_NONE.items()
        }  # as DomainBed has it
        base = RunConfig(
            **given,
            dataset=dataset,
            algorithm=algorithms[0],
            steps=steps,
            data_options={**sizes.data, **options},
        )
        found += [
            _config(base, algorithm, data.model, sizes, out, trial, number)
            for trial in range(trials)
            for out in groups_to_hold_out(names, chosen, pairs)
            for algorithm in algorithms
            for number in range(draws)
        ]
    return found


def look(dataset: str, options: Mapping[str, Any]) -> tuple[DomainData, list[str]]:
    """The dataset as it is before it is split anew, and its domains in the order in which it names them."""
    data = sets.load(dataset, **options)
    names = all_domains(data).names
    own = getattr(sets.registry.module(dataset), "DOMAINS", ())
    if len(names) < 2:
        raise InputError(f"dataset {dataset!r} has one domain, {names[0]!r}; none is left to train on.")
    return data, sorted(names, key=lambda n: own.index(n) if n in own else len(own))


def groups_to_hold_out(names: Sequence[str], chosen: Sequence[str], pairs: bool) -> Iterator[list[str]]:
    """Each of ``chosen`` alone; then each pair with one of them, unless that leaves nothing to train on."""
    for name in chosen:
        yield [name]
    if pairs and len(names) > 2:
        for pair in itertools.combinations(names, 2):
            if set(pair) & set(chosen):
                yield list(pair)


def _config(
    base: RunConfig, algorithm: str, model: str, sizes: Sizes, out: list[str], trial: int, number: int
) -> RunConfig:
    name, _, way = algorithm.partition(":")
    cls, options = algorithm_class(name), models.options_of(base.model or model)
    own = cls.domainbed(draw(search_space(cls, sizes.size), trial, number))
    of_model = {k: v for k, v in draw(sizes.model, trial, number).items() if k in options}
    of_optimizer = {
        **draw(sizes.optimizer, trial, number),
        **(own.optimizer if base.optimizer == "adam" else {}),
    }
    lr = of_optimizer.pop("lr")
    return replace(
        base,
        algorithm=name,
        draw=way or base.draw or ("domains" if cls.draw == "pooled" else None),
        label=algorithm,
        settings=own.settings if number else changed(cls, own.settings),
        lr=lr,
        optimizer_options={**base.optimizer_options, **of_optimizer},
        model_options={**base.model_options, **of_model},
        batch_size=draw(sizes.batch, trial, number)["batch_size"],
        seed=trial,
        protocol={"held_out": out, "trial": trial, **({"draw": number} if number else {})},
    )


def expected_seconds(configs: Iterable[RunConfig], records: Iterable[RunRecord]) -> float | None:
    """How long runs take one after another, by the finished ones most like each; ``None`` without any."""
    paces: dict[Any, list[float]] = {}
    for record in records:
        if record.status == "finished":
            for like in ((record.config.dataset, record.config.algorithm), record.config.dataset, None):
                paces.setdefault(like, []).append(record.seconds / record.config.steps)
    if not paces:
        return None
    likes = ((c.steps, ((c.dataset, c.algorithm), c.dataset, None)) for c in configs)
    return sum(steps * statistics.fmean(next(paces[k] for k in keys if k in paces)) for steps, keys in likes)
