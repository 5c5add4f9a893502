"""A small part of benchmarks/fuzz.py: nothing ends in a traceback, hangs, or harms a file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COUNT, SEED = 15, 17


@pytest.fixture(scope="module")
def commands() -> Iterator[Any]:
    """The generator of command lines."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fuzz_commands

        yield fuzz_commands
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of all kinds, from one process: most of its time goes into starting."""
    out = tmp_path_factory.mktemp("fuzz")
    line = [sys.executable, str(BENCHMARKS / "fuzz.py"), "all", "--count", str(COUNT), "--seed", str(SEED)]
    jobs = str(len(os.sched_getaffinity(0)))
    answer = subprocess.run([*line, "--jobs", jobs, "--out", str(out)], capture_output=True, text=True)
    assert answer.stdout.count(f"{COUNT:,} cases") == 3, answer.stdout + answer.stderr
    path = out / "fuzz-findings.jsonl"
    every = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    assert answer.returncode == (1 if every else 0)
    return {kind: [f for f in every if f["kind"] == kind] for kind in ("commands", "folders", "python")}


@pytest.mark.parametrize("kind", ["commands", "folders", "python"])
def test_nothing_is_found(findings: dict[str, list[Any]], kind: str) -> None:
    shown = [
        f"case {f['number']}: {f['findings'][0]['kind']} at {f['findings'][0]['where']}"
        for f in findings[kind]
    ]
    assert not shown, "\n".join(shown[:20])


def test_every_option_of_every_command_is_tried(commands: Any) -> None:
    """Without being listed: they come from the parsers."""
    for path, actions in commands.commands().items():
        lines = [commands.line(random.Random(number), path) for number in range(500)]
        assert 0.4 < sum(line.valid for line in lines) / len(lines) < 0.6
        tried = {part.action.dest for line in lines for part in line.parts if part.action is not None}
        assert {action.dest for action in actions} <= tried | commands.AVOIDED, path


def test_a_case_depends_on_its_seed_alone(commands: Any) -> None:
    def lines() -> list[list[str]]:
        return [commands.line(random.Random(f"{SEED}/commands/{n}")).words for n in range(50)]

    assert lines() == lines()
