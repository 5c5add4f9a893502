"""CDANN: features from which the domain cannot be predicted within a class."""

from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.dann import DANN


class CDANN(DANN):
    """Train like DANN, with a discriminator that is conditioned on the class.

    Domains may then differ in their class frequencies. The input of the discriminator is the features plus a
    learned embedding of the class, and every class in the batch has the same weight in its loss. The
    hyperparameters are those of DANN. With ``form="domainbed"`` the loss is also multiplied by the number of
    classes in the batch over the largest label in it plus one.

    Reference: Li et al., Deep Domain Generalization via Conditional Invariant Adversarial Networks, ECCV
    2018.
    """

    reference = "Li et al. ECCV 2018"
    tasks = frozenset({"classification", "ordinal"})
    sample_weights = False  # the discriminator is conditioned on every label
    conditional = True

    def discriminator_loss(self, out: Outputs, features: Tensor, penalty: float) -> Tensor:
        share = len(out.y.unique()) / (out.y.max() + 1).to(features.dtype) if self.alternates else 1.0
        loss = self.discriminator.loss(features, out.blocks, out.y, gradient_penalty=penalty / share)
        return share * loss
