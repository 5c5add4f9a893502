"""Archives unpacked into a folder, and never outside it."""

from __future__ import annotations

import errno
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import InputError
from shoal.files import check_expansion, check_regular

Tell = Callable[[str, str, int, int | None], None]
"""Is told a file's name, ``fetched`` or ``unpacked``, how much of it, and of how much."""


def unpack(archive: Path, to: Path, tell: Tell) -> None:
    """Unpacks a zip or tar file. One that would write elsewhere, or far more than it holds, is refused."""
    check_regular(archive)
    try:
        (_unzip if archive.suffix == ".zip" else _untar)(archive, to, tell)
    except OSError as error:
        if error.errno is not None and error.errno != errno.EINVAL:
            raise
        raise _broken(archive, error) from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise _broken(archive, error) from error


def _broken(archive: Path, error: Exception) -> InputError:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(
        f"{str(archive)!r} cannot be unpacked ({why}); remove it, and the same command downloads it again."
    )


def _unzip(archive: Path, to: Path, tell: Tell) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        for member in members:
            kind = stat.S_IFMT(member.external_attr >> 16)
            _check_member(archive, member.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
        _check_sizes(archive, to, sum(m.file_size for m in members))
        for done, member in enumerate(members, 1):
            file.extract(member, to)
            tell(archive.name, "unpacked", done, len(members))


def _untar(archive: Path, to: Path, tell: Tell) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise InputError("unpacking tar files safely needs Python 3.11.4 or newer.")
    with tarfile.open(archive, "r:" if archive.suffix == ".tar" else "r:gz") as file:
        members = file.getmembers()
        for member in members:
            link = member.issym() or member.islnk()
            _check_member(archive, member.name, member.isreg() or member.isdir() or link)
            if link:
                _check_member(archive, member.linkname, True)
        _check_sizes(archive, to, sum(m.size for m in members))

        def each() -> Iterator[tarfile.TarInfo]:
            for done, member in enumerate(members, 1):
                yield member
                tell(archive.name, "unpacked", done, len(members))

        file.extractall(to, each(), filter="data")


def _check_member(archive: Path, name: str, ordinary: bool) -> None:
    if not ordinary or not stays_inside(name):
        what = "points outside the folder" if ordinary else "is neither a file nor a folder"
        raise InputError(f"{str(archive)!r} is not unpacked: {name!r} in it {what}.")


def _check_sizes(archive: Path, to: Path, total: int) -> None:
    check_expansion(archive, total)
    check_room(to, total, f"what is in {archive.name}")


def stays_inside(name: str) -> bool:
    """Whether a path leads nowhere but down, on any system: no root, no drive, nothing like ``..``."""
    parts = re.split(r"[/\\]", name)
    upward = any(part not in ("", ".") and not part.strip(" .") for part in parts)
    rooted = name.startswith(("/", "\\")) or ":" in parts[0]
    return bool(name) and not rooted and not upward and "\0" not in name


def check_room(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{name} needs {amount(needed)}, and {str(folder)!r} has {amount(free)} free; free some disk "
            "space, or "
            "choose another folder."
        )


def amount(size: int) -> str:
    """Bytes in words."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} bytes"
