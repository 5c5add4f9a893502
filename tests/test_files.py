"""Files are written whole or not at all, and read as plain data."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.files import read_yaml, write_atomically


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
