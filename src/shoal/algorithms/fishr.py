"""Fishr: per-example gradients that vary alike in every domain."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from shoal.algorithms.base import DomainOutput, Loss, Outputs, check_state, full_precision
from shoal.algorithms.penalty import SHARE, STEPS, Penalised, Steps, flat, plain_output
from shoal.data.batch import Task
from shoal.errors import InputError
from shoal.settings import Range, log10, uniform

RESHAPING = (nn.Flatten, nn.Unflatten, nn.Identity)


class Fishr(Penalised):
    """Adds how far the domains differ in the variance of their examples' gradients of the last layer.

    An example's gradient with respect to the weights of a linear layer is r zᵀ, with z its features and r the
    slope of its loss along the outputs. So the variances need no gradient of their own:

        Var(W) = mean(r²)(z²)ᵀ − (mean r zᵀ)²,   Var(b) = mean r² − (mean r)²

    Each domain's variances v_d are smoothed over its visits, m_d ← κ m_d + (1 − κ) v_d, and the penalty is
    the mean square of m_d/(1 − κ) around the mean over the step's domains. The division keeps the penalty's
    slope along v_d the same for any κ.

    Args:
        weight: λ.
        start, ramp: λ is 0 for ``start`` (of the training), so that the averages settle, and then rises
            for ``ramp``.
        ema: κ.

    Reference: Rame et al., Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization, ICML
    2022.
    """

    family = "gradient matching"
    reference = "Rame et al. 2022"
    sample_weights = False
    needs_features = True
    knows_domains = True
    mean_of_examples = True

    variances: Tensor

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: Annotated[float, Range(0, search=log10(1, 4))] = 1000.0,
        start: Annotated[int, STEPS] | Annotated[float, SHARE._replace(search=uniform(0.0, 1.0))] = 0.3,
        ramp: Steps = 0,
        ema: Annotated[float, Range(0, below=1, search=uniform(0.9, 0.99))] = 0.95,
    ) -> None:
        super().__init__(model, loss, task, weight=weight, start=start, ramp=ramp)
        self.ema = ema
        head: Any = model.head
        self.place, last = _linear(head)
        self.biased = last.bias is not None
        numbers = last.weight.numel() + last.out_features * self.biased
        check_state("Fishr", task.domains, numbers, "the variance of every gradient of the last layer")
        self.register_buffer("variances", torch.zeros(task.domains, numbers, dtype=last.weight.dtype))

    def output_and_features(self, x: Any) -> tuple[Any, Any]:
        """The features are what enters the last layer."""
        model: Any = self.model
        with self.autocast():
            features = model.features(x)
            if isinstance(model.head, nn.Sequential):
                features = model.head[: self.place](features)
                output = model.head[self.place :](features)
            else:
                output = model.head(features)
        return full_precision(output), full_precision(features)

    def penalty(self, outputs: Outputs, losses: Tensor) -> Tensor:
        found = torch.stack([self._variances(v) for v in outputs])
        ids = self.ids(outputs)
        smooth = torch.lerp(found, self.variances[ids].to(found.dtype), self.ema)
        with torch.no_grad():
            self.variances.index_copy_(0, ids, smooth.detach().to(self.variances.dtype))
        smooth = smooth / (1 - self.ema)
        return (smooth - smooth.mean(0)).square().mean()

    def _variances(self, each: DomainOutput) -> Tensor:
        """Of an example's gradients of the last layer, weights and then biases."""
        output, z = plain_output(each, self), flat(each)
        count = len(z)
        loss = self.loss(output, each.y)
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        r = slope.reshape(count, -1) * count  # the loss is a mean
        weights = r.square().T @ z.square() / count - (r.T @ z / count).square()
        return torch.cat([weights.flatten(), r.var(0, correction=0)]) if self.biased else weights.flatten()


def _linear(head: nn.Module) -> tuple[int, nn.Linear]:
    """Where the one linear layer of a head is, and it."""
    parts = list(head) if isinstance(head, nn.Sequential) else [head]
    places = [i for i, part in enumerate(parts) if isinstance(part, nn.Linear)]
    before, after = parts[: places[0]] if places else [], parts[places[0] + 1 :] if places else []
    passing = all(isinstance(part, (*RESHAPING, nn.Dropout)) for part in before)
    if len(places) != 1 or not passing or not all(isinstance(part, RESHAPING) for part in after):
        raise InputError(
            f"Fishr's closed form needs a head that is one linear layer; this one is {type(head).__name__} "
            f"with {len(places)} of them. Put what comes before the last layer into the features."
        )
    return places[0], parts[places[0]]  # type: ignore[return-value]
