"""Whether a model, its data, a loss and an algorithm go together, found out before any training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.algorithms import Algorithm, Loss
from shoal.data.batch import DomainData, Task, TensorData, tensors_in
from shoal.data.check import check_examples, check_outputs
from shoal.data.loader import to_device
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.losses import BINARY, OF_NUMBERS, PROBABILITIES, UNKNOWN_LOSS, find_terms, shown_loss
from shoal.models import FeatureExtractor, FeatureModel
from shoal.models.calling import arguments, call
from shoal.replay import preserve_state
from shoal.training.evaluate import evaluating

MOST_CLASSES = 512
"""Classes that a loss is tried on."""


class Examined(NamedTuple):
    """What is to be learned, and the model's outputs for two examples."""

    task: Task
    loss: Loss
    """The user's own, or the default of the task."""
    x: Any
    y: Tensor
    output: Any
    weighted: bool = False
    """Whether examples have weights."""


def examine(
    model: nn.Module,
    data: DomainData,
    device: torch.device,
    classes: int | None,
    loss: Loss | None = None,
    features: FeatureExtractor | None = None,
) -> Examined:
    """Checks the data, and the model's outputs for two examples.

    Args:
        model: the model.
        data: the data.
        device: where the model is.
        classes: number of classes, if it is known.
        loss: the user's own.
        features: what finds the features of a model that is not a FeatureModel.
    """
    domains, examples = data.splits["train"], data.examples
    which = domains.indices[:2]
    if not isinstance(examples, TensorData):  # whose examples may differ in size
        which = which[[0, 0]]
    x, y, *weight = to_device(examples.batch(which), device)
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        _forward(model, x)  # gives them their shapes
    with preserve_state(model):
        output, width = _forward(model, x), None
        if features is not None:
            args, kwargs = arguments(model, x)
            width = features.find(*args, **kwargs).width
        elif isinstance(model, FeatureModel):
            parts = tensors_in(_forward(model.features, x))
            width = max([1, *(part[:1].numel() for part in parts)])
    kind, classes = _kind(data.kind, classes or data.classes, output, y)
    for split in data.splits.values():
        check_examples(examples, split, classes)
    check_outputs(output, y, classes, kind)
    if loss is None:
        loss = nn.functional.mse_loss if classes is None else nn.functional.cross_entropy
        if kind == "multilabel":
            loss = nn.functional.binary_cross_entropy_with_logits
        comparable = isinstance(output, Tensor) and (classes is not None or output.shape == y.shape)
        if not comparable:
            raise InputError(
                f"the model's output is {_form(output)} and the targets are {_form(y)}: regression needs one "
                "output per target. For classification make labels integers (y.long()); for other outputs "
                "give a loss."
            )
    task = Task(domains=len(domains), classes=classes, features=width, kind=kind)
    return Examined(task, loss, x, y, output, bool(weight))


def _kind(kind: str | None, classes: int | None, output: Any, y: Tensor) -> tuple[str, int | None]:
    """The kind of the task and the classes, by what the data say or else by shapes of labels and outputs."""
    if y.is_floating_point():
        if classes is not None or kind == "ordinal":
            raise InputError(f"the targets are {y.dtype}; the labels of classes must be integers: y.long().")
        return (kind if kind not in (None, "classification") else "regression"), None
    if not isinstance(output, Tensor):
        return kind or "classification", classes
    if y.ndim > 1 or output.ndim > 2:
        raise InputError(
            f"the model's output has shape {tuple(output.shape)} and the labels {tuple(y.shape)}: a class "
            "per example needs outputs (B, classes) and labels (B,). Several labels of 0 or 1 are "
            "task='multilabel', several numbers floating targets (y.float())."
        )
    if classes is None and output.ndim:
        classes = output[0].numel()
        if output.ndim == 1 or classes == 1:
            raise InputError(
                "the model has one output and the labels are whole numbers, which are classes: give it one "
                "output per class; for regression say task='regression' or make the targets floating; one "
                "logit with loss=nn.BCEWithLogitsLoss() is task='multilabel'."
            )
    return kind or "classification", classes


def _forward(model: nn.Module, x: Any) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return call(model, x)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        what, why = f"a {type(x).__name__}", _first_line(error)
        if isinstance(x, Tensor):
            what = f"x of shape {tuple(x.shape)}, {x.dtype}"
        elif isinstance(error, TypeError):
            why += (
                ". A tuple is passed as several arguments where forward needs more than one, a dict by name "
                "where all its keys are parameters of forward; otherwise x is one argument."
            )
        raise InputError(f"the model cannot take two training examples ({what}): {why}") from error


def check_comparison(algorithm: Algorithm, data: DomainData, sampler: DomainBatchSampler) -> None:
    """Methods that compare domains need at least two of them, and two a step."""
    names, each = data.splits["train"].names, sampler.domains_per_step
    if algorithm.min_domains < 2:
        return
    least, why = 1 if sampler.draw == "regrouped" else 2, f"{type(algorithm).__name__} compares domains"
    if len(names) < least:
        raise InputError(
            f"{why} and there is only one to train on ({names[0]!r}); give at least two, or train with 'erm'."
        )
    if not least <= each <= len(names):
        raise InputError(f"{why}; domains_per_step={each} must be from {least} to {len(names)}.")


def scored_splits(found: Examined, splits: Sequence[str]) -> list[str]:
    """Those of ``splits`` that are evaluated: none where outputs could not be compared with the targets."""
    output, y = found.output, found.y
    if isinstance(output, Tensor) and (found.task.classes is not None or output.shape == y.shape):
        return list(splits)
    why = f"the model's output is {_form(output)} and the targets are {_form(y)}, which cannot be compared"
    if splits != ["train"]:
        raise InputError(f"{why}; give the model one output, or no validation and test data.")
    warn(f"{why}: nothing is evaluated.", stacklevel=6)
    return []


def _form(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_loss(found: Examined, algorithm: Algorithm, divided: str | None) -> None:
    """Refuses a loss that is not one number, and one that cannot be had with what is asked of it.

    ``divided`` says why batches are taken in pieces. The pieces of a loss whose terms are known are put
    together exactly; any other must be the plain mean of its examples' losses.
    """
    loss, task, name = found.loss, found.task, type(algorithm).__name__
    terms, shown = find_terms(loss), shown_loss(loss)
    function = None if terms is None else terms.function
    if found.weighted and terms is None:
        raise InputError(UNKNOWN_LOSS.format("sample weights need", shown))
    if found.weighted and not algorithm.sample_weights:
        raise InputError(
            f"{name} does not take sample weights; leave them out, or train with 'fish', 'vrex' or 'erm'."
        )
    if function in PROBABILITIES and task.kind == "multilabel":
        raise InputError(
            f"{shown} is of probabilities; outputs are logits here: nn.BCEWithLogitsLoss().", "loss"
        )
    if function in (*BINARY, *OF_NUMBERS) and task.classes is not None:
        raise InputError(
            f"{shown} and the labels are whole numbers, which are {task.kind}: say task='multilabel' (0 and "
            "1) or task='regression', or leave the loss out (cross-entropy).",
            "loss",
        )
    if not isinstance(found.output, Tensor):
        return
    try:
        with torch.no_grad():
            value = loss(found.output, found.y)
    except Exception as error:
        if terms is None:  # it asks for more than this trial knows of; its first step will tell
            return
        shapes = f"outputs {tuple(found.output.shape)} and targets {tuple(found.y.shape)}"
        raise InputError(f"cannot take {shapes}: {_first_line(error)}", "loss") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"loss(output, y) must return one number, a mean over examples; got {got}.")
    gathered = type(algorithm).objective is not Algorithm.objective
    by_parts = terms is not None and algorithm.sample_weights and not algorithm.second_order
    needs = name if algorithm.plain_mean else None if gathered or by_parts else divided
    if needs and not _is_plain_mean(found):
        raise InputError(
            f"{needs} needs a loss that is the mean of its examples' losses, and this one is not (a class "
            "weight, ignore_index, or a sum): the result would depend on how batches are divided. Class "
            "weights in nn.CrossEntropyLoss(weight=…) can be divided by most algorithms."
        )


def _is_plain_mean(found: Examined) -> bool:
    """Whether a loss is the mean of its examples' losses, tried on random outputs and every class."""
    loss, y, classes = found.loss, found.y, found.task.classes
    count = min(classes or 8, MOST_CLASSES)
    generator, numbers = torch.Generator().manual_seed(0), torch.arange(count, device=y.device)
    output = torch.randn((count, *found.output.shape[1:]), generator=generator).to(found.output)
    y = numbers.to(y.dtype) if classes and y.ndim == 1 else y[numbers % len(y)]
    with torch.no_grad():
        whole = float(loss(output, y))
        parts = [float(loss(output[i : i + 1], y[i : i + 1])) for i in range(count)]
    return math.isclose(whole, sum(parts) / count, rel_tol=1e-3, abs_tol=1e-5)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
