"""A run's folder: what lies in it, and that one process uses it at a time."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shoal.training.folder as module
from shoal.errors import InputError
from shoal.training.checkpoint import Checkpoints
from shoal.training.folder import RunFolder


def test_started_and_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder:
        assert not folder.started
    folder.checkpoints.mkdir()
    assert not folder.started
    saved = Checkpoints(folder.checkpoints).save(1, {})
    assert folder.started
    saved.unlink()
    assert not folder.started
    folder.config.touch()
    assert folder.started
    assert not folder.finished
    folder.record.touch()
    assert folder.finished


def test_a_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file; a run requires a folder"):
        RunFolder(tmp_path / "file")
    with pytest.raises(InputError, match=r"file/a cannot be created or written to \(Not a directory\)"):
        RunFolder(tmp_path / "file" / "a")

    def refuse(**_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuse)
    with pytest.raises(InputError, match=r"cannot be created or written to \(Permission denied\)"):
        RunFolder(tmp_path)


def test_locked_within_the_block(tmp_path: Path) -> None:
    ours, other = RunFolder(tmp_path), RunFolder(tmp_path)
    mine = f"process {os.getpid()} on host {socket.gethostname()};"
    with ours as entered:
        assert entered is ours
        with pytest.raises(InputError, match=f"^{tmp_path} is in use by {mine}"), other:
            pass
        with ours:
            pass
        with pytest.raises(InputError, match="is in use by"), other:
            pass
    with other:
        with pytest.raises(InputError, match="is in use by"), ours:
            pass
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


@pytest.mark.parametrize(
    "name",
    ["card.md", "metrics.jsonl", ".lock", "checkpoints", "checkpoints/step-1.pt", "stages/train/record.json"],
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


def test_entries_are_replaced_and_half_written_files_removed(tmp_path: Path) -> None:
    (tmp_path / ".record.json.abcdefgh").touch()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_text("mine")
    with RunFolder(tmp_path) as folder:
        assert not (tmp_path / ".record.json.abcdefgh").exists()
        (tmp_path / "card.md").symlink_to(outside)  # made meanwhile
        folder.write("card.md", b"a card")
    assert (tmp_path / "card.md").read_text() == "a card"
    assert not (tmp_path / "card.md").is_symlink()
    assert outside.read_text() == "mine"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"), RunFolder(tmp_path):
        pass


# Other processes

HOLD = """if True:
    import os, sys, time
    from shoal.training.folder import RunFolder
    with RunFolder(sys.argv[1]):
        worker = os.fork() if sys.argv[2] == "fork" else None
        if worker == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(worker, flush=True)
        time.sleep(60)
    """


@contextmanager
def holder(folder: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process in the middle of its block, and the first line that it prints."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_holder_frees_it(tmp_path: Path) -> None:
    """Also if its forked workers live on, as soon as these have begun to run."""
    with holder(tmp_path, "fork") as (process, line):
        worker = int(line)
        try:
            expected = f"in use by process {process.pid} on host {socket.gethostname()}; wait for it"
            with pytest.raises(InputError, match=expected), RunFolder(tmp_path):
                pass
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.kill(worker, 0)
            for attempt in range(50):
                try:
                    with RunFolder(tmp_path):
                        break
                except InputError:
                    assert attempt < 49
                    time.sleep(0.1)
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_forked_process_does_not_free_it(tmp_path: Path) -> None:
    """Even if it leaves the block."""
    code = """if True:
        import os, sys
        from shoal.training.folder import RunFolder
        with RunFolder(sys.argv[1]):
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                try:
                    RunFolder(sys.argv[1]).__enter__()
                except ValueError as error:
                    print(error)
        """
    answer = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    assert "is in use by process" in answer.stdout
