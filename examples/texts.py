"""Texts from as many places as there are hospitals, and a tiny DistilBERT with random weights."""

from __future__ import annotations

import torch
from hospitals import SEED, SIZES
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification


def texts() -> dict[str, tuple[Tensor, Tensor]]:
    """Token numbers and a class: which half of the vocabulary prevails. Places like different words."""
    draw = torch.Generator().manual_seed(1)
    found = {}
    for place, (name, count) in enumerate(SIZES.items()):
        tokens = (torch.randint(2, 40, (count, 12), generator=draw) + 6 * place) % 50
        found[name] = tokens, ((tokens >= 25).float().mean(1) > 0.5).long()
    return found


def items() -> list[dict[str, Tensor]]:
    pairs = (pair for xs, ys in texts().values() for pair in zip(xs, ys, strict=True))
    return [{"input_ids": x, "labels": y} for x, y in pairs]


def bert() -> DistilBertForSequenceClassification:
    torch.manual_seed(SEED)
    size = {"vocab_size": 50, "max_position_embeddings": 12, "dim": 16, "hidden_dim": 32}
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return DistilBertForSequenceClassification(
        DistilBertConfig(n_layers=1, n_heads=2, num_labels=2, **size, **dropout)
    )


class Logits(nn.Module):
    """The same model as shoal.fit takes one: from inputs to outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits
