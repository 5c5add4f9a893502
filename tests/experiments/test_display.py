"""The estimate of the time that is left."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.experiments import display
from shoal.experiments.config import RunConfig


@pytest.mark.parametrize("parallel", [1, 4])
def test_the_estimate_is_by_the_clock(parallel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many run at a time, and whatever each says that it took."""
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    configs = [RunConfig("digits", "erm", steps=10, seed=seed) for seed in range(12)]
    shown = display.Display(configs, len(configs))
    for first in range(0, 8, parallel):
        group = configs[first : first + parallel]
        clock[0] += 30 * parallel
        for config in group:
            shown.tell(config, 10, "")
        for config in group:
            record: Any = SimpleNamespace(config=config, status="diverged", seconds=1e6, error="")
            shown.done(record)
    assert shown.estimate == " about 2 min left"
    shown.tell(configs[8], 5, "")
    assert "2 min" in shown.estimate or "1 min" in shown.estimate
