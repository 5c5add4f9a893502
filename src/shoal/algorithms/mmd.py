"""MMD: features with the same distribution in every domain, measured with kernels."""

from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.penalty import Penalised
from shoal.penalties import mmd


class MMD(Penalised):
    """Add the squared maximum mean discrepancy of features between domains, averaged over pairs.

    The kernel is Σ_γ exp(−γ‖x − y‖²) with seven γ from 0.001 to 1000: :func:`shoal.penalties.mmd`.

    Reference: Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018; Gretton et al.,
    A Kernel Two-Sample Test, 2012.
    """

    family = "feature alignment"
    reference = "Li et al. CVPR 2018"
    needs_features = True

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return mmd(out.features, out.blocks)
