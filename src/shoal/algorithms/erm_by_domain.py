"""ERM by domain: plain training with one forward pass per domain, the control for BatchNorm."""

from __future__ import annotations

from shoal.algorithms.base import Algorithm


class ERMByDomain(Algorithm):
    """Minimises the mean of the domains' mean losses, each domain's batch in a forward pass of its own.

    Methods that pass domains one by one, as Fish does, show BatchNorm one domain's statistics at a time, and
    pooled ERM those of a mixture. Where a network has BatchNorm, this is the ERM to compare them with.

    Reference: Vapnik, Statistical Learning Theory, 1998; the control is ours.
    """

    family = "risk"
    reference = "Vapnik 1998"
    passes = "apart"
    additive = True
    capturable = True
