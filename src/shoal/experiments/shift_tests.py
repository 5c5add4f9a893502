"""Tests for shifts between domains, as functions of arrays.

*Permutation tests* ask whether the domains differ at all: p is the share of random regroupings, into groups
of the same sizes, whose statistic is at least as large.

The *test of the relation* asks whether P(y | x) differs between domains, whose inputs may differ. It
multiplies two residuals, of the label and of the domain, each predicted from x out of sample:

    u_i = (1[d_i = d] − P̂(d | x_i)) · (1[y_i = c] − P̂(c | x_i))

If label and domain are independent given x, u has mean 0 everywhere in x (Shah & Peters, The Hardness of
Conditional Independence Testing, 2020), and the error of the two predictions enters only as their product:
one weak prediction raises no alarm, and where the domains do not overlap the second residual vanishes. The
statistic is a quadratic form of u in kernels of x; its null distribution comes from random signs (a wild
bootstrap). Several statistics at a time (one per column) are corrected by the distribution of their maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FLIPS = 999
"""Random signs of the test of the relation."""
PENALTIES = 10.0 ** np.arange(-3, 4)
NEIGHBOURS = (1, 3, 10, 30)
FOLDS, STEPS, SHRINKAGE = 5, 100, 1e-3
"""Parts of the examples; steps and ridge penalty of the softmax regression."""
WIDTHS = (1.0, 0.25, 0.06)
"""Of Gaussian kernels, times the median squared distance."""
ADDITIVE = 64
"""Up to so many features there is an additive kernel too: a smooth function of each."""
OVERLAPPING = 25
"""With fewer examples in the overlap of the domains, the test of the relation abstains."""


def p_value(found: float, by_chance: Array) -> float:
    """The share of random arrangements with at least as much, the one that was found among them."""
    return float((1 + np.sum(by_chance >= found - 1e-9)) / (1 + len(by_chance)))


def shuffles(groups: Array, count: int, seed: Sequence[int], within: Array | None = None) -> Iterator[Array]:
    """Regroupings into groups of the same sizes; with ``within``, only among examples alike in it."""
    rng = np.random.default_rng(seed)
    order = None if within is None else np.argsort(within, kind="stable")
    for _ in range(count):
        if within is None or order is None:
            yield rng.permutation(groups)
            continue
        mixed = np.empty_like(groups)
        mixed[order] = groups[order[np.lexsort((rng.random(len(order)), within[order]))]]
        yield mixed


def one_hot(codes: Array) -> Array:
    return np.eye(int(codes.max()) + 1)[codes]


def corrected(found: Array, by_chance: Array) -> Array:
    """p of each statistic, corrected by the distribution of the largest; ``by_chance`` is (times, each)."""
    every = _z(np.vstack([found, by_chance]))
    largest = every[1:].max(1)
    return np.array([p_value(float(z), largest) for z in every[0]])


def _z(statistics: Array, least: float = 1e-12) -> Array:
    """Standardised over the times and what was found."""
    scale = statistics.std(0)
    return np.asarray((statistics - statistics.mean(0)) / np.where(scale > least, scale, 1.0))


# Prediction out of sample


def squared_distances(x: Array) -> Array:
    squares = (x**2).sum(1)
    return np.asarray(np.maximum(squares[:, None] + squares[None] - 2 * x @ x.T, 0))


def gaussian(distances: Array, width: float = 1.0) -> Array:
    """A Gaussian kernel, as wide as ``width`` times the median squared distance."""
    middle = width * float(np.median(distances[np.triu_indices(len(distances), 1)]))
    return np.asarray(np.exp(-distances / (middle if middle > 0 else 1.0)))


def centred(kernel: Array) -> Array:
    kernel = kernel - kernel.mean(0)
    return np.asarray(kernel - kernel.mean(1)[:, None])


def predicted(x: Array, several: Sequence[Array]) -> list[Array]:
    """Each example's targets, predicted from others; ``x`` is standardised.

    By kernel ridge regressions (linear, additive, Gaussian of several widths), each fifth of the examples
    from the others by a closed form, and nearest neighbours; for classes also by a softmax regression on all
    of these. For each of the ``several`` targets the one that errs least is taken. (Of one example left out
    at a time, the mean of the others would reveal its label.)
    """
    count, width = x.shape
    distances = squared_distances(x)
    fold = np.random.default_rng(0).permutation(count) % FOLDS
    ends = np.cumsum([t.shape[1] for t in several])[:-1]
    every = np.hstack(several)
    found: list[dict[str, tuple[float, Array]]] = [{} for _ in several]

    def offer(family: str, guesses: Array) -> None:
        for target, best, guess in zip(several, found, np.split(guesses, ends, 1), strict=True):
            error = float(((target - guess) ** 2).sum())
            if family not in best or error < best[family][0]:
                best[family] = (error, guess)

    for family, kernel in _kernels(x, distances) if width else ():
        values, vectors = np.linalg.eigh(centred(kernel))
        values, mean = np.maximum(values, 0), every.mean(0)
        inside = vectors.T @ (every - mean)
        for penalty in PENALTIES:
            shrink = values / (values + penalty)
            residual = every - mean - vectors @ (shrink[:, None] * inside)
            guesses = np.empty_like(every)
            for own in (np.flatnonzero(fold == f) for f in range(FOLDS)):
                hat = (vectors[own] * shrink) @ vectors[own].T + 1 / count
                guesses[own] = every[own] - np.linalg.solve(np.eye(len(own)) - hat, residual[own])
            offer(family, guesses)
    np.fill_diagonal(distances, np.inf)
    order = np.argsort(distances, 1, kind="stable")[:, : max(NEIGHBOURS)]
    for k in NEIGHBOURS:
        offer("neighbours", every[order[:, :k]].mean(1))
    for target, best in zip(several, found, strict=True):
        if target.shape[1] > 1:
            guess = _softmax_fit(np.hstack([guess for _, guess in best.values()]), target, fold)
            best["softmax"] = (float(((target - guess) ** 2).sum()), guess)
    return [min(best.values(), key=lambda one: one[0])[1] for best in found]


def _kernels(x: Array, distances: Array) -> Iterator[tuple[str, Array]]:
    width = x.shape[1]
    yield "linear", x @ x.T / width
    if 1 < width <= ADDITIVE:
        yield "additive", sum(np.exp(-((v[:, None] - v[None]) ** 2)) for v in x.T) / width
    for scale in WIDTHS:
        yield "gaussian", gaussian(distances, scale)


def _softmax_fit(scores: Array, targets: Array, fold: Array) -> Array:
    """Probabilities by softmax regression on scores, each fifth predicted from the others.

    By Newton steps with a bound of the Hessian, ½ XᵀX for each class (Böhning 1992): one inversion, and
    every step lowers the loss.
    """
    x = np.hstack([scores - scores.mean(0), np.ones((len(scores), 1))])
    found = np.empty(targets.shape)
    for number in range(FOLDS):
        own, y = x[fold != number], targets[fold != number]
        penalty = SHRINKAGE * len(own) * np.eye(x.shape[1])
        bound = np.linalg.inv(own.T @ own / 2 + penalty)
        weight = np.zeros((x.shape[1], y.shape[1]))
        for _ in range(STEPS):
            weight += bound @ (own.T @ (y - softmax(own @ weight)) - penalty @ weight)
        found[fold == number] = softmax(x[fold == number] @ weight)
    return found


def softmax(logits: Array) -> Array:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True))


# The relation between inputs and labels


@dataclass(frozen=True)
class Relation:
    """Whether P(y | x) differs between domains: ``p`` in all, and per column of the inputs."""

    p: float
    statistic: float
    """The largest of all statistics, in standard deviations of the null distribution."""
    chance: float
    deviation: float
    columns: Array
    """p per column, corrected for their number."""
    overlap: float
    """How many examples, of all, lie where several domains do: 1 if x says nothing of the domain."""
    tested: bool
    """False where the domains hardly overlap: nothing can be said then."""


def relation_test(
    x: Array,
    targets: Array,
    groups: Array,
    columns: Sequence[Sequence[int]] = (),
    *,
    prevalence: bool = False,
    seed: int = 0,
    flips: int = FLIPS,
) -> Relation:
    """Does the label depend on the domain, given the inputs?

    Args:
        x: standardised features.
        targets: classes as columns of 0 and 1, or one column with the label of a regression.
        columns: for each column of the inputs, the numbers of its features.
        prevalence: whether other shares of labels in each domain are allowed for: each then has its own
            offset (added to log P̂(y | x), or to the mean of a regression), and only what goes beyond that
            counts. Needed where the shares differ, as these alone change P(y | x).
    """
    share = np.bincount(groups) / len(groups)
    domains = one_hot(groups)
    label, domain = predicted(x, [targets, domains])
    domain = np.clip(domain, 0, 1)
    classes = targets.shape[1] > 1
    label = np.clip(label, 0, 1) if classes else label
    overlap = float(min(1.0, (domain * (1 - domain)).sum(1).mean() / (share * (1 - share)).sum()))
    if overlap * len(x) < OVERLAPPING or not len(x[0]):
        return Relation(1.0, 0.0, 0.0, 0.0, np.ones(len(columns)), overlap, tested=False)
    rng = np.random.default_rng((seed, 11))
    signs = np.vstack([np.ones(len(x)), rng.choice([-1.0, 1.0], (flips, len(x)))]).T
    slopes = [partial(x, list(own)) for own in columns]
    residuals = [targets - label]
    if prevalence:
        residuals.append(targets - with_offsets(label, targets, groups))
    smooth = sum(_scaled(gaussian(squared_distances(x), w)) for w in WIDTHS[:2]) + _scaled(x @ x.T)
    found = []
    for number, residual in enumerate(residuals):
        outer = ((domains - domain) @ (domains - domain).T) * (residual @ residual.T)
        whole = _quadratic((smooth + (number == 0)) * outer, signs)
        each = [_sums(phi, domains - domain, residual, outer, signs) for phi in slopes]
        statistics = np.stack([whole, *each], 1)
        z = _z(statistics).max(1)
        numbers = (float(z[0]), float(z[1:].mean()), float(z[1:].std()))
        found.append((corrected(statistics[0], statistics[1:]), numbers))
    p = np.max([f[0] for f in found], 0)  # all must see it
    _, weakest = max(found, key=lambda f: float(f[0].min()))
    return Relation(float(p.min()), *weakest, p[1:], overlap, tested=True)


def with_offsets(label: Array, targets: Array, groups: Array) -> Array:
    """Predictions with an offset per domain, so that its labels are as frequent as they are there."""
    found = label.copy()
    for d in range(int(groups.max()) + 1):
        own = groups == d
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
    """A column's features without what the other columns say of them, by ridge regression."""
    others = np.delete(x, own, 1)
    if not others.shape[1]:
        return np.asarray(x[:, own])
    inner = others.T @ others + 0.01 * len(x) * np.eye(others.shape[1])
    return np.asarray(x[:, own] - others @ np.linalg.solve(inner, others.T @ x[:, own]))


def _scaled(kernel: Array) -> Array:
    kernel = centred(kernel)
    return kernel * (len(kernel) / max(float(np.trace(kernel)), 1e-12))


def _quadratic(matrix: Array, signs: Array) -> Array:
    """Σ_ij s_i M_ij s_j over pairs of different examples, for each column of signs."""
    matrix = matrix.copy()
    np.fill_diagonal(matrix, 0)
    return np.asarray((signs * (matrix @ signs)).sum(0))


def _sums(phi: Array, domain: Array, label: Array, outer: Array, signs: Array) -> Array:
    """The same with M = φφᵀ ∘ outer, by the cheaper of two ways."""
    if phi.shape[1] * domain.shape[1] * label.shape[1] > len(phi):
        return _quadratic((phi @ phi.T) * outer, signs)
    terms = (phi[:, :, None, None] * domain[:, None, :, None] * label[:, None, None, :]).reshape(len(phi), -1)
    return np.asarray(((terms.T @ signs) ** 2).sum(0) - (terms**2).sum())


# Columns whose distribution differs


def column_test(
    x: Array, groups: Array, columns: Sequence[Sequence[int]], regroupings: int, seed: int
) -> tuple[Array, Array, Array]:
    """Per column, the share of its variance between domains and a p corrected for their number.

    The third array is the largest share in each regrouping. Variances are those of ranks and of their
    distances from the middle, so that level and spread both count and outliers do not.
    """
    if not columns:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    level = np.stack([ranks(v) for v in x.T], 1)
    values = _z(np.stack([level, np.abs(level)], 2).reshape(len(x), -1), 1e-9)
    sizes = np.bincount(groups)

    def shares(g: Array) -> Array:
        between = ((one_hot(g).T @ values) ** 2 / sizes[:, None]).sum(0).reshape(-1, 2) / len(x)
        return np.array([[between[list(own)].mean(), between[list(own)].max()] for own in columns]).T

    mean, largest = shares(groups)
    by_chance = np.array([shares(g) for g in shuffles(groups, regroupings, (seed, 7))])
    return largest, corrected(mean, by_chance[:, 0]), by_chance[:, 1].max(1)


def ranks(values: Array) -> Array:
    """From −1 to 1, equal values sharing one."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - count / 2
    return np.asarray(2 * middle[place] / len(values) - 1)
