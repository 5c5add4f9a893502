"""A sum of decision trees, such as gradient boosting fits."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, flat_width, linear_head
from shoal.settings import Range

DEEPEST, MOST_TREES = 1000, 2**17
"""More is refused: evaluation takes a round for each level, and a number for each tree and example."""


def build(
    input_shape: tuple[int, ...],
    classes: int | None,
    nodes: Annotated[int, Range(1, 2**26)] = 0,
    trees: Annotated[int, Range(1, MOST_TREES)] = 0,
    scores: Annotated[int, Range(1, MOST_TREES)] = 0,
) -> FeatureModel:
    """``trees`` trees of ``nodes`` nodes altogether, which sum to ``scores`` numbers; a linear head.

    Args:
        nodes: of all trees together.
        trees: how many; number t adds to score t modulo ``scores``.
        scores: numbers that the head takes.
    """
    width = flat_width("tree-ensemble", input_shape)
    if not nodes or not scores or trees < scores or trees % scores:
        raise InputError(
            f"{trees} trees of {nodes} nodes of model 'tree-ensemble' cannot sum to {scores} scores."
        )
    return FeatureModel(Trees(width, nodes, trees, scores), linear_head(scores, classes))


class Trees(nn.Module):
    """The leaves' values that an example (B, width) falls into, summed to (B, scores).

    Nodes of all trees are in one list. In node i an example goes on to node ``left[i]`` if its feature
    number ``feature[i]`` is at most ``threshold[i]``, else to ``right[i]``; these come after i, and are i
    itself in a leaf. Thresholds are float32, as features are; values are summed in float64.
    """

    roots: Tensor
    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor

    def __init__(self, width: int, nodes: int, trees: int, scores: int) -> None:
        super().__init__()
        self.width, self.scores, self.depth = width, scores, 0
        self.register_buffer("roots", torch.zeros(trees, dtype=torch.int64))
        self.register_buffer("feature", torch.zeros(nodes, dtype=torch.int64))
        self.register_buffer("threshold", torch.zeros(nodes))
        for side in ("left", "right"):
            self.register_buffer(side, torch.arange(nodes))
        self.register_buffer("value", torch.zeros(nodes, dtype=torch.float64))
        self.register_load_state_dict_post_hook(_check)

    def forward(self, x: Tensor) -> Tensor:
        at = self.roots.expand(x.shape[0], -1)
        for _ in range(self.depth):
            below = x.gather(1, self.feature[at]) <= self.threshold[at]
            at = torch.where(below, self.left[at], self.right[at])
        found: Tensor = self.value[at].unflatten(1, (-1, self.scores)).sum(1)
        return found.to(x.dtype)


def _check(trees: Trees, *incompatible: Any) -> None:
    """Finds the depth; refuses what is no tree, on which evaluation might never end or leave the arrays."""
    nodes = len(trees.value)
    own = torch.arange(nodes, device=trees.left.device)
    for name, values, least, end in (
        ("roots", trees.roots, 0, nodes),
        ("feature", trees.feature, 0, trees.width),
        ("left", trees.left, own, nodes),
        ("right", trees.right, own, nodes),
    ):
        if bool(((values < least) | (values >= end)).any()):
            raise InputError(f"the trees are damaged: {name!r} has a number that is out of range.")
    if bool(((trees.left == own) != (trees.right == own)).any()):
        raise InputError("the trees are damaged: a node has only one child.")
    for name, values in (("threshold", trees.threshold), ("value", trees.value)):
        if bool(values.isnan().any()) or (name == "value" and not bool(values.isfinite().all())):
            raise InputError(f"the trees are damaged: {name!r} has a number that is not finite.")
    at, trees.depth = trees.roots.unique(), 0
    while len(at := at[trees.left[at] != at]):
        if trees.depth == DEEPEST:
            raise InputError(f"the trees are damaged: one is deeper than {DEEPEST:,} levels.")
        at, trees.depth = torch.cat([trees.left[at], trees.right[at]]).unique(), trees.depth + 1
