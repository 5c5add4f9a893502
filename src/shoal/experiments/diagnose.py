"""Diagnosis before training: do the domains differ, in what, and how large is the generalization gap?

The tests are in :mod:`shoal.experiments.shift_tests`. Over all questions p is corrected by Holm's method:
without any shift, the chance of one alarm or more is at most ``LEVEL``.

The probe is a kernel ridge regression, whose predictions for held-out examples have a closed form. With
A = (K + λI)⁻¹ and targets Y, a fit without the examples F errs on them by (A_FF)⁻¹ (A Y)_F. So each
regrouping is a full refit, and hundreds of them cost seconds.

Images and text are seen through a fixed embedding. It feeds the tests and, unless a model is asked for, a
small network for the short trainings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.data.batch import DomainData, InMemory, collate_of, cut, tensors_in
from shoal.data.loader import seeded, to_device
from shoal.data.sampler import key, permute
from shoal.data.splits import _in_smallest_domain
from shoal.data.table import Category, Preprocessing
from shoal.errors import InputError
from shoal.experiments import statistics
from shoal.experiments.diagnosis import Agreement, Column, Diagnosis, Domain, Gap, Question
from shoal.experiments.protocol import all_domains
from shoal.experiments.shift_tests import (
    Relation,
    column_test,
    corrected,
    gaussian,
    one_hot,
    p_value,
    ranks,
    relation_test,
    shuffles,
    squared_distances,
)
from shoal.gradients import cosines, gradient
from shoal.models import build
from shoal.settings import Count, Range, Seed, checked
from shoal.training.processes import pick_device

Array = NDArray[Any]
Factory = Callable[[int], nn.Module]
"""A fresh model from a seed."""
Tell = Callable[[str, int, int], None]
"""Is told the phase, and how many parts of how many are done."""

LEVEL = 0.05
LEAST = 16
"""A domain of fewer examples is too small to test."""
EXAMPLES, DOMAINS, REGROUPINGS, REPEATS, BUDGET = 2000, 12, 199, 2, 120.0
PROBED = 1200
"""The tests see no more examples than these: their cost grows with the cube."""
COLUMNS = 256
"""Inputs with more features are tested as a whole and not per column."""
FEWEST = 30
"""Steps of a short training, however small the budget."""
CHUNK, CHUNKS = 8, 40
"""Gradients are of so many examples at a time, and of so many chunks per domain at most."""
RIDGE, WORDS, BINS, SKETCH = 0.1, 256, 10, 2**16
SIDE, FILTERS, EMBEDDED = 32, 32, 128
"""Of the embedding of images: their side after pooling, random filters, and the dimension of the result."""
TAKE, PICK, BATCHES = 41, 42, 43  # what a key is for
SMALL = "mlp"
"""The model that is trained on embedded inputs."""
SURE = 2.6
"""Standard errors from 0 at which a domain's correlation has a sign: about 1 in 100 by chance."""


@checked
def diagnose(
    data: DomainData,
    model_factory: Factory | None = None,
    *,
    steps: Count = 150,
    seed: Seed = 0,
    batch_size: Count = 32,
    lr: Annotated[float, Range(above=0)] = 1e-3,
    examples: Count = EXAMPLES,
    max_domains: Annotated[int, Range(2)] = DOMAINS,
    regroupings: Annotated[int, Range(179)] = REGROUPINGS,
    budget: Annotated[float, Range(above=0)] | None = BUDGET,
    device: str | None = None,
    tell: Tell | None = None,
) -> Diagnosis:
    """What :func:`shoal.diagnose` does, of a dataset that is loaded.

    Args:
        model_factory: makes a fresh model from a seed. By default, the dataset's own for flat features; for
            images and text a small network on a fixed embedding.
        regroupings: random regroupings per question; the smallest p is 1 in one more than that, and with
            fewer than 179 none could be small enough to count.
        budget: seconds to aim at, or None. Where a step of training costs too much, there are fewer steps,
            fewer held-out domains, and at last the small network instead of the model; ``reduced`` says so.
    """
    begun, say = time.perf_counter(), tell or (lambda phase, done, total: None)
    end, reduced = begun + (math.inf if budget is None else budget), list[str]()

    def left() -> float:
        return end - time.perf_counter()

    where = pick_device(device)
    sample = draw(data, seed, examples, max_domains, seconds=left() / 3, tell=say)
    if sample.unread:
        reduced.append(f"{sample.unread:,} examples were not read")
    shifts = find_shifts(sample, seed, regroupings, say)
    make, plan, count = model_factory, None, len(sample.names)
    if make is None and isinstance(sample.x, Tensor) and sample.x.ndim == 2:
        make = _builder(data.model, data.input_shape, data.classes)
    if make is not None:
        trainer = _Trainer(sample, make, where, batch_size, lr)
        plan = _planned(trainer, count, steps, seed, left())
        if plan is None:
            reduced.append("a small network on fixed embeddings was trained instead of the model")
    embedded = plan is None
    if plan is None:
        small = replace(sample, x=torch.as_tensor(sample.features).float())
        make = _builder(SMALL, tuple(small.x.shape[1:]), data.classes)
        trainer = _Trainer(small, make, where, batch_size, lr)
        plan = _planned(trainer, count, steps, seed, left()) or (min(steps, FEWEST), 2)
    trainer.steps, count = plan
    if trainer.steps < steps:
        reduced.append(f"training runs have {trainer.steps} steps instead of {steps}")
    if count < len(sample.names):
        reduced.append(f"{count} of {len(sample.names)} domains were held out")
    gaps, average = _gaps(sample, trainer, seed, count, say)
    agreement, gradients = _agreement(sample, trainer, seed, regroupings, say)
    questions = holm([*shifts.questions, *agreement])
    options = {"steps": trainer.steps, "batch_size": batch_size, "lr": lr, "seed": seed}
    options |= {"regroupings": regroupings, "repeats": REPEATS, "level": LEVEL, "least": LEAST}
    options |= {"tested": len(shifts.rows), "relation_tested": shifts.relation.tested}
    return Diagnosis(
        task="regression" if data.classes is None else "classification",
        table=data.inputs.get("kind") == "table",
        domains=sample.described(),
        examples=len(sample.y),
        **sample.rest,
        questions=questions,
        effects={**label_effects(sample.codes, sample.groups), "overlap": shifts.relation.overlap},
        columns=described_columns(shifts, questions),
        confusion=shifts.confusion,
        gaps=gaps,
        average=average,
        gradients=gradients,
        reduced=tuple(reduced),
        settings={**options, "embedded": embedded},
        seconds=round(time.perf_counter() - begun, 3),
    )


def _builder(name: str, shape: Sequence[int], classes: int | None) -> Factory:
    return lambda seed: build(name, input_shape=tuple(shape), classes=classes, seed=seed)


# The sample


@dataclass(frozen=True)
class Parts:
    """A column, the numbers of its features, and what each of them is ("" for the value itself)."""

    name: str
    features: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """The examples that are looked at: inputs, labels and the number of each one's domain."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: Array
    x: Any
    y: Tensor
    classes: int | None
    features: Array
    columns: tuple[Parts, ...]
    """For flat inputs, how each column became features."""
    class_names: tuple[str, ...]
    unread: int
    rest: Mapping[str, Any]
    """What was not drawn, as a diagnosis says it."""

    @property
    def codes(self) -> Array:
        """Classes as numbers from 0; in regression, which tenth of all labels it is in."""
        values = self.y.numpy()
        if self.classes is None:
            edges = np.unique(np.quantile(values, np.arange(1, BINS) / BINS))
            values = np.searchsorted(edges, values, side="right")
        return np.unique(values, return_inverse=True)[1]

    @property
    def targets(self) -> Array:
        """What the probe predicts: classes as columns of 0 and 1, or the label, with mean 0."""
        columns = self.y.numpy()[:, None] if self.classes is None else one_hot(self.codes)
        return np.asarray(columns - columns.mean(0), np.float64)

    def described(self) -> tuple[Domain, ...]:
        raw, found = self.y.numpy(), []
        names = {v: self.class_names[v] if self.class_names else str(v) for v in map(int, np.unique(raw))}
        for d, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            own = raw[self.groups == d]
            if self.classes is None:
                labels = {"mean": float(own.mean()), "sd": float(own.std(ddof=1))}
            else:
                labels = {names[v]: float(np.mean(own == v)) for v in names}
            found.append(Domain(name, size, len(own), labels))
        return tuple(found)


def draw(
    data: DomainData, seed: int, examples: int, most: int, seconds: float = math.inf, tell: Tell | None = None
) -> Sample:
    """Some domains of at least ``LEAST`` examples and about equally many examples of each, by ``seed``.

    Reading ends after ``seconds``, though not before each domain has ``LEAST`` examples.
    """
    every = all_domains(data)
    if len(every) < 2:
        raise InputError(f"there is one domain, {every.names[0]!r}; at least two are required.")
    distinct = every.examples()
    overlapping = len(every.indices) - len(distinct)
    own = every.filter(_in_smallest_domain(every, distinct)) if overlapping else every
    large = np.flatnonzero(own.sizes >= LEAST)
    if len(large) < 2:
        raise InputError(
            f"of {len(own)} domains {len(large) or 'none'} has at least {LEAST} examples of its own; "
            "a diagnosis compares at least two of that size."
        )
    picked = np.sort(large[permute(key(seed, PICK), len(large), np.arange(min(most, len(large))))])
    taken = _shares(own.sizes[picked], max(examples, LEAST * len(picked)))
    rows = [  # in random order: the first few are a sample too
        own.indices_of(d)[permute(key(seed, TAKE, d), int(own.sizes[d]), np.arange(count))]
        for d, count in zip(picked.tolist(), taken, strict=True)
    ]
    index, owner = np.concatenate(rows).astype(np.int64), np.repeat(np.arange(len(picked)), taken)
    order = np.lexsort((owner, np.concatenate([np.arange(n) for n in taken])))  # the domains interleaved
    x, y = _loaded(data.split_as({"test": own}, {}), index[order], seed, LEAST * len(picked), seconds, tell)
    if y.ndim != 1:
        raise InputError(
            f"labels have shape {tuple(y.shape[1:])} each; there must be one number per example."
        )
    read = owner[order][: len(y)]
    back = torch.as_tensor(np.argsort(read, kind="stable"))
    x, y = cut(x, back), y[back]  # type: ignore[arg-type]
    return Sample(
        names=tuple(own.names[d] for d in picked),
        sizes=tuple(int(own.sizes[d]) for d in picked),
        groups=np.sort(read),
        x=x,
        y=y.double() if data.classes is None else y.long(),
        classes=data.classes,
        features=features(x),
        columns=columns_of(data, x),
        class_names=data.class_names,
        unread=len(index) - len(read),
        rest={
            "too_small": {own.names[d]: int(own.sizes[d]) for d in np.flatnonzero(own.sizes < LEAST)},
            "not_drawn": len(large) - len(picked),
            "examples_in_all": len(distinct),
            "overlapping": overlapping,
        },
    )


def columns_of(data: DomainData, x: Any) -> tuple[Parts, ...]:
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
    kept = x.double().std(0, correction=0).numpy() > 1e-9
    found, start = [], 0
    for name, parts in columns:
        own = [n for n in range(len(parts)) if kept[start + n]]
        if own:
            places = tuple(int(kept[: start + n].sum()) for n in own)
            found.append(Parts(name, places, tuple(parts[n] for n in own)))
        start += len(parts)
    return tuple(found)


def _shares(sizes: Array, total: int) -> list[int]:
    """How many of each, ``total`` in all at most: small ones whole, the others equally many."""
    left, shares = total, [0] * len(sizes)
    for done, d in enumerate(np.argsort(sizes, kind="stable").tolist()):
        shares[d] = min(int(sizes[d]), left // (len(sizes) - done))
        left -= shares[d]
    return shares


def _loaded(
    data: DomainData, index: Array, seed: int, least: int, seconds: float, tell: Tell | None
) -> tuple[Any, Tensor]:
    """The first of these examples, as many as could be read in time."""
    examples: Any = data.examples
    if isinstance(examples, InMemory):
        x, y = examples.batch(torch.as_tensor(index, device=examples.device))
    else:
        end, read = time.perf_counter() + seconds, []
        with seeded(seed):
            for i in index:
                read.append(examples[int(i)])
                if tell:
                    tell("reading examples", len(read), len(index))
                if len(read) >= least and time.perf_counter() > end:
                    break
            x, y = collate_of(examples)(read)
    return to_device(x, "cpu"), torch.as_tensor(y).cpu()


def features(x: Any) -> Array:
    """What the tests see: numbers as they are, embedded images, counts of tokens; all standardised.

    Tokens are counted by the remainder of their numbers, so that any vocabulary fits.
    """
    parts, images = [], []
    if isinstance(x, Mapping) and "input_ids" in x:
        ids, mask = x["input_ids"], x.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        bags = torch.zeros(len(ids), WORDS).scatter_add_(1, ids.long() % WORDS, mask.float())
        parts.append((bags / bags.sum(1, keepdim=True).clamp(min=1)).sqrt())
    else:
        leaves = list(tensors_in(x))
        images = [embedding(leaf) for leaf in leaves if leaf.ndim == 4]
        parts = [leaf.reshape(len(leaf), -1).float() for leaf in leaves if leaf.ndim not in (0, 4)]
    if not parts and not images:
        raise InputError(f"inputs are {type(x).__name__} without tensors; they cannot be tested.")
    found = torch.cat([*parts, *images], 1).double().numpy()
    if not np.isfinite(found).all():
        raise InputError("some inputs are not finite numbers; clean them first.")
    found = standardised(found)
    if images and found.shape[1] > EMBEDDED:  # principal components, scaled to a mean variance of 1
        found = found @ np.linalg.eigh(found.T @ found)[1][:, ::-1][:, : min(EMBEDDED, len(found))]
        found = found / max(float(found.std()), 1e-9)
    return found


def standardised(x: Array) -> Array:
    """Without constant features."""
    x, scale = x - x.mean(0), x.std(0)
    return np.asarray(x[:, scale > 1e-9] / scale[scale > 1e-9])


def embedding(images: Tensor) -> Tensor:
    """A fixed embedding of images: pooled pixels, and pooled responses of random filters at two scales.

    The filters have mean 0 and depend on the number of channels alone, so it is the same everywhere.
    """
    channels = images.shape[1]
    generator = torch.Generator().manual_seed(channels)
    filters = torch.randn(FILTERS, channels, 5, 5, generator=generator)
    filters -= filters.mean((1, 2, 3), keepdim=True)
    filters /= filters.flatten(1).norm(dim=1)[:, None, None, None]
    found = []
    for part in images.split(128):
        part = part.float()
        if max(part.shape[2:]) > SIDE:
            part = F.adaptive_avg_pool2d(part, SIDE)
        pooled = [F.adaptive_avg_pool2d(part, 8).flatten(1)]
        for scale in (1, 2):
            smaller = F.avg_pool2d(part, scale) if min(part.shape[2:]) >= 2 * scale else part
            response = F.conv2d(smaller, filters, padding=2)
            pooled.append(F.adaptive_avg_pool2d(response.relu(), 3).flatten(1))
        found.append(torch.cat(pooled, 1))
    return torch.cat(found)


# The tests


def question(name: str, measure: str, statistic: Callable[[Array], float], *groupings: Any) -> Question:
    """A permutation test: the statistic of the domains as they are, and of regroupings; large is a shift."""
    groups, regroupings = groupings
    found, by_chance = statistic(groups), np.array([statistic(g) for g in regroupings])
    null = float(by_chance.mean()), float(by_chance.std())
    return Question(name, measure, found, *null, p_value(found, by_chance))


def holm(questions: Sequence[Question]) -> tuple[Question, ...]:
    """Corrected for the number of questions: the chance of any false alarm stays at most ``LEVEL``."""
    adjusted = statistics.holm([q.p for q in questions])
    return tuple(replace(q, adjusted=p, alarm=p <= LEVEL) for q, p in zip(questions, adjusted, strict=True))


def counts(codes: Array, groups: Array) -> Array:
    """The table of domains by classes."""
    rows, columns = int(groups.max()) + 1, int(codes.max()) + 1
    return np.bincount(groups * columns + codes, minlength=rows * columns).reshape(rows, columns)


def label_question(codes: Array, groups: Array, regroupings: int, seed: int) -> Question:
    """Do the shares of labels differ? By the mutual information of label and domain, the G statistic / 2n."""

    def information(g: Array) -> float:
        table = counts(codes, g) / len(codes)
        expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True)
        full = table > 0
        return float((table[full] * np.log(table[full] / expected[full])).sum())

    drawn = shuffles(groups, regroupings, (seed, 1))
    return question("labels", "mutual information of label and domain", information, groups, drawn)


def label_effects(codes: Array, groups: Array) -> dict[str, float]:
    """Cramér's V, corrected for chance, and how far a domain's shares are from those of all at most."""
    table = counts(codes, groups).astype(float)
    n, (r, c) = table.sum(), table.shape
    rows, columns = table.sum(1, keepdims=True), table.sum(0, keepdims=True)
    distance = float((np.abs(table / rows - columns / n).sum(1) / 2).max())
    if c < 2:
        return {"cramers_v": 0.0, "total_variation": distance}
    chi = float(((table - rows * columns / n) ** 2 / (rows * columns / n)).sum()) / n
    phi = max(0.0, chi - (r - 1) * (c - 1) / (n - 1))
    least = min(r - (r - 1) ** 2 / (n - 1), c - (c - 1) ** 2 / (n - 1)) - 1
    return {"cramers_v": float(np.sqrt(phi / least)) if least > 0 else 0.0, "total_variation": distance}


def inverted(kernel: Array) -> Array:
    """A = (K + λI)⁻¹."""
    return np.asarray(np.linalg.inv(kernel + RIDGE * np.eye(len(kernel))))


def leave_one_out(inverse: Array) -> Array:
    """M, with which M Y are the predictions for each example of a learner that has all others' targets Y."""
    return np.eye(len(inverse)) - inverse / np.diag(inverse)[:, None]


def _guesses(by: Array, groups: Array) -> Array:
    """The domain that the probe ``by`` (of :func:`leave_one_out`) predicts, were all equally large."""
    share = np.bincount(groups) / len(groups)
    belongs = (np.eye(len(share)) - share[None])[groups]
    return np.asarray((by @ (belongs / share[None]).astype(np.float32)).argmax(1))


def _balanced_accuracy(by: Array, groups: Array) -> float:
    right = _guesses(by, groups) == groups
    return float((np.bincount(groups, right) / np.bincount(groups)).mean())


def held_out_question(inverse: Array, targets: Array, groups: Array, regroupings: int, seed: int) -> Question:
    """Is a whole held-out domain harder to predict than as many held-out examples at random?

    By the mean squared error of kernel ridge regression, in units of the targets' variance.
    """
    fitted, variance = inverse @ targets, max(float((targets**2).sum()), 1e-12)

    def error(g: Array) -> float:
        domains = [np.flatnonzero(g == d) for d in range(int(g.max()) + 1)]
        errors = (np.linalg.solve(inverse[np.ix_(own, own)], fitted[own]) for own in domains)
        return sum(float((e**2).sum()) for e in errors) / variance

    measure = "the error of kernel ridge regression in held-out domains"
    return question("held-out", measure, error, groups, shuffles(groups, regroupings, (seed, 4)))


@dataclass(frozen=True)
class Shifts:
    """The tests that need no training, and the examples (``rows`` of the sample) they were made with."""

    questions: tuple[Question, ...]
    relation: Relation
    column_shares: Array
    column_p: Array
    confusion: tuple[tuple[float, ...], ...]
    sample: Sample
    rows: Array
    targets: Array


def find_shifts(
    sample: Sample, seed: int, regroupings: int = REGROUPINGS, tell: Tell | None = None
) -> Shifts:
    """Labels, inputs, columns, the relation between inputs and labels, and whole domains held out.

    P(y | x) changes with the shares of labels alone. Where these differ (p at most ``LEVEL``), the question
    of the relation is therefore whether it changes by more than an offset per domain.
    """
    say = partial(tell or (lambda phase, done, total: None), "testing for shifts")
    taken = _shares(np.bincount(sample.groups), PROBED)
    rows = np.concatenate([np.flatnonzero(sample.groups == d)[:n] for d, n in enumerate(taken)])
    x, codes, groups = sample.features[rows], sample.codes[rows], sample.groups[rows]
    targets = sample.targets[rows]
    own = [column.features for column in sample.columns]
    say(0, 5)
    found = [label_question(sample.codes, sample.groups, regroupings, seed)]
    kernel = gaussian(squared_distances(x))
    inverse, alike = inverted(kernel), codes[:, None] == codes[None]
    by_input = leave_one_out(inverse).astype(np.float32)
    by_both = leave_one_out(inverted(kernel * (0.5 + 0.5 * alike))).astype(np.float32)
    say(1, 5)
    measure = "the probe's balanced accuracy"
    drawn = shuffles(groups, regroupings, (seed, 2))
    found.append(question("inputs", measure, partial(_balanced_accuracy, by_input), groups, drawn))
    drawn, measure = shuffles(groups, regroupings, (seed, 3), within=codes), f"{measure}, given the label"
    accuracy = partial(_balanced_accuracy, by_both)
    found.append(question("inputs within labels", measure, accuracy, groups, drawn))
    say(2, 5)
    shares, p, by_chance = column_test(x, groups, own, regroupings, seed)
    if own:
        measure = "the largest share of a column's variance between domains"
        numbers = (float(shares.max()), float(by_chance.mean()), float(by_chance.std()))
        found.append(Question("columns", measure, *numbers, float(p.min())))
    say(3, 5)
    outcomes = one_hot(codes) if sample.classes is not None else ranks(targets[:, 0])[:, None]
    relation = relation_test(x, outcomes, groups, own, prevalence=found[0].p <= LEVEL, seed=seed)
    measure = "dependence of label and domain given the inputs, in standard deviations"
    numbers = (relation.statistic, relation.chance, relation.deviation)
    found.append(Question("relation", measure, *numbers, relation.p))
    say(4, 5)
    found.append(held_out_question(inverse, targets, groups, regroupings, seed))
    say(5, 5)
    table = counts(_guesses(by_input, groups), groups)
    table = np.pad(table, ((0, 0), (0, len(table) - table.shape[1])))
    confusion = _tuples(table / table.sum(1, keepdims=True))
    return Shifts(tuple(found), relation, shares, p, confusion, sample, rows, outcomes)


def described_columns(shifts: Shifts, questions: Sequence[Question]) -> tuple[Column, ...]:
    """Which columns differ, and whose relation to the label does, where the question as a whole says so."""
    alarms, sample = {q.name for q in questions if q.alarm}, shifts.sample
    x, y, groups = sample.features[shifts.rows], shifts.targets, sample.groups[shifts.rows]
    labels = tuple(sample.described()[0].labels) if sample.classes is not None else ()
    first = 1 if len(labels) == 2 else 0  # of two classes, the second
    correlations = _correlations(x, y[:, first:], groups)
    scale = np.sqrt(np.maximum(np.bincount(groups) - 3, 0))
    found = []
    for n, column in enumerate(sample.columns):
        changes = "relation" in alarms and bool(shifts.relation.columns[n] <= LEVEL)
        own = correlations[:, list(column.features)]  # the feature and class where it varies most
        feature, label = np.unravel_index(own.var(0).argmax(), own.shape[1:])
        cells = own[:, feature, label]
        z = np.arctanh(np.clip(cells, -0.999999, 0.999999)) * scale
        found.append(
            Column(
                name=column.name,
                share=round(float(shifts.column_shares[n]), 6),
                p=float(shifts.column_p[n]),
                differs="columns" in alarms and bool(shifts.column_p[n] <= LEVEL),
                how=_differs_most(x, groups, column, sample.names),
                relation_p=float(shifts.relation.columns[n]),
                changes=changes,
                flips=changes and bool(z.max() > SURE and z.min() < -SURE),
                label=labels[first + int(label)] if labels else "",
                correlations={d: round(float(r), 6) for d, r in zip(sample.names, cells, strict=True)},
            )
        )
    return tuple(found)


def _correlations(x: Array, y: Array, groups: Array) -> Array:
    """Of every feature with every target in every domain, 0 where one is constant."""
    found = []
    for own in (groups == d for d in range(int(groups.max()) + 1)):
        a, b = x[own] - x[own].mean(0), y[own] - y[own].mean(0)
        scale = a.std(0)[:, None] * b.std(0)
        found.append(np.divide(a.T @ b / len(a), scale, out=np.zeros_like(scale), where=scale > 1e-12))
    return np.stack(found)


def _differs_most(x: Array, groups: Array, column: Parts, names: Sequence[str]) -> dict[str, Any]:
    """The domain and the feature that differ most from the rest, in level or in spread (of |ln ratio|)."""
    best, found = -1.0, dict[str, Any]()
    for feature, part in zip(column.features, column.names, strict=True):
        values = x[:, feature]
        yes = len(np.unique(values)) == 2
        shown = (values > values.mean()) * 1.0 if yes else values
        for d, domain in enumerate(names):
            own = groups == d
            level = abs(float(values[own].mean() - values[~own].mean()))
            spread = [max(float(values[side].std()), 1e-3) for side in (own, ~own)]
            ratio = 0.0 if yes else abs(math.log(spread[0] / spread[1])) / 2
            if max(level, ratio) > best:
                best, measure = max(level, ratio), np.std if ratio > level else np.mean
                there, elsewhere = (round(float(measure(shown[side])), 6) for side in (own, ~own))
                found = {"domain": domain, "part": part, "there": there, "elsewhere": elsewhere}
                found["measure"] = "share" if yes else "sd" if ratio > level else "mean"
    return found


# Short trainings


class _Trainer:
    """Trains by ERM on some rows of the sample, all domains pooled."""

    def __init__(
        self, sample: Sample, make: Factory, device: torch.device, batch: int, lr: float, steps: int = 1
    ) -> None:
        self.make, self.device, self.steps, self.batch, self.lr = make, device, steps, batch, lr
        self.x = to_device(sample.x, device)
        self.classification = sample.classes is not None
        y = sample.y
        if not self.classification:
            y = ((y - y.mean()) / (float(y.std()) or 1.0)).float()
        self.y = y.to(device)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        if self.classification:
            return F.cross_entropy(output, y)
        if output.shape != y.shape:
            raise InputError(f"the model gives shape {tuple(output.shape[1:])} per example, not a number.")
        return F.mse_loss(output, y)

    def fresh(self, seed: int) -> nn.Module:
        return self.make(seed).to(self.device).eval()

    def train(self, rows: Array, seed: int) -> nn.Module:
        model = self.fresh(seed)
        passes, element = np.divmod(np.arange(self.steps * self.batch), len(rows))
        order = rows[permute(key(seed, BATCHES, passes), len(rows), element)].reshape(self.steps, -1)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        model.train()
        with seeded(seed):
            for batch in torch.as_tensor(order, device=self.device):
                optimizer.zero_grad()
                self.loss(model(cut(self.x, batch)), self.y[batch]).backward()
                optimizer.step()
        if not all(p.isfinite().all() for p in model.parameters()):
            raise InputError(
                f"a short training run diverged with the learning rate {self.lr:g}; try a lower one."
            )
        return model.eval()

    def scores(self, model: nn.Module, rows: Array) -> Array:
        """Right or wrong for each example; in regression minus its squared error."""
        found = []
        with torch.inference_mode():
            for part in torch.as_tensor(rows, device=self.device).split(256):
                output, y = model(cut(self.x, part)), self.y[part]
                right = output.argmax(1) == y if self.classification else -((output - y) ** 2)
                found.append(right.double().cpu())
        return torch.cat(found).numpy()


def _planned(
    trainer: _Trainer, domains: int, steps: int, seed: int, seconds: float
) -> tuple[int, int] | None:
    """Steps per training and held-out domains that fit, by what a few steps cost; None if too few do."""
    if math.isinf(seconds):
        return steps, domains
    rows = np.arange(len(trainer.y))
    for trainer.steps in (1, 2, 4):  # the first warms up
        begun = time.perf_counter()
        trainer.train(rows, seed)
        cost = time.perf_counter() - begun
        if cost > seconds / 10:
            break
    evaluated = 2 * REPEATS * len(rows) / 256 + 2 * min(domains * CHUNKS, len(rows) / CHUNK)
    room = 0.8 * seconds / (cost / trainer.steps) - evaluated / 2  # steps in all
    for count in range(domains, 1, -1):
        fitting = int(room / (2 * REPEATS * count + 1))
        if fitting >= min(steps, FEWEST):
            return min(steps, fitting), count
    return None


def _gaps(sample: Sample, trainer: _Trainer, seed: int, count: int, say: Tell) -> tuple[tuple[Gap, ...], Gap]:
    """ERM in ``count`` held-out domains, and with a random group of the same size held out instead.

    Each example is predicted by models that were not trained on it, once without its whole domain and once
    without as many others from the held-out domains, from the same initial weights. Everything is repeated;
    intervals hold the spread of the paired difference over examples and that over repeats.
    """
    groups = sample.groups
    held = np.sort(permute(key(seed, PICK, 1), len(sample.names), np.arange(count)))
    own, total, done = np.isin(groups, held), 2 * REPEATS * count, 0
    scores = np.zeros((2, REPEATS, len(groups)))
    for repeat in range(REPEATS):
        regrouped = groups.copy()
        regrouped[own] = next(shuffles(groups[own], 1, (seed, 5, repeat)))
        for way, grouping in enumerate((regrouped, groups)):
            for d in held.tolist():
                out = grouping == d
                model = trainer.train(np.flatnonzero(~out), int(key(seed, repeat, d)[0] >> np.uint64(2)))
                scores[way, repeat, out] = trainer.scores(model, np.flatnonzero(out))
                done += 1
                say("short training runs", done, total)
    means = np.stack([scores[..., groups == d].mean(-1) for d in held], -1)  # way, repeat, domain
    over_repeats = (means[0] - means[1]).var(0, ddof=1).mean() / REPEATS
    t = statistics.t_limit(0.95, count * (REPEATS - 1))  # known from few repeats only
    each, sign = scores.mean(1), 1 if trainer.classification else -1
    found, halves = [], []
    for d in held:
        inside, outside = each[:, groups == d]
        over_examples = (inside - outside).var(ddof=1) / len(inside)
        halves.append(float(np.sqrt(statistics.Z**2 * over_examples + t**2 * over_repeats)))
        found.append(_gap(sample.names[d], inside.mean(), outside.mean(), sign, halves[-1]))
    inside, outside = (sign * np.mean([(g.in_domain, g.held_out) for g in found], 0)).tolist()
    return tuple(found), _gap("average", inside, outside, sign, float(np.linalg.norm(halves)) / count)


def _gap(name: str, inside: float, outside: float, sign: int, half: float) -> Gap:
    gap = float(inside) - float(outside)
    return Gap(name, sign * float(inside), sign * float(outside), gap, gap - half, gap + half)


# Gradients


def _agreement(
    sample: Sample, trainer: _Trainer, seed: int, regroupings: int, say: Tell
) -> tuple[list[Question], dict[str, Agreement]]:
    """Do the domains' gradients agree less than random groups', before and after a training on all?"""
    chunks: list[Array] = []
    for d in range(len(sample.names)):
        own = np.flatnonzero(sample.groups == d)
        some = min(len(own) // CHUNK, CHUNKS)
        order = permute(key(seed, PICK, d), len(own), np.arange(some * CHUNK))
        chunks += list(own[order].reshape(some, CHUNK))
    groups, found, agreements = np.array([sample.groups[c[0]] for c in chunks]), [], {}
    say("gradients", 0, 2)
    for number, when in enumerate(("at the start", "after training")):
        model = trainer.train(np.arange(len(sample.groups)), seed) if number else trainer.fresh(seed)
        products = chunk_products(model, trainer, chunks, seed)
        asked, agreements[when] = agreement_question(
            products, groups, sample.names, regroupings, (seed, 6, number)
        )
        found.append(replace(asked, name=f"gradients {when}"))
        say("gradients", number + 1, 2)
    return found, agreements


def agreement_question(
    products: Array, groups: Array, names: Sequence[str], regroupings: int, seed: Sequence[int]
) -> tuple[Question, Agreement]:
    """By the mean cosine, each domain's mean cosine with the others and the lowest pair, corrected for all.

    A mean over all pairs does not see a minority of reversed domains.
    """
    count = len(names)
    above = np.triu_indices(count, 1)

    def low(g: Array) -> Array:
        matrix = cosine_matrix(products, g)
        each = (matrix.sum(1) - np.diag(matrix)) / (count - 1)
        return np.array([each.mean(), matrix[above].min(), *each])

    found = low(groups)
    by_chance = np.array([low(g) for g in shuffles(groups, regroupings, seed)])
    p = corrected(-found, -by_chance)
    each, matrix = found[2:], cosine_matrix(products, groups)
    pair, worst = int(matrix[above].argmin()), by_chance[:, 2:].min(1)
    measure = "the lowest mean cosine of a domain's gradient with the others'"
    numbers = (float(each.min()), float(worst.mean()), float(worst.std()), float(p.min()))
    return Question("gradients", measure, *numbers), Agreement(
        matrix=_tuples(matrix),
        mean=float(found[0]),
        by_chance=float(by_chance[:, 0].mean()),
        lowest=names[int(each.argmin())],
        cosine=float(each.min()),
        pair=(names[above[0][pair]], names[above[1][pair]]),
        pair_cosine=float(matrix[above][pair]),
        conflicting=tuple(name for name, q in zip(names, p[2:], strict=True) if q <= LEVEL),
    )


def chunk_products(model: nn.Module, trainer: _Trainer, chunks: Sequence[Array], seed: int) -> Array:
    """Inner products of the mean gradients of every two chunks; of sketches of them where they are long."""
    params = [p for p in model.parameters() if p.requires_grad]
    length = sum(p.numel() for p in params)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(SKETCH, (length,), generator=generator).to(trainer.device)
    signs = (torch.randint(2, (length,), generator=generator) * 2 - 1).to(trainer.device)
    rows = []
    for chunk in chunks:
        index = torch.as_tensor(chunk, device=trainer.device)
        loss = trainer.loss(model(cut(trainer.x, index)), trainer.y[index])  # type: ignore[arg-type]
        flat = torch.cat([g.reshape(-1) for g in gradient(loss, params)])
        if length > SKETCH:
            flat = flat.new_zeros(SKETCH).index_add_(0, places, flat * signs)
        rows.append(flat.cpu())
    found = torch.stack(rows).double()
    if not found.isfinite().all():
        raise InputError("some gradients are not finite: the model's outputs overflow on these inputs.")
    return np.asarray((found @ found.T).numpy())


def cosine_matrix(products: Array, groups: Array) -> Array:
    """Cosines between the mean gradients of groups of chunks."""
    means = one_hot(groups).T
    means = means / means.sum(1, keepdims=True)
    return np.asarray(cosines(torch.as_tensor(means @ products @ means.T)))


def _tuples(matrix: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(v), 6) for v in row) for row in matrix)
