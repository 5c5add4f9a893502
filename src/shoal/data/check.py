"""Wrong data, found before training and named: what it is, where it is, what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoal.data.batch import TensorData, leaves
from shoal.data.domains import Domains
from shoal.data.examples import Items, Joined
from shoal.errors import InputError

CHUNK = 2**24  # numbers looked at together: bounds the memory for temporaries


def check_examples(
    dataset: Dataset[Any],
    domains: Domains,
    classes: int | None,
    sample: int = 64,
    *,
    ignored: int | None = None,
) -> None:
    """Refuse indices beyond the dataset, features that are not finite, and labels that cannot be.

    A dataset with tensors ``x`` and ``y`` is looked at whole, in pieces; of any other the first example of
    up to ``sample`` domains is. Only examples that are in some domain count. ``classes`` is ``None`` for
    regression; a label that is ``ignored`` may be there too.
    """
    count = len(dataset)  # type: ignore[arg-type]
    if (top := int(domains.indices.max())) >= count:
        d = domains.domain_at(int(domains.indices.argmax()))
        raise InputError(
            f"domain {domains.names[d]!r} has example {top}, but the dataset has {count} examples, "
            f"0 to {count - 1}."
        )
    x, y = (getattr(dataset, name, None) if isinstance(dataset, TensorData) else None for name in "xy")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        _check_type(y, classes)
        _check_finite(x, domains, "feature")
        _check_labels(y, domains, classes, ignored)
    else:
        if isinstance(dataset, Items | Joined) and classes is not None:
            _check_seen(*dataset.seen, domains, classes, ignored)
        for d in range(min(len(domains), sample)):
            _check_item(dataset, int(domains.indices_of(d)[0]), domains.names[d], classes, ignored)


def check_outputs(output: Any, y: Tensor, classes: int | None, kind: str = "") -> None:
    """Refuse a model's output for a batch with which the usual losses would fail, or worse, not fail.

    Logits must be as wide as there are classes, at axis 1. In regression an output (B, 1) against targets
    (B,) is broadcast to B × B differences, and the model learns the targets' mean. An output that is not a
    tensor is left to the user's loss.
    """
    if not isinstance(output, Tensor):
        return
    shape = tuple(output.shape)
    if output.ndim == 0 or shape[0] != len(y):
        raise InputError(
            f"the model's output has shape {shape} for {len(y)} examples; the first dimension must be the "
            "batch."
        )
    if classes is not None:
        right = (shape[0], classes, *y.shape[1:])
        if output.ndim < 2 or shape[1] != classes or (kind == "dense" and shape != right):
            raise InputError(
                f"the model's output has shape {shape}; with classes={classes} it must be "
                f"{right}: one logit for each class{' at each position' if y.ndim > 1 else ''}."
            )
    elif {shape[1:], tuple(y.shape[1:])} == {(), (1,)}:
        cure = ".squeeze(1) the output" if output.ndim == 2 else ".squeeze(1) the targets"
        raise InputError(
            f"the model's output has shape {shape} and the targets {tuple(y.shape)}: a loss would silently "
            f"compare every output with every target, {len(y)}×{len(y)}. Make the shapes equal: {cure}."
        )
    elif kind == "multilabel" and output.shape != y.shape:
        raise InputError(
            f"the model's output has shape {shape} and the labels {tuple(y.shape)}: with task='multilabel' "
            "there must be one logit for each label."
        )


def _check_type(y: Tensor, classes: int | None) -> None:
    kind = str(y.dtype).removeprefix("torch.")
    whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if classes is None and not y.is_floating_point():
        raise InputError(f"targets are {kind}; for regression they must be floating: y.float().")
    if classes is not None and not whole:
        raise InputError(f"labels are {kind}; with classes={classes} they must be integers: y.long().")
    if classes is not None and y.ndim == 2 and y.shape[1] == 1:
        raise InputError(f"labels have shape {tuple(y.shape)}; they must be ({len(y)},): y.squeeze(1).")


def _check_finite(values: Tensor, domains: Domains, what: str) -> None:
    if not (values.is_floating_point() or values.is_complex()):
        return
    if (result := _first(values, domains, lambda rows: ~rows.isfinite())) is None:
        return
    example, where = result
    row = values[example].reshape(-1)
    value = row[~row.isfinite()][0].item()
    raise InputError(f"{where} has a {what} that is {value}; fix or remove it.")


def _check_labels(y: Tensor, domains: Domains, classes: int | None, ignored: int | None) -> None:
    if classes is None:
        return _check_finite(y, domains, "target")

    def outside(rows: Tensor) -> Tensor:
        wrong = (rows.long() < 0) | (rows.long() >= classes)
        return wrong if ignored is None else wrong & (rows != ignored)

    if (result := _first(y, domains, outside)) is None:
        return None
    _, where = result
    if ignored is not None:
        y = torch.where(y == ignored, 0, y)
    used = y[torch.as_tensor(domains.examples().astype(np.int64), device=y.device)]
    raise InputError(_range_error(int(used.min()), int(used.max()), classes, where))


def _check_seen(which: Any, labels: Any, domains: Domains, classes: int, ignored: int | None) -> None:
    """Of labels that are known without reading the examples again."""
    inside = np.isin(which, domains.indices)
    if ignored is not None:
        inside &= labels != ignored
    used, wrong = labels[inside], inside & ((labels < 0) | (labels >= classes))
    if not wrong.any():
        return
    entry = int(np.argmax(domains.indices == which[int(np.argmax(wrong))]))
    where = _place(int(domains.indices[entry]), domains, domains.domain_at(entry), entry)
    raise InputError(_range_error(int(used.min()), int(used.max()), classes, where))


def _range_error(low: int, high: int, classes: int, first: str) -> str:
    where = f"the first label out of range is {first}"
    if low <= -(2**31):
        return f"there is a label {low}, which is what NaN becomes as an integer; {where}."
    right = (
        f"labels range from {low} to {high}; with classes={classes} they must range from 0 to {classes - 1}"
    )
    if low > 0 and high - low < classes:
        return f"{right}: subtract {low} ({where})."
    return f"{right}; set classes={high + 1}? ({where})." if low >= 0 else f"{right} ({where})."


def _first(values: Tensor, domains: Domains, bad: Callable[[Tensor], Tensor]) -> tuple[int, str] | None:
    """The first example in which some number is bad, and words for where it is."""
    rows = max(1, CHUNK // max(1, values[:1].numel()))
    for start in range(0, len(values), rows):
        wrong = bad(values[start : start + rows])
        if not wrong.any():
            continue
        examples = start + wrong.reshape(len(wrong), -1).any(1).nonzero()[:, 0].cpu().numpy()
        entries = np.flatnonzero(np.isin(domains.indices, examples))
        if len(entries):
            entry = int(entries[domains.indices[entries].argmin()])
            example = int(domains.indices[entry])
            return example, _place(example, domains, domains.domain_at(entry), entry)
    return None


def _is_weight(value: Any) -> bool:
    """Whether it is one floating number of at least 0."""
    values = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    return values.dtype.kind == "f" and not values.ndim and bool(np.isfinite(values) & (values >= 0))


def _place(example: int, domains: Domains, d: int, entry: int) -> str:
    """Where an example is, counted in its domain and, where that differs, in the whole data."""
    number = entry - int(domains.offsets[d])
    whole = f" (example {example} of all)" if number != example else ""
    return f"example {number} of domain {domains.names[d]!r}{whole}"


def _check_item(dataset: Any, example: int, name: str, classes: int | None, ignored: int | None) -> None:
    where = f"example {example} of domain {name!r}"
    item = dataset[example]
    weighted = isinstance(item, (tuple, list)) and len(item) == 3 and _is_weight(item[2])
    if not weighted and not (isinstance(item, (tuple, list)) and len(item) == 2):
        got = f"{len(item)} parts" if isinstance(item, (tuple, list)) else type(item).__name__
        raise InputError(f"{where} is {got}; an item of the dataset must be a pair (x, y).")
    x, y = item[:2]
    for part in leaves(x):
        floating = isinstance(part, Tensor | np.ndarray) and torch.as_tensor(part).is_floating_point()
        if floating and not bool(torch.as_tensor(part).isfinite().all()):
            raise InputError(f"{where} has a feature that is not finite; fix or remove it.")
    label = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if classes is None:
        if label.dtype.kind == "f" and not np.isfinite(label).all():
            raise InputError(f"{where} has a target that is not finite; fix or remove it.")
    elif label.dtype.kind not in "iu":
        raise InputError(f"{where} has label {y!r}; with classes={classes} it must be an integer.")
    elif ((label < 0) | (label >= classes))[label != ignored].any():
        raise InputError(
            f"{where} has label {label}; with classes={classes} labels must range from 0 to {classes - 1}."
        )
