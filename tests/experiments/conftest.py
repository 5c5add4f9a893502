"""An executor for tests that runs in this process, one after the other, so that they can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.experiments import execute
from shoal.experiments.run import run as usual

Run = Callable[..., Any]


class InProcess:
    def __init__(self, run: Run = usual) -> None:
        self.run_one = run

    def run(self, configs: Any, store: Any, how: Any, tell: Any, done: Any) -> dict[str, str]:
        failed = {}
        for config in {c.identity: c for c in store.missing(configs)}.values():
            try:
                record = self.run_one(config, "cpu")
            except Exception as error:
                failed[config.identity] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            store.save(record)
            if done:
                done(record)
        return failed


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Every command of the test runs in this process; call it to replace what a run does."""

    def use(run: Run = usual) -> None:
        monkeypatch.setattr(execute, "make_executor", lambda *given, **more: InProcess(run))

    use()
    return use
