"""Diagnosis before training: do the domains differ, in what, and how large is the generalization gap?

What is independent are entities: tests permute them, cross-validation keeps their rows together, and the gap
has intervals by entity. Over all tests p is corrected by Holm's method.

*Permutation tests* ask whether the domains differ at all. The rows of an entity in a domain are a unit; the
domains of units are permuted, and p is the share of permutations whose statistic is at least as large; of
several statistics, after correction by the distribution of the largest.

The *test of the relation* asks whether P(y | x) differs between domains. It multiplies the residuals of the
label and of the domain, each predicted from x for other entities than those the model was fitted to:

    u_i = (1[d_i = d] − P̂(d | x_i)) · (1[y_i = c] − P̂(c | x_i))

If label and domain are independent given x, u has mean 0 everywhere in x (Shah & Peters, The Hardness of
Conditional Independence Testing, 2020), and the error of the two predictions enters only as their product.
The statistic is the sum of (Σ_i φ(x_i) u_i)² over functions φ, domains d and classes c; its null distribution
comes from random signs of entities (a wild bootstrap).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import rel_entr
from scipy.stats import rankdata
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold
from torch import Tensor

from shoal.data.batch import DomainData, tensors_in
from shoal.data.loader import seeded
from shoal.data.splits import assigning_entries
from shoal.data.tables import Encoder
from shoal.errors import InputError
from shoal.experiments.protocol import all_domains
from shoal.experiments.statistics import codes_of, holm, mean_interval, t_limit

Array = NDArray[Any]
Folds = Sequence[tuple[Array, Array]]
LEVEL, PERMUTATIONS, FLIPS = 0.05, 199, 499
"""Level of the tests; random permutations of domains, and random signs of the test of the relation."""
FOLDS, SMOOTH, WIDTH, ROUNDS = 5, 150, 64, 50
"""Parts of the entities; smooth features, the principal components they are made of; rounds of boosting."""
MOST_CLASSES = 10
"""Rarer classes are one."""
OVERLAPPING = 40
"""With fewer entities in the overlap of the domains, the test of the relation abstains."""
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


@dataclass(frozen=True)
class Sample:
    """Standardised features, labels (classes or numbers), numbers of domains and entities, by row.

    ``columns`` are the features of each column; ``names`` are those of the domains.
    """

    x: Array
    labels: Array
    classes: int | None
    domains: Array
    entities: Array
    columns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    names: Sequence[str] = ()
    class_names: Sequence[str] = ()

    @property
    def codes(self) -> Array:
        """Classes from 0, the rarer ones as one; in regression, which tenth of all labels it is in."""
        if self.classes is None:
            return np.asarray(pandas.qcut(self.labels, 10, labels=False, duplicates="drop"))
        often = pandas.Series(self.labels).value_counts().index[: MOST_CLASSES - 1]
        return codes_of(np.where(np.isin(self.labels, often), self.labels, self.classes), len(self.labels))

    @property
    def targets(self) -> Array:
        """What is predicted: indicators of classes, or standardised labels in one column."""
        if self.classes is None:
            return ((self.labels - self.labels.mean()) / (self.labels.std() or 1.0))[:, None]
        return one_hot(self.codes)

    @property
    def units(self) -> Array:
        """The rows of an entity in a domain have the same number."""
        return codes_of(self.entities * (int(self.domains.max()) + 1) + self.domains, len(self.domains))

    def folds(self, seed: int) -> Folds:
        """Rows to fit to and rows to predict, with no entity in both."""
        parts = GroupKFold(min(FOLDS, len(np.unique(self.entities))), shuffle=True, random_state=seed % 2**32)
        return list(parts.split(self.x, groups=self.entities))


class Test(NamedTuple):
    """A test: its statistic, and the mean and deviation of it under the null hypothesis."""

    name: str
    statistic: float
    null: float
    deviation: float
    p: float


def diagnose(
    data: DomainData,
    *,
    seed: int = 0,
    examples: int = EXAMPLES,
    max_domains: int = DOMAINS,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """What :func:`shoal.diagnose` computes, of a dataset that is loaded, as plain data."""
    start, report = time.perf_counter(), progress or (lambda phase, done, total: None)
    report("reading examples", 0, 4)
    sample, drawn = draw(data, seed, examples, max_domains)
    report("testing for shifts", 1, 4)
    tests, found = shifts(sample, seed)
    report("comparing gradients", 2, 4)
    conflict, gradients = gradient_agreement(sample, seed)
    report("estimating the generalization gap", 3, 4)
    gap = generalization_gap(sample, seed)
    tests.append(conflict)
    results = [
        {**test._asdict(), "adjusted": p, "significant": p <= LEVEL}
        for test, p in zip(tests, holm([test.p for test in tests]), strict=True)
    ]
    significant = [test["name"] for test in results if test["significant"]]
    return {
        "task": "regression" if data.classes is None else "classification",
        "table": data.inputs.get("kind") == "table",
        "examples": len(sample.x),
        "entities": None if data.entities is None else len(np.unique(sample.entities)),
        **drawn,
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


def draw(data: DomainData, seed: int, examples: int, most: int) -> tuple[Sample, dict[str, Any]]:
    """Some domains of at least ``LEAST`` examples and about equally many examples of each, by ``seed``.

    An example of several domains is in the smallest. Also describes the domains, and what was not drawn.
    """
    every = all_domains(data)
    if len(every) < 2:
        raise InputError(f"there is one domain, {every.names[0]!r}; at least two are required.")
    domains = every.filter(assigning_entries(every))
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
        raise InputError(f"labels have shape {tuple(y.shape[1:])}; there must be one number per example.")
    x = features(inputs)
    columns = {name: places for name, places in columns_of(data, inputs).items() if x[:, places].any()}
    sample = Sample(
        x=x,
        labels=y.double().numpy() if data.classes is None else y.long().numpy(),
        classes=data.classes,
        domains=np.repeat(np.arange(len(picked)), taken),
        entities=np.arange(len(index)) if data.entities is None else data.entities[index],
        columns=columns,
        names=[domains.names[d] for d in picked],
        class_names=data.class_names,
    )
    small = np.flatnonzero(domains.sizes < LEAST)
    return sample, {
        "domains": described_domains(sample, domains.sizes[picked].tolist()),
        "too_small": {domains.names[d]: int(domains.sizes[d]) for d in small},
        "not_drawn": len(large) - len(picked),
        "examples_in_all": len(every.examples()),
    }


def features(x: Any) -> Array:
    """Numbers as they are, pooled pixels, counts of tokens (by remainders); standardised, constant ones 0."""
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


def columns_of(data: DomainData, x: Any) -> dict[str, list[int]]:
    """The features of each column; columns of arrays are numbered from 1."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] > COLUMNS:
        return {}
    if data.inputs.get("kind") != "table":
        return {f"feature {n + 1}": [n] for n in range(x.shape[1])}
    found, start = dict[str, list[int]](), 0
    for step in Encoder.from_dict(data.inputs).steps:
        found[step.name] = list(range(start, start + step.width))
        start += step.width
    return found


def described_domains(sample: Sample, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Size and labels of each domain: shares of classes, or mean and standard deviation."""
    found = []
    for d, (name, size) in enumerate(zip(sample.names, sizes, strict=True)):
        values = sample.labels[sample.domains == d]
        labels = {"mean": float(values.mean()), "sd": float(values.std(ddof=1))}
        if sample.classes is not None:
            labels = {_label(sample, c): float(np.mean(values == c)) for c in np.unique(sample.labels)}
        entities = len(np.unique(sample.entities[sample.domains == d]))
        found.append({"name": name, "size": size, "taken": len(values), "entities": entities})
        found[-1]["labels"] = labels
    return found


def _label(sample: Sample, code: int) -> str:
    return sample.class_names[code] if sample.class_names else str(code)


def one_hot(codes: Array) -> Array:
    return np.eye(int(codes.max()) + 1)[codes]


# Permutations and models


def permuted(domains: Array, units: Array, seed: Sequence[int], strata: Array | None = None) -> Array:
    """Domains of rows (1 + permutations, n): as they are, then permuted among units (of the same stratum)."""
    rng = np.random.default_rng(seed)
    of_unit = np.zeros(units.max() + 1, np.int64)
    of_unit[units] = domains
    strata = np.zeros_like(of_unit) if strata is None else strata
    order, mixed, found = np.argsort(strata, kind="stable"), np.empty_like(of_unit), [domains]
    for _ in range(PERMUTATIONS):
        mixed[order] = of_unit[np.lexsort((rng.random(len(of_unit)), strata))]
        found.append(mixed[units])
    return np.stack(found)


def compared(name: str, values: Array, reported: Array | None = None) -> tuple[Test, Array]:
    """A test by statistics (1 + times, each), of which the first were observed; and p of each, corrected.

    ``reported`` is the statistic that is shown (default: the largest, standardised).
    """
    values = values.reshape(len(values), -1)
    scale = values.std(0)
    z = (values - values.mean(0)) / np.where(scale > 1e-12, scale, 1.0)
    largest = z.max(1)
    p = np.array([(1 + np.sum(largest[1:] >= observed - 1e-9)) / len(values) for observed in z[0]])
    shown = largest if reported is None else reported
    null = shown[1:]
    return Test(name, float(shown[0]), float(null.mean()), float(null.std()), float(p.min())), p


def reduced(x: Array, seed: int = 0) -> Array:
    """x without constant features, or its principal components if it has more than ``WIDTH`` features."""
    x = x[:, x.std(0) > 0]
    if min(x.shape) <= WIDTH:
        return x
    x = PCA(WIDTH, random_state=seed % 2**32).fit_transform(x)
    return np.asarray(x / max(float(x.std()), 1e-9))


def smooth(x: Array, seed: int = 0, most: int = SMOOTH) -> Array:
    """Features of which linear models are smooth in x: x itself and those of a Gaussian kernel."""
    x = reduced(x, seed) if x.any() else np.zeros((len(x), 1))
    kernel = Nystroem(gamma=0.5 / x.shape[1], n_components=min(most, len(x)), random_state=seed % 2**32)
    found = np.hstack([x / np.sqrt(x.shape[1]), kernel.fit_transform(x)])
    return np.asarray(found - found.mean(0))


def linear_model(targets: Array, strength: float = 1.0) -> Any:
    """Logistic regression for classes, ridge regression for a number; the stronger, the less regularized."""
    return LogisticRegression(C=strength, max_iter=300) if targets.shape[1] > 1 else Ridge(1 / strength)


def boosting(targets: Array, seed: int) -> Any:
    from lightgbm import LGBMClassifier, LGBMRegressor

    kind = LGBMClassifier if targets.shape[1] > 1 else LGBMRegressor
    return kind(n_estimators=ROUNDS, num_leaves=15, random_state=seed % 2**31, n_jobs=1, verbose=-1)


def cross_fitted(model: Any, x: Array, targets: Array, folds: Folds) -> Array:
    """Predictions of each fold by the model fitted to the others."""
    found, codes = np.zeros_like(targets), targets.argmax(1)
    for train, test in folds:
        if targets.shape[1] == 1:
            found[test, 0] = clone(model).fit(x[train], targets[train, 0]).predict(x[test])
        elif len(known := np.unique(codes[train])) == 1:
            found[np.ix_(test, known)] = 1.0
        else:
            found[np.ix_(test, known)] = clone(model).fit(x[train], codes[train]).predict_proba(x[test])
    return found


def predicted(sample: Sample, targets: Array, folds: Folds, seed: int) -> Array:
    """Targets predicted by models that were fitted to other entities: linear, smooth, or boosting.

    That with the smallest error, if it is better than the mean by more than two standard errors. (A model
    that has learned nothing adds noise that the rows of a fold share, and random signs do not see that.)
    """
    models = (
        (linear_model(targets), sample.x),
        (linear_model(targets, 10.0), smooth(sample.x, seed, WIDTH)),
        (boosting(targets, seed), sample.x),
    )
    mean = np.broadcast_to(targets.mean(0), targets.shape)
    found = [mean, *(cross_fitted(model, x, targets, folds) for model, x in models)]
    errors = [((targets - guess) ** 2).sum(1) for guess in found]
    best = min(range(len(errors)), key=lambda n: float(errors[n].sum()))
    gain = mean_interval(errors[0] - errors[best], sample.entities)
    return found[best if gain.mean > 2 * (gain.se or math.inf) else 0]


# Tests


def shifts(sample: Sample, seed: int) -> tuple[list[Test], dict[str, Any]]:
    """Labels, inputs, inputs given the label, columns, and the relation between inputs and labels.

    P(y | x) changes with the shares of labels alone. Where these differ (p at most ``LEVEL``), the test of
    the relation is therefore whether it changes by more than an offset per domain.
    """
    folds, units, codes, x = sample.folds(seed), sample.units, one_hot(sample.codes), sample.x
    groupings = permuted(sample.domains, units, (seed, 1))
    labels = label_test(sample, groupings)
    inputs = domain_test("inputs", smooth(x, seed), groupings, folds)
    most_frequent = (one_hot(units).T @ codes).argmax(1)  # the label of a unit
    joint = smooth(np.hstack([x, *(x * label[:, None] for label in codes.T)]), seed)
    within = permuted(sample.domains, units, (seed, 2), most_frequent)
    within_labels = domain_test("inputs within labels", joint, within, folds)
    relation, relation_p, overlap = relation_test(sample, folds, offsets=labels.p <= LEVEL, seed=seed)
    found = {"relation_p": relation_p, "overlap": overlap, "relation_tested": relation.deviation > 0}
    if not sample.columns:
        return [labels, inputs, within_labels, relation], found
    columns, found["column_shares"], found["column_p"] = column_test(sample, groupings)
    return [labels, inputs, within_labels, columns, relation], found


def label_test(sample: Sample, groupings: Array) -> Test:
    """Do the shares of labels differ? By the mutual information of label and domain."""
    joint = np.stack([one_hot(groups).T for groups in groupings]) @ one_hot(sample.codes) / len(sample.x)
    values = rel_entr(joint, joint.sum(2, keepdims=True) * joint.sum(1, keepdims=True)).sum((1, 2))
    return compared("labels", values, values)[0]


def domain_test(name: str, features: Array, groupings: Array, folds: Folds) -> Test:
    """Can the domain be predicted? By the balanced accuracy of a classifier, fitted anew for every grouping.

    Ridge regression of indicators is linear in them, so all groupings are targets of one fit.
    """
    count = int(groupings[0].max()) + 1
    member = groupings[:, :, None] == np.arange(count)
    share = member.mean(1, keepdims=True)
    targets = np.hstack(list((member - share) / share)).astype(np.float32)  # as if all were equally large
    predictions, features = np.empty_like(targets), features.astype(np.float32)
    for train, test in folds:
        predictions[test] = Ridge(1.0).fit(features[train], targets[train]).predict(features[test])
    guesses = predictions.reshape(len(features), -1, count).argmax(2).T
    right = (guesses == groupings)[:, :, None] & member
    accuracy = (right.sum(1) / member.sum(1)).mean(1)
    return compared(name, accuracy, accuracy)[0]


def column_test(sample: Sample, groupings: Array) -> tuple[Test, Array, Array]:
    """Does a column differ? The test, and per column the share of its variance between domains and p.

    Variances are those of ranks and of their distances from the middle, so that level and spread both count
    and outliers do not.
    """
    level = rankdata(sample.x, axis=0)
    values = np.stack([level, np.abs(level - level.mean(0))], 2).reshape(len(level), -1)
    values = (values - values.mean(0)) / np.maximum(values.std(0), 1e-9)
    shares = []
    for groups in groupings:
        member = one_hot(groups)
        between = ((member.T @ values) ** 2 / member.sum(0)[:, None]).sum(0).reshape(-1, 2) / len(values)
        each = [between[list(places)] for places in sample.columns.values()]
        shares.append([[share.mean(), share.max()] for share in each])
    mean, largest = np.moveaxis(np.array(shares), 2, 0)
    test, p = compared("columns", mean, largest.max(1))
    return test, largest[0], p


def relation_test(sample: Sample, folds: Folds, *, offsets: bool, seed: int = 0) -> tuple[Test, Array, float]:
    """Does the label depend on the domain, given the inputs? The test, p per column, and the overlap.

    The overlap is the share of rows that lie where several domains do: 1 if x says nothing of the domain.
    Where it is too small, nothing is tested, and the deviation under the null hypothesis is 0. With
    ``offsets``, each domain has its own offset of log P̂(y | x), or of the number that is predicted.
    """
    member, x, count = one_hot(sample.domains), sample.x, len(sample.x)
    entities = codes_of(sample.entities, count)
    domain, share = predicted(sample, member, folds, seed), member.mean(0)
    overlap = float(min(1.0, (domain * (1 - domain)).sum(1).mean() / (share * (1 - share)).sum()))
    if overlap * (entities.max() + 1) < OVERLAPPING or not x.any():
        return Test("relation", 0.0, 0.0, 0.0, 1.0), np.ones(len(sample.columns)), overlap
    targets = sample.targets if sample.classes else rankdata(sample.labels)[:, None] / count - 0.5
    label = predicted(sample, targets, folds, seed)
    functions = smooth(x, seed, WIDTH)
    functions /= np.sqrt((functions**2).sum(1).mean())
    if offsets:
        known = np.log(np.maximum(label, 1e-3)) if sample.classes else label
        every, model = np.arange(count), linear_model(targets, 100.0)
        label = cross_fitted(model, np.hstack([known, member]), targets, [(every, every)])
    else:
        functions = np.column_stack([np.ones(count), functions])
    products = ((member - domain)[:, :, None] * (targets - label)[:, None, :]).reshape(count, -1)
    signs = np.random.default_rng((seed, 3)).choice([-1.0, 1.0], (FLIPS, entities.max() + 1))
    signs = np.vstack([np.ones(count), signs[:, entities]]).T.astype(np.float32)

    def squares(phi: Array) -> Array:
        sums = ((f[:, None] * products).T.astype(np.float32) @ signs for f in phi.T)
        return np.sum([(total**2).sum(0) for total in sums], 0)

    # A column's features without what the other columns say of them, by the inverse of the covariance.
    slopes = x @ np.linalg.inv(x.T @ x / count + 0.01 * np.eye(x.shape[1]))
    each = [functions, *(slopes[:, list(places)] for places in sample.columns.values())]
    test, p = compared("relation", np.stack([squares(phi) for phi in each], 1))
    return test, p[1:], overlap


def described_columns(
    sample: Sample, found: Mapping[str, Any], significant: Sequence[str]
) -> list[dict[str, Any]]:
    """Which columns differ, and whose relation to the label does, if the test as a whole is significant."""
    result, classes = [], np.unique(sample.labels) if sample.classes is not None else np.zeros(0)
    classes = classes[1:] if len(classes) == 2 else classes  # of two classes, the second
    targets = sample.labels[:, None] == classes if len(classes) else sample.targets
    domains = [sample.domains == d for d in range(len(sample.names))]
    certain = np.sqrt([max(len(np.unique(sample.entities[rows])) - 3, 0) for rows in domains])
    for n, (name, places) in enumerate(sample.columns.items()):
        x = sample.x[:, list(places)]
        correlations = np.array([_correlations(x[rows], targets[rows]) for rows in domains])
        feature, label = np.unravel_index(correlations.var(0).argmax(), correlations.shape[1:])
        cells = correlations[:, feature, label]  # where it varies most
        z = np.arctanh(np.clip(cells, -0.999999, 0.999999)) * certain
        levels = np.array([x[rows].mean(0) for rows in domains])
        place, most = np.unravel_index(np.abs(levels).argmax(), levels.shape)
        changes = "relation" in significant and bool(found["relation_p"][n] <= LEVEL)
        result.append(
            {
                "name": name,
                "share": round(float(found["column_shares"][n]), 6),
                "p": float(found["column_p"][n]),
                "differs": "columns" in significant and bool(found["column_p"][n] <= LEVEL),
                "most_different": {
                    "domain": sample.names[place],
                    "mean": round(float(levels[place, most]), 6),
                },
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


def gradient_agreement(sample: Sample, seed: int) -> tuple[Test, dict[str, Any]]:
    """Do the domains' gradients of ERM at the start agree less than those of random groups?

    The gradient of logistic and of ridge regression is (prediction − target) xᵀ, for smooth features x. The
    test is by the mean cosine, each domain's mean cosine with the others and the lowest pair, corrected for
    all: a mean over all pairs does not see a minority of reversed domains.
    """
    x, targets, matrices = smooth(sample.x, seed), sample.targets, []
    error = (1 / targets.shape[1] if targets.shape[1] > 1 else 0.0) - targets
    products = (error @ error.T) * (1 + x @ x.T)  # with the intercept
    for groups in permuted(sample.domains, sample.units, (seed, 6)):
        means = one_hot(groups).T / np.bincount(groups)[:, None]
        inner = means @ products @ means.T
        norms = np.sqrt(np.maximum(inner.diagonal(), 1e-30))
        matrices.append(inner / np.outer(norms, norms))
    matrix, count = np.stack(matrices), len(sample.names)
    each = (matrix.sum(2) - 1) / (count - 1)
    pairs = matrix[:, *np.triu_indices(count, 1)]
    test, p = compared("gradients", -np.column_stack([each.mean(1), pairs.min(1), each]), each.min(1))
    conflicting = [name for name, q in zip(sample.names, p[2:], strict=True) if q <= LEVEL]
    found = {"matrix": matrix[0].round(6).tolist(), "mean": float(pairs[0].mean())}
    return test, found | {"conflicting": conflicting}


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
    domains, count, targets = sample.domains, len(sample.names), sample.targets
    x, entities = reduced(sample.x, seed), codes_of(sample.entities, len(domains))
    random = permuted(domains, sample.units, (seed, 5))[1 : 1 + REPEATS]

    def scores(model: Any, groups: Array, fitted: Array) -> Array:
        """Of all rows, by models of the ``fitted`` ones without the row's group and its entities."""
        folds = []
        for d in range(count):
            others = fitted & ~np.isin(entities, entities[groups == d])
            train = others if others.any() else groups != d
            folds.append((np.flatnonzero(train), np.flatnonzero(groups == d)))
        return _scores(cross_fitted(model, x, targets, folds), targets)

    every, constant = np.full(len(x), True), _scores(np.broadcast_to(targets.mean(0), targets.shape), targets)
    models = {"a linear model": linear_model(targets), "gradient boosting": boosting(targets, seed)}
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
