"""CORAL: training with a penalty on different means and covariances of features between domains."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.penalty import Penalised, flat


class CORAL(Penalised):
    """Adds how far apart the domains' features are in mean and covariance.

    The mean over pairs of domains of ‖μ_i − μ_j‖²/d + ‖C_i − C_j‖²/d², for d features.

    Reference: Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV 2016; the
    means as in Koh et al., WILDS, 2021.
    """

    family = "feature alignment"
    reference = "Sun & Saenko 2016"
    needs_features = True

    def penalty(self, outputs: Outputs, losses: Tensor) -> Tensor:
        means, covariances = [], []
        for each in outputs:
            features = flat(each)
            mean = features.mean(0, keepdim=True)
            centred = features - mean
            means.append(mean[0])
            covariances.append(centred.T @ centred / max(len(features) - 1, 1))
        return _mean_over_pairs(torch.stack(means)) + _mean_over_pairs(torch.stack(covariances))


def _mean_over_pairs(x: Tensor) -> Tensor:
    """The mean over pairs of rows of the mean square of their difference, from distances to the middle."""
    if len(x) < 2:
        return x.new_zeros(()) * x.sum()
    return 2 / (len(x) - 1) * (x - x.mean(0)).square().flatten(1).mean(1).sum()
