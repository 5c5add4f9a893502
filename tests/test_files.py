"""Files are written whole or not at all, and read as plain data."""

import contextlib
import csv
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.files import (
    as_csv,
    dump_json,
    dump_yaml,
    finite,
    parse_yaml,
    read_json,
    replacing,
    write_atomically,
)
from shoal.terminal import clean

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", b"new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
    (tmp_path / ".a.tmp").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "real").read_text() == "old"


def test_a_device_is_written_to() -> None:
    code = (
        "from shoal.files import write_atomically as w; w('/dev/null', b'gone'); w('/dev/stdout', b'through')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"through"
    assert not Path("/dev/null").is_file()


def test_inputs_are_never_outputs(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("data")
    (tmp_path / "link.csv").symlink_to(tmp_path / "in.csv")
    os.link(tmp_path / "in.csv", tmp_path / "hard.csv")
    for name in ("in.csv", "link.csv", "hard.csv", f"../{tmp_path.name}/in.csv"):
        with (
            pytest.raises(InputError, match="is also an input"),
            replacing(tmp_path / name, [tmp_path / "in.csv"]),
        ):
            pass
    with pytest.raises(InputError, match="is a folder"), replacing(tmp_path):
        pass
    assert (tmp_path / "in.csv").read_text() == "data"


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with contextlib.suppress(KeyboardInterrupt), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_several_writers_and_the_remains_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    for _ in range(200):
        with contextlib.suppress(FileNotFoundError):
            seen.add(path.read_bytes())
        time.sleep(0.001)
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert seen <= {bytes([n]) * 10**5 for n in range(3)}
    write_atomically(path, b"end")
    assert os.listdir(path.parent) == ["a"]
    assert path.read_bytes() == b"end"


def _write(path: Path, number: int) -> None:
    while True:
        write_atomically(path, bytes([number]) * 10**5)


def test_what_cannot_be_read_is_a_value_error(tmp_path: Path) -> None:
    for text in (
        "[" * 5000,
        "{? {? ",
        "!!python/object/apply:os.system [echo]",
        "0x_",
        "2020-02-31",
        "a: *b",
    ):
        with pytest.raises(ValueError):
            parse_yaml(text)
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested"):
        read_json(tmp_path / "a.json")


@given(st.recursive(st.none() | st.booleans() | TEXTS | st.integers(), lambda x: st.lists(x, max_size=3)))
def test_what_is_written_is_read(content: object) -> None:
    shared = {"one": content, "two": content}
    assert json.loads(dump_json(shared)) == shared
    if not any(mark in repr(content) for mark in ("\\x85", "\\u2028", "\\u2029")):  # YAML's line ends
        assert parse_yaml(dump_yaml(shared)) == shared


def test_numbers_that_json_has_no_word_for() -> None:
    found = finite({"a": [1.5, float("nan")], "b": (float("inf"), "x")})
    assert found == {"a": [1.5, None], "b": [None, "x"]}


@given(st.lists(st.lists(TEXTS.filter(lambda t: "\0" not in t), min_size=2, max_size=3), max_size=4))
def test_csv(rows: list[list[str]]) -> None:
    assert list(csv.reader(io.StringIO(as_csv(rows), newline=""))) == rows


@given(st.text())
def test_no_control_character_is_printed(text: str) -> None:
    shown = clean(text)
    assert not set(shown) & {chr(c) for c in (*range(32), *range(127, 160))}
    assert len(shown) == len(text)


def test_a_full_standard_output_and_an_error_with_escapes_end_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "shoal", "list", "datasets", "--json"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    words = [sys.executable, "-m", "shoal", "train", "fi\x1b]0;owned\x07sh", "digits"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert b"Traceback" not in done.stderr
