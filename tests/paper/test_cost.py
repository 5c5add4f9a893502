"""`shoal reproduce cost`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.paper import cost

SMALL = {"sprite-cnn": cost.Network((3, 32, 32), 2, 2, 4)}


def test_every_method_is_timed_beside_fish_in_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "NETWORKS", SMALL)
    timings = iter(4.0**n for n in range(100))
    monkeypatch.setattr(cost, "_timed", lambda work, device: (work(), next(timings))[1])
    found = cost.measure(["sprite-cnn"], "cpu", rounds=4)
    rows = {row["method"]: row for row in found["rows"]}
    assert set(rows) == set(cost.METHODS)
    assert rows["Fish"]["ratio_to_fish"] == rows["ERM"]["ratio_to_erm"] == 1.0
    # The m-th timing takes 4^m. In each round IDGM comes right after Fish, but for the one that it begins.
    assert rows["IDGM, exact"]["rounds"] == [4.0, 4.0, 4.0**-3, 4.0]
    assert rows["IDGM, exact"]["ratio_to_fish"] == 4.0
    assert found["environment"]["device"] == "cpu"


def test_steps_of_all_methods_see_every_example(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    build = cost.models.build

    def watched(name: str, **given: object) -> object:
        model = build(name, **given)  # type: ignore[arg-type]
        number = f"model {len(seen)}"
        seen[number] = 0

        def count(module: object, inputs: tuple[object, ...]) -> None:
            seen[number] += len(inputs[0])  # type: ignore[arg-type]

        model.register_forward_pre_hook(count)
        return model

    monkeypatch.setattr(cost, "NETWORKS", SMALL)
    monkeypatch.setattr(cost, "WARM_UP", 0)
    monkeypatch.setattr(cost.models, "build", watched)
    cost.measure(["sprite-cnn"], "cpu", rounds=1)
    erm, fish, exact, differences = seen.values()
    assert erm == fish == 8
    assert exact >= 8
    assert differences >= 16  # at the start, and again where the difference is taken


def test_the_command_writes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "NETWORKS", SMALL)
    arguments = ["--networks", "sprite-cnn", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["reproduce", "cost", *arguments]) == 0
    assert "IDGM, finite differences" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "cost.json").read_text())["rows"]) == 4
    assert main(["reproduce", "cost", "--networks", "sprite", "--out", str(tmp_path)]) == 2
    assert "sprite-cnn" in capsys.readouterr().err
