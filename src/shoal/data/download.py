"""Fetching datasets: downloads that go on where they stopped, are checked, and unpacked all or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import shoal
from shoal.data.folders import find_files
from shoal.data.tree import Layout
from shoal.data.unpack import Tell, amount, check_room, unpack
from shoal.errors import InputError
from shoal.files import open_regular, read_json, read_text, write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
STARTS = {".zip": b"PK", ".gz": b"\x1f\x8b", ".tgz": b"\x1f\x8b"}
CHUNK = 2**20
TIMEOUT = 60  # seconds without a byte
PAUSES = (1, 2, 4, 8)  # seconds between attempts that bring nothing new
KEPT = "downloads"
BEFORE = "as it came before"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A file to fetch."""

    file: str
    urls: tuple[str, ...]
    """Where it is; the same bytes everywhere."""
    checksum: str = ""
    """``md5:…`` or ``sha256:…``; where it is empty the first download is trusted and later ones compared."""
    said_by: str = ""
    """Whose checksum it is."""
    size: int | None = None
    """In bytes, where it is known exactly."""
    about: int | None = None
    """In bytes, roughly, where it is not."""

    @property
    def archive(self) -> bool:
        return self.file.endswith(ARCHIVES)


def drive(number: str) -> str:
    """The address of a public file in Google Drive, past the page that asks whether one is sure."""
    return f"https://drive.usercontent.google.com/download?id={number}&export=download&confirm=t"


@dataclass(frozen=True)
class Download:
    """The files of a dataset, and how they become what its ``load`` reads."""

    home: str
    """Its folder, below the one that datasets are in."""
    sources: tuple[Source, ...]
    layout: Layout | None = None
    """Where its images are; without one the files are used as they come."""
    files: tuple[str, ...] = ()
    """Without a layout: what must be there, in one of the folders ``inside`` and with one of ``endings``."""
    inside: tuple[str, ...] = (".",)
    endings: tuple[str, ...] = ("",)
    arrange: Callable[[Path], str] | None = None
    """Is given the folder that all was unpacked to, puts it in order and says what it did."""

    def found_in(self, folder: Path) -> Path | None:
        """Where in ``folder`` all of the dataset is."""
        if self.layout is not None:
            with contextlib.suppress(InputError):
                root, domains = self.layout.find(folder)
                return root if len(domains) == len(self.layout.domains) else None
            return None
        for place in (folder / self.home, folder):
            with contextlib.suppress(InputError):
                paths = find_files(
                    self.files, folder=place, home="", inside=self.inside, endings=self.endings
                )
                return paths[0].parent
        return None


@dataclass(frozen=True)
class Got:
    """What became of a dataset that was asked for."""

    folder: Path
    files: list[dict[str, Any]] = field(default_factory=list)
    """Those that were fetched; none if the dataset was there."""
    notes: list[str] = field(default_factory=list)


def get(
    download: Download,
    folder: Path,
    *,
    tell: Tell = lambda file, doing, done, total: None,
    say: Say = lambda text: None,
) -> Got:
    """Fetches a dataset into its place below ``folder``, unless it is there.

    Files come to ``folder/downloads/home``, are checked there and unpacked to a hidden folder that takes the
    dataset's name when all is done: what was stopped half-way never looks like a dataset.

    Args:
        download: what to fetch.
        folder: the one that datasets are in.
        tell: is told how far it is.
        say: is told what went wrong and is tried again.
    """
    if where := download.found_in(folder):
        return Got(where)
    place, work = folder / download.home, folder / KEPT / download.home
    _make(work)
    with _alone(work):
        try:
            if where := download.found_in(folder):  # another process brought it just now
                return Got(where)
            if (
                download.layout is not None
                and place.exists()
                and (not place.is_dir() or any(place.iterdir()))
            ):
                raise InputError(
                    f"{str(place)!r} exists but is not a complete copy of {download.layout.title}; move it "
                    "away, or choose another folder."
                )
            files = [_obtain(source, work / source.file, tell, say) for source in download.sources]
            notes = _settle(download, work, folder, tell)
            for source, one in zip(download.sources, files, strict=True):
                if not one["checked"]:  # later downloads are compared with this one, as sha256sum does
                    note = f"{one['sha256']}  {source.file}\n"
                    write_atomically(_note(work / source.file), note.encode())
                (work / source.file).unlink()
            return Got(place, files, notes)
        finally:
            for empty in (work, work.parent):
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} cannot be made: {error.strerror}.") from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuses a second process; the lock ends with the one that holds it, however that ends."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another process is downloading to {str(folder)!r}; wait for it.") from None
        yield
    finally:
        os.close(handle)


# Checking


def _obtain(source: Source, path: Path, tell: Tell, say: Say) -> dict[str, Any]:
    """The file, fetched unless it is there, and checked."""
    url = "" if path.exists() else fetch(source.urls, path, tell=tell, say=say)
    size, result = path.stat().st_size, _digests(path)
    expected, whose = _expected(source, path)
    kind, _, right = expected.partition(":")
    with open_regular(path) as file:
        start = file.read(8)
    wrong = ""
    if kind and result[kind] != right.lower():
        wrong = f"its {kind} is {result[kind]}, not {right.lower()} ({whose})"
    elif source.size is not None and size != source.size:
        wrong = f"it has {size:,} bytes, not {source.size:,}"
    elif not start.startswith(STARTS.get(path.suffix, b"")):
        wrong = f"it has {amount(size)} that are no {path.suffix} file"
    if wrong:
        away = path.with_name(f"{path.name}.wrong")
        os.replace(path, away)
        changed = f" If it may have changed, remove {_note(path).name!r} there." if whose == BEFORE else ""
        raise InputError(
            f"{source.file}{f' from {url}' if url else ''} does not match: {wrong}. It is now "
            f"{str(away)!r}; the same command downloads it again.{changed}"
        )
    return {"file": source.file, "url": url, "bytes": size, "sha256": result["sha256"], "checked": whose}


def _expected(source: Source, path: Path) -> tuple[str, str]:
    """The checksum a file should have, and whose it is."""
    if source.checksum:
        return source.checksum, source.said_by
    note = _note(path)
    if not note.exists():
        return "", ""
    words = read_text(note, errors="replace").split()
    if not words or not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]):
        raise InputError(f"{str(note)!r} contains no sha256; remove it to accept the next download.")
    return f"sha256:{words[0]}", BEFORE


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digests(path: Path) -> dict[str, str]:
    sums = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with open_regular(path) as file:
        while chunk := file.read(CHUNK):
            for each in sums.values():
                each.update(chunk)
    return {kind: each.hexdigest() for kind, each in sums.items()}


# Fetching


class _Refused(Exception):
    """A server will not give the file, now or later."""


class _Part:
    """What has come of a file so far, and of which version at which address.

    The version is what the server called it, its ETag or date: the rest is asked for of the same one only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.part")
        self.note = path.with_name(f"{path.name}.part.json")
        self.url, self.version = "", ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stated = read_json(self.note)
            self.url, self.version = str(stated["url"]), str(stated["version"])

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def usable(self, url: str) -> int:
        """How many bytes need not come again from there."""
        return self.size() if self.version and self.url == url else 0

    def begin(self, url: str, version: str) -> None:
        # Emptied before the note is written: a kill in between leaves no bytes under a wrong version.
        with _writing(self.path):
            self.path.write_bytes(b"")
            write_atomically(self.note, json.dumps({"url": url, "version": version}).encode())
        self.url, self.version = url, version

    def finish(self, path: Path) -> None:
        os.replace(self.path, path)
        self.note.unlink(missing_ok=True)


def fetch(urls: Sequence[str], path: Path, *, tell: Tell, say: Say) -> str:
    """Fetches a file from the first address that gives it, which is returned.

    What came stays in ``path.part``, and the next call goes on from there. Broken connections and servers
    that are busy are tried again a few times.
    """
    part, troubles = _Part(path), []
    for url in sorted(urls, key=lambda url: url != part.url):  # where it began, it goes on
        try:
            _fetch(url, part, path.name, tell, say)
            part.finish(path)
            return url
        except _Refused as why:
            troubles.append(f"{url}: {why}")
        if part.usable(part.url):  # another address would begin anew
            break
    had = part.usable(part.url)
    kept = f" {amount(had)} are saved; the same command resumes." if had else ""
    by_hand = f" Put the file at {str(path)!r} and run the same command again."
    raise InputError(f"{path.name} could not be downloaded: {'; '.join(troubles)}.{kept or by_hand}")


def _fetch(url: str, part: _Part, name: str, tell: Tell, say: Say) -> None:
    best, failures = part.usable(url), 0
    while True:
        try:
            _attempt(url, part, name, tell)
            return
        except (OSError, http.client.HTTPException) as error:
            trouble, pause = _said(error), _pause(error)
        if part.size() > best:  # a server that always breaks off at the same place ends this all the same
            best, failures = part.size(), 0
        if failures == len(PAUSES):
            raise _Refused(f"{trouble}, {failures + 1} times")
        wait = PAUSES[failures] if pause is None else pause
        say(f"{name}: {trouble}; trying again in {wait} s")
        time.sleep(wait)
        failures += 1


def _pause(error: Exception) -> int | None:
    """How long the server asks to wait. An error that will not pass is raised as such."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code not in (408, 429) and error.code < 500:
            raise _Refused(_said(error)) from error
        asked = str(error.headers.get("Retry-After", ""))
        return min(int(asked), 60) if asked.isdecimal() else None
    reason = getattr(error, "reason", error)
    if isinstance(reason, str | ssl.SSLCertVerificationError):
        raise _Refused(_said(error)) from error
    return None


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server responded {error.code} {error.reason}"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)


def _attempt(url: str, part: _Part, name: str, tell: Tell) -> None:
    """One connection: all of the file, or the rest of it."""
    had = part.usable(url)
    headers = {"User-Agent": f"shoal/{shoal.__version__}", "Accept-Encoding": "identity"}
    if had:
        headers |= {"Range": f"bytes={had}-", "If-Range": part.version}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not had:
            raise
        if str(error.headers.get("Content-Range", "")) == f"bytes */{had}":
            return  # all of it was there
        part.begin(url, "")
        raise ConnectionError("the file on the server is shorter than the part already downloaded") from error
    with answer:
        if answer.headers.get_content_type() == "text/html" and not name.endswith((".html", ".htm")):
            raise _Refused(_PAGE)
        total = _total(answer)
        if getattr(answer, "status", None) != 206:
            had = 0
            part.begin(url, _version(answer.headers))
        elif not (
            str(answer.headers.get("Content-Range", "")).startswith(f"bytes {had}-")
            and _version(answer.headers) in (part.version, "")
        ):
            part.begin(url, "")
            raise ConnectionError("the server sent a different part than requested")
        if total is not None:
            check_room(part.path.parent, total - had, name)
        with _writing(part.path):
            out = part.path.open("ab", buffering=0)
        with out:
            while chunk := answer.read(CHUNK):
                with _writing(part.path):
                    _write(out, chunk)
                had += len(chunk)
                tell(name, "fetched", had, total)
    if total is not None and had < total:
        raise ConnectionError(f"the connection was closed after {had:,} of {total:,} bytes")


_PAGE = (
    "the server sent a web page instead of a file, as Google Drive does when a file was requested "
    "too often or is gone"
)


def _total(answer: Any) -> int | None:
    """The size of the whole file, if the server says."""
    span = str(answer.headers.get("Content-Range", "")) if getattr(answer, "status", None) == 206 else ""
    stated = span.rpartition("/")[2] if span else str(answer.headers.get("Content-Length", ""))
    return int(stated) if stated.isdecimal() else None


def _version(headers: Any) -> str:
    """What tells this version of the file from others; a weak ETag does not."""
    tag = str(headers.get("ETag", ""))
    return tag if tag.startswith('"') else str(headers.get("Last-Modified", ""))


def _write(out: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What a disk refuses is not taken for a broken connection."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be written: {error.strerror}. Free some disk space; the same "
            "command resumes."
        ) from error


# Unpacking


def _settle(download: Download, work: Path, folder: Path, tell: Tell) -> list[str]:
    """Unpacks what was fetched beside the dataset's place, and moves it there when it is whole."""
    aside, place = folder / f".{download.home}.unpacking", folder / download.home
    _remove(aside)  # of a process that was killed
    aside.mkdir()
    try:
        for source in download.sources:
            if source.archive:
                unpack(work / source.file, aside, tell)
            else:
                shutil.copyfile(work / source.file, aside / source.file)
        notes = [download.arrange(aside)] if download.arrange else []
        if download.layout is None:
            _make(place)
            for source in download.sources:
                os.replace(aside / source.file, place / source.file)
        else:
            if (whole := download.found_in(aside)) is None:
                raise InputError(
                    f"{', '.join(s.file for s in download.sources)}: not all domains of "
                    f"{download.layout.title} are in it ({', '.join(download.layout.domains)}). "
                    f"The files are in {str(work)!r}."
                )
            os.replace(whole, place)
    except OSError as error:
        what = f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror or error
        raise InputError(f"{download.home} cannot be unpacked in {str(folder)!r}: {what}.") from error
    finally:
        _remove(aside)
    return notes


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
