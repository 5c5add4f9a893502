"""Diagnosis before training: do the domains differ, in what, and what does it cost not to have seen one?

Every question is a permutation test. If nothing differed between the domains, it would not matter which
example is in which of them: so a number is computed for the domains as they are and for random regroupings
of the same examples into groups of the same sizes, and p is how often chance does as much. That is exact for
any sample size. Over all questions p is corrected by Holm's method: without any shift, the chance of one
alarm or more is at most ``LEVEL``.

Probe and quick learner are kernel ridge regressions, whose predictions for examples left out have a closed
form. With A = (K + λI)⁻¹ and targets Y, a learner that was not shown the examples F errs on them by
(A_FF)⁻¹ (A Y)_F. So each regrouping is a full refit, and hundreds of them cost seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.bench.protocol import all_domains
from shoal.data.batch import DomainData, cut, tensors_in
from shoal.data.loader import collate_of, seeded, to_device
from shoal.data.sampler import key, permute
from shoal.data.splits import _in_smallest_domain
from shoal.errors import InputError
from shoal.gradients import gradient
from shoal.models import build
from shoal.training.processes import pick_device

Array = NDArray[Any]
Factory = Callable[[int], nn.Module]
"""A fresh model from a seed."""

LEVEL = 0.05
LEAST = 16
"""A domain of fewer examples is too small to judge."""
EXAMPLES, DOMAINS, REGROUPINGS, REPEATS = 2000, 12, 199, 2
PROBED = 1200
"""The probe looks at no more examples than these: its cost grows with their cube."""
CHUNK, CHUNKS = 8, 40
"""Gradients are of so many examples at a time, and so many of them a domain at most."""
RIDGE, SIDE, WORDS, BINS, SKETCH = 0.1, 16, 256, 10, 2**16
TAKE, PICK, BATCHES = 41, 42, 43  # what a key is for


@dataclass(frozen=True)
class Domain:
    """A domain, its examples in the sample, and its labels: shares of classes, or mean and deviation."""

    name: str
    size: int
    taken: int
    labels: Mapping[str, float]


@dataclass(frozen=True)
class Question:
    """One test: what was ``found``, and the mean (``chance``) and ``deviation`` of it over regroupings."""

    name: str
    measure: str
    found: float
    chance: float
    deviation: float
    p: float
    adjusted: float = 1.0
    """p after Holm's correction over all questions."""
    alarm: bool = False


@dataclass(frozen=True)
class Price:
    """How well ERM does in a domain if some of its other examples were trained on, and if none were.

    Accuracy, or the squared error in units of the labels' variance. ``price`` is what not having seen the
    domain costs, and ``low`` to ``high`` about 95 % of where it may lie.
    """

    name: str
    seen: float
    unseen: float
    price: float
    low: float
    high: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found, as plain data; :mod:`shoal.report.diagnose` puts it into words."""

    task: str
    domains: tuple[Domain, ...]
    too_small: Mapping[str, int]
    left_aside: int
    """Domains that were large enough but not drawn."""
    examples: int
    examples_in_all: int
    overlapping: int
    """Examples in several domains; each counts in the smallest of them."""
    questions: tuple[Question, ...]
    effects: Mapping[str, float]
    confusion: tuple[tuple[float, ...], ...]
    """For each domain, the share of its examples that the probe takes for one of each."""
    prices: tuple[Price, ...]
    average: Price
    cosines: Mapping[str, tuple[tuple[float, ...], ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def alarms(self) -> tuple[str, ...]:
        return tuple(q.name for q in self.questions if q.alarm)

    def __getitem__(self, question: str) -> Question:
        return next(q for q in self.questions if q.name == question)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "alarms": list(self.alarms)}


def diagnose(
    data: DomainData,
    model_factory: Factory | None = None,
    *,
    steps: int = 150,
    seed: int = 0,
    batch_size: int = 32,
    lr: float = 1e-3,
    examples: int = EXAMPLES,
    domains: int = DOMAINS,
    regroupings: int = REGROUPINGS,
    device: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Looks at all domains of a dataset, whatever split they are in, and at short trainings on them.

    It is a look at data before training and not a test of a method: the domains that a benchmark would leave
    out are looked at as well. At most ``domains`` of them and ``examples`` in all are drawn, by ``seed``.

    Args:
        model_factory: makes a fresh model from a seed; by default the dataset's own model.
        steps: of each short ERM training, by Adam at rate ``lr``.
        regroupings: how many for each question; the smallest p is 1 in one more than that.
    """
    given = {"steps": (steps, 1), "domains": (domains, 2), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    for name, (value, least) in given.items():
        if value < least:
            raise InputError(f"{name}={value}; it must be at least {least}.")
    if not lr > 0:
        raise InputError(f"lr={lr}; a learning rate must be positive.")
    if regroupings < 139:
        raise InputError(f"regroupings={regroupings}; with fewer than 139 no p can be small enough to count.")
    begun, say = time.perf_counter(), tell or (lambda line: None)
    sample = draw(data, seed, examples, domains)
    make = model_factory or (
        lambda number: build(data.model, input_shape=data.input_shape, classes=data.classes, seed=number)
    )
    trainer = _Trainer(sample, make, pick_device(device), steps, batch_size, lr)
    say(f"{len(sample.names)} domains, {len(sample.y):,} examples; probing")
    probe = _Probe(sample, seed, regroupings)
    questions = [
        label_question(sample.codes, sample.groups, regroupings, seed),
        *probe.questions(),
        unseen_question(probe.inverse, probe.targets, probe.groups, regroupings, seed),
    ]
    prices, average = _prices(sample, trainer, seed, say)
    say("gradients")
    agreement, cosines = _agreement(sample, trainer, make, seed, regroupings)
    return Diagnosis(
        task="regression" if data.classes is None else "classification",
        domains=sample.described(),
        too_small=sample.too_small,
        left_aside=sample.left_aside,
        examples=len(sample.y),
        examples_in_all=sample.in_all,
        overlapping=sample.overlapping,
        questions=holm([*questions, *agreement]),
        effects=label_effects(sample.codes, sample.groups),
        confusion=probe.confusion(),
        prices=prices,
        average=average,
        cosines=cosines,
        settings={
            "steps": steps,
            "batch_size": batch_size,
            "lr": lr,
            "seed": seed,
            "regroupings": regroupings,
            "repeats": REPEATS,
            "level": LEVEL,
            "least": LEAST,
        },
        seconds=round(time.perf_counter() - begun, 3),
    )


# What is looked at


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
    too_small: Mapping[str, int]
    left_aside: int
    in_all: int
    overlapping: int
    class_names: tuple[str, ...] = ()

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
        """What the quick learner predicts: classes as columns of 0 and 1, or the label, with mean 0."""
        values = self.y.numpy()
        columns = values[:, None] if self.classes is None else np.eye(self.codes.max() + 1)[self.codes]
        return np.asarray(columns - columns.mean(0), np.float64)

    def described(self) -> tuple[Domain, ...]:
        found, values, raw = [], np.unique(self.y.numpy()), self.y.numpy()
        for d, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            own = raw[self.groups == d]
            if self.classes is None:
                labels = {"mean": float(own.mean()), "sd": float(own.std(ddof=1))}
            else:
                names = {v: self.class_names[v] if self.class_names else str(v) for v in map(int, values)}
                labels = {names[v]: float(np.mean(own == v)) for v in names}
            found.append(Domain(name, size, len(own), labels))
        return tuple(found)


def draw(data: DomainData, seed: int, examples: int, most: int) -> Sample:
    """Some domains of at least ``LEAST`` examples and about equally many examples of each, by ``seed``."""
    every = all_domains(data)
    if len(every) < 2:
        raise InputError(f"there is one domain, {every.names[0]!r}; a diagnosis compares at least two.")
    distinct = every.examples()
    overlapping = len(every.indices) - len(distinct)
    own = every.filter(_in_smallest_domain(every, distinct)) if overlapping else every
    large = np.flatnonzero(own.sizes >= LEAST)
    small = {own.names[d]: int(own.sizes[d]) for d in np.flatnonzero(own.sizes < LEAST)}
    if len(large) < 2:
        raise InputError(
            f"of {len(own)} domains {len(large) or 'none'} has at least {LEAST} examples of its own; "
            "a diagnosis compares at least two of that size."
        )
    picked = np.sort(large[permute(key(seed, PICK), len(large), np.arange(min(most, len(large))))])
    taken = _shares(own.sizes[picked], max(examples, LEAST * len(picked)))
    rows, groups = [], []
    for number, (d, count) in enumerate(zip(picked.tolist(), taken, strict=True)):
        places = permute(key(seed, TAKE, d), int(own.sizes[d]), np.arange(count))
        rows.append(own.indices_of(d)[places])  # in random order: the first few are a sample too
        groups.append(np.full(count, number))
    index = np.concatenate(rows).astype(np.int64)
    x, y = _loaded(data.split_as({"test": own}, {}), index, seed)
    if y.ndim != 1:
        raise InputError(f"labels have shape {tuple(y.shape[1:])} each; a diagnosis takes one number each.")
    return Sample(
        names=tuple(own.names[d] for d in picked),
        sizes=tuple(int(own.sizes[d]) for d in picked),
        groups=np.concatenate(groups),
        x=x,
        y=y.double() if data.classes is None else y.long(),
        classes=data.classes,
        features=features(x),
        too_small=small,
        left_aside=len(large) - len(picked),
        in_all=len(distinct),
        overlapping=overlapping,
        class_names=data.class_names,
    )


def _shares(sizes: Array, total: int) -> list[int]:
    """How many of each, ``total`` in all at most: small ones whole, the others equally many."""
    if sizes.sum() <= total:
        return [int(s) for s in sizes]
    left, shares = total, np.zeros(len(sizes), np.int64)
    for done, d in enumerate(np.argsort(sizes, kind="stable")):
        shares[d] = min(int(sizes[d]), left // (len(sizes) - done))
        left -= int(shares[d])
    return [int(s) for s in shares]


def _loaded(data: DomainData, index: Array, seed: int) -> tuple[Any, Tensor]:
    examples: Any = data.examples
    if hasattr(examples, "batch"):
        x, y = examples.batch(torch.as_tensor(index, device=examples.device))
    else:
        with seeded(seed):
            x, y = collate_of(examples)([examples[int(i)] for i in index])
    return to_device(x, "cpu"), torch.as_tensor(y).cpu()


def features(x: Any) -> Array:
    """What the probe sees of each example, standardised: numbers as they are, small images, counts of tokens.

    Tokens are counted by the remainder of their numbers, so that any vocabulary fits.
    """
    parts = []
    if isinstance(x, Mapping) and "input_ids" in x:
        ids, mask = x["input_ids"], x.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        bags = torch.zeros(len(ids), WORDS).scatter_add_(1, ids.long() % WORDS, mask.float())
        parts.append((bags / bags.sum(1, keepdim=True).clamp(min=1)).sqrt())
    else:
        for leaf in tensors_in(x):
            if not leaf.ndim:
                continue
            if leaf.ndim == 4 and max(leaf.shape[2:]) > SIDE:
                leaf = F.adaptive_avg_pool2d(leaf.float(), SIDE)
            parts.append(leaf.reshape(len(leaf), -1).float())
    if not parts:
        raise InputError(f"inputs are {type(x).__name__} without tensors; the probe cannot look at them.")
    found = torch.cat(parts, 1).double().numpy()
    if not np.isfinite(found).all():
        raise InputError("some inputs are not finite numbers; clean them first.")
    found = found - found.mean(0)
    scale = found.std(0)
    return np.asarray(found[:, scale > 1e-9] / scale[scale > 1e-9])


# The questions


def p_value(found: float, by_chance: Array) -> float:
    """How often chance does at least as much, the arrangement that was found among the possible ones."""
    return float((1 + np.sum(by_chance >= found - 1e-9)) / (1 + len(by_chance)))


def question(name: str, measure: str, found: float, by_chance: Array, more: bool = True) -> Question:
    """``more``: whether large values speak for a shift."""
    sign = 1 if more else -1
    p = p_value(sign * found, sign * by_chance)
    return Question(name, measure, float(found), float(by_chance.mean()), float(by_chance.std()), p)


def holm(questions: Sequence[Question]) -> tuple[Question, ...]:
    """Corrected for the number of questions: the chance of any false alarm stays at most ``LEVEL``."""
    adjusted, largest = {}, 0.0
    for done, n in enumerate(np.argsort([q.p for q in questions], kind="stable").tolist()):
        largest = max(largest, min(1.0, (len(questions) - done) * questions[n].p))
        adjusted[n] = largest
    return tuple(
        Question(q.name, q.measure, q.found, q.chance, q.deviation, q.p, adjusted[n], adjusted[n] <= LEVEL)
        for n, q in enumerate(questions)
    )


def shuffles(groups: Array, count: int, seed: Sequence[int], within: Array | None = None) -> Iterator[Array]:
    """Regroupings into groups of the same sizes; with ``within``, only among examples alike in it."""
    rng = np.random.default_rng(seed)
    if within is None:
        for _ in range(count):
            yield rng.permutation(groups)
        return
    order = np.argsort(within, kind="stable")
    for _ in range(count):
        shuffled = order[np.lexsort((rng.random(len(order)), within[order]))]
        mixed = np.empty_like(groups)
        mixed[order] = groups[shuffled]
        yield mixed


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

    by_chance = np.array([information(g) for g in shuffles(groups, regroupings, (seed, 1))])
    return question("labels", "mutual information of label and domain", information(groups), by_chance)


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


def likeness(x: Array) -> Array:
    """A Gaussian kernel, as wide as the median distance."""
    squares = (x**2).sum(1)
    distances = np.maximum(squares[:, None] + squares[None] - 2 * x @ x.T, 0)
    middle = float(np.median(distances[np.triu_indices(len(x), 1)]))
    return np.asarray(np.exp(-distances / (middle if middle > 0 else 1.0)))


def inverted(kernel: Array) -> Array:
    """A = (K + λI)⁻¹."""
    return np.asarray(np.linalg.inv(kernel + RIDGE * np.eye(len(kernel))))


def left_out_one(inverse: Array) -> Array:
    """M, with which M Y are the predictions for each example of a learner that has all others' targets Y."""
    return np.eye(len(inverse)) - inverse / np.diag(inverse)[:, None]


class _Probe:
    """Tells the domains apart by the inputs, and by inputs and labels together."""

    def __init__(self, sample: Sample, seed: int, regroupings: int) -> None:
        taken = _shares(np.bincount(sample.groups), PROBED)
        rows = np.concatenate([np.flatnonzero(sample.groups == d)[:n] for d, n in enumerate(taken)])
        self.groups, self.codes, self.targets = sample.groups[rows], sample.codes[rows], sample.targets[rows]
        self.seed, self.count = seed, regroupings
        kernel = likeness(sample.features[rows])
        same = self.codes[:, None] == self.codes[None]
        self.inverse = inverted(kernel)
        self.by_input = left_out_one(self.inverse).astype(np.float32)
        self.by_both = left_out_one(inverted(kernel * (0.5 + 0.5 * same))).astype(np.float32)
        self.share = np.bincount(self.groups) / len(self.groups)

    def guesses(self, by: Array, groups: Array) -> Array:
        """The domain that each example most likely is from, were all domains equally large."""
        belongs = (np.eye(len(self.share)) - self.share[None])[groups]
        return np.asarray((by @ (belongs / self.share[None]).astype(np.float32)).argmax(1))

    def accuracy(self, by: Array, groups: Array) -> float:
        """Over domains, each counted once."""
        right = self.guesses(by, groups) == groups
        return float((np.bincount(groups, right) / np.bincount(groups)).mean())

    def questions(self) -> list[Question]:
        by_input, by_both = (
            self.accuracy(self.by_input, self.groups),
            self.accuracy(self.by_both, self.groups),
        )
        anyhow = list(shuffles(self.groups, self.count, (self.seed, 2)))
        one = np.array([self.accuracy(self.by_input, g) for g in anyhow])
        both = np.array([self.accuracy(self.by_both, g) for g in anyhow])
        alike = shuffles(self.groups, self.count, (self.seed, 3), within=self.codes)
        within = np.array([self.accuracy(self.by_both, g) for g in alike])
        measure = "the probe's balanced accuracy"
        gain = "what the label adds to that accuracy"
        return [
            question("inputs", measure, by_input, one),
            question("inputs within labels", f"{measure}, told the label", by_both, within),
            question("relation", gain, by_both - by_input, both - one),
        ]

    def confusion(self) -> tuple[tuple[float, ...], ...]:
        table = counts(self.guesses(self.by_input, self.groups), self.groups)
        table = np.pad(table, ((0, 0), (0, len(table) - table.shape[1])))
        return _tuples(table / table.sum(1, keepdims=True))


def unseen_question(inverse: Array, targets: Array, groups: Array, regroupings: int, seed: int) -> Question:
    """Is it worse to have seen nothing of a whole domain than nothing of as many examples at random?

    The quick learner's mean squared error, in units of the targets' variance.
    """
    fitted, variance = inverse @ targets, max(float((targets**2).sum()), 1e-12)

    def error(g: Array) -> float:
        total = 0.0
        for d in range(int(g.max()) + 1):
            own = np.flatnonzero(g == d)
            total += float((np.linalg.solve(inverse[np.ix_(own, own)], fitted[own]) ** 2).sum())
        return total / variance

    by_chance = np.array([error(g) for g in shuffles(groups, regroupings, (seed, 4))])
    return question("unseen", "the quick learner's error in domains left out", error(groups), by_chance)


# Short trainings


class _Trainer:
    """Trains by ERM on some rows of the sample, all domains together."""

    def __init__(
        self, sample: Sample, make: Factory, device: torch.device, steps: int, batch: int, lr: float
    ) -> None:
        self.make, self.device, self.steps, self.batch, self.lr = make, device, steps, batch, lr
        self.x = to_device(sample.x, device)
        self.classification = sample.classes is not None
        y = sample.y
        if not self.classification:
            deviation = float(y.std())
            y = ((y - y.mean()) / (deviation if deviation > 0 else 1.0)).float()
        self.y = y.to(device)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        if self.classification:
            return F.cross_entropy(output, y)
        if output.shape != y.shape:
            raise InputError(f"the model gives shape {tuple(output.shape[1:])} an example, not a number.")
        return F.mse_loss(output, y)

    def train(self, rows: Array, seed: int) -> nn.Module:
        model = self.make(seed).to(self.device)
        passes, element = np.divmod(np.arange(self.steps * self.batch), len(rows))
        order = rows[permute(key(seed, BATCHES, passes), len(rows), element)].reshape(self.steps, -1)
        index = torch.as_tensor(order, device=self.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        model.train()
        with seeded(seed):
            for batch in index:
                optimizer.zero_grad()
                self.loss(model(cut(self.x, batch)), self.y[batch]).backward()
                optimizer.step()
        if not all(p.isfinite().all() for p in model.parameters()):
            raise InputError(f"a short training diverged at the learning rate {self.lr:g}; try a lower one.")
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


def _prices(
    sample: Sample, trainer: _Trainer, seed: int, say: Callable[[str], None]
) -> tuple[tuple[Price, ...], Price]:
    """ERM in every domain left out, beside ERM with a random group of the same size left out.

    Each example is predicted by models that have not seen it, once without its whole domain and once without
    as many others from anywhere: as many examples are trained on, from the same initial weights. Everything
    is repeated, and intervals hold the spread of the paired difference over examples and that over repeats.
    """
    groups, count = sample.groups, len(sample.names)
    total = 2 * REPEATS * count
    scores = np.zeros((2, REPEATS, len(groups)))
    for repeat in range(REPEATS):
        (random,) = shuffles(groups, 1, (seed, 5, repeat))
        for way, grouping in enumerate((random, groups)):
            for d in range(count):
                rows, out = np.flatnonzero(grouping != d), np.flatnonzero(grouping == d)
                start = int(key(seed, repeat, d)[0] >> np.uint64(2))
                model = trainer.train(rows, start)
                scores[way, repeat, out] = trainer.scores(model, out)
                say(f"short trainings: {repeat * 2 * count + way * count + d + 1} of {total}")
    means = np.stack([scores[..., groups == d].mean(-1) for d in range(count)], -1)  # way, repeat, domain
    luck = (means[0] - means[1]).var(0, ddof=1).mean() / REPEATS
    freedom = count * (REPEATS - 1)
    each = scores.mean(1)
    sign = 1 if trainer.classification else -1
    found, halves = [], []
    for d, name in enumerate(sample.names):
        seen, unseen = each[0, groups == d], each[1, groups == d]
        half = _half((seen - unseen).var(ddof=1) / len(seen), luck, freedom)
        found.append(_price(name, sign * seen.mean(), sign * unseen.mean(), sign, half))
        halves.append(half)
    both = (float(np.mean([p.seen for p in found])), float(np.mean([p.unseen for p in found])))
    return tuple(found), _price("average", *both, sign, float(np.linalg.norm(halves)) / count)


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18)
"""The 97.5 % points of Student's t with 1, 2, … degrees of freedom."""


def _half(over_examples: float, over_repeats: float, freedom: int) -> float:
    """Half of a 95 % interval from two variances; that over repeats is known from few of them only."""
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 2.16
    return float(np.sqrt(1.96**2 * over_examples + t**2 * over_repeats))


def _price(name: str, seen: float, unseen: float, sign: int, half: float) -> Price:
    price = sign * (float(seen) - float(unseen))
    return Price(name, float(seen), float(unseen), price, price - half, price + half)


# Gradients


def _agreement(
    sample: Sample, trainer: _Trainer, make: Factory, seed: int, regroupings: int
) -> tuple[list[Question], dict[str, tuple[tuple[float, ...], ...]]]:
    """Do the domains' gradients agree less than random groups', before and after a training on all?"""
    models = {"at the start": make(seed).to(trainer.device).eval()}
    models["after training"] = trainer.train(np.arange(len(sample.groups)), seed)
    chunks: list[Array] = []
    owner: list[int] = []
    for d in range(len(sample.names)):
        own: Array = np.flatnonzero(sample.groups == d)
        some = min(len(own) // CHUNK, CHUNKS)
        order = permute(key(seed, PICK, d), len(own), np.arange(some * CHUNK))
        chunks += list(own[order].reshape(some, CHUNK))
        owner += [d] * some
    groups, found, matrices = np.array(owner), [], {}
    for number, (when, model) in enumerate(models.items()):
        products = chunk_products(model, trainer, chunks, seed)
        by_chance = [mean_cosine(products, g) for g in shuffles(groups, regroupings, (seed, 6, number))]
        name, measure = f"gradients {when}", "the mean cosine between two domains' gradients"
        found.append(question(name, measure, mean_cosine(products, groups), np.array(by_chance), more=False))
        matrices[when] = _tuples(cosine_matrix(products, groups))
    return found, matrices


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
    means = np.eye(int(groups.max()) + 1)[groups].T
    means /= means.sum(1, keepdims=True)
    inner = means @ products @ means.T
    norms = np.sqrt(np.maximum(np.diag(inner), 0))
    scale = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    return np.asarray(inner * scale[:, None] * scale[None])


def mean_cosine(products: Array, groups: Array) -> float:
    """Over pairs of different groups."""
    cosines, count = cosine_matrix(products, groups), int(groups.max()) + 1
    return float((cosines.sum() - np.trace(cosines)) / (count * (count - 1)))


def _tuples(matrix: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(v), 6) for v in row) for row in matrix)
