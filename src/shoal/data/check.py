"""Wrong data, found before training and named: what it is, where it is, what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import Examples, TensorData, leaves
from shoal.data.domains import Domains
from shoal.errors import InputError, shown

Doubt = tuple[NDArray[np.bool_], str]
"""For each example whether something is wrong with it, and what."""
CHUNK = 2**16  # examples looked at together: bounds the memory for temporaries


def check_examples(
    dataset: Examples,
    domains: Domains,
    classes: int | None,
    sample: int = 64,
) -> None:
    """Refuse indices beyond the dataset, features that are not finite, and labels that cannot be.

    A :class:`TensorData` is looked at whole; of any other the first example of up to ``sample`` domains is,
    and the labels that it knows. Only examples that are in some domain count. ``classes`` is ``None`` for
    regression.
    """
    count = len(dataset)
    if (top := int(domains.indices.max())) >= count:
        name = domains.names[domains.domain_at(int(domains.indices.argmax()))]
        raise InputError(f"domain {name!r} has example {top}, but the dataset has {count} examples.")
    if isinstance(dataset, TensorData):
        for wrong, what in _doubts(dataset.x, dataset.y, dataset.weight, classes):
            _refuse(wrong, domains, what)
        if dataset.weight is not None:
            totals = np.add.reduceat(dataset.weight.numpy(force=True)[domains.indices], domains.offsets[:-1])
            if not totals.all():
                raise InputError(
                    f"every weight of domain {domains.names[totals.argmin()]!r} is 0; remove it."
                )
        return
    known = dataset.known_labels()
    if known is not None and classes is not None and (rows := known != -1).any():
        wrong, what = _wrong_labels(torch.as_tensor(known[rows]), classes)
        rows[rows] = wrong
        _refuse(rows, domains, what)
    for d in range(min(len(domains), sample)):
        example = int(domains.indices_of(d)[0])
        where, item = f"example {example} of domain {domains.names[d]!r}", dataset[example]
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise InputError(f"{where} is {shown(item)}; it must be a pair (x, y), or (x, y, weight).")
        if len(item) == 3 and (not isinstance(item[2], (float, Tensor, np.floating)) or not item[2] >= 0):
            raise InputError(f"{where} has 3 parts; the third must be a weight, got {shown(item[2])}.")
        numbers = [v for v in leaves(item[0]) if isinstance(v, (float, Tensor, np.ndarray))]
        x, y = [torch.as_tensor(v)[None] for v in numbers], torch.as_tensor(item[1])[None]
        for wrong, what in _doubts(x, y, None, classes, whole=False):
            if wrong.any():
                raise InputError(f"{where} has {what}.")


def _doubts(
    x: Any, y: Tensor, weight: Tensor | None, classes: int | None, whole: bool = True
) -> Iterator[Doubt]:
    if classes is None and whole and not y.is_floating_point():
        raise InputError(f"targets are {y.dtype}; for regression they must be floating: y.float().")
    for part in leaves(x):
        yield _not_finite(part), "a feature that is not finite"
    if weight is not None:
        yield _not_finite(weight) | (weight < 0).cpu().numpy(), "a weight that is not at least 0"
    if classes is None:
        yield _not_finite(y), "a target that is not finite"
    else:
        yield _wrong_labels(y, classes)


def _wrong_labels(y: Tensor, classes: int) -> Doubt:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels are {y.dtype}; with classes={classes} they must be integers: y.long().")
    if y.ndim > 1:
        hint = ": y.squeeze(1)" if y[0].numel() == 1 else "; several labels of 0 or 1 are task='multilabel'"
        raise InputError(f"labels have shape {tuple(y.shape)}; they must be ({len(y)},){hint}.")
    low, high = (int(value) for value in y.aminmax())
    wrong = (y < 0) | (y >= classes)
    hint = f": subtract {low}" if low > 0 and high - low < classes else ""
    right = f"with classes={classes} they must range from 0 to {classes - 1}{hint}"
    return wrong.cpu().numpy(), f"a wrong label; labels range from {low} to {high}; {right}"


def _not_finite(values: Tensor) -> NDArray[np.bool_]:
    if not (values.is_floating_point() or values.is_complex()):
        return np.zeros(len(values), dtype=bool)
    parts = [~part.reshape(len(part), -1).isfinite().all(1) for part in values.split(CHUNK)]
    return torch.cat(parts).cpu().numpy()


def _refuse(wrong: NDArray[np.bool_], domains: Domains, what: str) -> None:
    """Refuse the first example of a domain for which ``wrong`` holds."""
    entries = np.flatnonzero(wrong[domains.indices])
    if len(entries):
        entry = int(entries[domains.indices[entries].argmin()])
        d, example = domains.domain_at(entry), int(domains.indices[entry])
        place = entry - int(domains.offsets[d])
        of_all = "" if place == example else f" (example {example} of all)"
        raise InputError(f"example {place} of domain {domains.names[d]!r}{of_all} has {what}.")


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
