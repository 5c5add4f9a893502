"""Reptile: the update of Fish with an inner loop within one domain, as a control."""

from shoal.algorithms.fish import Fish


class Reptile(Fish):
    """Apply the update of Fish to S batches of *one* domain, another domain in every step.

    It maximises the inner product of gradients *within* a domain, which helps fast adaptation to each domain
    and not what they have in common. The hyperparameters are those of Fish.

    Reference: Nichol et al., On First-Order Meta-Learning Algorithms, 2018.
    """

    family = "meta-learning"
    reference = "Nichol et al. 2018"
    draw = "one-domain"
    min_domains = 1
