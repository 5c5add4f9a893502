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
from shoal.tensors import widest


class Processes:
    """Those that ``torchrun`` or ``accelerate launch`` started; otherwise this one alone.

    Every process holds the whole model and a share of each domain's batch.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.count, self.index = 1, 0
        if together():
            self.device = self._join(None if device is None else named_device(device))
        else:
            self.device = pick_device(device)

    def _join(self, wanted: torch.device | None) -> torch.device:
        """Enter the group of processes; the device of this one."""
        if not dist.is_initialized():
            cuda = wanted.type == "cuda" if wanted else torch.cuda.is_available()
            dist.init_process_group("nccl" if cuda else "gloo")
        self.count, self.index = dist.get_world_size(), dist.get_rank()
        device = torch.device("cpu")
        # CUDA that is asked for by name works with gloo too, which copies through the CPU.
        by_name = wanted is not None and wanted.type == "cuda" and torch.cuda.is_available()
        if "nccl" in str(dist.get_backend()) or by_name:
            local = int(os.environ.get("LOCAL_RANK", self.index % max(1, torch.cuda.device_count())))
            named = wanted is not None and wanted.index is not None
            device = wanted if named and wanted else torch.device("cuda", local)
            torch.cuda.set_device(device)
        if wanted is not None and wanted.type != device.type:
            raise InputError(
                f"device={str(wanted)!r}, but the processes were started together on {device}; "
                "launch them all for the same kind of device."
            )
        abandon()  # registered once
        atexit.register(_end_together)
        return device

    @classmethod
    def alone(cls, device: torch.device) -> Processes:
        """This process, whatever others there are."""
        one = cls.__new__(cls)
        one.count, one.index, one.device = 1, 0, device
        return one

    @property
    def main(self) -> bool:
        """The one that writes and shows."""
        return self.index == 0

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over processes, in one message for all tensors of a type."""
        sums: list[Tensor] = list(tensors)
        if self.count == 1:
            return sums
        for kind in dict.fromkeys(t.dtype for t in tensors):  # in the same order everywhere
            which = [i for i, t in enumerate(tensors) if t.dtype == kind]
            flat = torch.cat([tensors[i].reshape(-1) for i in which])
            dist.all_reduce(flat)
            parts = flat.split([tensors[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                sums[i] = part.view(tensors[i].shape)
        return sums

    def numbers(self, *values: float) -> list[float]:
        """Sums of a few numbers over processes."""
        if self.count == 1:
            return list(values)
        (total,) = self.sum([torch.tensor(values, dtype=widest(self.device), device=self.device)])
        return list(total.tolist())

    def broadcast(self, value: Any) -> Any:
        """What the main process has; the others' ``value`` is ignored."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def together() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (dist.is_available() and dist.is_initialized())


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device named, or CUDA where there is one, else the CPU."""
    named = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is not None:
        named = named_device(device)
        try:
            torch.empty(0, device=named)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise InputError(f"device={str(device)!r}: torch finds no such device here.") from error
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named


def named_device(device: str | torch.device) -> torch.device:
    """The device of this name, whether or not it exists."""
    try:
        named = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except (RuntimeError, ValueError):
        named = None
    if named is None or named.type == "meta" or (named.type == "cpu" and named.index):
        raise InputError(
            f"device={shown(device)} is not a device for training: use 'cpu', 'cuda' or 'cuda:1'."
        )
    return named


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
    """At the end of the program processes wait for each other before they close their connections.

    Without it gloo now and then aborts one that is still talking. One that ends with an error does not wait:
    the others may never come.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.barrier()
        dist.destroy_process_group()
