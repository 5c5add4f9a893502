"""Diagnosis before training: do the domains differ, in what, and how large is the generalization gap?

The tests are in :mod:`shoal.experiments.shift_tests`. Over all tests p is corrected by Holm's method: without
any shift, the chance of one significant test or more is at most ``LEVEL``. Entities are what is independent:
tests permute them, cross-validation keeps their rows together, and intervals of the gap are by entity.

The gap is that of a linear model or of gradient boosting, fitted to all domains together, and is reported
only if the model predicts better than a constant. Images and text are seen through pooled pixels and counts
of tokens. All sizes are bounded, and nothing depends on the speed of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.data.batch import DomainData, tensors_in
from shoal.data.loader import seeded
from shoal.data.splits import assigning_entries
from shoal.data.tables import Encoder
from shoal.data.tables.encode import Category
from shoal.errors import InputError
from shoal.experiments import shift_tests as tests
from shoal.experiments.protocol import all_domains
from shoal.experiments.shift_tests import (
    LEVEL,
    PERMUTATIONS,
    Array,
    Column,
    Sample,
    Test,
    one_hot,
    permuted,
    smooth,
)
from shoal.experiments.statistics import codes_of, holm, mean_interval, t_limit

Progress = Callable[[str, int, int], None]
"""Is called with the phase, and how many parts of how many are done."""
LEAST, EXAMPLES, DOMAINS = 16, 1500, 12
"""Examples of a domain at least; examples and domains of the sample at most."""
COLUMNS = 256
"""Inputs with more features are tested as a whole and not per column."""
WORDS, SIDE = 256, 8
"""Counted remainders of tokens; side of images after pooling."""
REPEATS = 5
"""Times that random groups are held out instead of the domains, and that the entities are halved."""
SURE = 2.6
"""Standard errors from 0 at which a domain's correlation has a sign: about 1 in 100 by chance."""


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
    report("reading examples", 0, 4)
    sample = draw(data, seed, examples, max_domains)
    report("testing for shifts", 1, 4)
    every, found = shifts(sample, seed)
    report("comparing gradients", 2, 4)
    more, gradients = gradient_agreement(sample, seed)
    report("estimating the generalization gap", 3, 4)
    gap = generalization_gap(sample, seed)
    every += more
    results = [
        {**test._asdict(), "adjusted": p, "significant": p <= LEVEL}
        for test, p in zip(every, holm([test.p for test in every]), strict=True)
    ]
    significant = [test["name"] for test in results if test["significant"]]
    return {
        "task": "regression" if data.classes is None else "classification",
        "table": data.inputs.get("kind") == "table",
        "domains": described_domains(sample),
        "examples": len(sample.x),
        "entities": None if data.entities is None else len(np.unique(sample.entities)),
        **sample.about,
        "tests": results,
        "significant": significant,
        "effects": {name: found[name] for name in ("overlap", "relation_tested")},
        "columns": described_columns(sample, found, significant),
        **gap,
        "gradients": gradients,
        "settings": {"seed": seed, "permutations": PERMUTATIONS, "level": LEVEL, "least": LEAST},
        "seconds": round(time.perf_counter() - start, 3),
    }


# The sample


def draw(data: DomainData, seed: int, examples: int, most: int) -> Sample:
    """Some domains of at least ``LEAST`` examples and about equally many examples of each, by ``seed``."""
    every = all_domains(data)
    if len(every) < 2:
        raise InputError(f"there is one domain, {every.names[0]!r}; at least two are required.")
    distinct = every.examples()
    overlapping = len(every.indices) - len(distinct)
    domains = every.filter(assigning_entries(every)) if overlapping else every
    large = np.flatnonzero(domains.sizes >= LEAST)
    if len(large) < 2:
        raise InputError(
            f"of {len(domains)} domains {len(large) or 'none'} has at least {LEAST} examples of its own; "
            "a diagnosis compares at least two of that size."
        )
    rng = np.random.default_rng(seed)
    picked = np.sort(rng.permutation(large)[:most])
    caps = np.arange(LEAST, max(examples, LEAST * len(picked)) + 1)  # of a domain, so that all are within it
    fits = np.minimum(domains.sizes[picked][:, None], caps).sum(0) <= caps[-1]
    taken = np.minimum(domains.sizes[picked], caps[fits][-1])
    drawn = [rng.permutation(domains.indices_of(int(d)))[:n] for d, n in zip(picked, taken, strict=True)]
    index = np.concatenate(drawn).astype(np.int64)
    with seeded(seed):
        inputs, y = data.examples.evaluation().batch(index)[:2]
    y = torch.as_tensor(y).cpu()
    if y.ndim != 1:
        raise InputError(
            f"labels have shape {tuple(y.shape[1:])} each; there must be one number per example."
        )
    x = features(inputs)
    return Sample(
        x=x,
        labels=y.double().numpy() if data.classes is None else y.long().numpy(),
        classes=data.classes,
        domains=np.repeat(np.arange(len(picked)), taken),
        entities=np.arange(len(index)) if data.entities is None else data.entities[index],
        columns=[column for column in columns_of(data, inputs) if x[:, list(column.features)].any()],
        names=[domains.names[d] for d in picked],
        sizes=[int(domains.sizes[d]) for d in picked],
        class_names=data.class_names,
        about={
            "too_small": {
                domains.names[d]: int(domains.sizes[d]) for d in np.flatnonzero(domains.sizes < LEAST)
            },
            "not_drawn": len(large) - len(picked),
            "examples_in_all": len(distinct),
            "overlapping": overlapping,
        },
    )


def features(x: Any) -> Array:
    """Numbers as they are, pooled pixels, counts of tokens; standardised, and constant ones 0.

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
    found = torch.cat([part.reshape(len(part), -1) for part in parts], 1).double().cpu().numpy()
    if not np.isfinite(found).all():
        raise InputError("some inputs are not finite numbers; clean them first.")
    scale = found.std(0)
    return np.asarray(np.where(scale > 1e-9, (found - found.mean(0)) / np.maximum(scale, 1e-9), 0.0))


def columns_of(data: DomainData, x: Any) -> list[Column]:
    """Which features columns became; those of arrays are numbered from 1."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] > COLUMNS:
        return []
    if data.inputs.get("kind") != "table":
        return [Column(f"feature {n + 1}", (n,)) for n in range(x.shape[1])]
    found, start = list[Column](), 0
    for step in Encoder.from_dict(data.inputs).steps:
        if isinstance(step, Category):
            parts = [f"= {value}" for value in step.values] + ["= other"] * step.other
        else:
            missing = bool(getattr(step, "indicator", False))
            plain = step.width - missing
            parts = ["" if plain == 1 else f"part {n + 1}" for n in range(plain)] + ["missing"] * missing
        found.append(Column(step.name, tuple(range(start, start + len(parts))), tuple(parts)))
        start += len(parts)
    return found


# Tests


def shifts(sample: Sample, seed: int) -> tuple[list[Test], dict[str, Any]]:
    """Labels, inputs, inputs given the label, columns, and the relation between inputs and labels.

    P(y | x) changes with the shares of labels alone. Where these differ (p at most ``LEVEL``), the test of
    the relation is therefore whether it changes by more than an offset per domain.
    """
    folds, units, codes, x = sample.folds(seed), sample.units, one_hot(sample.codes), sample.x
    groupings = permuted(sample.domains, units, (seed, 1))
    labels = tests.label_test(sample, groupings)
    inputs = tests.domain_test("inputs", smooth(x, seed), groupings, folds)
    most_frequent = (one_hot(units).T @ codes).argmax(1)  # the most frequent label of a unit
    joint = smooth(np.hstack([x, *(x * label[:, None] for label in codes.T)]), seed)
    within = permuted(sample.domains, units, (seed, 2), most_frequent)
    within_labels = tests.domain_test("inputs within labels", joint, within, folds)
    relation, relation_p, overlap = tests.relation_test(sample, folds, offsets=labels.p <= LEVEL, seed=seed)
    found = {"relation_p": relation_p, "overlap": overlap, "relation_tested": relation.deviation > 0}
    if not sample.columns:
        return [labels, inputs, within_labels, relation], found
    columns, found["column_shares"], found["column_p"] = tests.column_test(sample, groupings)
    return [labels, inputs, within_labels, columns, relation], found


def described_domains(sample: Sample) -> list[dict[str, Any]]:
    """Size and labels of each domain: shares of classes, or mean and standard deviation."""
    found = []
    for d, (name, size) in enumerate(zip(sample.names, sample.sizes, strict=True)):
        values = sample.labels[sample.domains == d]
        labels = {"mean": float(values.mean()), "sd": float(values.std(ddof=1))}
        if sample.classes is not None:
            labels = {_label(sample, c): float(np.mean(values == c)) for c in np.unique(sample.labels)}
        entities = len(np.unique(sample.entities[sample.domains == d]))
        found.append(
            {"name": name, "size": size, "taken": len(values), "entities": entities, "labels": labels}
        )
    return found


def _label(sample: Sample, code: int) -> str:
    return sample.class_names[code] if sample.class_names else str(code)


def described_columns(
    sample: Sample, found: Mapping[str, Any], significant: Sequence[str]
) -> list[dict[str, Any]]:
    """Which columns differ, and whose relation to the label does, if the test as a whole is significant."""
    result, classes = [], np.unique(sample.labels) if sample.classes is not None else np.zeros(0)
    classes = classes[1:] if len(classes) == 2 else classes  # of two classes, the second
    targets = sample.labels[:, None] == classes if len(classes) else sample.targets
    domains = [sample.domains == d for d in range(len(sample.names))]
    certain = np.sqrt([max(len(np.unique(sample.entities[rows])) - 3, 0) for rows in domains])
    for n, column in enumerate(sample.columns):
        x = sample.x[:, list(column.features)]
        correlations = np.array([_correlations(x[rows], targets[rows]) for rows in domains])
        feature, label = np.unravel_index(correlations.var(0).argmax(), correlations.shape[1:])
        cells = correlations[:, feature, label]  # where it varies most
        z = np.arctanh(np.clip(cells, -0.999999, 0.999999)) * certain
        changes = "relation" in significant and bool(found["relation_p"][n] <= LEVEL)
        result.append(
            {
                "name": column.name,
                "share": round(float(found["column_shares"][n]), 6),
                "p": float(found["column_p"][n]),
                "differs": "columns" in significant and bool(found["column_p"][n] <= LEVEL),
                "how": _differs_most(x, domains, column, sample.names),
                "relation_p": float(found["relation_p"][n]),
                "changes": changes,
                "flips": changes and bool(z.max() > SURE and z.min() < -SURE),
                "label": _label(sample, int(classes[label])) if len(classes) else "",
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
    sides = [[x[rows], x[~rows]] for rows in domains]
    level, spread = (np.array([[of(side, 0) for side in pair] for pair in sides]) for of in (np.mean, np.std))
    ratio = np.diff(np.log(np.maximum(spread, 1e-3)), axis=1) / 2
    sizes = np.abs(np.stack([np.diff(level, axis=1), ratio]))
    measure, d, _, n = np.unravel_index(sizes.argmax(), sizes.shape)
    here, elsewhere = (spread if measure else level)[d, :, n].round(6).tolist()
    result = {"domain": names[d], "part": column.parts[n], "measure": ("mean", "sd")[measure]}
    return result | {"here": here, "elsewhere": elsewhere}


# ERM


def generalization_gap(sample: Sample, seed: int) -> dict[str, Any]:
    """The score in held-out domains, against that where random groups of as many entities are held out.

    A score is the accuracy, or R². The model is the linear one or boosting, whichever predicts entities that
    it was not fitted to better; if neither is better than a constant (by entity, 95 %), there is no gap.
    Each example is predicted once without its whole domain and ``REPEATS`` times without a random group.

    The variance is that of the paired differences by entity, and half that of the models: gaps of models
    fitted to either half of the entities differ by twice the standard error. (Half, for the differences by
    entity contain a part of it; ``benchmarks/simulate_intervals.py`` counts what the intervals cover.)
    """
    domains, count = sample.domains, len(sample.names)
    x, targets, entities = (
        tests.reduced(sample.x, seed),
        sample.targets,
        codes_of(sample.entities, len(domains)),
    )
    random = permuted(domains, sample.units, (seed, 5))[1 : 1 + REPEATS]

    def scores(model: Any, groups: Array, fitted: Array) -> Array:
        """Of all rows, by models of the ``fitted`` ones without the row's group and its entities."""
        folds = []
        for d in range(count):
            others = fitted & ~np.isin(entities, entities[groups == d])
            train = others if others.any() else groups != d
            folds.append((np.flatnonzero(train), np.flatnonzero(groups == d)))
        return _scores(tests.cross_fitted(model, x, targets, folds), targets)

    every, constant = np.full(len(x), True), _scores(np.broadcast_to(targets.mean(0), targets.shape), targets)
    models = {"a linear model": tests.linear_model(targets)}
    models |= {"gradient boosting": tests.boosting(targets, seed)}
    first = {name: scores(model, random[0], every) for name, model in models.items()}
    best = max(first, key=lambda name: float(first[name].mean()))
    low = mean_interval(first[best] - constant, entities).low
    summary = {"name": best, "score": float(first[best].mean()), "constant": float(constant.mean())}
    if low is None or low <= 0:
        return {"model": {**summary, "learned": False}, "gaps": [], "average": None}

    def by_domain(values: Array) -> Array:
        """Means over the rows of each domain, and over domains."""
        means = np.array([values[domains == d].mean() for d in range(count)])
        return np.append(means, means.mean())

    model, halves = models[best], []
    within = np.mean([first[best], *(scores(model, groups, every) for groups in random[1:])], 0)
    without = scores(model, domains, every)
    for number, groups in enumerate(random):
        half = np.random.default_rng((seed, number)).permutation(entities.max() + 1)[entities] % 2 == 0
        pair = (scores(model, groups, rows) - scores(model, domains, rows) for rows in (half, ~half))
        halves.append(by_domain(np.subtract(*pair)) ** 2 / 4)
    of_entities, freedom = [], []
    for rows in (domains == d for d in range(count)):
        se = mean_interval((within - without)[rows], entities[rows]).se
        of_entities.append(math.inf if se is None else se**2)
        freedom.append(max(len(np.unique(entities[rows])) - 1, 1))
    variance = np.append(of_entities, np.mean(of_entities) / count) + np.mean(halves, 0) / 2
    reach = np.sqrt(variance) * [t_limit(0.95, dof) for dof in (*freedom, sum(freedom))]
    found = []
    for number, name in enumerate((*sample.names, "average")):
        a, b, half = (float(v[number]) for v in (by_domain(within), by_domain(without), reach))
        ends = (a - b - half, a - b + half) if math.isfinite(half) else (None, None)
        gap = {"name": name, "in_domain": a, "held_out": b, "gap": a - b}
        found.append(gap | {"low": ends[0], "high": ends[1]})
    return {"model": {**summary, "learned": True}, "gaps": found[:-1], "average": found[-1]}


def _scores(guess: Array, targets: Array) -> Array:
    """Whether each class is right, or how much of the variance of the label is explained (its mean is R²)."""
    if targets.shape[1] == 1:
        return np.asarray(1 - (targets - guess)[:, 0] ** 2)
    return (guess.argmax(1) == targets.argmax(1)).astype(np.float64)


def gradient_agreement(sample: Sample, seed: int) -> tuple[list[Test], dict[str, Any]]:
    """Cosines between the domains' gradients of ERM, at the start and after training on all examples.

    The gradient of logistic and of ridge regression is (prediction − target) xᵀ, for smooth features x.
    """
    x, targets, names = smooth(sample.x, seed), sample.targets, sample.names
    inner, everything = 1 + x @ x.T, np.arange(len(x))  # with the intercept
    trained = tests.cross_fitted(tests.linear_model(targets), x, targets, [(everything, everything)])
    start = np.full_like(targets, 1 / targets.shape[1] if targets.shape[1] > 1 else 0.0)
    groupings, every, found = permuted(sample.domains, sample.units, (seed, 6)), [], {}
    for when, guess in (("at the start", start), ("after training", trained)):
        error = guess - targets
        test, matrix, p = tests.agreement_test(f"gradients {when}", (error @ error.T) * inner, groupings)
        every.append(test)
        found[when] = {
            "matrix": matrix.round(6).tolist(),
            "mean": float(matrix[np.triu_indices(len(names), 1)].mean()),
            "conflicting": [name for name, q in zip(names, p, strict=True) if q <= LEVEL],
        }
    return every, found
