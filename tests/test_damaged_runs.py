"""Damaged run folders: no command ends in a traceback or hangs, and one bad run hides no other.

SHOAL_DAMAGES=500 tries more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.app import main
from shoal.files import dump_yaml, parse_json, parse_yaml

CASES = int(os.environ.get("SHOAL_DAMAGES", "15"))
VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 2**70, 10**400, 1.5, float("nan"), float("inf"), "", "text", "\x1b[31m", "../x"),
    *([], [1], [[[]]], ["a", None], {}, {"a": 1}, {"a": {"b": []}}, {"": None}),
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
        shoal.train(
            "erm", "data.csv", seed=2, out="runs/stopped", checkpoint_every=2, progress=stop, **OPTIONS
        )
    assert any((root / "runs" / "stopped" / "checkpoints").iterdir())
    return root


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 5)) if content else 0):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) + 1)])


def substitute(path: Path, chance: random.Random) -> None:
    """Puts a value of another type somewhere, in a file that stays JSON or YAML."""
    if path.suffix not in (".json", ".yaml", ".jsonl"):
        flip(path, chance)
        return
    yaml = path.suffix == ".yaml"
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    line = chance.randrange(len(texts))
    content = nest = parse_yaml(texts[line]) if yaml else parse_json(texts[line])
    for depth in reversed(range(chance.randrange(1, 6))):
        key = chance.choice(list(nest) if isinstance(nest, dict) else range(len(nest)))
        if depth == 0 or not isinstance(nest[key], dict | list) or not nest[key]:
            nest[key] = chance.choice(VALUES)
            break
        nest = nest[key]
    texts[line] = dump_yaml(content) if yaml else json.dumps(content)
    path.write_text("\n".join(texts) + "\n")


def replaced(path: Path, chance: random.Random) -> None:
    deep = ("[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "a: &a [*a]\n", "")
    path.write_text(chance.choice((*deep, json.dumps(chance.choice(VALUES)))))


def no_file(path: Path, chance: random.Random) -> None:
    path.unlink()
    makers: list[Callable[[], Any]] = [path.mkdir, lambda: os.mkfifo(path), lambda: None]
    makers += [lambda: path.symlink_to(path.name), lambda: path.symlink_to("/dev/zero")]
    chance.choice(makers)()


def commands(which: str) -> list[str]:
    bad, seed = f"runs/{which}", 0 if which == "finished" else 2
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in OPTIONS.items())
    every = [f"report {bad} --out page.html", f"train erm data.csv --seed {seed} --out {bad} {options}"]
    if which == "finished":
        every += [f"predict {bad} data.csv --out out.csv", f"score {bad} data.csv"]
        every += [f"export {bad} --format safetensors --out out.safetensors"]
    return every


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(CASES))
def test_any_damage(
    number: int,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(number)
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    which = chance.choice(("finished", "stopped"))
    files = sorted(path for path in Path("runs", which).rglob("*") if path.is_file())
    likely = [path for path in files if path.suffix in (".json", ".yaml", ".jsonl")]
    path = chance.choice(files + 3 * likely)
    harm = chance.choice([flip, cut, *[substitute] * 3, replaced, no_file])
    harm(path, chance)
    for command in commands(which):
        case = f"{number}: {harm.__name__} of {path}: {command}"
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
        frame = shoal.results(tmp_path)
    assert frame["path"].tolist() == ["good/record.json"]
    with pytest.raises(shoal.InputError, match=r"finished/record\.json"):
        shoal.report(tmp_path / "finished", tmp_path / "page.html")
