"""Damaged run folders: no command ends in a traceback or hangs, and one bad run hides no other.

SHOAL_DAMAGES=500 tries more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run
from shoal.files import dump_yaml, parse_json, parse_yaml

CASES = int(os.environ.get("SHOAL_DAMAGES", "15"))
VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 2**70, 10**400, 1.5, float("nan"), float("inf"), "", "text", "\x1b[31m", "../x"),
    *([], [1], [[[]]], ["a", None], {}, {"a": 1}, {"a": {"b": []}}, {"": None}),
]


def write_table(path: Path) -> Path:
    chance = random.Random(0)
    rows = [(chance.gauss(n % 2, 1), chance.random(), "abc"[n % 3], n % 2) for n in range(60)]
    path.write_text("x,z,place,ill\n" + "".join(f"{x:.3f},{z:.3f},{d},{y}\n" for x, z, d, y in rows))
    return path


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, a stopped one, and one that stays whole."""
    root = tmp_path_factory.mktemp("whole")
    data = {"file": str(write_table(root / "data.csv")), "label": "ill", "domain": "place", "test": "c"}
    config = RunConfig("table", "erm", 6, data_options=data, batch_size=4, eval_every=2)
    how = {"checkpoint_every": 2, "log_every": 1, "track_every": 2}

    def stop(step: int, note: str) -> None:
        if step >= 4:
            raise Stop

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(config, "cpu", folder=root / "runs" / "finished", how=how)
        run(replace(config, seed=1), "cpu", folder=root / "runs" / "good", how=how)
        with contextlib.suppress(Stop):
            run(replace(config, seed=2), "cpu", stop, root / "runs" / "stopped", how)
    assert (root / "runs" / "stopped" / "checkpoints").is_dir()
    return root


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 5))):
        if content:
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
    content = parse_yaml(texts[line]) if yaml else parse_json(texts[line])
    nest, depth = content, chance.randrange(1, 6)
    while True:
        keys = list(nest) if isinstance(nest, dict) else list(range(len(nest)))
        if not keys:
            break
        key = chance.choice(keys)
        depth -= 1
        if depth <= 0 or not isinstance(nest[key], dict | list) or not nest[key]:
            act = chance.randrange(8)
            if act == 0:
                del nest[key]
            elif act == 1 and isinstance(nest, dict):
                nest[chance.choice(("unknown", "files", "how", "1"))] = chance.choice(VALUES)
            else:
                nest[key] = chance.choice(VALUES)
            break
        nest = nest[key]
    texts[line] = dump_yaml(content) if yaml else json.dumps(content)
    path.write_text("\n".join(texts) + "\n")


def whole_value(path: Path, chance: random.Random) -> None:
    path.write_text(json.dumps(chance.choice(VALUES)))


def deep(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(("[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "a: &a [*a]\n")))


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def device(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


HARMS: list[Callable[[Path, random.Random], None]] = [
    *(flip, flip, cut, cut, substitute, substitute, substitute, substitute),
    *(whole_value, deep, empty, remove, folder, pipe, loop, device),
]


def commands(root: Path, which: str) -> list[list[str]]:
    runs, bad, data = root / "runs", root / "runs" / which, str(root / "data.csv")
    every = [
        ["show", str(runs)],
        ["show", str(bad)],
        ["results", str(runs)],
        ["report", str(runs), "--out", str(root / "page.html")],
        ["resume", str(bad), "--device", "cpu"],
    ]
    if which == "finished":
        every += [
            ["predict", str(bad), data, "--out", str(root / "out.csv")],
            ["score", str(bad), data],
            ["export", str(bad), "--format", "safetensors", "--out", str(root / "out.safetensors")],
        ]
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
    root = tmp_path / "copy"
    shutil.copytree(runs, root, symlinks=True)
    monkeypatch.chdir(root)
    which = chance.choice(("finished", "stopped"))
    files = sorted(path for path in (root / "runs" / which).rglob("*") if path.is_file())
    likely = [path for path in files if path.suffix in (".json", ".yaml", ".jsonl")]
    path, harm = chance.choice(files + 3 * likely), chance.choice(HARMS)
    harm(path, chance)
    for command in commands(root, which):
        case = f"{number}: {harm.__name__} of {path.relative_to(root)}: {' '.join(command[:1])}"
        try:
            code = main(command)
        except BaseException as error:
            raise AssertionError(case) from error
        shown = capsys.readouterr()
        assert code in (0, 1, 2), case
        errors = [line for line in shown.err.splitlines() if line.startswith("shoal: ")]
        if code:
            assert len(shown.err.splitlines()) <= 3 + len(errors), (case, shown.err)
            assert "Traceback" not in shown.err, (case, shown.err)
        if command[1].endswith("runs"):  # the others are still shown
            assert code == 0, (case, shown.err)
            assert "good" in shown.out or command[0] != "show", case


@pytest.mark.parametrize("name", ["config.yaml", "record.json"])
def test_a_bad_run_is_named_and_the_others_shown(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "finished" / name).write_text('{"run": 3}')
    assert main(["show", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert sum("step 6 of 6" in line for line in lines) == 1
    assert sum(str(tmp_path / "runs" / "finished" / name) in line for line in lines) == 1
    assert main(["show", str(tmp_path / "runs"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [len(shown["runs"]), len(shown["broken"])] == [2, 1]
