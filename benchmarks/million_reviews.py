"""A million reviews: how long until the first batch, and how much memory does it take?

Run: python benchmarks/million_reviews.py [--reviews N] [--reviewers T] [--folder DIR]. It writes an imitation
of Amazon-WILDS, loads it in fresh processes (with nothing kept on disk from before, then with the index and
the tokens of the same batches, twice), and deletes it. Exits with 1 if the first takes over 20 s or 2 GB.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `imitations`

SECONDS, GIGABYTES = 20, 2.0
TEXTS, WORDS = 2000, 105
SLOTS, BATCH, BATCHES = 5, 8, 20


def rows(reviews: int, reviewers: int) -> Iterator[list[Any]]:
    from imitations.wilds_text import AMAZON_HEADER, amazon_review

    rng = np.random.default_rng(0)
    texts = [amazon_review(rng, n, "", WORDS - 17)[5] for n in range(TEXTS)]
    yield list(AMAZON_HEADER)
    who, what = rng.integers(0, reviewers, reviews), rng.integers(0, TEXTS, reviews)
    for n, (user, text) in enumerate(zip(who.tolist(), what.tolist(), strict=True)):
        body = f"{n} {texts[text]}"
        year = 2000 + n % 19
        yield [
            *(f"A{user:013d}", f"B{n % 99_991:09d}", float(1 + text % 5), f"01 1, {year}", 946_684_800 + n),
            *(body, body[:20], bool(n % 2), f"Category_{n % 24}", year),
        ]


def write(place: Path, reviews: int, reviewers: int) -> float:
    """The megabytes written."""
    (place / "splits").mkdir(parents=True)
    with (place / "reviews.csv").open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows(
            rows(reviews, reviewers)
        )
    split = np.random.default_rng(1).choice(
        [-1, 0, 1, 2, 3, 4], reviews, p=[0.05, 0.7, 0.1, 0.025, 0.1, 0.025]
    )
    with (place / "splits" / "user.csv").open("w") as lines:
        lines.write("split,clean\n" + "".join(f"{s},True\n" for s in split.tolist()))
    return (place / "reviews.csv").stat().st_size / 1e6


def measure(folder: Path) -> dict[str, float]:
    """In this process: seconds to the dataset, to the first batch and to more, and the peak memory."""
    began = time.perf_counter()
    from shoal.data import DomainBatchSampler, MetaBatchLoader
    from shoal.datasets import load

    imported = time.perf_counter()
    data = load("amazon", folder=str(folder), tokenizer=str(folder / "tiny-bert"))
    loaded = time.perf_counter()
    sampler = DomainBatchSampler(data.splits["train"], BATCH, SLOTS, seed=0)
    batches = iter(MetaBatchLoader(data.examples, sampler, stop=BATCHES))
    first = next(batches)
    drawn = time.perf_counter()
    count = 1 + sum(1 for _ in batches)
    ended = time.perf_counter()
    assert len(first) == SLOTS
    assert count == BATCHES
    return {
        "import": imported - began,
        "index and split": loaded - imported,
        "first batch": drawn - loaded,
        "in all": drawn - began,
        "ms a further batch": (ended - drawn) / (BATCHES - 1) * 1000,
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "reviewers": len(data.splits["train"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reviews", type=int, default=10**6)
    parser.add_argument("--reviewers", type=int, default=10**5)
    parser.add_argument(
        "--folder", type=Path, help="in which to write (default: the system's for such files)"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return 0

    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        from imitations.wilds_text import fake_tokenizer

        fake_tokenizer(folder)
        began = time.perf_counter()
        megabytes = write(folder / "amazon_v2.1", args.reviews, args.reviewers)
        print(f"{args.reviews:,} reviews by {args.reviewers:,} reviewers, {megabytes:,.0f} MB", end=" ")
        print(f"(written in {time.perf_counter() - began:.0f} s)")
        found = []
        for what in ("nothing kept", "kept", "and again"):
            again = [sys.executable, __file__, "--measure", str(folder)]
            surroundings = {**os.environ, "SHOAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
            answer = subprocess.run(
                again, env=surroundings, check=True, capture_output=True, text=True
            ).stdout
            found.append(json.loads(answer.splitlines()[-1]))
            if what == "nothing kept":
                print(f"{'':>14}" + "".join(f"{column:>20}" for column in found[0]))
            print(f"{what:>14}" + "".join(f"{value:>20,.2f}" for value in found[-1].values()))
        cache = sum(path.stat().st_blocks * 512 for path in (folder / "cache").rglob("*") if path.is_file())
        print(f"on disk: {cache / 1e6:,.1f} MB kept")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores")
    return int(found[0]["in all"] > SECONDS or found[0]["peak GB"] > GIGABYTES)


if __name__ == "__main__":
    sys.exit(main())
