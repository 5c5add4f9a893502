"""Fetching datasets, from a server on this machine that behaves badly, and from folders."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.server
import io
import json
import ntpath
import os
import posixpath
import re
import resource
import shutil
import signal
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.cli import main
from shoal.data import download as module
from shoal.data import unpack as unpacking
from shoal.data.download import Download, Source, addresses, drive, fetch, get
from shoal.data.sets import load, registry
from shoal.data.unpack import amount, stays_inside, unpack
from shoal.errors import InputError

Captured = pytest.CaptureFixture[str]
DOWNLOADS: dict[str, Download] = {
    n: m.DOWNLOAD for n in registry.names() if hasattr(m := registry.module(n), "DOWNLOAD")
}
CONTENT = b"PK" + bytes(i * i % 251 for i in range(300_000))


@dataclass
class Served:
    """A file on the server, and how the server behaves."""

    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"one"'})
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Answers that come first."""
    breaks: list[int] = field(default_factory=list)
    """After how many bytes the connection ends, for the answers to come."""
    ranges: bool = True
    """Whether parts are given."""
    heeds_version: bool = True
    """Whether If-Range is."""
    shifts: int = 0
    """By how much a part begins elsewhere than was asked."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, Served] = {}
        self.asked: list[tuple[str, str | None]] = []
        """The path and the range of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def serve(self, content: bytes = CONTENT, name: str = "file.zip", **how: Any) -> Served:
        self.files[f"/{name}"] = served = Served(content, **how)
        return served


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        served = self.server.files.get(self.path)
        if served is None or served.refusals:
            code, headers = served.refusals.pop(0) if served else (404, {})
            self.answer(code, headers, b"")
            return
        start, code, headers = 0, 200, dict(served.headers)
        same = not served.heeds_version or self.headers.get("If-Range") in served.headers.values()
        if wanted and served.ranges and same:
            start, code = int(wanted.removeprefix("bytes=").rstrip("-")) + served.shifts, 206
            if start >= len(served.content):
                self.answer(416, {"Content-Range": f"bytes */{len(served.content)}"}, b"")
                return
            headers["Content-Range"] = f"bytes {start}-{len(served.content) - 1}/{len(served.content)}"
        self.answer(code, headers, served.content[start:], served.breaks.pop(0) if served.breaks else None)

    def answer(self, code: int, headers: dict[str, str], body: bytes, stop: int | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:stop])
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it would have waited, every time."""
    waited: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    monkeypatch.delenv("http_proxy", raising=False)
    return waited


def nothing(*_: Any) -> None:
    pass


def fetched(server: Server, folder: Path, name: str = "file.zip", tell: Any = nothing) -> bytes:
    fetch([f"{server.url}/{name}"], folder / name, tell=tell, say=nothing)
    assert [p.name for p in folder.iterdir()] == [name]  # no part, no note of it
    return (folder / name).read_bytes()


def stop_after(bytes_: int) -> Callable[..., None]:
    def tell(file: str, doing: str, done: int, total: int | None) -> None:
        if done >= bytes_:
            raise KeyboardInterrupt

    return tell


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 10_000)


def begun(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int = 100_000) -> int:
    """A download that Ctrl-C stopped; how much of it is there."""
    monkeypatch.setattr(module, "CHUNK", 10_000)
    with pytest.raises(KeyboardInterrupt):
        fetched(server, folder, tell=stop_after(at))
    server.asked.clear()
    size = (folder / "file.zip.part").stat().st_size
    assert size == at
    assert not (folder / "file.zip").exists()
    return size


# Fetching


def test_a_file_comes_whole_and_how_far_is_told(server: Server, tmp_path: Path, small_chunks: None) -> None:
    server.serve()
    told: list[Any] = []
    assert fetched(server, tmp_path, tell=lambda *how: told.append(how)) == CONTENT
    assert server.asked == [("/file.zip", None)]
    assert told[0][:2] == ("file.zip", "fetched")
    assert [done for _, _, done, _ in told] == sorted({done for _, _, done, _ in told})
    assert told[-1][2:] == (len(CONTENT), len(CONTENT))


def test_a_broken_connection_goes_on_from_there(server: Server, tmp_path: Path, waits: list[float]) -> None:
    server.serve(breaks=[100_000, 50_000, 1])
    assert fetched(server, tmp_path) == CONTENT
    assert [wanted for _, wanted in server.asked] == [
        None,
        "bytes=100000-",
        "bytes=150000-",
        "bytes=150001-",
    ]
    assert waits == [1, 1, 1]  # each brought something new


def test_what_was_stopped_goes_on_in_another_process(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve()
    size = begun(server, tmp_path, monkeypatch)
    assert fetched(server, tmp_path) == CONTENT
    assert server.asked == [("/file.zip", f"bytes={size}-")]


def test_a_date_will_do_where_there_is_no_etag(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve(headers={"ETag": 'W/"weak"', "Last-Modified": "Sun, 15 Nov 2026 10:00:00 GMT"})
    begun(server, tmp_path, monkeypatch)
    assert fetched(server, tmp_path) == CONTENT
    assert server.asked[0][1] is not None


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"weak"'}], ids=["nothing", "weak"])
def test_without_a_version_it_begins_anew(
    headers: dict[str, str], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve(headers=headers)
    begun(server, tmp_path, monkeypatch)
    server.serve(CONTENT[::-1], headers=headers)
    assert fetched(server, tmp_path) == CONTENT[::-1]
    assert server.asked == [("/file.zip", None)]


@pytest.mark.parametrize("heeds_version", [True, False], ids=["by the server", "by us"])
def test_a_file_that_changed_begins_anew(
    heeds_version: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve()
    begun(server, tmp_path, monkeypatch)
    server.serve(CONTENT[::-1] + b"more", headers={"ETag": '"two"'}, heeds_version=heeds_version)
    assert fetched(server, tmp_path) == CONTENT[::-1] + b"more"


@pytest.mark.parametrize("how", [{"ranges": False}, {"shifts": -7}, {"shifts": 7}], ids=str)
def test_a_server_that_gives_no_parts_or_wrong_ones(
    how: dict[str, Any], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve(**how)
    begun(server, tmp_path, monkeypatch)
    assert fetched(server, tmp_path) == CONTENT


def test_a_part_from_elsewhere_is_not_continued(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve()
    begun(server, tmp_path, monkeypatch)
    server.serve(CONTENT[::-1], "mirror/file.zip")
    fetch([f"{server.url}/mirror/file.zip"], tmp_path / "file.zip", tell=nothing, say=nothing)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("note", ["", "{", "[]", '{"url": 1}'])
def test_a_spoilt_note_begins_anew(
    note: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve()
    begun(server, tmp_path, monkeypatch)
    (tmp_path / "file.zip.part.json").write_text(note)
    assert fetched(server, tmp_path) == CONTENT
    assert server.asked == [("/file.zip", None)]


def test_a_part_that_is_whole_already(server: Server, tmp_path: Path) -> None:
    server.serve()
    with pytest.raises(KeyboardInterrupt):
        fetched(server, tmp_path, tell=stop_after(len(CONTENT)))
    told: list[Any] = []
    assert fetched(server, tmp_path, tell=lambda *how: told.append(how)) == CONTENT
    assert server.asked[1:] == [("/file.zip", f"bytes={len(CONTENT)}-")]  # it answers 416
    assert told == []


def test_a_part_that_is_longer_than_the_file_begins_anew(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve()
    begun(server, tmp_path, monkeypatch)
    server.serve(CONTENT[:5000])
    assert fetched(server, tmp_path) == CONTENT[:5000]


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path, waits: list[float]) -> None:
    server.serve(refusals=[(503, {}), (429, {"Retry-After": "7"}), (500, {"Retry-After": "9999"}), (502, {})])
    said: list[str] = []
    fetch([f"{server.url}/file.zip"], tmp_path / "file.zip", tell=nothing, say=said.append)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert waits == [1, 7, 60, 8]
    assert said[0] == "file.zip: the server responded 503 Service Unavailable; trying again in 1 s"


def test_a_server_that_stays_busy_or_breaks_off_is_given_up(
    server: Server, tmp_path: Path, waits: list[float]
) -> None:
    server.serve(refusals=[(503, {})] * 99)
    with pytest.raises(InputError, match=r"503 Service Unavailable, 5 times\. Use --mirror, or put"):
        fetched(server, tmp_path)
    assert len(server.asked) == 5
    server.serve(breaks=[100_000] * 99, ranges=False)
    with pytest.raises(
        InputError, match=r"was closed after 100,000 of 300,002 bytes, 5 times\. 100\.0 kB are saved"
    ):
        fetched(server, tmp_path)
    assert len(server.asked) == 5 + 5
    server.files["/file.zip"].breaks.clear()
    assert fetched(server, tmp_path) == CONTENT


def test_a_file_that_is_not_there_is_looked_for_elsewhere(
    server: Server, tmp_path: Path, waits: list[float]
) -> None:
    with pytest.raises(InputError) as error:
        fetched(server, tmp_path)
    assert f"{server.url}/file.zip: the server responded 404 Not Found." in str(error.value)
    assert repr(str(tmp_path / "file.zip")) in str(error.value)
    assert (len(server.asked), waits, list(tmp_path.iterdir())) == (1, [], [])
    server.serve(name="other/file.zip")
    urls = [f"{server.url}/file.zip", f"{server.url}/other/file.zip"]
    assert fetch(urls, tmp_path / "file.zip", tell=nothing, say=nothing) == urls[1]


def test_where_it_began_it_goes_on(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.serve()
    begun(server, tmp_path, monkeypatch)
    server.serve(CONTENT[::-1], "other/file.zip")
    urls = [f"{server.url}/other/file.zip", f"{server.url}/file.zip"]
    assert fetch(urls, tmp_path / "file.zip", tell=nothing, say=nothing) == urls[1]
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_another_address_does_not_cost_what_came(server: Server, tmp_path: Path) -> None:
    server.serve(breaks=[100_000, *[0] * 99])
    server.serve(name="other/file.zip")
    urls = [f"{server.url}/file.zip", f"{server.url}/other/file.zip"]
    with pytest.raises(InputError, match=r"100\.0 kB are saved; the same command resumes"):
        fetch(urls, tmp_path / "file.zip", tell=nothing, say=nothing)
    assert {path for path, _ in server.asked} == {"/file.zip"}
    assert (tmp_path / "file.zip.part").read_bytes() == CONTENT[:100_000]


def test_a_server_that_cannot_be_reached(tmp_path: Path, waits: list[float]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_address[1]}/file.zip"
    with pytest.raises(InputError, match="Connection refused, 5 times"):
        fetch([url], tmp_path / "file.zip", tell=nothing, say=nothing)
    assert waits == [1, 2, 4, 8]


def test_a_web_page_is_no_archive(server: Server, tmp_path: Path) -> None:
    server.serve(b"<html>Are you sure?", headers={"Content-Type": "text/html; charset=utf-8"})
    with pytest.raises(InputError, match="sent a web page instead of a file, as Google Drive does"):
        fetched(server, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert drive("abc").startswith("https://drive.usercontent.google.com/download?id=abc&")


def test_a_full_disk_keeps_what_came(server: Server, tmp_path: Path, small_chunks: None) -> None:
    server.serve()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (123_456, before[1]))
    try:
        with pytest.raises(
            InputError, match=r"file.zip.part' cannot be written: .*Free some disk space"
        ) as error:
            fetched(server, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert (tmp_path / "file.zip.part").read_bytes() == CONTENT[:123_456]
    assert fetched(server, tmp_path) == CONTENT
    assert server.asked[-1][1] == "bytes=123456-"


def test_a_folder_that_cannot_be_written_to_is_no_broken_connection(
    server: Server, tmp_path: Path, waits: list[float]
) -> None:
    server.serve()
    (tmp_path / "file.zip.part").mkdir()
    with pytest.raises(InputError, match=r"file.zip.part' cannot be written: Is a directory"):
        fetched(server, tmp_path)
    assert waits == []


def test_what_a_system_does_not_write_at_once_is_written(tmp_path: Path) -> None:
    class Slow(io.BytesIO):
        def write(self, content: Any) -> int:
            return super().write(content[:3])

    out = Slow()
    module._write(out, CONTENT[:100])
    assert out.getvalue() == CONTENT[:100]


def test_room_is_looked_for_before(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    server.serve()
    free = shutil.disk_usage(tmp_path)._replace(free=299_999)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(
        InputError, match=r"file.zip needs 300\.0 kB, and .* has 300\.0 kB free; free some disk space"
    ):
        fetched(server, tmp_path)
    assert (tmp_path / "file.zip.part").stat().st_size == 0


def test_amounts() -> None:
    assert [amount(n) for n in (0, 999, 1000, 2_500_000, 6_492_615_601)] == [
        "0 bytes", "999 bytes", "1.0 kB", "2.5 MB", "6.5 GB"]  # fmt: skip


# Mirrors


def test_mirrors_are_addresses_or_folders(tmp_path: Path) -> None:
    source = Source("a b.zip", ("https://example.org/1",))
    assert addresses(source, None) == ("https://example.org/1",)
    assert addresses(source, "http://example.org/x/") == ("http://example.org/x/a%20b.zip",)
    assert addresses(source, "file:///data") == ("file:///data/a%20b.zip",)
    assert addresses(source, str(tmp_path)) == ((tmp_path / "a b.zip").as_uri(),)
    with pytest.raises(InputError, match="must be a folder, or start with http://"):
        addresses(source, "ftp://example.org")
    with pytest.raises(InputError, match="there is no folder 'nowhere'"):
        addresses(source, "nowhere")


# Checking


def zipped(*names: str, content: bytes = b"picture") -> bytes:
    with io.BytesIO() as out:
        with zipfile.ZipFile(out, "w") as file:
            for name in names:
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # of no date
        return out.getvalue()


PICTURES = [f"kfold/{d}/dog/{i}.jpg" for d in ("art_painting", "cartoon", "photo", "sketch") for i in (1, 2)]
PACS = zipped(*PICTURES, "kfold/readme.txt", "__MACOSX/kfold/._x")


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pacs(**changed: Any) -> Download:
    """PACS, with another checksum: none by default."""
    return replace(DOWNLOADS["pacs"], sources=(Source("PACS.zip", ("http://localhost:9/",), **changed),))


def mirror(folder: Path, **files: bytes) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return str(folder)


def all_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


PLACED = ["PACS/readme.txt", *(name.replace("kfold", "PACS") for name in PICTURES)]


@pytest.mark.parametrize(
    "checksum", [f"md5:{md5(PACS)}", f"sha256:{sha256(PACS).upper()}"], ids=["md5", "sha256"]
)
def test_what_is_as_published_is_unpacked(checksum: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    source = mirror(tmp_path / "mirror", PACS__zip=PACS)
    got = get(pacs(checksum=checksum, said_by="me", size=len(PACS)), to, mirror=source)
    assert got.folder == to / "PACS"
    assert all_in(to) == sorted(PLACED)
    assert not (to / "downloads").exists()
    (one,) = got.files
    assert (one["sha256"], one["bytes"], one["checked"]) == (sha256(PACS), len(PACS), "me")
    shutil.rmtree(source)
    again = get(pacs(), to, mirror="http://localhost:9")
    assert (again.folder, again.files) == (to / "PACS", [])


def test_another_checksum_is_told_and_a_rerun_fetches_anew(tmp_path: Path) -> None:
    to = tmp_path / "to"
    source = mirror(tmp_path / "mirror", PACS__zip=b"PKwrong")
    wanted = pacs(checksum=f"md5:{md5(PACS)}", said_by="me")
    with pytest.raises(InputError) as error:
        get(wanted, to, mirror=source)
    assert f"its md5 is {md5(b'PKwrong')}, not {md5(PACS)} (me)" in str(error.value)
    assert all_in(to) == ["downloads/PACS/PACS.zip.wrong"]
    mirror(tmp_path / "mirror", PACS__zip=PACS)
    assert len(get(wanted, to, mirror=source).files) == 1


@pytest.mark.parametrize(
    ("content", "expected", "message"),
    [
        (PACS, {"size": 12}, f"it has {len(PACS):,} bytes, not 12"),
        (b"<html>", {}, r"it has 6 bytes that are no \.zip file"),
        (b"", {}, r"it has 0 bytes that are no \.zip file"),
    ],
    ids=["size", "page", "empty"],
)
def test_another_size_and_no_archive_are_told(
    content: bytes, expected: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        get(pacs(**expected), tmp_path / "to", mirror=mirror(tmp_path / "mirror", PACS__zip=content))
    assert all_in(tmp_path / "to") == ["downloads/PACS/PACS.zip.wrong"]


def test_without_a_checksum_the_first_is_trusted_and_others_compared(tmp_path: Path) -> None:
    to = tmp_path / "to"
    source = mirror(tmp_path / "mirror", PACS__zip=PACS)
    assert get(pacs(), to, mirror=source).files[0]["checked"] == ""
    note = to / "downloads/PACS/PACS.zip.sha256"
    assert note.read_text() == f"{sha256(PACS)}  PACS.zip\n"
    shutil.rmtree(to / "PACS")
    assert get(pacs(), to, mirror=source).files[0]["checked"] == "as it came before"
    shutil.rmtree(to / "PACS")
    other = zipped(*PICTURES, content=b"other")
    mirror(tmp_path / "mirror", PACS__zip=other)
    with pytest.raises(
        InputError, match=f"sha256 is {sha256(other)}, not {sha256(PACS)} .*remove 'PACS.zip.sha"
    ):
        get(pacs(), to, mirror=source)
    assert not (to / "PACS").exists()
    got = get(pacs(), to, mirror=source, sha256={"PACS.zip": sha256(other)})
    assert got.files[0]["checked"] == "--sha256"
    note.write_text("nonsense")
    shutil.rmtree(to / "PACS")
    with pytest.raises(InputError, match=r"PACS.zip.sha256' contains no sha256; remove it"):
        get(pacs(), to, mirror=source)


def test_an_archive_that_could_not_be_unpacked_is_not_trusted_later(tmp_path: Path) -> None:
    source = mirror(tmp_path / "mirror", PACS__zip=b"PK" + b"0" * 100)
    with pytest.raises(InputError, match="cannot be unpacked"):
        get(pacs(), tmp_path / "to", mirror=source)
    assert not list(tmp_path.rglob("*.sha256"))
    (tmp_path / "to/downloads/PACS/PACS.zip").unlink()
    mirror(tmp_path / "mirror", PACS__zip=PACS)
    get(pacs(), tmp_path / "to", mirror=source)


def test_ones_own_checksum_counts_instead_of_the_published(tmp_path: Path) -> None:
    source = mirror(tmp_path / "mirror", PACS__zip=PACS)
    published = pacs(checksum=f"md5:{md5(b'other')}", said_by="me", size=1)
    with pytest.raises(InputError, match=r"not a{64} \(--sha256\)"):
        get(published, tmp_path / "to", mirror=source, sha256={"PACS.zip": "a" * 64})
    get(published, tmp_path / "to", mirror=source, sha256={"PACS.zip": sha256(PACS).upper()})


def test_an_archive_that_was_put_there_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "downloads/PACS").mkdir(parents=True)
    (tmp_path / "downloads/PACS/PACS.zip").write_bytes(PACS)
    got = get(pacs(checksum=f"md5:{md5(PACS)}"), tmp_path, keep=True)
    assert got.files[0]["url"] == ""
    assert (tmp_path / "downloads/PACS/PACS.zip").read_bytes() == PACS
    assert set(PLACED) < set(all_in(tmp_path))


# Unpacking

EVIL = [
    "/etc/x",
    "//x",
    "../x",
    "a/../../x",
    "a/..",
    "..",
    "C:/x",
    "c:x",
    "\\x",
    "a\\..\\..\\x",
    ".. /x",
    "a/.../x",
]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_members_that_lead_out_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    archive = tmp_path / f"evil.{kind}"
    archive.write_bytes(zipped("good", name) if kind == "zip" else tarred(("good", {}), (name, {})))
    (tmp_path / "to").mkdir()
    with pytest.raises(InputError, match=f"{re.escape(repr(name))} in it points outside the folder"):
        unpack(archive, tmp_path / "to", nothing)
    assert all_in(tmp_path) == [f"evil.{kind}"]


def tarred(*members: tuple[str, dict[str, Any]]) -> bytes:
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w:gz") as file:
            for name, how in members:
                member = tarfile.TarInfo(name)
                member.size = 7 if not how else 0
                for key, value in how.items():
                    setattr(member, key, value)
                file.addfile(member, io.BytesIO(b"picture") if not how else None)
        return out.getvalue()


@pytest.mark.parametrize(
    "how",
    [
        {"type": tarfile.SYMTYPE, "linkname": "/etc"},
        {"type": tarfile.SYMTYPE, "linkname": "../.."},
        {"type": tarfile.SYMTYPE, "linkname": "b/../../.."},
        {"type": tarfile.SYMTYPE, "linkname": ""},
        {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": "../secret"},
        {"type": tarfile.FIFOTYPE},
        {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
        {"type": tarfile.BLKTYPE},
    ],
    ids=str,
)
def test_links_that_lead_out_and_devices_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "evil.tar.gz").write_bytes(tarred(("good", {}), ("a/evil", how)))
    (tmp_path / "to").mkdir()
    with pytest.raises(InputError, match=r"points outside the folder|is neither a file nor a folder"):
        unpack(tmp_path / "evil.tar.gz", tmp_path / "to", nothing)
    assert list((tmp_path / "to").iterdir()) == []


def test_links_within_the_archive_are_taken(tmp_path: Path) -> None:
    link = {"type": tarfile.SYMTYPE, "linkname": "one"}
    hard = {"type": tarfile.LNKTYPE, "linkname": "./a/one"}
    (tmp_path / "good.tgz").write_bytes(tarred(("./a/one", {}), ("./a/two", link), ("./b", hard)))
    (tmp_path / "to").mkdir()
    unpack(tmp_path / "good.tgz", tmp_path / "to", nothing)
    assert {(tmp_path / "to" / n).read_bytes() for n in ("a/one", "a/two", "b")} == {b"picture"}


def test_tarfiles_own_check_is_on_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "stays_inside", lambda name: True)
    (tmp_path / "evil.tgz").write_bytes(tarred(("../evil", {})))
    (tmp_path / "to").mkdir()
    with pytest.raises(InputError, match="cannot be unpacked"):
        unpack(tmp_path / "evil.tgz", tmp_path / "to", nothing)
    assert all_in(tmp_path) == ["evil.tgz"]


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_in_a_zip_are_refused(mode: int, tmp_path: Path) -> None:
    info = zipfile.ZipInfo("evil")
    info.external_attr = (mode | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as file:
        file.writestr("good", b"")
        file.writestr(info, "/etc/passwd")
    (tmp_path / "to").mkdir()
    with pytest.raises(InputError, match="'evil' in it is neither a file nor a folder"):
        unpack(tmp_path / "evil.zip", tmp_path / "to", nothing)
    assert list((tmp_path / "to").iterdir()) == []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab.:~\\/ \0", max_size=4) | st.sampled_from(["..", ".", "C:"]), max_size=5).map(
        "/".join
    )
)
@example("a/b.jpg")
def test_a_name_that_stays_inside_does_so_everywhere(name: str) -> None:
    if not stays_inside(name):
        return
    assert posixpath.normpath(posixpath.join("/top", name)).startswith(("/top/", "/top"))
    assert ".." not in posixpath.normpath(name).split("/")
    joined = ntpath.normpath(ntpath.join("C:\\top", name))
    assert joined == "C:\\top" or joined.startswith("C:\\top\\")
    assert not any(part and not part.rstrip(" .") for part in joined.split("\\"))


def test_ordinary_names_stay_inside() -> None:
    good = [
        "a",
        "./a",
        "a/b.jpg",
        "Real World/Alarm Clock/1.jpg",
        "a..b/..c/d..",
        ".",
        "./",
        "a//b",
        "é/日本.png",
    ]
    assert [name for name in good if not stays_inside(name)] == []
    assert [name for name in ["", "a\0b", *EVIL] if stays_inside(name)] == []


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_bombs_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.files.SMALL", 1000)
    archive = tmp_path / f"bomb.{kind}"
    zeros = bytes(3_000_000)
    archive.write_bytes(zipped("a", content=zeros) if kind == "zip" else gzip.compress(_tar_of(zeros)))
    (tmp_path / "to").mkdir()
    with pytest.raises(InputError, match=r"declares 3,000,000 bytes of content, which is implausible for"):
        unpack(archive, tmp_path / "to", nothing)
    monkeypatch.setattr("shoal.files.SMALL", 2**30)
    free = shutil.disk_usage(tmp_path)._replace(free=2_999_999)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda folder: free)
        with pytest.raises(InputError, match=rf"what is in bomb.{kind} needs 3\.0 MB"):
            unpack(archive, tmp_path / "to", nothing)
    assert list((tmp_path / "to").iterdir()) == []
    unpack(archive, tmp_path / "to", nothing)
    assert (tmp_path / "to/a").read_bytes() == zeros


def _tar_of(content: bytes) -> bytes:
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w") as file:
            member = tarfile.TarInfo("a")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
        return out.getvalue()


def spoilt(content: bytes) -> bytes:
    middle = len(content) // 3
    return content[:middle] + bytes(b ^ 255 for b in content[middle : middle + 40]) + content[middle + 40 :]


NOISE = bytes(i * i * i % 253 for i in range(5000))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.zip", zipped("a", "b", content=NOISE)[:-30]),
        ("a.zip", spoilt(zipped("a", content=NOISE))),
        ("a.tar.gz", gzip.compress(_tar_of(NOISE))[:-200]),
        ("a.tar.gz", spoilt(gzip.compress(_tar_of(NOISE)))),
        ("a.tar", b"nonsense" * 100),
    ],
    ids=["zip cut", "zip spoilt", "tar cut", "tar spoilt", "no tar"],
)
def test_broken_archives_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "to").mkdir()
    with pytest.raises(InputError, match=rf"{name}' cannot be unpacked \(.+\); remove it") as error:
        unpack(tmp_path / name, tmp_path / "to", nothing)
    assert "\n" not in str(error.value)


# All or nothing


def test_a_kill_in_the_middle_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    source = mirror(tmp_path / "mirror", PACS__zip=PACS)
    child = os.fork()
    if not child:

        def die(file: str, doing: str, done: int, total: int | None) -> None:
            if (doing, done) == ("unpacked", 8):
                os.kill(os.getpid(), signal.SIGKILL)

        get(pacs(), tmp_path / "to", mirror=source, tell=die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(all_in(tmp_path / "to" / ".PACS.unpacking")) >= 7  # nearly all
    with pytest.raises(InputError, match="PACS is not in"):
        load("pacs", folder=str(tmp_path / "to"))
    shutil.rmtree(source)  # the archive was whole
    get(pacs(), tmp_path / "to")
    assert set(all_in(tmp_path / "to")) == {*PLACED, "downloads/PACS/PACS.zip.sha256"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_stop_in_the_middle_tidies_up(error: BaseException, tmp_path: Path) -> None:
    def fail(file: str, doing: str, done: int, total: int | None) -> None:
        if (doing, done) == ("unpacked", 3):
            raise error

    source = mirror(tmp_path / "mirror", PACS__zip=PACS)
    with pytest.raises((KeyboardInterrupt, InputError)) as caught:
        get(pacs(), tmp_path / "to", mirror=source, tell=fail)
    if isinstance(error, OSError):
        assert "PACS cannot be unpacked in" in str(caught.value)
        assert "No space left on device" in str(caught.value)
    assert all_in(tmp_path / "to") == ["downloads/PACS/PACS.zip"]
    assert not (tmp_path / "to/.PACS.unpacking").exists()


def test_archives_of_something_else_are_refused_and_kept(tmp_path: Path) -> None:
    source = mirror(tmp_path / "mirror", PACS__zip=zipped("kfold/photo/dog/1.jpg", "kfold/sketch/dog/1.jpg"))
    with pytest.raises(
        InputError, match=r"PACS.zip: not all domains of PACS are in it \(art_painting, .*The files are in"
    ):
        get(pacs(), tmp_path / "to", mirror=source)
    assert all_in(tmp_path / "to") == ["downloads/PACS/PACS.zip"]


def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "to/PACS/photo").mkdir(parents=True)
    (tmp_path / "to/PACS/photo/mine.jpg").write_bytes(b"mine")
    source = mirror(tmp_path / "mirror", PACS__zip=PACS)
    with pytest.raises(InputError, match=r"PACS' exists but is not a complete copy of PACS; move it away"):
        get(pacs(), tmp_path / "to", mirror=source)
    assert all_in(tmp_path / "to") == ["PACS/photo/mine.jpg"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made: Not a directory"):
        get(pacs(), tmp_path / "file", mirror=source)


def test_two_processes_do_not_fetch_the_same(tmp_path: Path) -> None:
    source = mirror(tmp_path / "mirror", PACS__zip=PACS)

    def another(file: str, doing: str, done: int, total: int | None) -> None:
        with pytest.raises(
            InputError, match=r"another process is downloading to .*downloads/PACS'; wait for it"
        ):
            get(pacs(), tmp_path / "to", mirror=source)
        assert (tmp_path / "to/downloads/PACS").is_dir()

    get(pacs(), tmp_path / "to", mirror=source, tell=another)
    get(pacs(), tmp_path / "to", mirror=source)


# The datasets


@pytest.mark.parametrize("name", DOWNLOADS)
def test_what_is_said_of_sources_is_sound(name: str) -> None:
    download = DOWNLOADS[name]
    files = [s.file for s in download.sources]
    assert len(set(files)) == len(files)
    for source in download.sources:
        assert all(re.fullmatch(r"https?://[\w./?=&-]+", url) for url in source.urls)
        assert source.urls
        assert re.fullmatch(r"(md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}|)", source.checksum)
        assert bool(source.said_by) == bool(source.checksum)
        assert "/" not in source.file
    if download.layout is not None:
        assert download.layout.name == name
        assert download.home == download.layout.folders[0]


def test_which_can_be_fetched() -> None:
    assert sorted(DOWNLOADS) == [
        *("coloured-mnist", "domainnet", "heart", "office-home"),
        *("pacs", "rotated-mnist", "terra-incognita", "vlcs"),
    ]


@pytest.mark.parametrize("name", ["heart", "rotated-mnist", "coloured-mnist", "pacs", "domainnet"])
def test_what_is_missing_says_how_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"`shoal data get {name.replace('coloured', 'rotated')}`"
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(InputError, match=said):
        load(name)
    with pytest.raises(InputError, match=said):
        load(name, folder=str(tmp_path))


def without_sums(name: str) -> Download:
    download = DOWNLOADS[name]
    plain = tuple(replace(s, checksum="", said_by="", size=None) for s in download.sources)
    return replace(download, sources=plain)


@pytest.mark.parametrize(
    ("name", "archive", "folders"),
    [
        ("vlcs", "VLCS.tar.gz", ["VLCS/Caltech101", "VLCS/LabelMe", "VLCS/SUN09", "VLCS/VOC2007"]),
        (
            "office-home",
            "OfficeHomeDataset_10072016.zip",
            [f"OfficeHomeDataset_10072016/{d}" for d in ("Art", "Clipart", "Product", "Real World")],
        ),
    ],
)
def test_archives_as_they_are_published(name: str, archive: str, folders: list[str], tmp_path: Path) -> None:
    names = [f"{folder}/dog/1.jpg" for folder in folders]
    content = zipped(*names) if archive.endswith("zip") else tarred(*((n, {}) for n in names))
    (tmp_path / archive).write_bytes(content)
    got = get(without_sums(name), tmp_path / "to", mirror=str(tmp_path))
    assert got.folder.name == DOWNLOADS[name].home
    assert sorted(p.parent.parent.name for p in got.folder.rglob("*.jpg")) == [
        f.split("/")[1] for f in folders
    ]


def test_domainnet_is_six_archives_less_the_copies(tmp_path: Path) -> None:
    domains = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    for domain in domains:
        (tmp_path / f"{domain}.zip").write_bytes(zipped(*(f"{domain}/dog/{i}.jpg" for i in range(3))))
    (tmp_path / "mine").write_text("mine")
    copies = [
        "clipart/dog/1.jpg",
        "real/dog/2.jpg",
        "real/dog/2.jpg",
        "real/gone.jpg",
        "",
        "../../mine",
        "clipart",
    ]
    (tmp_path / "domain_net_duplicates.txt").write_text("\n".join(copies))
    got = get(without_sums("domainnet"), tmp_path / "to", mirror=str(tmp_path))
    left = {f"{d}/dog/{i}.jpg" for d in domains for i in range(3)} - set(copies)
    assert set(all_in(got.folder)) == left
    assert got.notes == ["2 images that DomainBed lists as duplicates are excluded"]
    assert (tmp_path / "mine").exists()
    assert len(list((tmp_path / "to/downloads").rglob("*.sha256"))) == 7


def labels(**changed: Any) -> dict[str, Any]:
    """Camera traps as LILA describes them; an image at camera 38 has two animals."""
    images = [{"id": f"i{n}", "file_name": f"{n}.jpg", "location": where}
              for n, where in enumerate(["38", "46", 100, "43", "38", "7", "46", "46"])]  # fmt: skip
    kinds = [(0, 1), (0, 2), (0, 1), (1, 3), (2, 1), (3, 2), (4, 9), (5, 1), (6, 1), (7, 2)]
    return {
        "images": images,
        "categories": [{"id": i, "name": n} for i, n in {1: "bird", 2: "cat", 3: "empty", 9: "car"}.items()],
        "annotations": [{"image_id": f"i{n}", "category_id": kind} for n, kind in kinds],
        **changed,
    }


def terra(folder: Path, said: Any) -> Path:
    pictures = [(f"eccv_18_all_images_sm/{n}.jpg", {}) for n in range(7)]  # the last one is not in it
    (folder / "eccv_18_all_images_sm.tar.gz").write_bytes(tarred(*pictures))
    content = json.dumps(said).encode()
    name = "caltech_images_20210113.json"
    (folder / "caltech_camera_traps.json.zip").write_bytes(zipped(name, content=content))
    return folder


def test_terra_incognita_is_sorted_by_its_labels(tmp_path: Path) -> None:
    got = get(without_sums("terra-incognita"), tmp_path / "to", mirror=str(terra(tmp_path, labels())))
    assert all_in(got.folder) == [
        "location_100/bird/2.jpg",
        "location_38/bird/0.jpg",
        "location_38/cat/0.jpg",
        "location_43/cat/3.jpg",
        "location_46/bird/6.jpg",
        "location_46/empty/1.jpg",
    ]
    assert got.notes == [
        "5 images of four cameras and ten classes are kept; 1 listed in the labels are not in the archive"
    ]


@pytest.mark.parametrize("said", [[], {}, labels(images=[{"id": 1}]), labels(categories=None)], ids=str)
def test_labels_of_another_form_are_refused(said: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"caltech_images_20210113.json contains no camera trap labels"):
        get(without_sums("terra-incognita"), tmp_path / "to", mirror=str(terra(tmp_path, said)))
    assert not (tmp_path / "to/terra_incognita").exists()


def test_labels_cannot_reach_outside(tmp_path: Path) -> None:
    (tmp_path / "mine.jpg").write_text("mine")
    said = labels()
    said["images"][4]["file_name"] = "../../../mine.jpg"
    said["annotations"].append({"image_id": "i4", "category_id": 1})
    get(without_sums("terra-incognita"), tmp_path / "to", mirror=str(terra(tmp_path, said)))
    assert (tmp_path / "mine.jpg").exists()
    assert not list((tmp_path / "to").rglob("mine.jpg"))


# The command


def real_pacs(folder: Path) -> bytes:
    """A zip like that of PACS, with small images."""
    with io.BytesIO() as out:
        with zipfile.ZipFile(out, "w") as file:
            for d, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
                for c, label in enumerate(("dog", "horse")):
                    for i in range(5):
                        picture = io.BytesIO()
                        Image.new("RGB", (30, 20), (60 * d, 100 * c, 40 * i)).save(picture, "JPEG")
                        file.writestr(f"kfold/{domain}/{label}/{i}.jpg", picture.getvalue())
        folder.mkdir(exist_ok=True)
        (folder / "PACS.zip").write_bytes(out.getvalue())
        return out.getvalue()


def test_get_check_and_load(
    server: Server, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    content = real_pacs(tmp_path / "mirror")
    server.serve(content, "mirror/PACS.zip", breaks=[1000])
    command = ["data", "get", "pacs", "--mirror", f"{server.url}/mirror", "--sha256", sha256(content)]
    assert main([*command, "--keep-archive"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "pacs is now in data/PACS.",
        f"  PACS.zip: sha256 {sha256(content)}, checked (--sha256)",
        "Next: shoal data check data/PACS --dataset pacs",
    ]
    assert f"PACS.zip: {amount(len(content))} of {amount(len(content))} fetched" in shown.err
    assert "PACS.zip: 40 of 40 unpacked" in shown.err
    assert "the connection was closed after 1,000 of" in shown.err
    assert len(shown.err.splitlines()) < 25  # a line a tenth
    assert main(["data", "check", "data/PACS", "--dataset", "pacs", "--json", "--workers", "1"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["unreadable"]) == (40, {})  # too few, but all sound
    assert load("pacs", folder="data", size=16).splits["test"].names == ("sketch",)
    assert main(command) == 0
    assert "pacs is already in data/PACS; nothing was downloaded." in capsys.readouterr().out
    assert main(["data", "get", "pacs", "--mirror", "data/downloads/PACS", "--to", "b c", "--json",
                 "--sha256", f"PACS.zip={sha256(content)}"]) == 0  # fmt: skip
    (report,) = json.loads(capsys.readouterr().out)["datasets"]
    assert (report["folder"], report["next"]) == ("b c/PACS", "shoal data check 'b c/PACS' --dataset pacs")
    assert report["files"][0]["bytes"] == len(content)


def test_real_mnist_from_a_mirror(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.environ.get("SHOAL_DATA")
    if not root or not Path(root, "mnist/train-images-idx3-ubyte.gz").is_file():
        pytest.skip("SHOAL_DATA is unset or has no mnist: no real files")
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    assert main(["data", "get", "coloured-mnist", "--mirror", str(Path(root, "mnist"))]) == 0
    assert "Next: shoal train erm coloured-mnist --data-dir" in capsys.readouterr().out
    assert all_in(tmp_path) == sorted(f"mnist/{s.file}" for s in DOWNLOADS["rotated-mnist"].sources)
    assert len(load("rotated-mnist", per_domain=50).examples) == 300  # type: ignore[arg-type]
    assert main(["data", "get", "rotated-mnist", "--mirror", "http://localhost:9"]) == 0
    assert "nothing was downloaded" in capsys.readouterr().out


def test_real_hospitals_from_a_mirror(tmp_path: Path, capsys: Captured) -> None:
    root = os.environ.get("SHOAL_DATA")
    if not root or not Path(root, "heart_disease").is_dir():
        pytest.skip("SHOAL_DATA is unset or has no heart_disease: no real files")
    source = Path(root, "heart_disease").resolve().as_uri()
    assert main(["data", "get", "heart", "--mirror", source, "--to", str(tmp_path)]) == 0
    assert len(load("heart", folder=str(tmp_path / "heart_disease")).examples) == 920  # type: ignore[arg-type]


def test_a_plan_fetches_nothing(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", None)
    to = ["--to", str(tmp_path / "to"), "--plan"]
    assert main(["data", "get", "rotated-mnist", "terra-incognita", *to]) == 0
    shown = capsys.readouterr().out
    assert f"rotated-mnist, in {tmp_path / 'to/mnist'}, would be downloaded" in shown
    assert "  t10k-labels-idx1-ubyte.gz: 4.5 kB, md5 ec29112dd5afa0611ce80d1b7f02629c (torchvision)" in shown
    assert "    https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz" in shown
    assert "eccv_18_all_images_sm.tar.gz: about 6.5 GB, no checksum is published" in shown
    assert "they were not tested" in shown
    assert main(["data", "get", "pacs", *to, "--mirror", "http://here", "--json", "--sha256", "a" * 64]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plan"]
    assert plan["files"][0]["urls"] == ["http://here/PACS.zip"]
    assert (plan["files"][0]["checksum"], plan["there"]) == (f"sha256:{'a' * 64}", False)
    assert list(tmp_path.iterdir()) == []


def test_help_says_what_there_is(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", "get", "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for option in (
        "--to DIR",
        "--mirror URL",
        "--sha256 HEX",
        "--keep-archive",
        "--plan",
        "they were not tested",
    ):
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear"], "dataset 'linear' cannot be downloaded; these can: coloured-mnist, domainnet,"),
        (["pasc"], "Did you mean 'pacs'?"),
        (["pacs", "--sha256", "12"], "--sha256 takes 64 hexadecimal digits, got '12'"),
        (
            ["heart", "--sha256", "a" * 64],
            "there are several files; use FILE=aaaaaaaa… with one of processed.cleveland",
        ),
        (
            ["heart", "--sha256", f"x={'a' * 64}"],
            "'x' is not a file of this dataset; the files are: processed.cleveland.data",
        ),
        (["pacs", "--mirror", "nowhere"], "--mirror: there is no folder 'nowhere'"),
        (["pacs", "--mirror", "gopher://x"], "must be a folder, or start with http://"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_DATA", raising=False)  # where a dataset may be already
    assert main(["data", "get", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not shown.out
    assert all_in(tmp_path) == []


def test_one_that_cannot_be_had_does_not_stop_the_others(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = real_pacs(tmp_path / "mirror")
    command = ["data", "get", "vlcs", "pacs", "--mirror", str(tmp_path / "mirror"), "--to", str(tmp_path)]
    assert main([*command, "--sha256", f"PACS.zip={sha256(content)}"]) == 2
    shown = capsys.readouterr()
    assert "pacs is now in" in shown.out
    assert "shoal: vlcs: VLCS.tar.gz could not be downloaded: file://" in shown.err
    assert "No such file or directory" in shown.err


def test_ctrl_c_says_that_it_goes_on(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "fetch", stop)
    assert main(["data", "get", "pacs", "--to", str(tmp_path)]) == 130
    assert "interrupted. The same command resumes the download" in capsys.readouterr().err
