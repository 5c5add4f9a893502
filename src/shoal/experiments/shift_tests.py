"""Tests for shifts between domains, as functions of arrays.

*What is independent*: entities. The rows of one entity in one domain are a unit; an entity that appears in
several domains is a unit in each of them, which makes domains more alike and the tests more cautious.

*Permutation tests* ask whether the domains differ at all: the domains of units are permuted, and p is the
share of permutations whose statistic is at least as large. The classifier that predicts the domain from the
inputs is a ridge regression on smooth features of the inputs, fitted anew for every permutation, and predicts
entities that it was not fitted to.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import rel_entr
from scipy.stats import rankdata
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold

from shoal.experiments.statistics import codes_of
from shoal.gradients import cosines

Array = NDArray[Any]
Folds = Sequence[tuple[Array, Array]]
LEVEL, PERMUTATIONS, FLIPS = 0.05, 199, 499
"""Level of the tests; random permutations of domains, and random signs of the test of the relation."""
FOLDS, SMOOTH, WIDTH, TREES = 5, 150, 64, 40
"""Parts of the entities; smooth features, the principal components they are made of; trees of a forest."""
MOST_CLASSES = 10
"""Rarer classes are one."""
OVERLAPPING = 40
"""With fewer entities in the overlap of the domains, the test of the relation abstains."""


@dataclass(frozen=True)
class Rows:
    """Rows to test: standardised features, labels, and numbers of domains and entities."""

    x: Array
    labels: Array
    """Classes from 0, or the labels of a regression."""
    classes: int | None
    domains: Array
    entities: Array
    columns: Sequence[Sequence[int]] = ()
    """For each column of the inputs, the numbers of its features."""

    @property
    def codes(self) -> Array:
        """Classes from 0, the rarer ones as one; in regression, which tenth of all labels it is in."""
        if self.classes is None:
            edges = np.unique(np.quantile(self.labels, np.arange(1, 10) / 10))
            return np.unique(np.searchsorted(edges, self.labels, side="right"), return_inverse=True)[1]
        often = np.argsort(-np.bincount(self.labels), kind="stable")
        merged = np.minimum(np.argsort(often)[self.labels], MOST_CLASSES - 1)
        return np.unique(merged, return_inverse=True)[1]

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
    measure: str
    statistic: float
    null: float
    deviation: float
    p: float


# Permutations


def permuted(domains: Array, units: Array, seed: Sequence[int], strata: Array | None = None) -> Array:
    """Domains of rows (1 + permutations, n): as they are, then permuted among units (of the same stratum)."""
    rng = np.random.default_rng(seed)
    own = np.zeros(units.max() + 1, np.int64)
    own[units] = domains
    strata = np.zeros_like(own) if strata is None else strata
    order, mixed, found = np.argsort(strata, kind="stable"), np.empty_like(own), [domains]
    for _ in range(PERMUTATIONS):
        mixed[order] = own[np.lexsort((rng.random(len(own)), strata))]
        found.append(mixed[units])
    return np.stack(found)


def compared(name: str, measure: str, values: Array, p: float | None = None) -> Test:
    """A test by the first of ``values``, which was observed, and the others, under the null hypothesis."""
    null = values[1:]
    p = p_value(values) if p is None else p
    return Test(name, measure, float(values[0]), float(null.mean()), float(null.std()), p)


def p_value(values: Array) -> float:
    """The share of values that are at least as large as the first, which was observed."""
    return float(np.mean(values >= values[0] - 1e-9))


def corrected(values: Array) -> tuple[Array, Array]:
    """p of several statistics (1 + times, each), corrected by the distribution of their maximum; that too."""
    scale = values.std(0)
    z = (values - values.mean(0)) / np.where(scale > 1e-12, scale, 1.0)
    largest = z.max(1)
    return np.array([p_value(np.append(own, largest[1:])) for own in z[0]]), largest


def one_hot(codes: Array) -> Array:
    return np.eye(int(codes.max()) + 1)[codes]


# Labels and inputs


def label_test(rows: Rows, groupings: Array) -> tuple[Test, Array]:
    """Do the shares of labels differ? By the mutual information of label and domain; the shares too."""
    targets, values = one_hot(rows.codes), []
    for groups in groupings:
        joint = one_hot(groups).T @ targets / len(targets)
        values.append(rel_entr(joint, joint.sum(1, keepdims=True) * joint.sum(0)).sum())
    table = one_hot(rows.domains).T @ targets
    shares = table / table.sum(1, keepdims=True)
    return compared("labels", "mutual information of label and domain", np.array(values)), shares


def smooth(x: Array, labels: Array | None = None, seed: int = 0, most: int = SMOOTH) -> Array:
    """Features of which linear models are smooth in x: x itself and those of a Gaussian kernel.

    With ``labels`` (n, classes), the kernel of two rows with different labels is halved.
    """
    if min(x.shape) > WIDTH:
        x = PCA(WIDTH, random_state=seed % 2**32).fit_transform(x)
        x = x / max(float(x.std()), 1e-9)
    gamma = 0.5 / max(x.shape[1], 1)
    whole = x if labels is None else np.hstack([x, labels * np.sqrt(np.log(2) / (2 * gamma))])
    if not whole.shape[1]:
        return np.zeros((len(x), 1))
    kernel = Nystroem(gamma=gamma, n_components=min(most, len(x)), random_state=seed % 2**32)
    found = np.hstack([x / np.sqrt(max(x.shape[1], 1)), kernel.fit_transform(whole)])
    return np.asarray(found - found.mean(0))


def domain_test(name: str, features: Array, groupings: Array, folds: Folds) -> tuple[Test, Array]:
    """Can the domain be predicted? By the balanced accuracy of a classifier; its guesses too.

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
    return compared(name, "balanced accuracy of predicting the domain", accuracy), guesses[0]


def column_test(rows: Rows, groupings: Array) -> tuple[Test, Array, Array]:
    """The test, and per column the share of its variance between domains and a p corrected for their number.

    Variances are those of ranks and of their distances from the middle, so that level and spread both count
    and outliers do not.
    """
    level = rankdata(rows.x, axis=0) / len(rows.x)
    level -= level.mean(0)
    values = np.stack([level, np.abs(level)], 2).reshape(len(level), -1)
    scale = values.std(0)
    values = (values - values.mean(0)) / np.where(scale > 1e-9, scale, 1.0)
    means, largest = [], []
    for groups in groupings:
        member = one_hot(groups)
        between = ((member.T @ values) ** 2 / member.sum(0)[:, None]).sum(0).reshape(-1, 2) / len(values)
        means.append([between[list(own)].mean() for own in rows.columns])
        largest.append([between[list(own)].max() for own in rows.columns])
    p, most = corrected(np.array(means))[0], np.array(largest).max(1)
    measure = "largest share of a column's variance between domains"
    return compared("columns", measure, most, float(p.min())), np.array(largest[0]), p


# The relation between inputs and labels


def predicted(rows: Rows, targets: Array, folds: Folds, seed: int) -> Array:
    """Targets predicted by models that were fitted to other entities.

    By a linear model, a smooth one and a forest, of which the one that errs least is used.
    """
    forests = (ExtraTreesRegressor, ExtraTreesClassifier)[targets.shape[1] > 1]
    forest = forests(TREES, min_samples_leaf=5, max_features=0.5, random_state=seed % 2**32)
    curved = smooth(rows.x, seed=seed, most=WIDTH)
    found = [
        cross_fitted(linear_model(targets, 1.0), rows.x, targets, folds),
        cross_fitted(linear_model(targets, 10.0), curved, targets, folds),
        cross_fitted(forest, rows.x, targets, folds),
    ]
    return min(found, key=lambda guess: float(((targets - guess) ** 2).sum()))


def linear_model(targets: Array, strength: float) -> Any:
    """Logistic regression for classes, ridge regression for a number; the stronger, the less regularized."""
    return LogisticRegression(C=strength, max_iter=300) if targets.shape[1] > 1 else Ridge(1 / strength)


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


def relation_test(rows: Rows, folds: Folds, *, prevalence: bool, seed: int = 0) -> tuple[Test, Array, float]:
    """Does the label depend on the domain, given the inputs? The test, p per column, and the overlap.

    The overlap is the share of rows that lie where several domains do: 1 if x says nothing of the domain.
    Where it is too small, nothing is tested, and the deviation under the null hypothesis is 0.

    Args:
        prevalence: whether other shares of labels in each domain are allowed for: each then has its own
            offset (added to log P̂(y | x), or to the mean of a regression), and only what goes beyond that
            counts. Needed where the shares differ, as these alone change P(y | x).
    """
    name, measure = "relation", "dependence of label and domain given the inputs, in standard deviations"
    member, entities, count = one_hot(rows.domains), codes_of(rows.entities, len(rows.x)), len(rows.x)
    domain, share = predicted(rows, member, folds, seed), member.mean(0)
    overlap = float(min(1.0, (domain * (1 - domain)).sum(1).mean() / (share * (1 - share)).sum()))
    if overlap * (entities.max() + 1) < OVERLAPPING or not rows.x.shape[1]:
        return Test(name, measure, 0.0, 0.0, 0.0, 1.0), np.ones(len(rows.columns)), overlap
    targets = rows.targets if rows.classes else rankdata(rows.labels)[:, None] / count - 0.5
    label = predicted(rows, targets, folds, seed)
    residuals = [targets - label]
    if prevalence:
        residuals.append(targets - with_offsets(label, targets, rows.domains))
    signs = np.random.default_rng((seed, 3)).choice([-1.0, 1.0], (FLIPS, entities.max() + 1))
    signs = np.vstack([np.ones(count), signs[:, entities]]).T.astype(np.float32)
    functions = smooth(rows.x, seed=seed, most=WIDTH)
    functions /= np.sqrt((functions**2).sum(1).mean())
    slopes = [partial(rows.x, list(own)) for own in rows.columns]
    found = []
    for number, residual in enumerate(residuals):
        products = ((member - domain)[:, :, None] * residual[:, None, :]).reshape(count, -1)
        whole = functions if number else np.column_stack([np.ones(count), functions])
        found.append(corrected(np.stack([_squares(phi, products, signs) for phi in (whole, *slopes)], 1)))
    p = np.max([own for own, _ in found], 0)  # all must see it
    _, largest = max(found, key=lambda one: float(one[0].min()))
    return compared(name, measure, largest, float(p.min())), p[1:], overlap


def _squares(functions: Array, products: Array, signs: Array) -> Array:
    """Σ (Σ_i s_i φ(x_i) u_i)² over the functions φ and the products u, for each column of signs."""
    sums = ((phi[:, None] * products).T.astype(np.float32) @ signs for phi in functions.T)
    return np.sum([(own**2).sum(0) for own in sums], 0)


def with_offsets(label: Array, targets: Array, domains: Array) -> Array:
    """Predictions with an offset per domain, so that its labels are as frequent as they are there."""
    found = label.copy()
    for own in (domains == d for d in range(int(domains.max()) + 1)):
        if targets.shape[1] == 1:
            found[own] += (targets[own] - label[own]).mean()
            continue
        wanted = targets[own].sum(0) + 0.5
        odds = np.maximum(label[own], 1e-3)
        for _ in range(50):
            odds /= odds.sum(1, keepdims=True)
            odds *= wanted / (odds.sum(0) + 0.5)
        found[own] = odds / odds.sum(1, keepdims=True)
    return found


def partial(x: Array, own: list[int]) -> Array:
    """A column's features without what the other columns say of them."""
    others = np.delete(x, own, 1)
    if not others.shape[1]:
        return x[:, own]
    explained = Ridge(0.01 * len(x)).fit(others, x[:, own]).predict(others)
    return np.asarray(x[:, own] - explained.reshape(len(x), -1))


# Gradients


def agreement_test(name: str, products: Array, groupings: Array) -> tuple[Test, Array, Array]:
    """Do the domains' gradients agree less than those of random groups?

    By the mean cosine, each domain's mean cosine with the others and the lowest pair, corrected for all: a
    mean over all pairs does not see a minority of reversed domains. ``products`` are the inner products of
    the rows' gradients. Returns the test, the cosines, and p for each domain.
    """
    matrices = []
    for groups in groupings:
        means = one_hot(groups).T
        means = means / means.sum(1, keepdims=True)
        matrices.append(cosines(torch.as_tensor(means @ products @ means.T)).numpy())
    matrix = np.stack(matrices)
    count = matrix.shape[1]
    each = (matrix.sum(2) - 1) / (count - 1)
    pairs = matrix[:, *np.triu_indices(count, 1)]
    p, _ = corrected(-np.column_stack([each.mean(1), pairs.min(1), each]))
    measure = "lowest mean cosine of a domain's gradient with the others'"
    return compared(name, measure, each.min(1), float(p.min())), matrix[0], p[2:]
