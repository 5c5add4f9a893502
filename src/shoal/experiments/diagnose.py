"""Diagnosis before training: do the domains differ, in what, and how large is the generalization gap?

The tests are in :mod:`shoal.experiments.shift_tests`. Over all tests p is corrected by Holm's method: without
any shift, the chance of one significant test or more is at most ``LEVEL``. Entities are what is independent:
tests permute them, cross-validation keeps their rows together, and intervals of the gap are by entity.

ERM is logistic or ridge regression on smooth features of the inputs, fitted to all domains together; its
gradients have a closed form. Images and text are seen through pooled pixels and counts of tokens. All sizes
are bounded, and nothing depends on the speed of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, Examples, InMemory, collate_of, tensors_in
from shoal.data.loader import seeded, to_device
from shoal.data.sampler import key, permute
from shoal.data.splits import assigning_entries
from shoal.data.table import Category, Preprocessing
from shoal.errors import InputError
from shoal.experiments import statistics
from shoal.experiments.protocol import all_domains
from shoal.experiments.shift_tests import (
    LEVEL,
    PERMUTATIONS,
    Rows,
    Test,
    agreement_test,
    column_test,
    cross_fitted,
    domain_test,
    label_test,
    linear_model,
    one_hot,
    permuted,
    relation_test,
    smooth,
)

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Is called with the phase, and how many parts of how many are done."""
LEAST, EXAMPLES, DOMAINS = 16, 1500, 12
"""Examples of a domain at least; examples and domains of the sample at most."""
COLUMNS = 256
"""Inputs with more features are tested as a whole and not per column."""
WORDS, SIDE = 256, 8
"""Counted remainders of tokens; side of images after pooling."""
REPEATS = 3
"""Random groups that are held out instead of each domain."""
SURE = 2.6
"""Standard errors from 0 at which a domain's correlation has a sign: about 1 in 100 by chance."""
TAKE, PICK = 41, 42  # what a key is for


class Column(NamedTuple):
    """A column of the inputs, the numbers of its features, and what each of them is ("" for the value)."""

    name: str
    features: tuple[int, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """The examples of a diagnosis, their domains and columns, and what was not drawn."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: Rows
    columns: tuple[Column, ...]
    class_names: tuple[str, ...]
    rest: dict[str, Any]


def diagnose(
    data: DomainData,
    *,
    seed: int = 0,
    examples: int = EXAMPLES,
    max_domains: int = DOMAINS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What :func:`shoal.diagnose` computes, of a dataset that is loaded, as plain data."""
    start, report = time.perf_counter(), progress or (lambda phase, done, total: None)
    sample = draw(data, seed, examples, max_domains, report)
    report("testing for shifts", 0, 2)
    tests, found = shifts(sample.rows, seed)
    report("testing for shifts", 1, 2)
    gaps = generalization_gaps(sample, seed)
    more, gradients = gradient_agreement(sample, seed)
    report("testing for shifts", 2, 2)
    tests += more
    adjusted = statistics.holm([test.p for test in tests])
    results = [
        {**test._asdict(), "adjusted": p, "significant": p <= LEVEL}
        for test, p in zip(tests, adjusted, strict=True)
    ]
    significant = [test["name"] for test in results if test["significant"]]
    return {
        "task": "regression" if data.classes is None else "classification",
        "table": data.inputs.get("kind") == "table",
        "domains": described_domains(sample),
        "examples": len(sample.rows.x),
        "entities": None if data.entities is None else len(np.unique(sample.rows.entities)),
        **sample.rest,
        "tests": results,
        "significant": significant,
        "effects": {name: found[name] for name in ("total_variation", "overlap", "relation_tested")},
        "columns": described_columns(sample, found, significant),
        "confusion": found["confusion"].round(6).tolist(),
        "gaps": gaps[:-1],
        "average": gaps[-1],
        "gradients": gradients,
        "settings": {"seed": seed, "permutations": PERMUTATIONS, "level": LEVEL, "least": LEAST},
        "seconds": round(time.perf_counter() - start, 3),
    }


# The sample


def draw(data: DomainData, seed: int, examples: int, most: int, report: Progress) -> Sample:
    """Some domains of at least ``LEAST`` examples and about equally many examples of each, by ``seed``."""
    every = all_domains(data)
    if len(every) < 2:
        raise InputError(f"there is one domain, {every.names[0]!r}; at least two are required.")
    distinct = every.examples()
    overlapping = len(every.indices) - len(distinct)
    own = every.filter(assigning_entries(every)) if overlapping else every
    large = np.flatnonzero(own.sizes >= LEAST)
    if len(large) < 2:
        raise InputError(
            f"of {len(own)} domains {len(large) or 'none'} has at least {LEAST} examples of its own; "
            "a diagnosis compares at least two of that size."
        )
    picked = np.sort(large[permute(key(seed, PICK), len(large), np.arange(min(most, len(large))))])
    taken = _shares(own.sizes[picked], max(examples, LEAST * len(picked)))
    index = np.concatenate(
        [
            own.indices_of(d)[permute(key(seed, TAKE, d), int(own.sizes[d]), np.arange(count))]
            for d, count in zip(picked.tolist(), taken, strict=True)
        ]
    ).astype(np.int64)
    if isinstance(data.examples, Examples):  # no method is evaluated: rows may be those of any split
        data = replace(data, examples=data.examples.unguarded())
    x, y = _loaded(data.split_as({"test": own}, {}), index, seed, report)
    if y.ndim != 1:
        raise InputError(
            f"labels have shape {tuple(y.shape[1:])} each; there must be one number per example."
        )
    columns = columns_of(data, x)
    entities = np.arange(len(index)) if data.entities is None else data.entities[index]
    domains, of_columns = np.repeat(np.arange(len(picked)), taken), [column.features for column in columns]
    labels = y.double().numpy() if data.classes is None else y.long().numpy()
    return Sample(
        names=tuple(own.names[d] for d in picked),
        sizes=tuple(int(own.sizes[d]) for d in picked),
        rows=Rows(features(x), labels, data.classes, domains, entities, of_columns),
        columns=columns,
        class_names=data.class_names,
        rest={
            "too_small": {own.names[d]: int(own.sizes[d]) for d in np.flatnonzero(own.sizes < LEAST)},
            "not_drawn": len(large) - len(picked),
            "examples_in_all": len(distinct),
            "overlapping": overlapping,
        },
    )


def _shares(sizes: Array, total: int) -> list[int]:
    """How many of each, ``total`` in all at most: small ones whole, the others equally many."""
    left, shares = total, [0] * len(sizes)
    for done, d in enumerate(np.argsort(sizes, kind="stable").tolist()):
        shares[d] = min(int(sizes[d]), left // (len(sizes) - done))
        left -= shares[d]
    return shares


def _loaded(data: DomainData, index: Array, seed: int, report: Progress) -> tuple[Any, Tensor]:
    examples: Any = data.examples
    if isinstance(examples, InMemory):
        x, y = examples.batch(torch.as_tensor(index, device=examples.device))[:2]
    else:
        read = []
        with seeded(seed):
            for i in index:
                read.append(examples[int(i)])
                report("reading examples", len(read), len(index))
            x, y = collate_of(examples)(read)[:2]
    return to_device(x, "cpu"), torch.as_tensor(y).cpu()


def features(x: Any) -> Array:
    """Numbers as they are, pooled pixels, counts of tokens; standardised, and constant ones left out.

    Tokens are counted by the remainder of their numbers, so that any vocabulary fits.
    """
    if isinstance(x, Mapping) and "input_ids" in x:
        ids, mask = x["input_ids"], x.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        bags = torch.zeros(len(ids), WORDS).scatter_add_(1, ids.long() % WORDS, mask.float())
        parts = [(bags / bags.sum(1, keepdim=True).clamp(min=1)).sqrt()]
    else:
        leaves = [leaf.float() for leaf in tensors_in(x) if leaf.ndim]
        parts = [F.adaptive_avg_pool2d(leaf, SIDE) if leaf.ndim == 4 else leaf for leaf in leaves]
    if not parts:
        raise InputError(f"inputs are {type(x).__name__} without tensors; they cannot be tested.")
    found = torch.cat([part.reshape(len(part), -1) for part in parts], 1).double().numpy()
    if not np.isfinite(found).all():
        raise InputError("some inputs are not finite numbers; clean them first.")
    scale = found.std(0)
    return np.asarray((found - found.mean(0))[:, scale > 1e-9] / scale[scale > 1e-9])


def columns_of(data: DomainData, x: Any) -> tuple[Column, ...]:
    """How columns became features, constant ones left out; those of arrays are numbered from 1."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] > COLUMNS:
        return ()
    columns = [(f"feature {n + 1}", [""]) for n in range(x.shape[1])]
    if data.inputs.get("kind") == "table":
        columns = []
        for step in Preprocessing.from_dict(data.inputs).steps:
            if isinstance(step, Category):
                names = [f"= {v}" for v in step.values] + ["= other"] * step.other
            else:
                missing = bool(getattr(step, "indicator", False))
                plain = step.width - missing
                names = ["" if plain == 1 else f"part {n + 1}" for n in range(plain)] + ["missing"] * missing
            columns.append((step.name, names))
    varies = x.double().std(0, correction=0).numpy() > 1e-9
    found, start = [], 0
    for name, parts in columns:
        if own := [n for n in range(len(parts)) if varies[start + n]]:
            places = tuple(int(varies[: start + n].sum()) for n in own)
            found.append(Column(name, places, tuple(parts[n] for n in own)))
        start += len(parts)
    return tuple(found)


# Tests


def shifts(rows: Rows, seed: int) -> tuple[list[Test], dict[str, Any]]:
    """Labels, inputs, inputs given the label, columns, and the relation between inputs and labels.

    P(y | x) changes with the shares of labels alone. Where these differ (p at most ``LEVEL``), the test of
    the relation is therefore whether it changes by more than an offset per domain.
    """
    folds, units = rows.folds(seed), rows.units
    groupings = permuted(rows.domains, units, (seed, 1))
    labels, shares = label_test(rows, groupings)
    inputs, guesses = domain_test("inputs", smooth(rows.x, seed=seed), groupings, folds)
    usual = (one_hot(units).T @ one_hot(rows.codes)).argmax(1)  # the most frequent label of a unit
    joint = smooth(rows.x, one_hot(rows.codes), seed)
    given, _ = domain_test(
        "inputs within labels", joint, permuted(rows.domains, units, (seed, 2), usual), folds
    )
    tests = [labels, inputs, given]
    found: dict[str, Any] = {"column_shares": (), "column_p": ()}
    if rows.columns:
        columns, found["column_shares"], found["column_p"] = column_test(rows, groupings)
        tests.append(columns)
    relation, found["relation_p"], found["overlap"] = relation_test(
        rows, folds, prevalence=labels.p <= LEVEL, seed=seed
    )
    found["relation_tested"] = relation.deviation > 0
    overall = one_hot(rows.codes).mean(0)
    found["total_variation"] = float((np.abs(shares - overall).sum(1) / 2).max())
    member = one_hot(rows.domains)
    found["confusion"] = member.T @ np.eye(member.shape[1])[guesses] / member.sum(0)[:, None]
    return [*tests, relation], found


def described_domains(sample: Sample) -> list[dict[str, Any]]:
    """Size and labels of each domain: shares of classes, or mean and standard deviation."""
    raw, found = sample.rows.labels, []
    for d, (name, size) in enumerate(zip(sample.names, sample.sizes, strict=True)):
        own = sample.rows.domains == d
        if sample.rows.classes is None:
            labels = {"mean": float(raw[own].mean()), "sd": float(raw[own].std(ddof=1))}
        else:
            labels = {_class(sample, c): float(np.mean(raw[own] == c)) for c in np.unique(raw)}
        entities = len(np.unique(sample.rows.entities[own]))
        found.append(
            {"name": name, "size": size, "taken": int(own.sum()), "entities": entities, "labels": labels}
        )
    return found


def _class(sample: Sample, code: int) -> str:
    return sample.class_names[code] if sample.class_names else str(code)


def described_columns(
    sample: Sample, found: Mapping[str, Any], significant: Sequence[str]
) -> list[dict[str, Any]]:
    """Which columns differ, and whose relation to the label does, if the test as a whole is significant."""
    rows, result = sample.rows, []
    classes = np.unique(rows.labels) if rows.classes is not None else np.zeros(0)
    classes = classes[1:] if len(classes) == 2 else classes  # of two classes, the second
    targets = rows.labels[:, None] == classes if len(classes) else rows.targets
    domains = [rows.domains == d for d in range(len(sample.names))]
    certain = np.sqrt([max(len(np.unique(rows.entities[own])) - 3, 0) for own in domains])
    for n, column in enumerate(sample.columns):
        own = np.array([_correlations(rows.x[d][:, list(column.features)], targets[d]) for d in domains])
        feature, label = np.unravel_index(own.var(0).argmax(), own.shape[1:])  # where it varies most
        cells = own[:, feature, label]
        z = np.arctanh(np.clip(cells, -0.999999, 0.999999)) * certain
        changes = "relation" in significant and bool(found["relation_p"][n] <= LEVEL)
        result.append(
            {
                "name": column.name,
                "share": round(float(found["column_shares"][n]), 6),
                "p": float(found["column_p"][n]),
                "differs": "columns" in significant and bool(found["column_p"][n] <= LEVEL),
                "how": _differs_most(rows.x, domains, column, sample.names),
                "relation_p": float(found["relation_p"][n]),
                "changes": changes,
                "flips": changes and bool(z.max() > SURE and z.min() < -SURE),
                "label": _class(sample, int(classes[label])) if len(classes) else "",
                "correlations": {d: round(float(r), 6) for d, r in zip(sample.names, cells, strict=True)},
            }
        )
    return result


def _correlations(x: Array, y: Array) -> Array:
    """Of every feature with every target, 0 where one is constant."""
    a, b = x - x.mean(0), y - y.mean(0)
    scale = a.std(0)[:, None] * b.std(0)
    return np.divide(a.T @ b / len(a), scale, out=np.zeros_like(scale), where=scale > 1e-12)


def _differs_most(x: Array, domains: Sequence[Array], column: Column, names: Sequence[str]) -> dict[str, Any]:
    """The domain and the feature that differ most from the rest, in level or in spread (of |ln ratio|)."""
    best, found = -1.0, dict[str, Any]()
    for feature, part in zip(column.features, column.parts, strict=True):
        values = x[:, feature]
        yes = len(np.unique(values)) == 2
        shown = (values > values.mean()) * 1.0 if yes else values
        for name, own in zip(names, domains, strict=True):
            level = abs(float(values[own].mean() - values[~own].mean()))
            spread = [max(float(values[side].std()), 1e-3) for side in (own, ~own)]
            ratio = 0.0 if yes else abs(math.log(spread[0] / spread[1])) / 2
            if max(level, ratio) > best:
                best, measure = max(level, ratio), np.std if ratio > level else np.mean
                there, elsewhere = (round(float(measure(shown[side])), 6) for side in (own, ~own))
                found = {"domain": name, "part": part, "there": there, "elsewhere": elsewhere}
                found["measure"] = "share" if yes else "sd" if ratio > level else "mean"
    return found


# ERM


def generalization_gaps(sample: Sample, seed: int) -> list[dict[str, Any]]:
    """ERM in held-out domains, and with random groups of as many entities held out instead; the average last.

    A score is the accuracy, or R². Each example is predicted by models that were not fitted to its entity,
    once without its whole domain and ``REPEATS`` times without a random group. Intervals are those of the
    paired difference, by entity, and of models fitted without other groups; that of the average is about
    these domains.
    """
    rows = sample.rows
    x, targets = smooth(rows.x, seed=seed), rows.targets
    model = linear_model(targets, 1.0)

    def scores(groups: Array) -> Array:
        folds = []
        for d in range(len(sample.names)):
            others = ~np.isin(rows.entities, rows.entities[groups == d])  # nor other rows of its entities
            train = others if others.any() else groups != d
            folds.append((np.flatnonzero(train), np.flatnonzero(groups == d)))
        guess = cross_fitted(model, x, targets, folds)
        if rows.classes is None:
            return np.asarray(1 - (targets - guess)[:, 0] ** 2)
        return (guess.argmax(1) == targets.argmax(1)).astype(np.float64)

    random = permuted(rows.domains, rows.units, (seed, 5))[1 : 1 + REPEATS]
    repeats, without = np.array([scores(groups) for groups in random]), scores(rows.domains)
    within, count = repeats.mean(0), len(sample.names)
    means = np.array([repeats[:, rows.domains == d].mean(1) for d in range(count)])  # domain, repeat
    over_models = float(means.var(1, ddof=1).mean()) * (1 + 1 / REPEATS)
    over_models *= statistics.t_limit(0.95, count * (REPEATS - 1)) ** 2
    found, halves = [], []
    for d, name in enumerate(sample.names):
        own = rows.domains == d
        gap, low, _, _ = statistics.mean_interval((within - without)[own], rows.entities[own])
        halves.append(math.inf if low is None else math.hypot(gap - low, math.sqrt(over_models)))
        ends = (None, None) if low is None else (gap - halves[-1], gap + halves[-1])
        found.append(_gap(name, float(within[own].mean()), float(without[own].mean()), *ends))
    both = np.mean([(gap["in_domain"], gap["held_out"]) for gap in found], 0)
    half, gap = math.hypot(*halves) / len(halves), float(both[0] - both[1])
    ends = (gap - half, gap + half) if math.isfinite(half) else (None, None)
    return [*found, _gap("average", *both.tolist(), *ends)]


def _gap(name: str, within: float, without: float, low: float | None, high: float | None) -> dict[str, Any]:
    scores = {"in_domain": within, "held_out": without, "gap": within - without}
    return {"name": name, **scores, "low": low, "high": high}


def gradient_agreement(sample: Sample, seed: int) -> tuple[list[Test], dict[str, Any]]:
    """Cosines between the domains' gradients of ERM, at the start and after training on all examples.

    The gradient of logistic and of ridge regression is (prediction − target) xᵀ.
    """
    rows = sample.rows
    x, targets, names = smooth(rows.x, seed=seed), rows.targets, sample.names
    inner = 1 + x @ x.T  # with the intercept
    everything = np.arange(len(x))
    trained = cross_fitted(linear_model(targets, 1.0), x, targets, [(everything, everything)])
    start = np.full_like(targets, 1 / targets.shape[1] if targets.shape[1] > 1 else 0.0)
    groupings, tests, found = permuted(rows.domains, rows.units, (seed, 6)), [], {}
    for when, guess in (("at the start", start), ("after training", trained)):
        error = guess - targets
        test, matrix, p = agreement_test(f"gradients {when}", (error @ error.T) * inner, groupings)
        tests.append(test)
        above = np.triu_indices(len(names), 1)
        pair = int(matrix[above].argmin())
        found[when] = {
            "matrix": matrix.round(6).tolist(),
            "mean": float(matrix[above].mean()),
            "pair": [names[above[0][pair]], names[above[1][pair]]],
            "pair_cosine": float(matrix[above][pair]),
            "conflicting": [name for name, q in zip(names, p, strict=True) if q <= LEVEL],
        }
    return tests, found
