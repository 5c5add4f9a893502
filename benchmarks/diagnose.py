"""What `shoal diagnose` says of three datasets, how often it is wrong without a shift, and what it finds.

    python benchmarks/diagnose.py                          # all of it; heart is read from SHOAL_DATA
    python benchmarks/diagnose.py calibration --times 200 --jobs 16   # the tests that need no training
    python benchmarks/diagnose.py alarms --splits 200      # only false alarms of the whole command

Calibration: families of data whose relation between inputs and labels is the same in all domains (no shift,
strong covariate shift, ten classes, label shift, many noise columns), and others where it was changed. False
alarms: examples of one kind (the patients of Cleveland; upright digits) are dealt at random to two to
six pseudo-domains of unequal sizes. Power: a shift is planted in one of three such domains of digits. Both
with everything as the command does it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.digits import shuffled_digits
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments.diagnose import Sample, described_columns, diagnose, draw, find_shifts, holm
from shoal.experiments.diagnosis import Diagnosis
from shoal.report.diagnose import kinds, text
from shoal.report.tables import Table

DATASETS = ("heart", "rotated-digits", "coloured-digits")
TAKEN, LEAST = 600, 30
KINDS = ("labels", "inputs", "relation")
Array = NDArray[Any]
Made = tuple[Array, Array, Array]
"""Inputs, labels and domains."""


def readings() -> None:
    for name in DATASETS:
        try:
            data = sets.load(name)
        except InputError as error:
            print(f"{name} is left out: {error}\n")
            continue
        found = diagnose(data)
        print(f"### {name}, {found.seconds:.1f} s\n\n```")
        print(text(found.to_dict(), f"shoal compare {name}"))
        print("```\n", flush=True)


@cache
def pool(name: str) -> tuple[torch.Tensor, torch.Tensor, DomainData]:
    """Examples without domains: inputs, labels, and the dataset they are of."""
    if name == "digits":
        images, digits = shuffled_digits(torch.Generator().manual_seed(0))
        return images, digits, sets.load("rotated-digits")
    heart = sets.load("heart", held_out="cleveland")
    rows = torch.as_tensor(heart.splits["test"].indices).long()
    examples = heart.examples
    assert isinstance(examples, TensorData)
    return examples.x[rows], examples.y[rows], heart


def dealt(x: torch.Tensor, y: torch.Tensor, of: DomainData, sizes: list[int], seed: int) -> DomainData:
    """Random examples in pseudo-domains of these sizes; classes and network as in the dataset."""
    rows = torch.as_tensor(np.random.default_rng([seed, 7]).permutation(len(y))[: sum(sizes)])
    domains = Domains.from_sizes({f"d{n}": size for n, size in enumerate(sizes)})
    examples = TensorData(x[rows].view(len(rows), *of.input_shape), y[rows].clone())
    return DomainData(examples, {"train": domains}, of.classes, of.input_shape, of.model)


def unequal(total: int, seed: int) -> list[int]:
    """Two to six sizes of at least LEAST."""
    rng = np.random.default_rng([seed, 8])
    count = int(rng.integers(2, 7))
    spare = total - LEAST * count
    return [LEAST + int(spare * share) for share in rng.dirichlet(np.ones(count))]


def of_pool(job: tuple[str, int]) -> Diagnosis:
    name, seed = job
    x, y, of = pool(name)
    return diagnose(dealt(x, y, of, unequal(min(TAKEN, len(y)), seed), seed), seed=seed, device="cpu")


def of_planted(job: tuple[str, int]) -> Diagnosis:
    kind, seed = job
    return diagnose(planted(kind, 1000 + seed), seed=seed, device="cpu")


def alarms(splits: int, first: int, workers: ProcessPoolExecutor) -> None:
    begun, names = time.perf_counter(), ["cleveland", "digits"]
    try:
        pool("cleveland")
    except InputError as error:
        print(f"heart is left out: {error}")
        names.remove("cleveland")
    table = Table(["pool", "splits", "any alarm", *_names(), "gap intervals without 0"])
    total, wrong = 0, 0
    for number, name in enumerate(names):
        count = splits // len(names) + (number < splits % len(names))
        found = list(workers.map(of_pool, [(name, first + number * splits + n) for n in range(count)]))
        by_name = Counter(alarm for d in found for alarm in d.alarms)
        bad = sum(bool(d.alarms) for d in found)
        gaps = [g for d in found for g in d.gaps]
        outside = sum(g.low > 0 or g.high < 0 for g in gaps)
        total, wrong = total + count, wrong + bad
        table.add(name, count, bad, *(by_name[q] for q in _names()), f"{outside} of {len(gaps)}")
        print(f"{name}: {bad} of {count}", file=sys.stderr, flush=True)
    low, high = wilson(wrong, total)
    print(f"```\n{table.text()}\n```\n")
    print(
        f"Any alarm in {wrong} of {total} splits without a shift: {wrong / total:.1%}, 95 % interval "
        f"{low:.1%} to {high:.1%}. {time.perf_counter() - begun:.0f} s.\n",
        flush=True,
    )


def _names() -> list[str]:
    return [
        *("labels", "inputs", "inputs within labels", "columns", "relation", "held-out"),
        *("gradients at the start", "gradients after training"),
    ]


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """A 95 % interval of a share."""
    z, share = 1.96, hits / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2)) / (1 + z * z / trials)
    return max(0.0, middle - half), middle + half


def planted(kind: str, seed: int) -> DomainData:
    """Three domains of 200 digits; of the last one something is changed."""
    x, y, of = pool("digits")
    x = x.view(len(x), *of.input_shape)
    data = dealt(x, y, of, [200, 200, 200], seed)
    examples = data.examples
    assert isinstance(examples, TensorData)
    last = torch.as_tensor(data.splits["train"].indices_of(2)).long()
    if kind == "labels":  # nearly all are below 5
        rng = np.random.default_rng([seed, 9])
        odds = np.where(y.numpy() < 5, 9.0, 1.0)
        rows = torch.as_tensor(rng.choice(len(y), 200, replace=False, p=odds / odds.sum()))
        examples.x[last], examples.y[last] = x[rows], y[rows]
    elif kind == "inputs":  # paler, with a grey ground
        examples.x[last] = 0.3 + 0.5 * examples.x[last]
    else:  # half of its labels are one too high
        half = last[::2]
        examples.y[half] = (examples.y[half] + 1) % 10
    return data


def power(times: int, workers: ProcessPoolExecutor) -> None:
    table = Table(["planted", "times", "named alone", "any alarm", *_names()])
    for kind in KINDS:
        found = list(workers.map(of_planted, [(kind, seed) for seed in range(times)]))
        by_name = Counter(alarm for d in found for alarm in d.alarms)
        named = sum(kinds(d.to_dict()) == [kind] for d in found)
        table.add(kind, times, named, sum(bool(d.alarms) for d in found), *(by_name[q] for q in _names()))
    print(f"```\n{table.text()}\n```\n", flush=True)


# Calibration of the tests that need no training


def _sizes(rng: np.random.Generator, count: int | None = None, total: int = 600) -> Array:
    """The domain of each example: three to six, of unequal sizes."""
    count = count or int(rng.integers(3, 7))
    spare = total - LEAST * count
    return np.repeat(np.arange(count), [LEAST + int(spare * s) for s in rng.dirichlet(np.full(count, 2.0))])


def _drawn(rng: np.random.Generator, logits: Array) -> Array:
    return (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(int)


def _shifted(rng: np.random.Generator, g: Array, width: int, by: float, scale: float = 1.0) -> Array:
    """Normal inputs whose mean differs by domain."""
    return scale * rng.normal(size=(len(g), width)) + by * rng.normal(size=(g.max() + 1, width))[g]


def no_shift(rng: np.random.Generator) -> Made:
    g = _sizes(rng)
    x = rng.normal(size=(len(g), 8))
    return x, _drawn(rng, 2 * x[:, 0] - x[:, 1]), g


def covariate_linear(rng: np.random.Generator) -> Made:
    g = _sizes(rng)
    x = _shifted(rng, g, 10, 1.0)
    return x, _drawn(rng, 2 * x @ rng.normal(size=10)), g


def covariate_curved(rng: np.random.Generator) -> Made:
    g = _sizes(rng)
    x = _shifted(rng, g, 6, 1.5)
    return x, _drawn(rng, 3 * np.sin(1.5 * x[:, 0]) + 1.5 * x[:, 1] * x[:, 2]), g


def covariate_plane(rng: np.random.Generator) -> Made:
    """Two features, other means and spreads, a chequered probability."""
    g = _sizes(rng)
    spread = rng.uniform(0.5, 1.5, (g.max() + 1, 1))[g]
    x = _shifted(rng, g, 2, 0.0) * spread + _shifted(rng, g, 2, 2.0, 0.0)
    return x, _drawn(rng, 6 * np.sin(2 * x[:, 0]) * np.cos(2 * x[:, 1])), g


def covariate_apart(rng: np.random.Generator) -> Made:
    """Domains that hardly overlap."""
    g = _sizes(rng)
    x = _shifted(rng, g, 5, 4.0)
    return x, _drawn(rng, 2 * np.sin(x[:, 0]) + x[:, 1]), g


def covariate_regression(rng: np.random.Generator) -> Made:
    g = _sizes(rng)
    x = _shifted(rng, g, 6, 1.0)
    return x, x[:, 0] ** 2 + x[:, 1] * x[:, 2] + 0.5 * rng.normal(size=len(g)), g


def ten_centres(rng: np.random.Generator) -> Made:
    """Ten classes that the nearest centre tells apart in every domain, each domain moved a little."""
    g = _sizes(rng)
    y = rng.integers(0, 10, len(g))
    return 1.5 * rng.normal(size=(10, 8))[y] + _shifted(rng, g, 8, 0.4, 0.3), y, g


def ten_cells(rng: np.random.Generator) -> Made:
    """The label is the nearest of ten centres; the inputs lie anywhere, and elsewhere by domain."""
    g = _sizes(rng)
    x, centres = _shifted(rng, g, 8, 0.8, 1.2), 1.2 * rng.normal(size=(10, 8))
    return x, ((x[:, None] - centres) ** 2).sum(-1).argmin(1), g


def ten_rings(rng: np.random.Generator) -> Made:
    """Ten narrow rings in two of eight features, which no probe learns from 600 examples."""
    g = _sizes(rng)
    x = _shifted(rng, g, 8, 1.0, 1.5)
    return x, (np.floor(x[:, 0] ** 2 + x[:, 1] ** 2) % 10).astype(int), g


def _label_shift(rng: np.random.Generator, classes: int, moved: float) -> Made:
    g = _sizes(rng)
    shares = rng.dirichlet(np.ones(classes), g.max() + 1)
    y = np.array([rng.choice(classes, p=shares[d]) for d in g])
    x = rng.normal(size=(classes, 8))[y] + _shifted(rng, g, 8, 0.0)
    x[:, 4:] += _shifted(rng, g, 4, moved, 0.0)
    return x, y, g


def labels_of_3(rng: np.random.Generator) -> Made:
    return _label_shift(rng, 3, 0.0)


def labels_of_10(rng: np.random.Generator) -> Made:
    return _label_shift(rng, 10, 0.0)


def many_noise_columns(rng: np.random.Generator) -> Made:
    g = _sizes(rng)
    x = _shifted(rng, g, 40, 0.7)
    return x, _drawn(rng, 2 * x[:, 0] + 1.5 * x[:, 1]), g


def _flip(rng: np.random.Generator, reversed_domains: int, by: float) -> Made:
    """Five to twenty correlated columns; the first one's relation is reversed in some domains."""
    width, g = int(rng.integers(5, 21)), np.repeat(np.arange(6), 120)
    mixing = np.eye(width) + 0.15 * rng.normal(size=(width, width))
    x = rng.normal(size=(len(g), width)) @ mixing
    x = x / x.std(0) + _shifted(rng, g, width, by, 0.0)
    sign = rng.permutation(np.where(np.arange(6) < reversed_domains, -1, 1))[g]
    return x, _drawn(rng, 2 * sign * x[:, 0] + x[:, 1] - 0.5 * x[:, 2]), g


def flip_in_one(rng: np.random.Generator) -> Made:
    return _flip(rng, 1, 0.0)


def flip_in_half(rng: np.random.Generator) -> Made:
    return _flip(rng, 3, 0.0)


def flip_and_covariate(rng: np.random.Generator) -> Made:
    return _flip(rng, 2, 0.4)


def _flip_of_kind(rng: np.random.Generator, kind: str) -> Made:
    """The first column is yes or no, or the label a number; reversed in one domain of six."""
    width, g = int(rng.integers(5, 21)), np.repeat(np.arange(6), 120)
    x, sign = rng.normal(size=(len(g), width)), np.where(rng.permutation(6) < 1, -1, 1)[g]
    if kind == "regression":
        return x, sign * x[:, 0] + x[:, 1] + rng.normal(size=len(g)), g
    x[:, 0] = rng.random(len(g)) < 0.4
    return x, _drawn(rng, 2.5 * sign * (2 * x[:, 0] - 1) + x[:, 1]), g


def flip_of_a_yes(rng: np.random.Generator) -> Made:
    return _flip_of_kind(rng, "boolean")


def flip_in_regression(rng: np.random.Generator) -> Made:
    return _flip_of_kind(rng, "regression")


def ten_relabelled(rng: np.random.Generator) -> Made:
    """Ten separated classes; in one domain of four, half of the labels are one too high."""
    g, y = _sizes(rng, 4), rng.integers(0, 10, 600)
    y = y[: len(g)]
    x = 1.5 * rng.normal(size=(10, 8))[y] + 0.4 * rng.normal(size=(len(g), 8))
    other = (g == 0) & (rng.random(len(g)) < 0.5)
    return x, np.where(other, (y + 1) % 10, y), g


def threshold_moves(rng: np.random.Generator) -> Made:
    """Inputs and threshold move together: the shares of labels stay, P(y | x) does not."""
    g = _sizes(rng, 4)
    by = np.array([-0.8, -0.3, 0.3, 0.8])[g]
    x = rng.normal(size=(len(g), 6))
    x[:, 0] += by
    return x, _drawn(rng, 3 * (x[:, 0] - by)), g


NULL = (
    *(no_shift, covariate_linear, covariate_curved, covariate_plane, covariate_apart, covariate_regression),
    *(ten_centres, ten_cells, ten_rings, labels_of_3, labels_of_10, many_noise_columns),
)
FLIPS = (flip_in_one, flip_in_half, flip_and_covariate, flip_of_a_yes, flip_in_regression)
CHANGED = (*FLIPS, ten_relabelled, threshold_moves)
FAMILIES = {made.__name__: made for made in (*NULL, *CHANGED)}


def sample_of(family: str, seed: int) -> Sample:
    """A family's random data, as the diagnosis would draw them."""
    x, y, g = FAMILIES[family](np.random.default_rng([seed, 5]))
    classes = None if y.dtype.kind == "f" else int(y.max()) + 1
    labels = torch.as_tensor(y, dtype=torch.float32 if classes is None else torch.int64)
    examples = TensorData(torch.as_tensor(x, dtype=torch.float32), labels)
    domains = {"train": Domains.from_labels(g)}
    return draw(DomainData(examples, domains, classes, x.shape[1:], "mlp"), seed, len(g), 12)


def of_family(job: tuple[str, int]) -> tuple[list[str], list[str], list[str]]:
    """The alarms, the kinds of shift in the verdict, and the columns named for a changed relation."""
    sample = sample_of(*job)
    shifts = find_shifts(sample, job[1])
    questions = holm(shifts.questions)
    result = {"questions": [asdict(q) for q in questions]}
    named = [c for c in described_columns(shifts, questions) if c.changes]
    alarms = [q.name for q in questions if q.alarm]
    return alarms, kinds(result), [c.name for c in sorted(named, key=lambda c: c.relation_p)]


def calibration(times: int, first: int, names: list[str], workers: ProcessPoolExecutor) -> bool:
    """Whether every family keeps to its bound."""
    begun, good = time.perf_counter(), True
    table = Table(["family", "datasets", "any alarm", "relation in the verdict", "bound", "column named", ""])
    for name in names:
        jobs = [(name, first + n) for n in range(times)]
        results = list(workers.map(of_family, jobs, chunksize=max(1, min(8, times // 32))))
        any_alarm = sum(bool(alarms) for alarms, _, _ in results)
        relation = sum("relation" in verdict for _, verdict, _ in results)
        right = sum("feature 1" in columns for _, _, columns in results)
        named = sum(bool(columns) for _, _, columns in results)
        made = FAMILIES[name]
        if made in NULL:
            most = int(0.08 * times)
            kept = relation <= most and named <= most and (made is not no_shift or any_alarm <= most)
            column, bound = f"{named} any", f"at most {most}"
        elif made in FLIPS:
            kept = right >= 0.9 * times
            column, bound = f"{right} right", f"right in {math.ceil(0.9 * times)}"
        else:
            kept, column, bound = True, f"{named} any", "–"
        good &= kept
        table.add(name, times, any_alarm, relation, bound, column, "" if kept else "missed")
        print(
            f"{name}: {relation} of {times}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True
        )
    print(f"```\n{table.text()}\n```\n\n{time.perf_counter() - begun:.0f} s.\n", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=["readings", "calibration", "alarms", "power", []])
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first random split")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME"
    )
    given = parser.parse_args()
    which, good = given.which or ["readings", "calibration", "alarms", "power"], True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "readings" in which:
        print("## Readings\n")
        readings()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, spawn, torch.set_num_threads, (1,)) as workers:
        if "calibration" in which:
            print("## Calibration\n")
            good = calibration(given.times, given.first, given.families, workers)
        if "alarms" in which:
            print("## Without a shift\n")
            alarms(given.splits, given.first, workers)
        if "power" in which:
            print("## Planted in one of three domains of 200 digits\n")
            power(given.times, workers)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
