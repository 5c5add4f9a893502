"""Checks before training: which example is wrong and what would be right, and the outputs of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import Examples, TensorData, tensors_in
from shoal.data.domains import Domains
from shoal.errors import InputError

CHUNK = 2**16  # examples that are tested together: bounds the memory for temporaries


def check_examples(examples: Examples, domains: Domains, classes: int | None, sample: int = 64) -> None:
    """Refuse features that are not finite, and wrong labels.

    :class:`TensorData` is checked completely; of other datasets, the labels that are known and the first
    example of up to ``sample`` domains. Examples that are in no domain do not count. ``classes`` is ``None``
    for regression.
    """
    every = np.arange(len(examples))
    if isinstance(examples, TensorData):
        _refuse(domains, every, _problems(examples.x, examples.y, examples.weight, classes))
        if examples.weight is not None:
            weights = examples.weight.numpy(force=True)[domains.indices]
            totals = np.add.reduceat(weights, domains.offsets[:-1])
            if not totals.all():
                name = domains.names[totals.argmin()]
                raise InputError(f"every weight of domain {name!r} is 0; remove it.")
        return
    if classes is not None and (labels := examples.known_labels()) is not None:
        _refuse(domains, every, _problems((), torch.tensor(labels), None, classes))
    for start in domains.offsets[:-1][:sample]:
        rows = domains.indices[start : start + 1]
        x, y, *weight = examples.batch(rows)
        _refuse(domains, rows, _problems(x, y, weight[0] if weight else None, classes))


def _refuse(domains: Domains, rows: NDArray[Any], problems: Iterator[tuple[Tensor, str]]) -> None:
    """Refuse the first wrong example in a domain; ``rows`` are the indices of the examples."""
    for wrong, what in problems:
        if not wrong.any():
            continue
        entries = np.flatnonzero(np.isin(domains.indices, rows[wrong.numpy(force=True)]))
        if len(entries):
            entry = int(entries[domains.indices[entries].argmin()])
            d, example = domains.domain_at(entry), int(domains.indices[entry])
            place = entry - int(domains.offsets[d])
            of_all = "" if place == example else f" (example {example} of all)"
            raise InputError(f"example {place} of domain {domains.names[d]!r}{of_all} has {what}.")


def _problems(x: Any, y: Tensor, weight: Tensor | None, classes: int | None) -> Iterator[tuple[Tensor, str]]:
    """For each check, which examples fail it and what is wrong with them."""
    for part in tensors_in(x):
        yield not_finite(part), "a feature that is not finite"
    if weight is not None:
        yield not_finite(weight) | (weight < 0), "a weight that is not at least 0"
    if classes is None:
        yield not_finite(y), "a target that is not finite"
        return
    if y.is_floating_point() or y.dtype == torch.bool:
        raise InputError(f"labels are {y.dtype}; with classes={classes} they must be integers: y.long().")
    if y.ndim == 2 and y.shape[1] == 1:
        raise InputError(f"labels have shape {tuple(y.shape)}; they must be ({len(y)},): y.squeeze(1).")
    y = y.long()
    low, high = (int(value) for value in y.aminmax())
    hint = f": subtract {low}" if low > 0 and high - low < classes else ""
    right = f"with classes={classes} they must range from 0 to {classes - 1}{hint}"
    wrong = ((y < 0) | (y >= classes)).reshape(len(y), -1).any(1)
    yield wrong, f"a wrong label; labels range from {low} to {high}; {right}"


def not_finite(values: Tensor) -> Tensor:
    """Which examples have a number that is not finite."""
    return torch.cat([~part.reshape(len(part), -1).isfinite().all(1) for part in values.split(CHUNK)])


def check_outputs(output: Any, y: Tensor, classes: int | None, kind: str = "") -> None:
    """Refuse a model's output for a batch with which the usual losses would fail, or worse, not fail.

    Logits must be as wide as there are classes, at axis 1. In regression an output (B, 1) against targets
    (B,) is broadcast to B × B differences, and the model learns the targets' mean. An output that is not a
    tensor is left to the user's loss.
    """
    if not isinstance(output, Tensor):
        return
    shape, expected = tuple(output.shape), ""
    if output.ndim == 0 or shape[0] != len(y):
        expected = f"the first dimension must be the batch, {len(y)}"
    elif classes is not None:
        if shape[1:] != (classes,):
            expected = f"with classes={classes} it must be {(len(y), classes)}, one logit for each class"
    elif {shape[1:], tuple(y.shape[1:])} == {(), (1,)}:
        cure = "output" if output.ndim == 2 else "targets"
        expected = f"a loss would silently compare {len(y)}×{len(y)} pairs: .squeeze(1) the {cure}"
    elif kind == "multilabel" and output.shape != y.shape:
        expected = "with task='multilabel' there must be one logit for each label"
    if expected:
        raise InputError(f"the model's output has shape {shape} for targets {tuple(y.shape)}: {expected}.")
