"""The command line: what is typed, what comes out, and what is said where it is wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.cli.app import main, make_app

COMMANDS = ("demo", "list", "data", "diagnose", "train", "compare", "predict", "score", "export", "sweep")
COMMANDS += ("report", "reproduce")
STEPS = ["--steps", "20", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(here: Path) -> str:
    rows = [f"{n % 7},{n % 3},{'yes' if n % 7 > 3 else 'no'},{'abcd'[n % 4]}" for n in range(160)]
    (here / "table.csv").write_text("\n".join(["x,z,ill,site", *rows]))
    return "table.csv"


OF_TABLE = ["--label", "ill", "--domain", "site"]


def commands(app: App) -> list[App]:
    """All commands with flags, those of `shoal data` too."""
    names = [name for name in app if not name.startswith("-")]
    return [leaf for name in names for leaf in (commands(app[name]) or [app[name]])]


def flags(app: App) -> list[str]:
    arguments = app.assemble_argument_collection()
    return [a.name for a in arguments if a.parameter.name and a.name.startswith("--")]


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that is refused: one or two lines, and exit code 2."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    _, colon, message = err.rpartition("shoal: ")
    assert colon
    assert len(message.splitlines()) <= 2
    return message


def test_a_dozen_commands_with_about_150_options() -> None:
    app = make_app()
    assert sorted(name for name in app if not name.startswith("-")) == sorted(COMMANDS)
    every = [flag for leaf in commands(app) for flag in flags(leaf)]
    assert len(every) <= 175


@pytest.mark.parametrize("name", [*COMMANDS, "data check", "data get", "data example"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: shoal {name}" in out
    assert ":class:" not in out
    assert "``" not in out


def test_train_again_resumes_and_prints_json(
    table: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "erm", table, *OF_TABLE, "--held-out", "d", *STEPS, "--out", "run", "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["status"] == "finished"
    assert first["config"]["data_options"]["held_out"] == "d"
    weights = (here / "run/model.safetensors").read_bytes()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["history"] == first["history"]
    assert (here / "run/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian"], ["train"]),
        (["train", "fsh", "table.csv", *OF_TABLE], ["fsh", "fish"]),
        (["train", "erm", "table.csv", *OF_TABLE, "--stepz", "3"], ["--stepz", "--steps"]),
        (["train", "erm", "table.csv", *OF_TABLE, "--steps", "1.5"], ["--steps", "1.5"]),
        (["train", "erm", "table.csv", *OF_TABLE, "--optimizer", "adm"], ["--optimizer", "adm", "adam"]),
        (["train", "erm", "table.csv", *OF_TABLE, "--search", "3"], ["--search"]),  # of compare
        (["train", "fish", "table.csv", *OF_TABLE, "--settings.meta-rl", "1"], ["meta_rl", "meta_lr"]),
        (["train", "erm"], ["DATA"]),
        (["predict", "nowhere", "table.csv"], ["nowhere"]),
        (["train", "erm", "table.csv", *OF_TABLE, "--config", "none.yaml"], ["none.yaml"]),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else str(value),
)
def test_what_is_wrong_is_named(
    words: list[str], named: list[str], table: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = failure(capsys, *words)
    assert [text for text in named if text not in message] == []
    assert sorted(p.name for p in here.iterdir()) == [table]


def test_options_come_from_a_file(table: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"label": "ill", "domain": "site", "steps": 7, "held_out": ["c", "d"]}
    options |= {"settings": {"meta_lr": 0.25}, "clip": 2.0, "optimizer_options": {"weight_decay": 0.01}}
    (here / "options.yaml").write_text(yaml.safe_dump(options))
    words = ["train", "fish", table, "--config", "options.yaml", "--out", "run", "--device", "cpu", "--json"]
    assert main([*words, "--steps", "9"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["steps"], config["settings"]) == (9, {"meta_lr": 0.25})
    assert config["data_options"]["held_out"] == ["c", "d"]
    assert (config["clip"], config["optimizer_options"]) == (2.0, {"weight_decay": 0.01})  # without a flag
    for text, named in (("stepz: 9", "'steps'"), ("[a]", "NAME: VALUE"), ("steps: {", "options.yaml")):
        (here / "options.yaml").write_text(f"{text}\n")
        assert named in failure(capsys, *words)


def test_a_failed_run_is_exit_code_1(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "erm", table, *OF_TABLE, *STEPS, "--optimizer", "sgd", "--lr", "1e6", "--out", "run"]
    assert main(words) == 1
    assert "step" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_has_a_message_and_a_code(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.api.listing.listed_names", lambda names: signal.raise_signal(number))
    assert main(["list"]) == 128 + number
    assert "the same command resumes" in capsys.readouterr().err


def test_names_of_strangers_do_not_move_the_cursor(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = ("a", "b", "c\x1b[2J")
    rows = [f"{n % 7},{'yes' if n % 7 > 3 else 'no'},{sites[n % 3]}" for n in range(150)]
    (here / "table.csv").write_text("\n".join(["x,ill,site", *rows]))
    main(["train", "erm", "table.csv", *OF_TABLE, *STEPS, "--out", "run"])
    out, err = capsys.readouterr()
    assert "\x1b[2J" not in out + err


WORDS = st.one_of(
    st.sampled_from(["--steps", "--lr", "--held-out", "--settings.meta-lr", "--drop", "--kinds.x", "--json"]),
    st.sampled_from(["", "0", "-1", "nan", "1e400", "no", "null", "[", "{}", "--", "-x", "💧", "table.csv"]),
    st.text(max_size=8),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["train", "compare", "predict", "score", "export", "report", "data", "list"]),
    st.lists(WORDS),
)
def test_whatever_is_typed_ends_without_a_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    assert main([command, *words]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err
