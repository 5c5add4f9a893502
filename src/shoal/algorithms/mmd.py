"""MMD: features with the same distribution in every domain, measured with kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.penalty import Penalised, flat
from shoal.data.batch import widest

GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


class MMD(Penalised):
    """Adds the squared maximum mean discrepancy between the domains' features, averaged over pairs.

    The kernel is Σ_γ exp(−γ‖x − y‖²) with seven γ from 0.001 to 1000.

    Reference: Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018; Gretton et al.,
    A Kernel Two-Sample Test, 2012.
    """

    family = "feature alignment"
    reference = "Li et al. CVPR 2018"
    needs_features = True

    def penalty(self, outputs: Outputs, losses: Tensor) -> Tensor:
        count = len(outputs)
        features = [flat(v) for v in outputs]
        # The narrow kernels look at differences that a difference of float32 squares would lose.
        every = torch.cat(features).to(widest(features[0].device))
        every = every - every.mean(0).detach()
        squares = every.square().sum(1)
        distances = (squares[:, None] + squares[None] - 2 * every @ every.T).clamp(min=0)
        kernel = torch.stack([torch.exp(-gamma * distances) for gamma in GAMMAS]).sum(0)
        sizes = [len(f) for f in features]
        blocks = [row.split(sizes, dim=1) for row in kernel.split(sizes)]
        means = torch.stack([torch.stack([block.mean() for block in row]) for row in blocks])
        own = means.diagonal()
        apart = own[:, None] + own[None] - 2 * means  # zero on the diagonal
        return (apart.sum() / max(count * (count - 1), 1)).to(features[0].dtype)
