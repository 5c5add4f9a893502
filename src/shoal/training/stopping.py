"""How a training ends before its time, and what of the process it leaves as it was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from shoal.data.loader import seeded


class Signals:
    """Within the block the first SIGINT or SIGTERM only sets ``asked``; a second one acts as usual.

    A block within such a block is the same one. In a thread, where Python cannot watch signals, and with
    ``watch=False`` nothing changes.
    """

    active: ClassVar[Signals | None] = None

    def __init__(self, watch: bool = True) -> None:
        self.watch = watch and threading.current_thread() is threading.main_thread()
        self.asked: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if self.watch and Signals.active is None:
            Signals.active = self
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # whoever ignores it has a reason
                    self._handlers[number] = signal.signal(number, self._ask)
        return Signals.active if self.watch and Signals.active else self

    def __exit__(self, *error: object) -> None:
        if Signals.active is self:
            Signals.active = None
            self._restore_handlers()

    def _ask(self, number: int, frame: object) -> None:
        self.asked = signal.Signals(number)
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM was received: the step was finished and a checkpoint written."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process sends it to the main one
        return type(self), (str(self), self.signal)


class Diverged(RuntimeError):
    """A loss or gradient was not finite; ``history`` holds what was measured before."""

    def __init__(self, message: str, history: list[Any]) -> None:
        super().__init__(message)
        self.history = history


@contextmanager
def isolated_rng(device: torch.device, deterministic: bool = False) -> Iterator[None]:
    """Trainings in this block leave random state outside as it was, and whether kernels are deterministic."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        with seeded(0):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if state is not None:
            torch.cuda.set_rng_state(state, device)
