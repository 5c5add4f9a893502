"""The processes that train one model together, on torch.distributed."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import InputError, shown


class Processes:
    """Those that ``torchrun`` or ``accelerate launch`` started; otherwise this one alone.

    Every process has the whole model, and of every batch each has as many examples.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.count, self.index, self.device = 1, 0, pick_device(device)
        if not together():
            return
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            atexit.register(_end_together)
        self.count, self.index = dist.get_world_size(), dist.get_rank()
        nccl = "nccl" in str(dist.get_backend())
        if device is None and not nccl:
            self.device = torch.device("cpu")
        if nccl and self.device.type != "cuda":
            raise InputError(f"{shown(device)}, but the processes were started for CUDA.", "device")
        if self.device.type == "cuda":  # also with gloo, which copies through the CPU
            if device is None or torch.device(device).index is None:
                self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.index)))
            torch.cuda.set_device(self.device)

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and shows."""
        return self.index == 0

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means over processes, in one message for all tensors of a type."""
        means = list(tensors)
        if self.count == 1:
            return means
        for kind in dict.fromkeys(t.dtype for t in tensors):  # in the same order everywhere
            which = [i for i, t in enumerate(tensors) if t.dtype == kind]
            flat = torch.cat([tensors[i].reshape(-1) for i in which])
            dist.all_reduce(flat)
            parts = flat.div_(self.count).split([tensors[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                means[i] = part.view(tensors[i].shape)
        return means

    def rows(self, part: Tensor) -> Tensor:
        """The rows of all processes, of which each has every n-th."""
        parts = [torch.empty_like(part.contiguous()) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous())
        return torch.stack(parts, 1).flatten(0, 1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of the main process."""
        if self.count > 1:
            dist.broadcast(tensor := tensor.contiguous().clone(), 0)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, that of the main one first."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values


def together() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (dist.is_available() and dist.is_initialized())


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device of this name; by default CUDA where there is one, else the CPU."""
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError) as error:
        message = f"{shown(device)} is not a device that torch finds here, such as 'cpu', 'cuda' or 'cuda:1'."
        raise InputError(message, "device") from error
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def abandon() -> None:
    """This process ends with an error: it will not wait for the others."""
    atexit.unregister(_end_together)


def leave(code: int) -> None:
    """End a program of several processes; nothing is torn down, which now and then aborts."""
    if dist.is_available() and dist.is_initialized():
        if code == 0:
            _end_together()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_together() -> None:
    """Wait for the others, which gloo may abort while they still talk, unless this one ends with an error."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.barrier()
        dist.destroy_process_group()
