"""Reading and writing files, and text that is safe to print."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.files import (
    dump_yaml,
    open_regular,
    parse_yaml,
    read_bytes,
    replacing,
    write_atomically,
)
from shoal.terminal import Printable


class TestReading:
    def test_a_pipe_is_refused_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "data.csv")
        with pytest.raises(InputError, match=r"data\.csv' is a pipe, not a regular file"):
            open_regular(tmp_path / "data.csv")

    @pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/"])
    def test_devices_and_folders_are_refused(self, path: str) -> None:
        with pytest.raises(InputError, match=r"is a (device|folder)"):
            read_bytes(path)

    def test_no_more_than_the_limit(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"12345")
        assert read_bytes(tmp_path / "a", 5) == b"12345"
        with pytest.raises(InputError, match="5 bytes; at most 4"):
            read_bytes(tmp_path / "a", 4)

    @pytest.mark.parametrize(
        "text",
        [
            "a: &a [x]\nb: *a",
            "[" * 5000,
            "- " * 5000,
            "{? {? {? ",
            "!!python/object/apply:os.system [echo]",
            "0x_",
            "2020-02-31",
            "1e999999:5:9",
        ],
    )
    def test_bad_yaml_is_a_value_error_or_plain(self, text: str) -> None:
        try:
            parse_yaml(text)
        except ValueError:
            return
        assert "&" not in text

    @given(
        st.recursive(st.none() | st.booleans() | st.text() | st.integers(), lambda x: st.lists(x, max_size=3))
    )
    @example("\x85")
    @example(" a\u2028b\u2029\n ")
    def test_what_is_dumped_is_read(self, content: object) -> None:
        shared = {"one": content, "two": content}
        assert parse_yaml(dump_yaml(shared)) == shared


class TestWriting:
    def test_a_link_stays_and_its_target_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "real").write_text("old")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        write_atomically(tmp_path / "link", b"new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_text() == "new"

    def test_a_pipe_is_written_through(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
        write_atomically(pipe, b"through")
        assert reader.communicate(timeout=10)[0] == b"through"
        assert not pipe.is_file()

    def test_inputs_are_never_outputs(self, tmp_path: Path) -> None:
        (tmp_path / "in.csv").write_text("data")
        (tmp_path / "link.csv").symlink_to(tmp_path / "in.csv")
        os.link(tmp_path / "in.csv", tmp_path / "hard.csv")
        for name in ("in.csv", "link.csv", "hard.csv", "../" + tmp_path.name + "/in.csv"):
            with (
                pytest.raises(InputError, match="is also an input"),
                replacing(tmp_path / name, [tmp_path / "in.csv"]),
            ):
                pass
        assert (tmp_path / "in.csv").read_text() == "data"

    def test_an_error_leaves_what_was_there(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("old")
        with contextlib.suppress(KeyboardInterrupt), replacing(tmp_path / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt
        assert (tmp_path / "a").read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]


class TestPrinting:
    @given(st.text())
    def test_no_control_character_gets_through(self, text: str) -> None:
        stream = io.StringIO()
        Printable(stream).write(text)
        assert not set(stream.getvalue()) & {chr(c) for c in (*range(9), *range(11, 32), *range(127, 160))}
        assert len(stream.getvalue()) == len(text)

    def test_what_the_encoding_lacks(self) -> None:
        raw = io.BytesIO()
        stream = Printable(io.TextIOWrapper(raw, encoding="ascii"))
        stream.write("Łódź \udcff\n")
        stream.flush()
        assert raw.getvalue() == b"\\u0141\\xf3d\\u017a ?\n"

    def test_a_full_standard_output_is_an_error_in_one_line(self) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "shoal", "list", "datasets", "--json"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 1
        assert done.returncode == 1
        assert "No space left" in done.stderr

    def test_an_error_text_with_escapes(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "train", "fi\x1b]0;owned\x07sh", "digits"],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert done.returncode == 2
        assert b"\x1b" not in done.stderr
        assert b"Traceback" not in done.stderr
