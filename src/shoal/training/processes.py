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
        if not together():
            self.device = pick_device(device)
            return
        wanted = None if device is None else named_device(device)
        if not dist.is_initialized():
            cuda = wanted.type == "cuda" if wanted else torch.cuda.is_available()
            dist.init_process_group("nccl" if cuda else "gloo")
        self.count, self.index = dist.get_world_size(), dist.get_rank()
        self.device = torch.device("cpu")
        # Asked for by name, CUDA works with gloo too, which copies through the CPU.
        asked = wanted is not None and wanted.type == "cuda" and torch.cuda.is_available()
        if "nccl" in str(dist.get_backend()) or asked:
            local = int(os.environ.get("LOCAL_RANK", self.index % max(1, torch.cuda.device_count())))
            self.device = torch.device("cuda", local)
            if wanted is not None and wanted.index is not None:
                self.device = wanted
            torch.cuda.set_device(self.device)
        if wanted is not None and wanted.type != self.device.type:
            raise InputError(
                f"device={str(wanted)!r}, but the processes were started together on {self.device}; "
                "launch them all for the same kind of device."
            )
        abandon()  # once is enough
        atexit.register(_end_together)

    @classmethod
    def alone(cls, device: torch.device) -> Processes:
        """This process, whatever others there are."""
        found = cls.__new__(cls)
        found.count, found.index, found.device = 1, 0, device
        return found

    @property
    def main(self) -> bool:
        """The one that writes and shows."""
        return self.index == 0

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over processes, in one message for all tensors of a type."""
        found: list[Tensor] = list(tensors)
        if self.count == 1:
            return found
        for kind in dict.fromkeys(t.dtype for t in tensors):  # in the same order everywhere
            which = [i for i, t in enumerate(tensors) if t.dtype == kind]
            flat = torch.cat([tensors[i].reshape(-1) for i in which])
            dist.all_reduce(flat)
            parts = flat.split([tensors[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                found[i] = part.view(tensors[i].shape)
        return found

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

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


def together() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (dist.is_available() and dist.is_initialized())


KNOWN = {
    "cpu": lambda: 1,
    "cuda": torch.cuda.device_count,
    "mps": lambda: int(torch.backends.mps.is_available()),
    "xpu": torch.xpu.device_count,
}
"""Kinds of devices, and how many there are."""


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device named, or CUDA where there is one, else the CPU."""
    named = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is not None:
        named = named_device(device)
        if named.type not in KNOWN:
            raise InputError(
                f"device={str(device)!r} is not supported; supported devices: {', '.join(KNOWN)}."
            )
        count = KNOWN[named.type]()
        if not (named.index or 0) < count:
            kind, many = named.type.upper(), f"only {count}" if count else "no"
            raise InputError(f"device={str(device)!r}, but torch finds {many} {kind} device here.")
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named


def named_device(device: str | torch.device) -> torch.device:
    """The device of this name, whether or not it exists."""
    try:
        named = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except (RuntimeError, ValueError):
        named = None
    if named is None or named.type == "meta":
        raise InputError(
            f"device={shown(device)} is not a device for training: use 'cpu', 'cuda' or 'cuda:1'."
        )
    return named


def abandon() -> None:
    """This process ends with an error: it will not wait for the others."""
    atexit.unregister(_end_together)


def leave(code: int) -> None:
    """Ends a program of several processes; nothing is torn down, which now and then aborts."""
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
