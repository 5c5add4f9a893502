"""Where datasets' files are, and fetching them by pooch: resumed, checked, and unpacked all or nothing."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shoal.errors import InputError

VARIABLE, CACHE = "SHOAL_DATA", "SHOAL_CACHE"
SAY_WHERE = f"folder in data_options, data_dir, or the environment variable {VARIABLE} sets where"
TRIES, TIMEOUT = 5, 60  # attempts, seconds without a byte

OnProgress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that are there and all there will be, where it is known."""


def cache_folder() -> Path:
    """Where what is expensive to compute is kept: ``$SHOAL_CACHE``, or ``~/.cache/shoal``."""
    return Path(os.environ.get(CACHE) or "~/.cache/shoal").expanduser()


def roots(needed: str, folder: str | Path | None, home: str, get: str | None = None) -> list[Path]:
    """Where to look: ``folder``, or where that is ``None`` ``$SHOAL_DATA/home`` and ``$SHOAL_DATA``."""
    if folder is not None:
        return [Path(str(folder)).expanduser()]
    if root := os.environ.get(VARIABLE):
        return [Path(root, home).expanduser(), Path(root).expanduser()]
    raise InputError(f"{needed} are needed; {SAY_WHERE} they are{_or_get(get)}.")


def find_files(
    names: Sequence[str],
    *,
    folder: str | Path | None,
    home: str,
    inside: Sequence[str] = (".",),
    endings: Sequence[str] = ("",),
    get: str | None = None,
) -> list[Path]:
    """A path for each of ``names``, all from one folder: one of ``inside`` of one of the :func:`roots`.

    Files may have any of ``endings`` after their name; `shoal data get` downloads the dataset ``get``.
    """
    top = roots(f"the files {', '.join(names)}", folder, home, get)
    places = [root / sub for root in top for sub in inside]
    there = [
        {n: p for n in names for e in reversed(endings) if (p := place / f"{n}{e}").is_file()}
        for place in places
    ]
    best = max(there, key=len)
    if missing := [name for name in names if name not in best]:
        where = " or ".join(repr(str(p)) for p in ([places[there.index(best)]] if best else places))
        raise InputError(f"there is no file {missing[0]!r} in {where}; {SAY_WHERE} to look{_or_get(get)}.")
    return [best[name] for name in names]


def needed(dataset: str, option: str, value: str | None, reads: str) -> Path:
    """The path that an option of a dataset of one's own must give."""
    if value is None:
        raise InputError(f"dataset {dataset!r} reads {reads}; set {option} in data_options.")
    return Path(str(value)).expanduser()


def _or_get(name: str | None) -> str:
    return f"; `shoal data get {name}` downloads them" if name else ""


@dataclass(frozen=True)
class Source:
    """A file to download, the same bytes from all ``urls``.

    Its ``checksum`` is ``md5:…`` or ``sha256:…``, where ``checksum_from`` has published one.
    """

    file: str
    urls: Sequence[str]
    checksum: str | None = None
    checksum_from: str = ""
    size: int | None = None
    """In bytes, roughly where the checksum is not known."""


@dataclass(frozen=True)
class Download:
    """The files of a dataset, and how they become what its ``load`` reads."""

    home: str
    """Its folder, below the one that datasets are in."""
    sources: Sequence[Source]
    find: Callable[[Path], Path]
    """Where in a folder all of the dataset is, or an InputError."""
    prepare: Callable[[Path], str] | None = None
    """Puts the files in the folder that all was unpacked to in order, and says what it did."""

    def there(self, folder: Path) -> Path | None:
        """Where in a folder all of the dataset is, if it is."""
        try:
            return self.find(folder)
        except InputError:
            return None


@dataclass(frozen=True)
class Got:
    """What became of a dataset that was asked for: ``files`` are those that were downloaded."""

    folder: Path
    files: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def get(download: Download, folder: Path, on_progress: OnProgress = lambda file, done, total: None) -> Got:
    """Downloads a dataset into its place below ``folder``, unless it is there.

    Files come to ``folder/downloads/home`` and are unpacked to a temporary folder that takes the dataset's
    name when all is done: what was stopped half-way never looks like a dataset.
    """
    if where := download.there(folder):
        return Got(where)
    place, work = folder / download.home, folder / "downloads" / download.home
    if place.exists() and any(place.iterdir()):
        message = f"{str(place)!r} exists but is not a complete copy"
        raise InputError(f"{message}; move it away or choose another folder.")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / ".lock", blocking=False):
            files = [_fetch(source, work, on_progress) for source in download.sources]
            with tempfile.TemporaryDirectory(prefix=f".{download.home}-", dir=folder) as partial:
                for source in download.sources:
                    _unpack(work / source.file, Path(partial))
                notes = [download.prepare(Path(partial))] if download.prepare else []
                os.replace(_inner(Path(partial)), place)
    except Timeout:
        raise InputError(f"another process is downloading to {str(work)!r}; wait for it.") from None
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be written: {error.strerror or error}.") from error
    shutil.rmtree(work, ignore_errors=True)
    return Got(place, files, notes)


def _unpack(path: Path, to: Path) -> None:
    """By the filter for data: no member outside of the folder, no links out of it, no devices."""
    try:
        if path.name.endswith(".zip"):  # which holds neither links nor devices for zipfile
            shutil.unpack_archive(path, to)
        elif path.name.endswith((".tar", ".tar.gz", ".tgz")):
            shutil.unpack_archive(path, to, filter="data")
        else:
            shutil.copy(path, to)
    except (shutil.ReadError, tarfile.TarError, zlib.error, ValueError, EOFError) as error:
        again = "remove it to download it again"
        raise InputError(f"{str(path)!r} cannot be unpacked ({error}); {again}.") from error


def _inner(folder: Path) -> Path:
    """The only folder in it, where an archive has one around everything."""
    inside = [p for p in folder.iterdir() if p.name != "__MACOSX"]
    return _inner(inside[0]) if len(inside) == 1 and inside[0].is_dir() else folder


def _fetch(source: Source, work: Path, on_progress: OnProgress) -> dict[str, Any]:
    """A source's file in ``work``, whose checksum is right where one is known."""
    try:
        import pooch
        from requests import RequestException
    except ImportError as error:
        raise InputError("downloads require pooch: pip install 'shoal[download]'.") from error
    pooch.get_logger().setLevel("WARNING")
    resume, problems = Resume(work / f"{source.file}.part", on_progress), []
    for url in source.urls:
        try:
            path = pooch.retrieve(url, source.checksum, source.file, work, downloader=resume)
        except (RequestException, ValueError) as error:  # ValueError: another checksum
            problems.append(f"{url}: {' '.join(str(error).split())[:300]}")
            continue
        about = {"file": source.file, "url": url, "bytes": Path(path).stat().st_size}
        return about | {"sha256": pooch.file_hash(path), "checked": source.checksum_from}
    advice = f"The same command resumes; a file that you have is taken from {str(work / source.file)!r}."
    raise InputError(f"{source.file} could not be downloaded: {'; '.join(problems)}. {advice}")


class Resume:
    """A downloader for pooch that resumes: the rest of ``part`` is asked for of the same version."""

    def __init__(self, part: Path, on_progress: OnProgress) -> None:
        self.part, self.on_progress = part, on_progress
        self.tag = part.with_name(f"{part.name}.etag")

    def __call__(self, url: str, output_file: Any, pooch: Any, check_only: bool = False) -> None:
        from requests import ConnectionError, Timeout
        from requests.exceptions import ChunkedEncodingError

        for attempt in range(1, TRIES + 1):
            try:
                self._continue(url)
                break
            except (ConnectionError, Timeout, ChunkedEncodingError):  # the last: fewer bytes than announced
                if attempt == TRIES:
                    raise
                time.sleep(2**attempt)
        shutil.move(self.part, output_file)
        self.tag.unlink(missing_ok=True)

    def _continue(self, url: str) -> None:
        import requests

        headers = {"Accept-Encoding": "identity"}
        done = self.part.stat().st_size if self.part.exists() and self.tag.exists() else 0
        if done:
            headers |= {"Range": f"bytes={done}-", "If-Range": self.tag.read_text()}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            about = response.headers
            if response.status_code == 416:  # the file is shorter than what came, or all of it is there
                self.tag.unlink()
                raise requests.ConnectionError("the part that was downloaded does not fit the file")
            response.raise_for_status()
            if about.get("Content-Type", "").startswith("text/html"):
                why = "as Google Drive does after too many downloads"
                raise requests.RequestException(f"the server sent a web page instead of the file, {why}")
            done = done if response.status_code == 206 else 0
            version = about.get("ETag") or about.get("Last-Modified")
            self.tag.unlink(missing_ok=True)
            if version and not version.startswith("W/"):
                self.tag.write_text(version)
            total = done + int(about["Content-Length"]) if "Content-Length" in about else None
            with self.part.open("ab" if done else "wb") as file:
                for chunk in response.iter_content(2**16):
                    done += file.write(chunk)
                    self.on_progress(self.part.stem, done, total)
