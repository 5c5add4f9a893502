"""What tests of comparisons share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.experiments import execute

Run = Callable[..., Any]
original = execute.run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs are done in this process, one after the other; call it to replace what a run does."""

    def use(run: Run | None = None) -> None:
        def one(config: Any, device: Any, folder: Any, **options: Any) -> Any:
            return run(config, "cpu") if run else original(config, "cpu", folder, **options)

        monkeypatch.setattr(execute, "run", one)
        monkeypatch.setattr(execute, "count_jobs", lambda *args: 1)

    use()
    return use
