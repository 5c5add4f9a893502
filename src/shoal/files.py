"""The one place where files are opened and written: regular files only, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import stat
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

import yaml

from shoal.errors import InputError

LARGEST = 2**30
"""Most bytes of a file that is read whole, such as a record, unless the caller allows more."""
LARGEST_YAML = 2**20
READER_SECONDS = 10.0
BOMB, SMALL = 200, 2**30
"""Times its own size is more than an archive or a packed table grows to; but so many bytes always may be."""
LONGEST = 2**24
"""Characters of a line of a text file."""
DEEPEST = 100
"""Most levels of nesting in JSON or YAML from a file."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | Path) -> io.BufferedReader:
    """``path`` for reading bytes. A pipe or a device, on which reading could hang or never end, is refused.

    Raises InputError for those, and OSError where there is no such file or it may not be read.
    """
    # Without O_NONBLOCK, opening a pipe that nobody writes to waits for ever.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_regular(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: str | Path) -> None:
    """Refuses what is there but is no regular file, for libraries that open files themselves."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _check_regular(os.stat(path).st_mode, path)


def _check_regular(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise InputError(f"{str(path)!r} is {kind}, not a regular file.")


def open_text(path: str | Path, encoding: str = "utf-8-sig", errors: str = "strict") -> TextIO:
    """``path`` for reading text, with line ends as they are, as :mod:`csv` wants it."""
    return io.TextIOWrapper(open_regular(path), encoding, errors, newline="")


def lines_of(file: TextIO, where: str | Path, most: float = math.inf) -> Iterator[str]:
    """The rest of a text file. One with an endless line, or more than ``most`` characters, is refused."""
    while line := file.readline(LONGEST):
        most -= len(line)
        if len(line) == LONGEST or most < 0:
            what = (
                "is far larger than its header says"
                if most < 0
                else f"has a line of {LONGEST:,} characters or more"
            )
            raise InputError(f"{str(where)!r} {what}; it is not read.")
        yield line


def check_expansion(path: str | Path, size: int | None = None) -> float:
    """Refuses a packed file said to hold ``size`` bytes, far more than its own; gives the most it may."""
    own = os.stat(path).st_size
    most = max(SMALL, BOMB * own)
    if size is not None and size > most:
        raise InputError(
            f"{str(path)!r} declares {size:,} bytes of content, which is implausible for a file of "
            f"{own:,} bytes."
        )
    return most


def check_zip(path: str | Path) -> None:
    """Refuses a zip file, such as an ``.npz``, that would fill the memory; ValueError where it is none."""
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as file:
            check_expansion(path, sum(member.file_size for member in file.infolist()))
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(str(error)) from error


def read_bytes(path: str | Path, limit: int | None = LARGEST) -> bytes:
    """All of a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise InputError(f"{str(path)!r} has {size:,} bytes; at most {limit:,} are read of such a file.")
        return file.read() if limit is None else file.read(size)


def read_text(path: str | Path, limit: int | None = LARGEST, errors: str = "strict") -> str:
    return read_bytes(path, limit).decode("utf-8", errors)


def read_json(path: str | Path, limit: int | None = LARGEST) -> Any:
    """What a JSON file holds; ValueError where it is none."""
    return parse_json(read_bytes(path, limit))


def parse_json(content: str | bytes) -> Any:
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(found, (dict, list)) and not _shallow(content):
        _check_depth(found)
    return found


_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def _shallow(content: str | bytes) -> bool:
    """Whether brackets alone show that JSON is not nested too deeply: quick, and sure where it says yes."""
    marks = (content.encode(errors="replace") if isinstance(content, str) else content).translate(
        None, _OTHERS
    )
    for _ in range(DEEPEST):
        before, marks = marks, marks.replace(b"[]", b"").replace(b"{}", b"")
        if marks in (b"", before):
            break
    return not marks


def _check_depth(content: Any) -> None:
    level, depth = [content], 0
    while level := [
        part
        for nest in level
        for part in (nest.values() if type(nest) is dict else nest)
        if type(part) is dict or type(part) is list
    ]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")


def finite(content: Any) -> Any:
    """``content`` with null for numbers that JSON has no word for."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, (list, tuple)) else content


def dump_json(content: Any) -> bytes:
    """For people to read too; bytes of a file's name that are no text become escapes, as JSON has them."""
    return json.dumps(content, default=dict, ensure_ascii=False, indent=1).encode(errors="backslashreplace")


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds; ValueError where it is none."""
    return parse_yaml(read_text(path, LARGEST_YAML))


def parse_yaml(text: str) -> Any:
    """Plain data. Aliases, with which a short text can stand for a huge one, are refused."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (
        OverflowError,
        TypeError,
        AttributeError,
    ) as error:  # PyYAML's, for scalars that only look like one
        raise ValueError(f"a value cannot be read ({error})") from error


def dump_yaml(content: Any) -> str:
    """``content`` as :func:`parse_yaml` reads it."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError("it is nested too deeply")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Unicode's own line ends are read as spaces unless they are escaped, which only double quotes do."""
        style = '"' if set(data) & set("\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing: a kill or a full disk leaves what was there before."""
    with _replacing(Path(path)) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: str | Path, inputs: Iterable[str | Path] = ()) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` when the block ends; after an error nothing has changed.

    A symbolic link stays and the file that it points to is replaced. Anything but a regular file, such as a
    pipe or ``/dev/null``, is written to as it is. One of ``inputs`` is never overwritten; see
    :func:`check_output`.
    """
    path = Path(path)
    check_output(path, inputs)
    with _replacing(path) as file:
        yield file


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    if (number := _descriptor(path)) is not None:
        sys.stdout.flush()
        with os.fdopen(os.dup(number), "wb") as through:
            yield through
        return
    if path.exists() and not path.is_file() and not path.is_dir():
        with os.fdopen(_opened(path), "wb") as through:
            yield through
        return
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:50]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _opened(path: Path) -> int:
    """A pipe or a device, to write to; for a reader of a pipe we wait a while and not for ever."""
    began = time.monotonic()
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(handle, True)
            return handle
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() - began > READER_SECONDS:
                why = "the pipe is not open for reading" if error.errno == errno.ENXIO else error.strerror
                raise OSError(error.errno, why, str(path)) from None
        time.sleep(0.05)


def _descriptor(path: Path) -> int | None:
    """What ``/dev/stdout`` and the like stand for: opened by name, a file would be written from its start."""
    names = {"/dev/stdout": "1", "/dev/stderr": "2"}
    text = re.sub(r"/(dev|proc/self)/fd/", "", names.get(str(path), str(path)))
    return int(text) if text.isascii() and text.isdigit() and path.is_absolute() else None


def check_output(path: str | Path, inputs: Iterable[str | Path] = (), option: str = "") -> None:
    """Refuses a file to write that is one of ``inputs``, by whatever name, or there already in one of them.

    To be asked before time is spent. A folder, and a file in place of a folder, are refused too. ``option``
    is what it was given as, for the message.
    """
    path = Path(path)
    name = f"{option} {str(path)!r}".lstrip()
    if path.is_dir():
        raise InputError(f"{name} is a folder; specify a file.")
    for above in path.parents:
        if above.exists() and not above.is_dir():
            raise InputError(f"{name} cannot be written: {str(above)!r} is a file.")
    if not path.exists():
        return
    real = Path(os.path.realpath(path))
    for source in inputs:
        within = os.path.isdir(source) and Path(os.path.realpath(source)) in real.parents
        if within or same_file(path, source):
            raise InputError(f"{name} is also an input and would be overwritten; choose another name.")


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether both are there and are one file, by whatever name or link."""
    try:
        return os.path.samefile(one, other) and not os.path.samefile(one, os.devnull)
    except (OSError, ValueError):
        return False


def _mode(target: Path) -> int:
    """The permissions of what is replaced, or those of a new file."""
    with contextlib.suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _flush_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system lets a folder be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
