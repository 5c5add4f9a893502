"""Hessian alignment: equal gradients and curvature of the head in all domains."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Log, Outputs, Step
from shoal.errors import InputError
from shoal.models.features import find_head
from shoal.settings import Range, log10


class HessianAlignment(Algorithm):
    """Penalize differences between domains of the gradient and the Hessian of a linear head.

    With the gradient g_i and the Hessian H_i of the loss of domain i with respect to the head, and ḡ and H̄
    of the mean loss, which are taken as constants,

        L = mean_i L_i + mean_i ( α ‖c_i − c̄‖² + β ‖g_i − ḡ‖² ),

    where c_i is the Hessian-gradient product H_i g_i (``form="hgp"``) or the diagonal of H_i
    (``form="diagonal"``), exact, where the authors estimate it by Hutchinson's method. Both follow from
    features and logits, so that no derivative goes through the network twice.

    Args:
        form: what of the Hessian is aligned.
        hessian_weight: α; the authors use 1e-4 for products and 1e-3 for the diagonal.
        gradient_weight: β.
        features: name of the layer that returns the features (default: the input of the last linear layer).

    Reference: Hemati et al., Understanding Hessian Alignment for Domain Generalization, ICCV 2023.
    """

    family = "gradient matching"
    reference = "Hemati et al. 2023"
    min_domains = 2
    needs_features = True
    tasks = frozenset({"classification", "ordinal", "multilabel", "regression"})
    form: Literal["hgp", "diagonal"] = "hgp"
    hessian_weight: Annotated[float, Range(0, search=log10(-5, -3))] = 1e-4
    gradient_weight: Annotated[float, Range(0, search=log10(-3, -1))] = 0.005
    bias = False

    def check_input(self, x: Any) -> None:
        super().check_input(x)
        head = find_head(self.model, x)
        layers = [m for m in head.modules() if isinstance(m, nn.Linear)]
        if len(layers) != 1 or len(list(head.parameters())) != len(list(layers[0].parameters())):
            raise InputError(f"hessian-alignment needs a head that is one linear layer, got {head}.")
        self.bias = layers[0].bias is not None

    def objective(self, out: Outputs, step: Step) -> tuple[Tensor, Log]:
        losses, logits, sizes = self.losses(out), out.logits, out.batch.sizes
        z = out.features.flatten(1)
        z = torch.cat([z, torch.ones_like(z[:, :1])], 1) if self.bias else z
        (slope,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)  # each of its domain's loss

        def curvature(direction: Tensor) -> Tensor:
            """The Hessian of each example's loss with respect to its logits, times a direction (B, K)."""
            direction = direction.reshape(logits.shape)
            (product,) = torch.autograd.grad(slope, logits, direction, create_graph=True)
            return product.reshape(len(logits), -1)

        def product(directions: Tensor) -> Tensor:
            """H_i v_i for a direction v_i (S, K, d) of every domain."""
            pairs = zip(z.split(sizes), directions, strict=True)
            return _outer(curvature(torch.cat([f @ v.T for f, v in pairs])), z, sizes)

        gradients = _outer(slope.reshape(len(logits), -1), z, sizes)
        mean = gradients.mean(0, keepdim=True)
        if self.form == "hgp":
            each, common = product(gradients), product(mean.expand_as(gradients)).mean(0)
        else:
            units = torch.eye(gradients.shape[1]).to(z)
            columns = [curvature(u.expand(len(logits), -1))[:, k] for k, u in enumerate(units)]
            each = _outer(torch.stack(columns, 1), z**2, sizes)
            common = each.mean(0)
        hessians = (each - common.detach()).pow(2).sum() / len(each)
        slopes = (gradients - mean.detach()).pow(2).sum() / len(each)
        penalty = self.hessian_weight * hessians + self.gradient_weight * slopes
        return losses.mean() + penalty, {"losses": losses.detach(), "penalty": penalty.detach()}


def _outer(rows: Tensor, features: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Σ rows ⊗ features over the examples of each domain, (S, K, d)."""
    return torch.stack([r.T @ f for r, f in zip(rows.split(sizes), features.split(sizes), strict=True)])
