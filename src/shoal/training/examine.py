"""Whether a model, its data and an algorithm go together, found out before any training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm, Loss
from shoal.data.batch import DomainData, Task
from shoal.data.check import check_examples, check_outputs
from shoal.data.domains import Domains
from shoal.data.loader import collate_of, to_device
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.replay import leaves_no_trace

TOKEN = 256
"""What a token counts as, when it is asked how large a batch may be: it soon becomes hundreds of numbers."""


class Examined(NamedTuple):
    """What is to be learned, the loss that is usual for it, two examples, and how many numbers one has."""

    task: Task
    loss: Loss
    x: Any
    numbers: int


def examine(
    model: nn.Module,
    data: DomainData,
    examples: Any,
    device: torch.device,
    classes: int | None,
    own_loss: bool = False,
) -> Examined:
    """Looks at the data, and at what the model makes of two examples, before anything is trained.

    ``examples`` are the data's, where they will be read. With ``own_loss`` the user knows what becomes of
    outputs that do not match the targets.
    """
    domains = data.splits["train"]
    x, y = _two(examples, domains, device)
    output = _trial(model, x)
    classes = classes or data.classes
    if y.is_floating_point() and classes is not None:
        raise InputError(f"classes={classes} but the targets are {y.dtype}; labels must be integers.")
    if not y.is_floating_point() and classes is None and isinstance(output, Tensor) and output.ndim in (1, 2):
        classes = output[0].numel()
        if output.ndim == 1 or classes == 1:
            raise InputError(
                "the model has one output and the labels are whole numbers, which are classes: give it one "
                "output per class; for regression say task='regression' or make the targets floating."
            )
    for which in data.splits.values():
        check_examples(examples, which, classes)
    check_outputs(output, y, classes)
    if not own_loss and classes is None and isinstance(output, Tensor) and output.shape != y.shape:
        raise InputError(
            f"the model's output has shape {tuple(output.shape)} and the floating targets {tuple(y.shape)}: "
            "regression needs one output per target. For classification make labels integers (y.long())."
        )
    usual: Loss = nn.functional.mse_loss if classes is None else nn.functional.cross_entropy
    features = _numbers(_trial(model.features, x)) if isinstance(model, FeatureModel) else None
    task = Task(domains=len(domains), classes=classes, features=features)
    return Examined(task, usual, x, _numbers(x, TOKEN))


def _trial(model: nn.Module, x: Any) -> Any:
    """What the model makes of ``x``, before training and without a trace."""
    mode = model.training
    try:
        with torch.no_grad(), leaves_no_trace(model):
            return model.eval()(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        given = f"x of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        given += f" of {', '.join(map(repr, x))}" if isinstance(x, Mapping) else ""
        first = (str(error).splitlines() or [""])[0]
        raise InputError(f"the model cannot take two training examples ({given}): {first}") from error
    finally:
        model.train(mode)


def check_comparison(algorithm: Algorithm, data: DomainData, sampler: DomainBatchSampler) -> None:
    """Methods that compare domains need at least two of them, and two a step."""
    name = type(algorithm).__name__
    if algorithm.knows_domains and sampler.domains_per_step > algorithm.task.domains:
        raise InputError(
            f"{name} keeps something for each of {algorithm.task.domains} domains; domains_per_step="
            f"{sampler.domains_per_step} must be at most {algorithm.task.domains}."
        )
    if not algorithm.compares_domains or sampler.draw == "regrouped":
        return
    if len(data.splits["train"]) < 2:
        only = data.splits["train"].names[0]
        raise InputError(
            f"{name} compares domains and there is only one to train on ({only!r}); "
            "give at least two, or train with 'erm'."
        )
    if sampler.domains_per_step < 2:
        raise InputError(f"{name} compares domains: domains_per_step must be at least 2, got 1.")


def _numbers(x: Any, whole: int = 1) -> int:
    """How many numbers the first tensor of a nest has for an example; a whole one counts as ``whole``."""
    while not isinstance(x, Tensor):
        values = list(x.values()) if isinstance(x, Mapping) else list(x)
        x = values[0]
    return max(1, x[:1].numel()) * (1 if x.is_floating_point() else whole)


def _two(examples: Any, domains: Domains, device: torch.device) -> tuple[Any, Tensor]:
    """Two examples as a batch."""
    which = [int(i) for i in domains.indices[:2]]
    if hasattr(examples, "batch"):
        return to_device(examples.batch(torch.tensor(which, device=examples.device)), device)
    return to_device(tuple(collate_of(examples)([examples[i] for i in which])), device)
