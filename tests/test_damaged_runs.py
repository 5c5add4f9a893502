"""Damaged run folders: no command ends in a traceback or hangs, and one bad run hides no other.

SHOAL_DAMAGES=500 tries more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from shoal.cli.app import main
from shoal.experiments.store import Store

CASES = int(os.environ.get("SHOAL_DAMAGES", "8"))
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**70, 10**400, 1.5, float("nan"), float("inf"), "", "text", "\x1b[31m", "../x"),
    *([], [1], [[[]]], ["a", None], {}, {"a": {"b": []}}, {"": None}),
]
OPTIONS: dict[str, Any] = {"label": "ill", "domain": "place", "held_out": "c", "steps": 6, "batch_size": 4}
OPTIONS |= {"eval_every": 2, "track_every": 2, "device": "cpu"}


class Stop(Exception):
    pass


def stop(step: int, note: str) -> None:
    if step >= 4:
        raise Stop


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, a stopped one, and one that stays whole."""
    root, chance = tmp_path_factory.mktemp("whole"), random.Random(0)
    rows = [f"{chance.gauss(n % 2, 1):.3f},{chance.random():.3f},{'abc'[n % 3]},{n % 2}" for n in range(60)]
    (root / "data.csv").write_text("\n".join(["x,z,place,ill", *rows]))
    with contextlib.chdir(root), contextlib.suppress(Stop):
        shoal.train("erm", "data.csv", out="runs/finished", progress=False, **OPTIONS)
        shoal.train("erm", "data.csv", seed=1, out="runs/good", progress=False, **OPTIONS)
        more = {"seed": 2, "checkpoint_every": 2, "progress": stop}
        shoal.train("erm", "data.csv", out="runs/stopped", **OPTIONS, **more)
    assert any((root / "runs" / "stopped" / "checkpoints").iterdir())
    return root


def harm(path: Path, chance: random.Random) -> str:
    """Flips a bit, cuts the file, puts another value somewhere, or puts something else in its place."""
    kind, content = chance.choice(["bit", "cut", "value", "value", "text", "link"]), path.read_bytes()
    if kind == "value" and path.suffix in (".json", ".yaml"):
        nest = whole = yaml.safe_load(content)  # JSON is YAML
        for depth in reversed(range(chance.randrange(1, 6))):
            key = chance.choice(list(nest) if isinstance(nest, dict) else range(len(nest)))
            if depth == 0 or not isinstance(nest[key], dict | list) or not nest[key]:
                nest[key] = chance.choice(VALUES)
                break
            nest = nest[key]
        path.write_text(json.dumps(whole))
    elif kind == "text":
        path.write_text(chance.choice(["[" * 100_000, "a: &a [*a]\n", "", json.dumps(chance.choice(VALUES))]))
    elif kind == "link":
        path.unlink()
        chance.choice([path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path.name)])()
    elif kind == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif content:
        at = chance.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
    return kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(CASES))
def test_any_damage(
    number: int, runs: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(number)
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    which = chance.choice(("finished", "stopped"))
    files = sorted(path for path in Path("runs", which).rglob("*") if path.is_file())
    path = chance.choice(files + 3 * [path for path in files if path.suffix in (".json", ".yaml", ".jsonl")])
    kind = harm(path, chance)
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in OPTIONS.items())
    commands = [f"report runs/{which} --out page.html"]
    commands += [f"train erm data.csv --seed {2 * (which == 'stopped')} --out runs/{which} {options}"]
    if which == "finished":
        commands += [f"predict runs/{which} data.csv --out out.csv", f"score runs/{which} data.csv"]
        commands += [f"export runs/{which} --format safetensors --out out.safetensors"]
    for command in commands:
        case = f"{number}: {kind} of {path}: {command}"
        try:
            code = main(command.split())
        except BaseException as error:
            raise AssertionError(case) from error
        shown = capsys.readouterr().err
        assert "Traceback" not in shown, (case, shown)
        assert code in (0, 1, 2), (case, shown)


def test_a_bad_run_is_named_and_the_others_shown(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "runs", tmp_path, dirs_exist_ok=True)
    (tmp_path / "finished" / "record.json").write_text('{"run": 3}')
    with pytest.warns(UserWarning, match="finished/record.json"):
        frame = Store(tmp_path).frame()
    assert frame["path"].tolist() == ["good/record.json"]
    with pytest.raises(shoal.InputError, match=r"finished/record\.json"):
        shoal.report(tmp_path / "finished", tmp_path / "page.html")
