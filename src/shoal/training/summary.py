"""What is written down of a training: what it was, where it ran, what was measured."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import shoal
from shoal.training.options import plain

if TYPE_CHECKING:
    from shoal.training.recipes import Job
    from shoal.training.setup import Setup


def summary(job: Job, status: str = "finished", error: str = "") -> dict[str, Any]:
    """Everything measured, as plain data."""
    history, setup, tracking = job.points, job.setup, job.trainer.tracking
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
        "agreement": tuple(tracking.measurements) if tracking else (),
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
