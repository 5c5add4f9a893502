"""What `shoal diagnose` says of three datasets, how often it is wrong without a shift, and what it finds.

    python benchmarks/diagnose.py                          # all of it; heart is read from SHOAL_DATA
    python benchmarks/diagnose.py alarms --splits 200      # only false alarms

False alarms: examples of one kind (the patients of Cleveland; upright digits) are dealt at random to two to
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
from functools import cache

import numpy as np
import torch

from shoal.bench.diagnose import Diagnosis, diagnose
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.digits import shuffled_digits
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.report.diagnose import kinds, text
from shoal.report.tables import Table

DATASETS = ("heart", "rotated-digits", "coloured-digits")
TAKEN, LEAST = 600, 30
KINDS = ("labels", "inputs", "relation")


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
    heart = sets.load("heart", test="cleveland")
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
    table = Table(["pool", "splits", "any alarm", *_names(), "price intervals without 0"])
    total, wrong = 0, 0
    for number, name in enumerate(names):
        count = splits // len(names) + (number < splits % len(names))
        found = list(workers.map(of_pool, [(name, first + number * splits + n) for n in range(count)]))
        by_name = Counter(alarm for d in found for alarm in d.alarms)
        bad = sum(bool(d.alarms) for d in found)
        prices = [p for d in found for p in d.prices]
        outside = sum(p.low > 0 or p.high < 0 for p in prices)
        total, wrong = total + count, wrong + bad
        table.add(name, count, bad, *(by_name[q] for q in _names()), f"{outside} of {len(prices)}")
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
        *("labels", "inputs", "inputs within labels", "relation", "unseen"),
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=["readings", "alarms", "power", []])
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first random split")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="processes")
    given = parser.parse_args()
    which = given.which or ["readings", "alarms", "power"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "readings" in which:
        print("## Readings\n")
        readings()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.at_once, spawn, torch.set_num_threads, (1,)) as workers:
        if "alarms" in which:
            print("## Without a shift\n")
            alarms(given.splits, given.first, workers)
        if "power" in which:
            print("## Planted in one of three domains of 200 digits\n")
            power(given.times, workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
