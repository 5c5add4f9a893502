"""What tests of comparisons share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.experiments import execute
from shoal.experiments.store import Store

Run = Callable[..., Any]
usual = Store.run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs are done in this process, one after the other; call it to replace what a run does."""

    def use(run: Run | None = None) -> None:
        def one(self: Store, config: Any, device: Any, tell: Any, how: Any) -> Any:
            return run(config, "cpu") if run else usual(self, config, device, tell, how)

        monkeypatch.setattr(Store, "run", one)
        monkeypatch.setattr(execute, "make_executor", lambda *given, **more: execute.InProcess("cpu"))

    use()
    return use
