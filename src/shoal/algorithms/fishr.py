"""Fishr: per-example gradients with the same variance in every domain."""

from dataclasses import replace
from typing import Annotated, Any

from torch import Tensor, nn

from shoal.algorithms.base import Loss, Outputs
from shoal.algorithms.penalty import FRACTION, STEPS, USUAL_STEPS, Penalised
from shoal.data.batch import Task
from shoal.errors import InputError, shown
from shoal.models import FeatureModel
from shoal.penalties import FishrVariances, fishr
from shoal.settings import Range, log10, uniform

START = {"uniform": [0, USUAL_STEPS], "of": USUAL_STEPS}
CLOSED_FORM = "Fishr's closed form needs"


class Fishr(Penalised):
    """Add a penalty on differences between domains in the variance of per-example gradients.

    Those of the last layer, smoothed over the steps of each domain: :func:`shoal.penalties.fishr`.

    Args:
        weight: weight λ of the penalty.
        start: number of steps for which λ is 0, so that the averages converge; a float is a fraction of the
            training.
        ema: decay κ.

    Reference: Rame et al., Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization, ICML
    2022.
    """

    family = "gradient matching"
    reference = "Rame et al. 2022"
    sample_weights = False
    needs_features = True
    plain_mean = True
    weight: Annotated[float, Range(0, search=log10(1, 4))] = 1000.0
    start: Annotated[int, STEPS] | Annotated[float, replace(FRACTION, search=START)] = 0.3
    ema: Annotated[float, Range(0, below=1, search=uniform(0.9, 0.99))] = 0.95

    def __init__(self, model: nn.Module, loss: Loss, task: Task, **settings: Any) -> None:
        if settings.get("features") is None and isinstance(model, FeatureModel):
            linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
            settings["features"] = linear[-1] if linear else "head"
        super().__init__(model, loss, task, **settings)

    def setup(self) -> None:
        super().setup()
        last = self.extractor.linear if self.extractor else None
        if last is None:
            raise InputError(
                f"{CLOSED_FORM} the last linear layer of the model: features='layer.name' must name one, got "
                f"{shown(self.features)}. shoal.fit finds it."
            )
        options: Any = {"bias": last.bias is not None, "ema": self.ema, "dtype": last.weight.dtype}
        self.variances = FishrVariances(self.task.domains, last.in_features, last.out_features, **options)

    def check_input(self, x: Any) -> None:
        super().check_input(x)
        assert self.extractor is not None
        layer, last, width = self.extractor.layer, self.extractor.linear, self.extractor.width
        if not self.extractor.is_output:
            raise InputError(
                f"{CLOSED_FORM} a model whose output is that of a linear layer, and layer {layer!r} is "
                "followed by something else, or its output is not one tensor."
            )
        if last is not None and width is not None and width != last.in_features:
            raise InputError(
                f"{CLOSED_FORM} a last layer that is applied once to each example, and layer {layer!r} is "
                f"applied to {width // last.in_features} positions."
            )

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return fishr(out.logits, out.features, out.y, out.blocks, loss=self.loss, variances=self.variances)
