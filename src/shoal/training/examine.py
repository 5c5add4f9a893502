"""Whether a model, its data, a loss and an algorithm go together, found out before any training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

SIZED = 16
"""Examples among which the largest is sought, where they differ in size."""
MOST_CLASSES = 512
"""Classes that a loss is tried on."""
SEVERAL = (
    ". A tuple is passed as several arguments where forward needs more than one, a dict by name where all "
    "its keys are parameters of forward; otherwise x is one argument."
)


class Examined(NamedTuple):
    """What is to be learned, and the model's outputs for two examples."""

    task: Task
    loss: Loss
    """The default loss of the task."""
    x: Any
    y: Tensor
    output: Any
    numbers: int
    """The most that one example becomes in any operation of the model."""
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
    if not isinstance(examples, TensorData):  # they may differ in size
        places = np.linspace(0, len(domains.indices) - 1, min(SIZED, len(domains.indices))).astype(int)
        largest_one = max(domains.indices[places], key=lambda i: _numbers(examples.batch([i])[0]))
        which = np.repeat(largest_one, 2)
    x, y, *weight = to_device(examples.batch(which), device)
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        _forward(model, x)  # gives them their shapes
    with Largest() as largest, preserve_state(model):
        output = _forward(model, x)
    kind, classes = _kind(data.kind, classes or data.classes, output, y)
    for split in data.splits.values():
        check_examples(examples, split, classes)
    check_outputs(output, y, classes, kind)
    if loss is None and classes is None and isinstance(output, Tensor) and output.shape != y.shape:
        raise InputError(
            f"the model's output has shape {tuple(output.shape)} and the floating targets {tuple(y.shape)}: "
            "regression needs one output per target. For classification make labels integers (y.long())."
        )
    default: Loss = nn.functional.mse_loss if classes is None else nn.functional.cross_entropy
    if kind == "multilabel":
        default = nn.functional.binary_cross_entropy_with_logits
    width = None
    if features is not None:
        args, kwargs = arguments(model, x)
        width = features.find(*args, **kwargs).width
    elif isinstance(model, FeatureModel):
        with preserve_state(model):
            width = _numbers(_forward(model.features, x))
    task = Task(domains=len(domains), classes=classes, features=width, kind=kind)
    numbers = max(largest.numbers // len(y), _numbers(x))
    return Examined(task, default, x, y, output, numbers, bool(weight))


def _numbers(x: Any) -> int:
    """How many numbers the largest tensor of a nest has for an example."""
    return max([1, *(t[:1].numel() for t in tensors_in(x) if t.ndim)])


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


class Largest(TorchDispatchMode):
    """``numbers`` is the size of the largest tensor that any operation in the block makes, views aside."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, Tensor) and t.ndim > 1]
            self.numbers = max([self.numbers, *sizes])
        return made


def _forward(model: nn.Module, x: Any) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return call(model, x)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        what = f"x of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        what += f" of {', '.join(map(repr, x))}" if isinstance(x, Mapping) else ""
        several = isinstance(x, (tuple, list, Mapping)) and isinstance(error, TypeError)
        why = _first_line(error) + (SEVERAL if several else "")
        raise InputError(f"the model cannot take two training examples ({what}): {why}") from error


def check_comparison(algorithm: Algorithm, data: DomainData, sampler: DomainBatchSampler) -> None:
    """Methods that compare domains need at least two of them, and two a step."""
    name, each, domains = type(algorithm).__name__, sampler.domains_per_step, data.splits["train"]
    regrouped = sampler.draw == "regrouped"
    if algorithm.min_domains < 2:
        return
    if len(domains) < 2 and not regrouped:
        only = domains.names[0]
        raise InputError(
            f"{name} compares domains and there is only one to train on ({only!r}); "
            "give at least two, or train with 'erm'."
        )
    least, most = 1 if regrouped else 2, algorithm.task.domains
    if not least <= each <= most:
        raise InputError(
            f"{name} compares {most} domains; domains_per_step={each} must be from {least} to {most}."
        )


def why_unscored(found: Examined) -> str:
    """Why an evaluation could not compare outputs with the targets, or would broadcast; "" if it can."""
    output, y = found.output, found.y
    if isinstance(output, Tensor) and (found.task.classes is not None or output.shape == y.shape):
        return ""
    got = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    return f"the model's output is {got} and the targets are {tuple(y.shape)}, which cannot be compared"


def check_loss(loss: Loss, found: Examined, algorithm: Algorithm, divided: str | None) -> None:
    """Refuses a loss that is not one number, and one that cannot be had with what is asked of it.

    ``divided`` says why batches are taken in pieces. The pieces of a loss whose terms are known are put
    together exactly; any other must be the plain mean of its examples' losses.
    """
    terms, name, shown, task = find_terms(loss), type(algorithm).__name__, shown_loss(loss), found.task
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
    if needs and not _is_plain_mean(loss, found):
        raise InputError(
            f"{needs} needs a loss that is the mean of its examples' losses, and this one is not (a class "
            "weight, ignore_index, or a sum): the result would depend on how batches are divided. Class "
            "weights in nn.CrossEntropyLoss(weight=…) can be divided by most algorithms."
        )


def _is_plain_mean(loss: Loss, found: Examined) -> bool:
    """Whether a loss is the mean of its examples' losses, tried on random outputs and every class."""
    y, classes = found.y, found.task.classes
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
