"""Gradient boosting of LightGBM in the place of a network.

Its file holds numbers only: the text of LightGBM after its checksum, for LightGBM ends the process on text
that it cannot read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]

LEAST = 1e-12
"""The least probability: that of classes without training rows."""
FILE = "model.txt"
"""The name of its file in a run folder."""


class BoostedBaseline(nn.Module):
    """A fitted model that is called as a network is: features (B, width) in, logits or numbers out.

    ValueError or KeyError: the content is damaged.

    Args:
        content: content of its file.
        width: number of features.
        classes: number of classes, or ``None`` for regression.
        known: classes of the training rows, which the fitted model tells apart, in order.
    """

    def __init__(self, content: bytes, width: int, classes: int | None, known: Sequence[int]) -> None:
        from lightgbm import Booster

        super().__init__()
        self.content, self.width, self.classes, self.known = content, width, classes, list(known)
        in_order = self.known == sorted({*self.known} & {*range(classes or 0)})
        if not in_order or (classes is not None and len(self.known) < 2):
            raise ValueError(f"known classes {self.known} of {classes}")
        checksum, _, text = content.partition(b"\n")
        if checksum != hashlib.sha256(text).hexdigest().encode():
            raise ValueError("its checksum is wrong")
        self.model: Any = Booster(model_str=text.decode())
        scores = len(self.known) if len(self.known) > 2 else 1
        if self.model.num_feature() != width or self.model.num_model_per_iteration() != scores:
            raise ValueError("its trees are for other data")

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

    def outputs(self, x: Array, every: int = 0) -> Iterator[Array]:
        """Log-probabilities of all classes (n, classes), or numbers (n,), after ``every`` so many rounds."""
        from scipy.special import expit, softmax

        rounds, scores = self.model.current_iteration(), np.zeros(1)
        for start in range(0, rounds, every or rounds):
            span = {"start_iteration": start, "num_iteration": every or rounds}
            scores = scores + self.model.predict(x, raw_score=True, num_threads=1, **span)
            if self.classes is None:
                yield np.asarray(scores)
                continue
            found = (
                softmax(scores, 1) if len(self.known) > 2 else np.stack([expit(-scores), expit(scores)], 1)
            )
            shares = np.full((len(x), self.classes), LEAST)
            shares[:, self.known] = np.maximum(found, LEAST)
            yield np.log(shares)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(next(self.outputs(x.cpu().numpy())))
