"""Reweighted: plain training on examples drawn equally often from every domain."""

from __future__ import annotations

from shoal.algorithms.erm import ERM


class Reweighted(ERM):
    """Minimises the mean loss over examples of which each domain gives as many, whatever its size.

    The way to train on groups of very different sizes: domains are dealt out example by example, so small
    ones come again sooner.

    Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
    """

    reference = "Koh et al. 2021"
    draw = "balanced"
