"""Command lines made from the parsers' own options with values that nobody expects: no traceback."""

from __future__ import annotations

import argparse
import io
import os
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import COMMANDS, main
from shoal.cli.arguments import Parser, values
from shoal.data import sets
from shoal.errors import InputError
from shoal.experiments.run import _loaded

VALUES = (
    *("", " ", "0", "-1", "1", "2", "3.5", "0,5", "1e400", "1e-400", "nan", "inf", "-inf", "1_000", "٣", "½"),
    *(
        "9" * 30,
        "9" * 5000,
        str(2**63),
        str(2**64),
        "x",
        "x" * 300,
        "x" * 5000,
        "\0",
        "\ud800",
        "\x1b[2J",
        "±",
    ),
    *("a=1", "=", "a=", "=1", "a=[", "a=*b", "seed=x", "seed=-1", "meta_lr=0,5", "meta_lr=nan", "test=no"),
    *(
        "cpu",
        "cuda:99",
        "meta",
        "cuda:-1",
        "step:nan:1",
        "step:1:0",
        "plateau",
        "true",
        "null",
        "None",
        "~nobody/x",
    ),
    *("..", "/", "/dev/null", "/dev/stdin", "nowhere.csv", "linear", "fish", "none", "-", "--", "%s", "{}"),
)
"""Of any option."""
TRIED = (
    "train",
    "compare",
    "sweep",
    "diagnose",
    "predict",
    "score",
    "list",
    "soup",
    "show",
    "resume",
    "results",
    "export",
)
FIRST: dict[str, list[str]] = {
    "train": ["fish", "linear"],
    "compare": ["linear"],
    "sweep": ["linear", "--algorithms", "erm"],
    "diagnose": ["linear"],
    "list": ["algorithms"],
}


class Reached(InputError):
    """What was typed was accepted: work would begin here."""


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str, **options: Any) -> Any:
        sets.check_options(name, options)
        raise Reached("loaded")

    monkeypatch.setattr(sets, "load", load)
    _loaded.cache_clear()  # an earlier test may have loaded the same
    monkeypatch.chdir(tmp_path)


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = Parser()
    import_module(COMMANDS[command]).add_arguments(parser)
    return parser


def code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as stop:  # of --help
        return int(stop.code or 0)


def ended_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code(words) in (0, 1, 2, 130), words
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err, words
    assert len(shown.err) < 2000, words
    assert len(shown.err.splitlines()) <= 4, (words, shown.err)


def each_option(command: str, values: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(command)
    for action in parser_of(command)._actions:
        if action.option_strings and action.nargs != 0:
            for value in draw.sample(VALUES, values):
                first = FIRST.get(command, ["nowhere"])
                ended_well([command, *first, action.option_strings[-1], value], capsys)


@pytest.mark.parametrize("command", TRIED)
def test_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    each_option(command, 4, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", TRIED)
def test_every_option_with_every_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    each_option(command, len(VALUES), capsys)


@pytest.mark.parametrize("seed", range(10))
def test_random_command_lines(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        command = draw.choice(TRIED)
        words = [
            command,
            *(FIRST.get(command, []) if draw.random() < 0.7 else draw.sample(VALUES, draw.randint(0, 2))),
        ]
        actions = parser_of(command)._actions
        for action in draw.sample(actions, draw.randint(0, min(3, len(actions)))):
            words += action.option_strings[-1:]
            words += draw.choices(VALUES, k=0 if action.nargs == 0 else draw.randint(0, 3))
        ended_well(words, capsys)


def test_what_is_right_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests above can fail."""
    right = "train fish linear --set meta_lr=0.1 --set buffers=walk --lr 1e-2 --warm-start 0.1 --seed 5"
    assert main(right.split()) == 2
    assert capsys.readouterr().err == "shoal: loaded\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tran fish", "unknown command 'tran'. Did you mean 'train'?"),
        ("train fish linear --step 5", "unknown argument '--step'. Did you mean --steps?"),
        ("train fish linear --seed -1", "--seed must be a whole number from 0 to"),
        (
            "train fish linear --seed 99999999999999999999",
            "--seed must be a whole number from 0 to",
        ),
        ("train fish linear --steps 1_000", "got '1_000'. Did you mean 1000?"),
        (
            "train fish linear --lr 0,5",
            "--lr must be a number above 0 and at most 1e+06, got '0,5'. Did",
        ),
        ("train fish linear --set meta_lr=0,5", "got '0,5'. Did you mean 0.5?"),
        ("train fish linear --set meta_lr=0.1 meta_lr=0.2", "--set sets 'meta_lr' twice"),
        ("train fish linear --set meta_lr=0.1 --set meta_lr=0.2", "--set sets 'meta_lr' twice"),
        (
            "train fish linear --device meta",
            "--device 'meta' is not a device for training: use 'cpu', 'cuda' or 'cuda:1'",
        ),
        ("train fish linear --device cuda:9999", "'cuda:9999', but torch finds"),
        ("train fish linear --warm-start 500.0", "got 500.0. Did you mean 500?"),
        ("train fish linear --model mlp --model-set width=0", "width of model 'mlp' must be"),
        (
            "train fish linear --data per_domain=x",
            "per_domain of dataset 'linear' must be a multiple of",
        ),
        (
            "compare linear --precision fp8",
            "--precision must be 'fp32' or 'bf16' or 'fp16' or 'auto', got 'fp8'",
        ),
        ("diagnose linear --budget nan", "--budget must be a number above 0, got 'nan'"),
    ],
)
def test_what_is_wrong_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("+1", 1),
        ("01", "01"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1_000", "1_000"),
        ("٣", "٣"),
        ("nan", "nan"),
        ("2020-01-31", "2020-01-31"),
        ("[1, 2]", [1, 2]),
        ("null", None),
        ("true", True),
        ("'1'", "1"),
    ],
)
def test_values_are_what_was_typed(text: str, value: Any) -> None:
    found = values([f"name={text}"], "--set")["name"]
    assert found == value
    assert type(found) is type(value)


def test_the_whole_program() -> None:
    source = Path(sys.modules["shoal"].__file__ or "").parents[1]
    for words, ends in (("--help >&-", 0), ("--help >&- 2>&- <&-", 0), ("tran 2>&-", 2), ("tran", 2)):
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m shoal {words}"],
            env=os.environ | {"PYTHONPATH": str(source)},
            capture_output=True,
        )
        assert done.returncode == ends, words
        assert b"Traceback" not in done.stderr


def test_closed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["list", "datasets", "linear"]) == 0
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["list", "datasets", "linear", "--json"]) == 0
    assert main(["list", "datasets", "lniear"]) == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_any_encoding_of_the_output(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["list", "algorithms", "idgm"], *([command, "--help"] for command in TRIED)):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert code(words) == 0
        assert written.getvalue().decode(encoding)


def test_a_current_folder_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert main(["list", "datasets"]) == 2
    finally:
        os.chdir(tmp_path)
    assert capsys.readouterr().err == "shoal: the current folder no longer exists; change to another.\n"
