"""Tests for shifts between domains, as functions of a sample.

*What is independent*: entities. The rows of one entity in one domain are a unit; an entity that appears in
several domains is a unit in each of them, which makes domains more alike and the tests more cautious.

*Permutation tests* ask whether the domains differ at all: the domains of units are permuted, and p is the
share of permutations whose statistic is at least as large; of several statistics, after correction by the
distribution of the largest. The classifier that predicts the domain is fitted anew for every permutation.

The *test of the relation* asks whether P(y | x) differs between domains, whose inputs may differ. It
multiplies the residuals of the label and of the domain, each predicted from x for other entities than those
the model was fitted to:

    u_i = (1[d_i = d] − P̂(d | x_i)) · (1[y_i = c] − P̂(c | x_i))

If label and domain are independent given x, u has mean 0 everywhere in x (Shah & Peters, The Hardness of
Conditional Independence Testing, 2020), and the error of the two predictions enters only as their product.
The statistic is the sum of (Σ_i φ(x_i) u_i)² over functions φ, domains d and classes c; its null distribution
comes from random signs of entities (a wild bootstrap).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray
from scipy.special import rel_entr
from scipy.stats import rankdata
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold

from shoal.experiments.statistics import codes_of, mean_interval

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


class Column(NamedTuple):
    """A column of the inputs, the numbers of its features, and what each of them is ("" for the value)."""

    name: str
    features: tuple[int, ...]
    parts: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Sample:
    """The examples of a diagnosis: standardised features, labels, and numbers of domains and entities.

    ``labels`` are classes from 0, or numbers (``classes`` is then ``None``). ``names`` and ``sizes`` are
    those of the domains, and ``about`` says what was not drawn.
    """

    x: Array
    labels: Array
    classes: int | None
    domains: Array
    entities: Array
    columns: Sequence[Column] = ()
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()
    class_names: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

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
        """Rows to fit to and rows to predict, with no entity in both, whatever the domains."""
        parts = GroupKFold(min(FOLDS, len(np.unique(self.entities))), shuffle=True, random_state=seed % 2**32)
        return list(parts.split(self.x, groups=self.entities))


class Test(NamedTuple):
    """A test: its statistic, and the mean and deviation of it under the null hypothesis."""

    name: str
    statistic: float
    null: float
    deviation: float
    p: float


def one_hot(codes: Array) -> Array:
    return np.eye(int(codes.max()) + 1)[codes]


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


# Features and models


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
    """Gradient boosting of LightGBM."""
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


# Tests


def label_test(sample: Sample, groupings: Array) -> Test:
    """Do the shares of labels differ? By the mutual information of label and domain."""
    joint = np.stack([one_hot(groups).T for groups in groupings]) @ one_hot(sample.codes) / len(sample.x)
    values = rel_entr(joint, joint.sum(2, keepdims=True) * joint.sum(1, keepdims=True)).sum((1, 2))
    return compared("labels", values, values)[0]


def domain_test(name: str, features: Array, groupings: Array, folds: Folds) -> Test:
    """Can the domain be predicted? By the balanced accuracy of a classifier.

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
        each = [between[list(column.features)] for column in sample.columns]
        shares.append([[values_of.mean(), values_of.max()] for values_of in each])
    mean, largest = np.moveaxis(np.array(shares), 2, 0)
    test, p = compared("columns", mean, largest.max(1))
    return test, largest[0], p


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


def relation_test(sample: Sample, folds: Folds, *, offsets: bool, seed: int = 0) -> tuple[Test, Array, float]:
    """Does the label depend on the domain, given the inputs? The test, p per column, and the overlap.

    The overlap is the share of rows that lie where several domains do: 1 if x says nothing of the domain.
    Where it is too small, nothing is tested, and the deviation under the null hypothesis is 0.

    Args:
        offsets: whether other shares of labels in each domain, which alone change P(y | x), are allowed for:
            each domain then has its own offset of log P̂(y | x), or of the number that is predicted.
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
    each = [functions, *(slopes[:, list(column.features)] for column in sample.columns)]
    test, p = compared("relation", np.stack([squares(phi) for phi in each], 1))
    return test, p[1:], overlap


def agreement_test(name: str, products: Array, groupings: Array) -> tuple[Test, Array, Array]:
    """Do the domains' gradients agree less than those of random groups?

    By the mean cosine, each domain's mean cosine with the others and the lowest pair, corrected for all: a
    mean over all pairs does not see a minority of reversed domains. ``products`` are the inner products of
    the rows' gradients. Returns the test, the cosines, and p for each domain.
    """
    matrices = []
    for groups in groupings:
        means = one_hot(groups).T / np.bincount(groups)[:, None]
        inner = means @ products @ means.T
        norms = np.sqrt(np.maximum(inner.diagonal(), 1e-30))
        matrices.append(inner / np.outer(norms, norms))
    matrix = np.stack(matrices)
    count = matrix.shape[1]
    each = (matrix.sum(2) - 1) / (count - 1)
    pairs = matrix[:, *np.triu_indices(count, 1)]
    test, p = compared(name, -np.column_stack([each.mean(1), pairs.min(1), each]), each.min(1))
    return test, matrix[0], p[2:]
