"""PCGrad: what one domain's gradient takes from another is cut away."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients


class PCGrad(Algorithm):
    """The mean of the domains' gradients after each was made orthogonal to those it conflicts with.

    Gradient i goes through the others in turn; where its product with g_j is negative, its component along
    g_j is removed. The order is round a circle from i on, random because the batches come in random order.

    Reference: Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020 (which takes the sum).
    """

    family = "gradient surgery"
    reference = "Yu et al. 2020"
    passes = "apart"
    compares_domains = True
    capturable = True

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        gradients, log = self.domain_gradients(batches, engine)
        stacked = [torch.stack(same) for same in zip(*gradients, strict=True)]
        flat = [s.flatten(1) for s in stacked]
        weights = surgery(torch.stack([f @ f.T for f in flat]).sum(0))
        return [torch.tensordot(weights, s, 1) for s in stacked], log


def surgery(gram: Tensor) -> Tensor:
    """How much of each gradient ends up in the mean of the projected ones, from their products g_i·g_j.

    A projected gradient is a combination of the original ones, so their products are all one needs.
    """
    count = len(gram)
    mixture = torch.eye(count, dtype=gram.dtype, device=gram.device)
    lengths = gram.diagonal()
    places = torch.arange(count, device=gram.device)
    for turn in range(1, count):
        other = (places + turn) % count
        products = (mixture @ gram)[places, other]
        conflict = (products < 0) & (lengths[other] > 0)
        along = torch.where(conflict, products / lengths[other], 0)
        mixture[places, other] -= along
    return mixture.mean(0)
