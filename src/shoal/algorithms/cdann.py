"""CDANN: features from which the domain cannot be predicted within a class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Loss
from shoal.algorithms.dann import DANN
from shoal.data.batch import Task, widest


class CDANN(DANN):
    """DANN whose adversary also gets the class, so that domains may differ in their class frequencies.

    The adversary gets the features plus a learned vector of the example's class, and every class counts the
    same in its loss. Takes DANN's settings.

    Reference: Li et al., Deep Domain Generalization via Conditional Invariant Adversarial Networks, ECCV
    2018.
    """

    reference = "Li et al. ECCV 2018"
    tasks = frozenset({"classification", "ordinal"})
    sample_weights = False  # the discriminator is conditioned on every label
    instead = ("dann", "coral", "mmd")

    def __init__(self, model: nn.Module, loss: Loss, task: Task, **settings: Any) -> None:
        super().__init__(model, loss, task, **settings)
        assert task.classes is not None
        assert task.features is not None
        dtype = next(self.adversary.parameters()).dtype
        self.classes = nn.Embedding(task.classes, task.features, dtype=dtype)

    def adversary_parameters(self) -> list[nn.Parameter]:
        return [*super().adversary_parameters(), *self.classes.parameters()]

    def adversary_input(self, features: Tensor, y: Tensor) -> Tensor:
        return features + self.classes(y)

    def example_weights(self, y: Tensor) -> Tensor:
        counts = y.new_zeros(self.classes.num_embeddings).index_add(0, y, torch.ones_like(y))
        return 1 / (counts[y] * (counts > 0).sum()).to(widest(y.device))
