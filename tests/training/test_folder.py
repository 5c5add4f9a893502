"""A run's folder: one process uses it at a time, and nothing is written through a link."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError
from shoal.training.folder import RunFolder, check_output

WHO = f"in use by process {os.getpid()} on host {socket.gethostname()};"


def test_started_and_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.checkpoints.mkdir()
    assert not folder.started
    (folder.checkpoints / "step-0000000001.pt").touch()
    assert folder.started
    assert not folder.finished
    folder.record.touch()
    assert folder.finished


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file; a run requires a folder"):
        RunFolder(tmp_path / "file")
    with pytest.raises(InputError, match=r"file/a cannot be created or written to \(Not a directory\)"):
        RunFolder(tmp_path / "file" / "a")


def test_locked_within_the_block(tmp_path: Path) -> None:
    ours, other = RunFolder(tmp_path), RunFolder(tmp_path)
    with ours:
        with pytest.raises(InputError, match=f"^{tmp_path} is {WHO}"), other:
            pass
        if (child := os.fork()) == 0:  # a forked process does not free it, even if it leaves the block
            ours.__exit__()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(InputError, match="is in use by"), other:
            pass
    with other, pytest.raises(InputError, match="is in use by"), ours:
        pass


def test_a_killed_process_frees_it_also_if_its_forked_workers_live_on(tmp_path: Path) -> None:
    code = """if True:
        import os, sys, time
        from shoal.training.folder import RunFolder
        with RunFolder(sys.argv[1]):
            worker = os.fork()
            if worker == 0:
                os.close(1)
                time.sleep(60)
                os._exit(0)
            print(worker, flush=True)
            time.sleep(60)
        """
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(InputError, match=f"in use by process {process.pid} "), RunFolder(tmp_path):
            pass
        process.kill()
        process.wait()
        process.stdout.close()
        for attempt in range(50):  # as soon as the worker has begun to run
            try:
                with RunFolder(tmp_path):
                    break
            except InputError:
                assert attempt < 49
                time.sleep(0.1)
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    "name", ["card.md", "metrics.jsonl", ".lock", "checkpoints", "stages/train/record.json"]
)
def test_links_are_refused_and_what_they_point_to_is_left_alone(tmp_path: Path, name: str) -> None:
    """Those of a stranger's run, whoever resumes it."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir() if name == "checkpoints" else outside.write_text("mine")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)
    with pytest.raises(InputError, match=f"{name}' is a symbolic link"), RunFolder(run):
        pass
    assert outside.is_dir() or outside.read_text() == "mine"


def test_entries_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    with RunFolder(tmp_path / "run") as folder:
        (folder.path / "card.md").symlink_to(tmp_path / "outside")  # made meanwhile
        folder.write("card.md", b"a card")
    assert (tmp_path / "run" / "card.md").read_text() == "a card"
    assert not (tmp_path / "run" / "card.md").is_symlink()
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"), RunFolder(tmp_path):
        pass


def test_files_of_a_run_are_no_output(tmp_path: Path) -> None:
    for name in ("config.yaml", "record.json", "predictions/a.csv", "mine.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("record.json", "predictions/a.csv"):
        with pytest.raises(InputError, match="belongs to the run in"):
            check_output(tmp_path / name)
    check_output(tmp_path / "mine.csv")
