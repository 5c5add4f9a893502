"""Baselines of scikit-learn and LightGBM in the place of a network.

Their files hold numbers only: a linear model is JSON, boosting is the text of LightGBM. LightGBM ends the
process on text that it cannot read, so it only gets text that is made here from checked trees.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, FiniteFloat
from torch import Tensor, nn

Array = NDArray[Any]

LEAST = 1e-12
"""The least probability: that of classes without training rows."""
MOST_LEAVES = 2**16


class Baseline(nn.Module):
    """A fitted model that is called as a network is: features (B, width) in, logits or numbers out.

    ValueError or KeyError: the content is damaged.

    Args:
        content: content of its file.
        width: number of features.
        classes: number of classes, or ``None`` for regression.
        known: classes of the training rows, which the fitted model tells apart, in order.
    """

    file: ClassVar[str]
    """The name of its file in a run folder."""
    model: Any
    """The model of scikit-learn or LightGBM; its classes are the numbers of the known ones."""

    def __init__(self, content: bytes, width: int, classes: int | None, known: Sequence[int]) -> None:
        super().__init__()
        self.content, self.width, self.classes, self.known = content, width, classes, list(known)
        in_order = self.known == sorted({*self.known} & {*range(classes or 0)})
        if not in_order or (classes is not None and len(self.known) < 2):
            raise ValueError(f"known classes {self.known} of {classes}")

    @abstractmethod
    def values(self, x: Array, every: int = 0) -> Iterator[Array]:
        """Probabilities of the known classes (n, known), or numbers (n,); of boosting ``every`` n rounds."""

    def logits(self, values: Array) -> Array:
        """Log-probabilities of all classes (n, classes), or numbers (n,) as they are."""
        if self.classes is None:
            return values
        shares = np.full((len(values), self.classes), LEAST)
        shares[:, self.known] = np.maximum(values, LEAST)
        return np.log(shares)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.logits(next(self.values(x.cpu().numpy()))))


class Coefficients(BaseModel):
    """The content of ``model.json``: a row per class, or one for two classes and in regression."""

    coefficients: list[list[FiniteFloat]]
    intercepts: list[FiniteFloat]


class LinearBaseline(Baseline):
    """Logistic or ridge regression of scikit-learn."""

    file = "model.json"

    def __init__(self, content: bytes, width: int, classes: int | None, known: Sequence[int]) -> None:
        from sklearn.linear_model import LogisticRegression, Ridge

        super().__init__(content, width, classes, known)
        found = Coefficients.model_validate_json(content)
        weight, bias = np.array(found.coefficients), np.array(found.intercepts)
        rows = 1 if len(self.known) <= 2 else len(self.known)
        if weight.shape != (rows, width) or bias.shape != (rows,):
            raise ValueError(f"coefficients {weight.shape} and intercepts {bias.shape}")
        self.model = Ridge() if classes is None else LogisticRegression()
        self.model.coef_, self.model.intercept_ = (weight[0], bias[0]) if classes is None else (weight, bias)
        self.model.classes_ = np.arange(len(self.known))

    def values(self, x: Array, every: int = 0) -> Iterator[Array]:
        yield self.model.predict(x) if self.classes is None else self.model.predict_proba(x)


class BoostedBaseline(Baseline):
    """Gradient boosting of LightGBM."""

    file = "model.txt"

    def __init__(self, content: bytes, width: int, classes: int | None, known: Sequence[int]) -> None:
        from lightgbm import Booster

        super().__init__(content, width, classes, known)
        each = len(self.known) if len(self.known) > 2 else 1
        trees = _trees(content.decode(), width)
        if not trees or len(trees) % each:
            raise ValueError(f"{len(trees)} trees for {each} scores")
        kind = {0: "regression", 2: "binary sigmoid:1"}.get(len(self.known), f"multiclass num_class:{each}")
        header = (
            f"tree\nversion=v4\nnum_class={each}\nnum_tree_per_iteration={each}\nlabel_index=0\n"
            f"max_feature_idx={width - 1}\nobjective={kind}\n"
            f"feature_names={' '.join(f'f{n}' for n in range(width))}\n"
            f"feature_infos={' '.join(['none'] * width)}\n\n"
        )
        numbered = "".join(f"Tree={n}\n{tree}\n\n\n" for n, tree in enumerate(trees))
        self.model = Booster(model_str=f"{header}{numbered}end of trees\n")

    def values(self, x: Array, every: int = 0) -> Iterator[Array]:
        from scipy.special import expit, softmax

        rounds, scores = self.model.current_iteration(), 0.0
        for start in range(0, rounds, every or rounds):
            span = {"start_iteration": start, "num_iteration": every or rounds}
            scores = scores + self.model.predict(x, raw_score=True, num_threads=1, **span)
            if len(self.known) > 2:
                yield softmax(scores, 1)
            else:
                yield np.stack([expit(-scores), expit(scores)], 1) if self.known else scores


def _trees(text: str, width: int) -> list[str]:
    """The trees in a text of LightGBM, checked and without statistics.

    A node sends a row to ``left_child`` if the feature is at most the threshold. Children are later nodes,
    or −1 − n for leaf n. Thresholds become the greatest float32 that is no larger: for features, which are
    float32, nothing changes, and the export to ONNX does not round them up.
    """
    text, end, _ = text.partition("\nend of trees")
    if not end:
        raise ValueError("the end is missing")
    trees: list[str] = []
    for block in re.split(r"^Tree=\d+$", text, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^(\w+)=(.*)$", block, re.MULTILINE))
        value, limit = (np.array(fields[name].split(), float) for name in ("leaf_value", "threshold"))
        names = ("split_feature", "left_child", "right_child")
        feature, left, right = (np.array(fields[name].split(), np.int64) for name in names)
        inner, children = len(value) - 1, np.concatenate([left, right])
        expected = [*range(-inner - 1, 0), *range(1, inner)] if inner else []
        if not (
            0 <= inner < MOST_LEAVES
            and len(feature) == len(limit) == len(left) == len(right) == inner
            and sorted(children.tolist()) == expected
            and ((children < 0) | (children > np.tile(np.arange(inner), 2))).all()
            and ((feature >= 0) & (feature < width)).all()
            and np.isfinite([*value, *limit]).all()
            and fields["num_cat"] == "0"
        ):
            raise ValueError(f"tree {len(trees)} is not a tree")
        with np.errstate(over="ignore"):
            rounded = limit.astype(np.float32)
        rounded = np.where(rounded > limit, np.nextafter(rounded, np.float32(-np.inf)), rounded)
        parts = {"split_feature": feature, "threshold": rounded.astype(float), "decision_type": 2 + 0 * left}
        parts |= {"left_child": left, "right_child": right, "leaf_value": value}
        lines = [f"{name}={' '.join(map(repr, part.tolist()))}" for name, part in parts.items()]
        trees.append("\n".join([f"num_leaves={inner + 1}", "num_cat=0", *lines, "shrinkage=1"]))
    return trees


KINDS: dict[str, type[Baseline]] = {kind.file: kind for kind in (LinearBaseline, BoostedBaseline)}
"""By the file that each is in."""
