"""Reweighted: plain training on examples drawn equally often from every domain."""

from shoal.algorithms.erm import ERM


class Reweighted(ERM):
    """Minimise the mean loss over examples that are sampled equally often from every domain.

    For domains of very different sizes: the examples of small domains are repeated more often.

    Reference: Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021.
    """

    reference = "Koh et al. 2021"
    draw = "balanced"
