"""DomainBed's protocol: how a dataset is split, and every run of a sweep.

As published (Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021): each domain is cut
into 80 % in and 20 % out; one domain is held out, and training uses the in-splits of the others. Each seed
has its own split and tries the default hyperparameters and those of a random search.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal import datasets as sets
from shoal import models
from shoal.algorithms import algorithm_class, display_name, split_draw
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.sampler import key, permute
from shoal.data.splits import hold_out_domains
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.search import RATES, Space, changed, sample
from shoal.settings import Size, search_space

OUT = 0.2
"""The fraction of a domain in its out-split."""
SPLIT = 31  # purpose of a random key
STEPS, SEEDS, SEARCH = 5001, 3, 20
"""Steps of a run, seeds, and hyperparameter trials of each seed, the defaults first."""
PINNED = {"precision": "fp32", "memory_format": "contiguous", "schedule": "constant"}
"""What published results were computed with, unless it is set."""


@dataclass(frozen=True)
class Spaces:
    """Search spaces and evaluation interval of DomainBed, by the size of the images."""

    optimizer: Space
    batch: Space
    eval_every: int
    model: Space = field(default_factory=dict)
    network: str | None = None
    """Name of the model with its pretrained weights; ``None``: the dataset's."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Options of the dataset that differ from its defaults."""
    size: Size = "small"
    """Which search space of an algorithm is used."""


SMALL = Spaces(RATES["random"], {"batch_size": {"default": 64, "log2": [3, 9], "whole": True}}, 100)
LARGE = Spaces(
    {**RATES["pretrained"], "weight_decay": {"default": 0.0, "log10": [-6, -2]}},
    {"batch_size": {"default": 32, "log2": [3, 5.5], "whole": True}},
    300,
    {"dropout": {"default": 0.0, "choice": [0.0, 0.1, 0.5]}},
    size="large",
)
LARGE_SIDE = 128
"""Images are large if both sides have at least so many pixels."""


def spaces_of(dataset: str, input_shape: Sequence[int]) -> Spaces:
    """By the size of the images, with what the dataset's module sets in ``DOMAINBED``."""
    spaces = LARGE if len(input_shape) == 3 and min(input_shape[1:]) >= LARGE_SIDE else SMALL
    return replace(spaces, **getattr(sets.registry.module(dataset), "DOMAINBED", {}))


def resplit(data: DomainData, held_out: Sequence[str], seed: int) -> DomainData:
    """``data`` with the domains ``held_out`` as test, and every domain cut by ``seed``.

    ``train`` and ``validation`` are the in- and out-splits of the other domains, ``test`` and ``oracle``
    those of the held-out domains. An example of a held-out domain is in no other, as in
    :func:`~shoal.data.splits.hold_out_domains`. Notes on the dataset's own splits are dropped.
    """
    domains = all_domains(data)
    rest, test = hold_out_domains(domains, list(held_out))
    out = out_splits(domains, seed)
    splits = {}
    for part, names in ((rest, ("train", "validation")), (test, ("test", "oracle"))):
        for name, keep in zip(names, (~out[part.indices], out[part.indices]), strict=True):
            if not keep.any():
                which = "in" if name in ("train", "test") else "out"
                raise InputError(f"nothing is left for the {which}-splits of {', '.join(part.names[:5])}.")
            splits[name] = part.filter(keep)
    notes = {name: note for name, note in data.notes.items() if name not in data.splits}
    return data.split_as(splits, notes)


def all_domains(data: DomainData) -> Domains:
    """Every domain with all its examples in any split, in increasing order."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for domains in data.splits.values():
        for number, name in enumerate(domains.names):
            parts.setdefault(name, []).append(domains.indices_of(number))
    return Domains.from_indices({name: np.unique(np.concatenate(part)) for name, part in parts.items()})


def out_splits(domains: Domains, seed: int) -> NDArray[np.bool_]:
    """For each example, whether it is in out-splits: a fifth of each domain, by the seed and the name alone.

    An example in several domains is on the same side in all: the smallest of them decides (of equals the
    first), and a fifth of the examples that it decides on are out.
    """
    decided, out = np.zeros((2, int(domains.indices.max()) + 1), dtype=bool)
    for number in np.argsort(domains.sizes, kind="stable"):
        name, rows = domains.names[number], domains.indices_of(int(number))
        free = rows[~decided[rows]]
        if len(free):
            digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            place = permute(key(SPLIT, seed, digest), len(free), np.arange(len(free)))
            out[free] = place < max(1, int(OUT * len(free)))
            decided[free] = True
        if out[rows].all() or not out[rows].any():
            raise InputError(
                f"domain {name!r} cannot be split into 80 % and 20 %: it has {len(rows)} examples, "
                f"{len(free)} of them in no smaller domain."
            )
    return out


def plan(
    datasets: Mapping[str, Mapping[str, Any]],
    algorithms: Sequence[str],
    *,
    seeds: int = SEEDS,
    search: int = SEARCH,
    pairs: bool = False,
    steps: int = STEPS,
    eval_every: int | None = None,
    **fields: Any,
) -> list[RunConfig]:
    """Every run of a sweep; equal arguments give equal runs, and more seeds or trials add some.

    ``datasets`` maps names to options; ``pairs`` adds the runs of leave-one-domain-out selection, in which
    two domains are held out. ``fields`` are further fields of every configuration. All algorithms try the
    same learning rates and batch sizes. What a dataset declares in ``DOMAINBED`` is a default.
    """
    for name in algorithms:
        algorithm_class(split_draw(name)[0])
    modules = {dataset: sets.registry.module(dataset) for dataset in datasets}
    configs = []
    for dataset, options in datasets.items():
        data = sets.load(dataset, **options)
        names, order = list(all_domains(data).names), getattr(modules[dataset], "DOMAINS", ())
        if len(names) < 2:
            raise InputError(f"dataset {dataset!r} has one domain, {names[0]!r}; none is left to train on.")
        names = sorted(names, key=lambda n: order.index(n) if n in order else len(order))
        groups = [[name] for name in names]
        groups += map(list, itertools.combinations(names, 2)) if pairs and len(names) > 2 else []
        spaces = spaces_of(dataset, data.input_shape)
        common = {"eval_every": eval_every or spaces.eval_every, "select": "last", **fields}
        common["model"] = common.get("model") or spaces.network
        common |= {name: common.get(name) or value for name, value in PINNED.items()}
        common["data_options"] = {**spaces.data, **options}
        base = RunConfig(dataset, algorithms[0], steps, **common)
        configs += [
            _config(base, algorithm, data.model, spaces, out, seed, trial)
            for seed in range(seeds)
            for out in groups
            for algorithm in algorithms
            for trial in range(search)
        ]
    return configs


def _config(
    base: RunConfig, row: str, model: str, spaces: Spaces, out: list[str], seed: int, trial: int
) -> RunConfig:
    name, draw = split_draw(row)
    cls, options = algorithm_class(name), models.options_of(base.model or model)
    searched = cls.domainbed(sample(search_space(cls, spaces.size), seed, trial))
    of_model = {k: v for k, v in sample(spaces.model, seed, trial).items() if k in options}
    of_optimizer = sample(spaces.optimizer, seed, trial)
    of_optimizer |= searched.optimizer if base.optimizer == "adam" else {}
    lr = of_optimizer.pop("lr")
    return replace(
        base,
        algorithm=name,
        draw=draw or base.draw or ("domains" if cls.draw == "pooled" else None),
        label=display_name(row),
        settings=searched.settings if trial else changed(cls, searched.settings),
        lr=lr,
        optimizer_options={**base.optimizer_options, **of_optimizer},
        model_options={**base.model_options, **of_model},
        batch_size=sample(spaces.batch, seed, trial)["batch_size"],
        seed=seed,
        protocol={"held_out": out, "seed": seed, **({"trial": trial} if trial else {})},
    )
