"""Wrong data, found before training and named: what it is, where it is, what would be right."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal.data.batch import TensorData, leaves
from shoal.data.domains import Domains
from shoal.errors import InputError, shown

CHUNK = 2**16  # examples looked at together: bounds the memory for temporaries


def check_examples(
    dataset: Dataset[Any],
    domains: Domains,
    classes: int | None,
    sample: int = 64,
    *,
    ignored: int | None = None,
) -> None:
    """Refuse indices beyond the dataset, features that are not finite, and labels that cannot be.

    A dataset with tensors ``x`` and ``y`` is looked at whole; of any other the first example of up to
    ``sample`` domains is, and the labels that it knows: ``seen``, indices and classes. Only examples that are
    in some domain count. ``classes`` is ``None`` for regression; labels that are ``ignored`` may be there.
    """
    count = len(dataset)  # type: ignore[arg-type]
    if (top := int(domains.indices.max())) >= count:
        name = domains.names[domains.domain_at(int(domains.indices.argmax()))]
        raise InputError(f"domain {name!r} has example {top}, but the dataset has {count} examples.")
    x, y = (getattr(dataset, name, None) if isinstance(dataset, TensorData) else None for name in "xy")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if classes is None and not y.is_floating_point():
            raise InputError(f"targets are {y.dtype}; for regression they must be floating: y.float().")
        _refuse(_not_finite(x), domains, "a feature that is", x)
        if classes is None:
            _refuse(_not_finite(y), domains, "a target that is", y)
        else:
            wrong, what = _wrong_labels(y, classes, ignored)
            _refuse(wrong, domains, what)
        return
    seen = getattr(dataset, "seen", None)
    if seen is not None and classes is not None and len(seen[0]):
        wrong, what = _wrong_labels(torch.as_tensor(seen[1]), classes, ignored)
        rows = np.zeros(count, dtype=bool)
        rows[seen[0]] = wrong
        _refuse(rows, domains, what)
    for d in range(min(len(domains), sample)):
        example = int(domains.indices_of(d)[0])
        _check_item(dataset[example], f"example {example} of domain {domains.names[d]!r}", classes, ignored)


def _check_item(item: Any, where: str, classes: int | None, ignored: int | None) -> None:
    if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
        raise InputError(f"{where} is {shown(item)}; it must be a pair (x, y), or (x, y, weight).")
    if len(item) == 3 and (not isinstance(item[2], (float, Tensor, np.floating)) or not item[2] >= 0):
        raise InputError(f"{where} has 3 parts; the third must be a weight, got {shown(item[2])}.")
    values = [*leaves(item[0]), *([item[1]] if classes is None else [])]
    tensors = [torch.as_tensor(v)[None] for v in values if isinstance(v, (float, Tensor, np.ndarray))]
    if any(_not_finite(t).any() for t in tensors):
        raise InputError(f"{where} has a feature or a target that is not finite.")
    if classes is not None:
        wrong, what = _wrong_labels(torch.as_tensor(item[1])[None], classes, ignored)
        if wrong.any():
            raise InputError(f"{where} has {what}.")


def _wrong_labels(y: Tensor, classes: int, ignored: int | None) -> tuple[NDArray[np.bool_], str]:
    """For each example, whether it has a label out of range, and that in words."""
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels are {y.dtype}; with classes={classes} they must be integers: y.long().")
    if y.ndim == 2 and y.shape[1] == 1:
        raise InputError(f"labels have shape {tuple(y.shape)}; they must be ({len(y)},): y.squeeze(1).")
    y = y.long() if ignored is None else torch.where(y == ignored, 0, y.long())
    low, high = (int(value) for value in y.aminmax())
    wrong = ((y < 0) | (y >= classes)).reshape(len(y), -1).any(1)
    hint = f": subtract {low}" if low > 0 and high - low < classes else ""
    right = f"with classes={classes} they must range from 0 to {classes - 1}{hint}"
    return wrong.cpu().numpy(), f"a wrong label; labels range from {low} to {high}; {right}"


def _not_finite(values: Tensor) -> NDArray[np.bool_]:
    """For each example."""
    if not (values.is_floating_point() or values.is_complex()):
        return np.zeros(len(values), dtype=bool)
    parts = [~part.reshape(len(part), -1).isfinite().all(1) for part in values.split(CHUNK)]
    return torch.cat(parts).cpu().numpy()


def _refuse(wrong: NDArray[np.bool_], domains: Domains, what: str, values: Tensor | None = None) -> None:
    """Refuse the first example of a domain for which ``wrong`` holds."""
    entries = np.flatnonzero(wrong[domains.indices])
    if len(entries):
        entry = int(entries[domains.indices[entries].argmin()])
        d, example = domains.domain_at(entry), int(domains.indices[entry])
        place = entry - int(domains.offsets[d])
        of_all = "" if place == example else f" (example {example} of all)"
        if values is not None:
            row = values[example].reshape(-1)
            what += f" {row[~row.isfinite()][0].item()}"
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
        right = (shape[0], classes, *y.shape[1:])
        if output.ndim < 2 or shape[1] != classes or (kind == "dense" and shape != right):
            expected = f"with classes={classes} it must be {right}, one logit for each class"
    elif {shape[1:], tuple(y.shape[1:])} == {(), (1,)}:
        cure = "output" if output.ndim == 2 else "targets"
        expected = f"a loss would silently compare {len(y)}×{len(y)} pairs: .squeeze(1) the {cure}"
    elif kind == "multilabel" and output.shape != y.shape:
        expected = "with task='multilabel' there must be one logit for each label"
    if expected:
        raise InputError(f"the model's output has shape {shape} for targets {tuple(y.shape)}: {expected}.")
