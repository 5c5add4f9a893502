"""Training again on training and validation data, once validation has said for how long.

The last step of ERM++ (Teterwak et al., ERM++: An Improved Baseline for Domain Generalization, 2023): the
search finds a number of steps on held-out validation examples, and the final model is trained from the same
initial weights for that many steps on all examples of the training domains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.training.options import probes_head, uses_swad

if TYPE_CHECKING:
    from shoal.training.recipes import Job

Plan = dict[str, Any]
"""What a search has found, as plain data: ``options`` for the training after it, and what to report of it."""


def with_validation(data: DomainData) -> DomainData:
    """``data`` with the validation examples of the training domains in ``train``, and no validation."""
    train, validation = data.splits["train"], data.splits.get("validation")
    known = set(train.names)
    same = [name for name in validation.names if name in known] if validation else []
    if validation is None or not same:
        raise InputError(
            "retrain=True needs validation examples of the training domains, under the same names."
        )
    more = {name: validation.indices_of(validation.number(name)) for name in same}
    every = {
        name: np.sort(np.concatenate([train.indices_of(number), more.get(name, [])]).astype(np.int64))
        for number, name in enumerate(train.names)
    }
    splits = {**data.splits, "train": Domains.from_indices(every)}
    del splits["validation"]
    return data.split_as(splits, {k: v for k, v in data.notes.items() if k != "validation"})


def plan(job: Job) -> Plan:
    """What a training that is over says of the one to come."""
    search = job.trainer
    point, rule = search.selection.selected
    steps, average, options = point.step, search.selection.average, job.options
    changes: dict[str, Any] = {"average": options["average"]}
    first = average.start if options["average"] and options["average"].startswith("sma") else 0  # type: ignore[union-attr]
    if uses_swad(options):  # the mean over the same steps
        first, steps = average.span if average and average.span else (steps + 1, steps)
    if first:  # unless the selected weights are from before the averaging
        changes["average"] = f"sma:{first}" if first <= steps else None
    if job.warm is not None:
        warm = job.warm.selection.selected_step
        changes["warm_start"] = f"head:{warm}" if probes_head(options) else warm
    if search.selection.interpolation:
        changes["wise_ft"] = search.selection.interpolation["alpha"]
    at = next((n for n, other in enumerate(search.history) if other is point), None)
    return {
        "options": {**changes, "steps": steps},
        "at": at,
        "point": point.to_dict() if at is None else None,
        "rule": rule,
        "notes": search.selection.notes,
        "interpolation": search.selection.interpolation,
    }
