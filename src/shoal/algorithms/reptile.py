"""Reptile: Fish's counter-example, whose walk stays within one domain."""

from __future__ import annotations

from shoal.algorithms.fish import Fish


class Reptile(Fish):
    """Fish's update on S batches of *one* domain, another domain every step.

    It maximises the inner product of gradients *within* a domain, which helps fast adaptation to each domain
    and not what they have in common. Takes Fish's settings.

    Reference: Nichol et al., On First-Order Meta-Learning Algorithms, 2018.
    """

    family = "meta-learning"
    reference = "Nichol et al. 2018"
    draw = "one-domain"
    compares_domains = False
