"""Files written whole or not at all; JSON, YAML and CSV."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml
from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def file_lock(path: Path) -> FileLock:
    """A lock of the operating system, which ends with the process, however that ends.

    By default filelock 4 falls back to one that outlives a killed process; earlier versions do not.
    """
    flag = "fallback_to_soft"
    only: Any = {flag: False} if flag in inspect.signature(FileLock.__init__).parameters else {}
    return FileLock(path, mode=0o666, **only)


def write_atomically(path: str | Path, content: bytes) -> None:
    """All of it or nothing: a kill or a full disk leaves what was there before."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` when the block ends; after an error nothing has changed.

    The entry itself is replaced: a link becomes a file, and what it points to stays. The temporary file has a
    fixed name, so that the next writer takes over what a killed one has left; a lock on it keeps writers
    apart. Devices, such as ``/dev/stdout``, are written to.
    """
    path = Path(path)
    if path.parts[:2] == ("/", "dev"):
        with path.open("wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.tmp")
    with _open_locked(temporary) as file:
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl:
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if not fcntl:  # Windows replaces closed files only
        temporary.replace(path)


def _open_locked(temporary: Path) -> IO[bytes]:
    """The file, created if need be, once no other process writes to it; never what a link points to."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    while True:
        file = os.fdopen(os.open(temporary, flags, 0o666), "r+b")
        if not fcntl:
            return file
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(temporary)):
                return file
        file.close()  # another process has put this one in its place


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_bytes())


def dump_json(content: Any) -> bytes:
    """For people to read too; bytes of a file's name that are no text become escapes, as JSON has them."""
    return json.dumps(content, default=dict, ensure_ascii=False, indent=1).encode(errors="backslashreplace")


def finite(content: Any) -> Any:
    """``content`` with null for numbers that JSON has no word for."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, (list, tuple)) else content


def read_yaml(path: str | Path) -> Any:
    """The plain data that a YAML file holds; ValueError where it is none."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def dump_yaml(content: Any) -> str:
    """``content`` as :func:`read_yaml` reads it."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV, with lines that end in LF."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
