"""ERM by domain: plain training with one forward pass per domain, the control for BatchNorm."""

from shoal.algorithms.base import Algorithm


class ERMByDomain(Algorithm):
    """Minimise the mean of the mean losses of the domains, with one forward pass per domain.

    Algorithms with one forward pass per domain, such as Fish, compute BatchNorm statistics per domain, and
    pooled ERM computes them over all domains. For networks with BatchNorm, compare them with this version of
    ERM.

    Reference: Vapnik, Statistical Learning Theory, 1998; the control is ours.
    """

    family = "risk"
    reference = "Vapnik 1998"
    per_domain = True
