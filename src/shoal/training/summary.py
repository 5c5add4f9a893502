"""What is written down of a training: what it was, where it ran, what was measured."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import shoal
from shoal.data.batch import DomainData
from shoal.data.loader import seeded
from shoal.training.card import with_card
from shoal.training.options import plain

if TYPE_CHECKING:
    from shoal.training.recipes import Job
    from shoal.training.setup import Setup


def summary(job: Job, status: str = "finished", error: str = "") -> dict[str, Any]:
    """Everything measured, as plain data."""
    history, setup = job.points, job.setup
    point, rule = job.selected if history else (None, "last step")
    formats = {"memory_format": "channels-last"} if setup.channels_last else {}
    formats |= {"precision": "bf16"} if setup.options["precision"] == "bf16" else {}
    return {
        "status": status,
        "history": tuple(each.to_dict() for each in history),
        "selected": next((n for n, each in enumerate(history) if each is point), -1),
        "rule": rule,
        "seconds": round(job.seconds, 3),
        "environment": environment(setup.device, setup.processes.count) | formats,
        "error": error,
        "warm_up": tuple(each.to_dict() for each in job.warm.history) if job.warm else (),
        "notes": dict(setup.data.notes),
        "agreement": tuple(job.trainer.agreement),
        "interpolation": job.trainer.selection.interpolation,
    }


def environment(device: torch.device, processes: int = 1) -> dict[str, str]:
    cuda = device.type == "cuda"
    return {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": str(torch.get_num_threads()),
        "processes": str(processes),
    }


def surroundings(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """What it takes to repeat a run, besides its settings."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return {"environment": environment(device, processes), "command": shlex.join([name, *sys.argv[1:]])}


def describe(setup: Setup, where: bool = True) -> dict[str, Any]:
    """A training that was started from Python: its options, and the names of what cannot be written down."""
    return {
        "algorithm": type(setup.algorithm).__name__,
        "model": type(setup.model).__name__,
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "domains": {split: len(domains) for split, domains in setup.data.splits.items()},
        "options": plain(setup.options),
        **(surroundings(setup.device, setup.processes.count) if where else {}),
    }


def model_files(
    setup: Setup,
    recipe: Mapping[str, Any] | None,
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """The files of a trained model, by name, without its weights.

    ``recipe`` is the model's ``name`` and ``options``; ``None`` for a network of the user's own.
    ``calibration`` is that of :mod:`shoal.training.calibration`.
    """
    with seeded(setup.options["seed"]):  # reading an example may draw random numbers
        x = setup.data.examples.evaluation()[int(setup.data.splits["train"].indices[0])][0]
    shape, numbers = list(setup.data.input_shape), ""
    if isinstance(x, torch.Tensor):
        shape, numbers = shape or list(x.shape), str(x.dtype).removeprefix("torch.")
    content, files = about(setup.data, setup.model, recipe, setup.task.classes, shape, numbers)
    content |= {"task": setup.task.kind, "calibration": calibration}
    return with_card(content, files, setup.data, record, config)


def about(
    data: DomainData,
    model: nn.Module,
    recipe: Mapping[str, Any] | None,
    classes: int | None,
    shape: list[int],
    numbers: str,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """How to build the trained model and to feed it, as plain data, and the files that this refers to."""
    described, files = dict(data.inputs), dict[str, bytes]()
    if described:
        from shoal.data.inputs import reader

        known, files = reader(described, data.input_shape).portable()
        described = dict(known)
    built: dict[str, Any] = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if recipe is not None:
        from shoal.models import settings_of

        # With the options that were left as they are: a later version may have other defaults.
        name = str(recipe["name"])
        defaults = {key: option.default for key, option in settings_of(name).items()}
        built = {"name": name, "options": plain({**defaults, **(recipe.get("options") or {})})}
        encoder: Any = getattr(getattr(getattr(model, "features", None), "body", None), "config", None)
        if hasattr(encoder, "to_json_string"):  # of transformers
            files["encoder/config.json"] = encoder.to_json_string().encode()
    content = {
        "format": 1,
        "inputs": described,
        "input_shape": shape,
        "numbers": numbers,
        "classes": classes,
        "class_names": list(data.class_names) if len(data.class_names) == classes else [],
        "model": built,
    }
    return content, files
