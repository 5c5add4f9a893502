"""Baselines of scikit-learn and LightGBM in the place of a network.

Their files hold numbers only: a linear model is JSON, boosting is the text of LightGBM after its checksum,
for LightGBM ends the process on text that it cannot read.
"""

from __future__ import annotations

import hashlib
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
        checksum, _, text = content.partition(b"\n")
        if checksum != hashlib.sha256(text).hexdigest().encode():
            raise ValueError("its checksum is wrong")
        self.model = Booster(model_str=text.decode())
        if self.model.num_feature() != width or self.model.num_model_per_iteration() != self.scores:
            raise ValueError("its trees are for other data")

    @property
    def scores(self) -> int:
        """Of a row: one, or one of each class if there are more than two."""
        return len(self.known) if len(self.known) > 2 else 1

    @classmethod
    def content_of(cls, text: str) -> bytes:
        """The content of the file for a model's text.

        Thresholds become the greatest float32 that is no larger: for features, which are float32, nothing
        changes, and the export to ONNX does not round them up.
        """

        def rounded(line: re.Match[str]) -> str:
            limits = np.array(line[1].split(), float)
            with np.errstate(over="ignore"):
                found = limits.astype(np.float32)
            found = np.where(found > limits, np.nextafter(found, np.float32(-np.inf)), found)
            return f"threshold={' '.join(map(repr, found.astype(float).tolist()))}"

        text = re.sub(r"^tree_sizes=.*\n", "", text, flags=re.MULTILINE)  # of the old thresholds
        body = re.sub(r"^threshold=(.*)$", rounded, text, flags=re.MULTILINE).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

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


KINDS: dict[str, type[Baseline]] = {kind.file: kind for kind in (LinearBaseline, BoostedBaseline)}
"""By the file that each is in."""
