"""DomainBed's update rules for DANN and CDANN, one example at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor, int]
"""Examples, their labels and the number of their domain."""


def cross_entropy(logits: Tensor, target: int) -> Tensor:
    return logits.exp().sum().log() - logits[target]


def average(values: Sequence[Tensor]) -> Tensor:
    return sum(values[1:], values[0]) / len(values)


class Adversarial:
    """A generator (``features`` and ``head`` of the model) and a discriminator, each with an Adam.

    Every update counts, from 1 on; one whose number leaves a rest of ``d_steps`` by 1 + ``d_steps`` trains
    the generator, any other the discriminator. Both Adams have the same betas, (beta1, 0.9). With ``classes``
    (vectors that are added to the features) it is CDANN: an example of class y counts 1 / (n_y K), with n_y
    examples of the class in the update and K the largest class in it plus one.
    """

    def __init__(
        self,
        model: nn.Module,
        discriminator: nn.Module,
        classes: nn.Embedding | None,
        *,
        weight: float,
        d_steps: int,
        penalty: float,
        beta1: float,
        lr_g: float,
        lr_d: float,
        decay_g: float = 0.0,
        decay_d: float = 0.0,
    ) -> None:
        self.model, self.discriminator, self.classes = model, discriminator, classes
        self.weight, self.d_steps, self.penalty = weight, d_steps, penalty
        judge = [*discriminator.parameters(), *(classes.parameters() if classes is not None else ())]
        self.judge = torch.optim.Adam(judge, lr=lr_d, betas=(beta1, 0.9), weight_decay=decay_d)
        self.generator = torch.optim.Adam(
            model.parameters(), lr=lr_g, betas=(beta1, 0.9), weight_decay=decay_g
        )
        self.updates = 0

    def update(self, batches: Sequence[Batch]) -> str:
        self.updates += 1
        features, labels, domains = [], [], []
        for x, y, d in batches:
            for row, label in zip(x, y, strict=True):
                features.append(self.model.features(row[None])[0])
                labels.append(int(label))
                domains.append(d)
        loss = self.discriminator_loss(features, labels, domains)
        self.judge.zero_grad()
        self.generator.zero_grad()
        if self.updates % (1 + self.d_steps) < self.d_steps:
            loss.backward()
            self.judge.step()
            return "discriminator"
        logits = [self.model.head(z[None])[0] for z in features]
        own = average([cross_entropy(out, y) for out, y in zip(logits, labels, strict=True)])
        (own - self.weight * loss).backward()
        self.generator.step()
        return "generator"

    def discriminator_loss(
        self, features: Sequence[Tensor], labels: Sequence[int], domains: Sequence[int]
    ) -> Tensor:
        total, norms = torch.zeros((), dtype=torch.float64), []
        for z, y, d in zip(features, labels, domains, strict=True):
            shown = z if self.classes is None else z + self.classes.weight[y]
            loss = cross_entropy(self.discriminator(shown[None])[0], d)
            (slope,) = torch.autograd.grad(loss, shown, create_graph=True)
            norms.append((slope * slope).sum())
            share = len(labels) if self.classes is None else labels.count(y) * (max(labels) + 1)
            total = total + loss / share
        return total + self.penalty * average(norms)
