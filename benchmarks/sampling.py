"""A million domains over a hundred million examples: does a draw still cost what it costs for ten?

Run: python benchmarks/sampling.py [--examples N] [--domains T]. Exits with 1 if the largest set's median
draw takes more than twice the smallest's.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time

import numpy as np

from shoal.data import DomainBatchSampler, Domains

SLOTS, BATCH = 5, 32
DRAWS, LIMIT = 3000, 2.0


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def build(domains: int, examples: int) -> tuple[DomainBatchSampler, float]:
    labels = np.random.default_rng(0).integers(0, domains, examples, dtype=np.int32)
    began = time.perf_counter()
    made = Domains.from_labels(labels)
    return DomainBatchSampler(made, BATCH, SLOTS, steps=1), time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=10**8)
    parser.add_argument("--domains", type=int, default=10**6)
    args = parser.parse_args()

    settings = [(10, 10**3), (10**3, 10**5), (args.domains, args.examples)]
    before = peak_gb()
    samplers, build_times = zip(*(build(*setting) for setting in settings), strict=True)
    peak = peak_gb()

    times: list[list[float]] = [[] for _ in settings]
    for draw in range(DRAWS):  # interleaved, so that a busy machine slows all alike
        step = draw * 1009  # far apart: no draw finds its data in the cache because of the one before
        for sampler, taken in zip(samplers, times, strict=True):
            began = time.perf_counter()
            sampler.plan(step)
            taken.append(time.perf_counter() - began)
    medians = [statistics.median(taken) * 1e6 for taken in times]

    print(f"one draw of {SLOTS} × {BATCH} examples, median of {DRAWS}")
    print(f"{'domains':>10} {'examples':>12} {'build s':>8} {'arrays MB':>10} {'draw µs':>8} {'ratio':>6}")
    for (domains, examples), sampler, built, median in zip(
        settings, samplers, build_times, medians, strict=True
    ):
        held = sampler.domains
        megabytes = (held.indices.nbytes + held.offsets.nbytes + held.sizes.nbytes) / 1e6
        row = f"{domains:>10,} {examples:>12,} {built:>8.2f} {megabytes:>10.1f} {median:>8.0f}"
        print(f"{row} {median / medians[0]:>6.2f}")
    print(f"peak memory {peak:.1f} GB ({before:.1f} GB before building, labels included)")
    return 1 if medians[-1] / medians[0] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
