"""What is global in a process and a training changes: put back afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.data.loader import seeded


@contextmanager
def world(device: torch.device, deterministic: bool = False) -> Iterator[None]:
    """Trainings in this block leave the random numbers outside as they were.

    Kernels are deterministic within it, if asked for.
    """
    cuda = device.type == "cuda"
    outside = torch.cuda.get_rng_state(device) if cuda else None
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    # Within the user's own autocast, half-precision copies of weights must not outlive their use.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        with seeded(0):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if outside is not None:
            torch.cuda.set_rng_state(outside, device)
