"""Why a training may end before its time: somebody asks for it, or its numbers are no longer finite."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from shoal.training.history import Point

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Within the block the first signal only sets ``asked``; a second one acts as it would outside.

    In a thread, where Python cannot watch signals, and with ``watch=False`` nothing changes.
    """

    def __init__(self, watch: bool = True) -> None:
        self.watch = watch and threading.current_thread() is threading.main_thread()
        self.asked: signal.Signals | None = None
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self.watch:
            for number in STOPPING:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:  # whoever ignores it has a reason
                    self.before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number)
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, attended to: the step was finished and a checkpoint written."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal

    def __reduce__(self) -> tuple[Any, ...]:  # to come whole out of a worker process
        return type(self), (str(self), self.signal)


class Diverged(RuntimeError):
    """A loss or gradient was not finite; ``history`` holds what was measured before."""

    def __init__(self, message: str, history: list[Point], step: int, domain: str | None, what: str) -> None:
        super().__init__(message)
        self.history = history
        self.step, self.domain, self.quantity = step, domain, what
