"""CORAL: training with a penalty on different means and covariances of features between domains."""

from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.penalty import Penalised
from shoal.penalties import coral


class CORAL(Penalised):
    """Add a penalty on the differences in mean and covariance of the domains' features.

    The penalty is :func:`shoal.penalties.coral`.

    Reference: Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV 2016; the
    means as in Koh et al., WILDS, 2021.
    """

    family = "feature alignment"
    reference = "Sun & Saenko 2016"
    needs_features = True

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return coral(out.features, out.blocks)
