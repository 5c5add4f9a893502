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

from shoal.files import as_csv, dump_json, dump_yaml, finite, read_yaml, write_atomically
from shoal.terminal import clean


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
    code = "from shoal.files import write_atomically as w; w('/dev/null', b''); w('/dev/stdout', b'through')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"through"
    assert not Path("/dev/null").is_file()


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


@pytest.mark.parametrize("text", ["{? {? ", "!!python/object/apply:os.system [echo]", "2020-02-31", "a: *b"])
def test_yaml_that_is_no_plain_data(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError):
        read_yaml(tmp_path / "a.yaml")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    content = {"one": [1, None, "é: \\ \"'"], "two": {"off": True, "1e3": "\n"}}
    content |= {"again": content["one"]}
    (tmp_path / "a.yaml").write_text(dump_yaml(content), encoding="utf-8")
    assert json.loads(dump_json(content)) == read_yaml(tmp_path / "a.yaml") == content
    assert finite({"a": [1.5, float("nan")], "b": (float("inf"), "x")}) == {
        "a": [1.5, None],
        "b": [None, "x"],
    }
    rows = [["a,b", 'say "x"'], ["two\nlines", ""]]
    assert list(csv.reader(io.StringIO(as_csv(rows), newline=""))) == rows


def test_no_control_character_is_printed() -> None:
    assert clean("a\x1b[31mé\u202eb\n", keep="\n") == "a?[31mé?b\n"


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
