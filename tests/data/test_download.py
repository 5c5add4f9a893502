"""Downloads: from a server on this machine that behaves badly, and from files."""

from __future__ import annotations

import errno
import hashlib
import http.server
import io
import json
import os
import re
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

from shoal.data import download as module
from shoal.data.download import Download, fetch, get, unpack
from shoal.datasets import load, registry
from shoal.errors import InputError

DOWNLOADS: dict[str, Download] = {
    name: registry.module(name).DOWNLOAD for name in registry.having("DOWNLOAD")
}
CONTENT = b"PK" + bytes(i * i % 251 for i in range(300_000))


@dataclass
class Served:
    """A file on the server, and how the server behaves."""

    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"one"'})
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # responses that come first
    breaks: list[int] = field(default_factory=list)  # bytes after which the connection is closed
    ranges: bool = True  # whether parts are served
    heeds_version: bool = True  # whether If-Range is respected
    shifts: int = 0  # by how much a part begins elsewhere than requested


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, Served] = {}
        self.asked: list[tuple[str, str | None]] = []  # path and range of every request

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


def fetched(server: Server, folder: Path, tell: Any = nothing) -> bytes:
    fetch([f"{server.url}/file.zip"], folder / "file.zip", tell=tell, say=nothing)
    assert [p.name for p in folder.iterdir()] == ["file.zip"]  # no part, and no note on it
    return (folder / "file.zip").read_bytes()


def stop_after(count: int) -> Callable[..., None]:
    def tell(file: str, doing: str, done: int, total: int | None) -> None:
        if done >= count:
            raise KeyboardInterrupt

    return tell


@pytest.fixture
def begun(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins a download, which Ctrl-C stops after 100,000 bytes."""

    def begin() -> None:
        monkeypatch.setattr(module, "CHUNK", 10_000)
        with pytest.raises(KeyboardInterrupt):
            fetched(server, tmp_path, tell=stop_after(100_000))
        server.asked.clear()
        assert (tmp_path / "file.zip.part").stat().st_size == 100_000

    return begin


def test_a_broken_connection_resumes(server: Server, tmp_path: Path, waits: list[float]) -> None:
    server.serve(breaks=[100_000, 50_000, 1])
    told: list[Any] = []
    assert fetched(server, tmp_path, tell=lambda *how: told.append(how)) == CONTENT
    assert told[-1] == ("file.zip", "fetched", len(CONTENT), len(CONTENT))
    ranges = [wanted for _, wanted in server.asked]
    assert ranges == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]
    assert waits == [1, 1, 1]  # each brought something new


@pytest.mark.parametrize(
    ("headers", "resumed"),
    [
        ({"ETag": '"one"'}, "bytes=100000-"),
        ({"ETag": 'W/"weak"', "Last-Modified": "Sun, 15 Nov 2026 10:00:00 GMT"}, "bytes=100000-"),
        ({"ETag": 'W/"weak"'}, None),
        ({}, None),
    ],
    ids=["etag", "date", "weak", "nothing"],
)
def test_an_interrupted_download_resumes_if_the_version_is_known(
    headers: dict[str, str], resumed: str | None, server: Server, tmp_path: Path, begun: Callable[[], None]
) -> None:
    server.serve(headers=headers)
    begun()
    assert fetched(server, tmp_path) == CONTENT
    assert server.asked == [("/file.zip", resumed)]


@pytest.mark.parametrize(
    ("content", "how"),
    [
        (CONTENT[::-1] + b"more", {"headers": {"ETag": '"two"'}}),
        (CONTENT[::-1] + b"more", {"headers": {"ETag": '"two"'}, "heeds_version": False}),
        (CONTENT[:5000], {}),
        (CONTENT, {"ranges": False}),
        (CONTENT, {"shifts": -7}),
        (CONTENT, {"shifts": 7}),
    ],
    ids=["another version", "that the server ignores", "shorter", "no parts", "earlier", "later"],
)
def test_what_cannot_be_continued_is_fetched_anew(
    content: bytes, how: dict[str, Any], server: Server, tmp_path: Path, begun: Callable[[], None]
) -> None:
    server.serve()
    begun()
    server.serve(content, **how)
    assert fetched(server, tmp_path) == content


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path, waits: list[float]) -> None:
    server.serve(refusals=[(503, {}), (429, {"Retry-After": "7"}), (500, {"Retry-After": "9999"}), (502, {})])
    assert fetched(server, tmp_path) == CONTENT
    assert waits == [1, 7, 60, 8]


def test_a_server_that_stays_busy_or_breaks_off_is_given_up(server: Server, tmp_path: Path) -> None:
    server.serve(refusals=[(503, {})] * 99)
    with pytest.raises(InputError, match="503 Service Unavailable, 5 times"):
        fetched(server, tmp_path)
    server.serve(breaks=[100_000] * 99, ranges=False)
    with pytest.raises(InputError, match=r"100\.0 kB are saved; the same command resumes"):
        fetched(server, tmp_path)
    server.files["/file.zip"].breaks.clear()
    assert fetched(server, tmp_path) == CONTENT


def test_other_addresses_are_tried(server: Server, tmp_path: Path, waits: list[float]) -> None:
    urls = [f"{server.url}/file.zip", f"{server.url}/other/file.zip"]
    with pytest.raises(InputError, match=r"404 Not Found.*file\.zip"):
        fetch(urls, tmp_path / "file.zip", tell=nothing, say=nothing)
    assert (waits, list(tmp_path.iterdir())) == ([], [])
    server.serve(name="other/file.zip")
    assert fetch(urls, tmp_path / "file.zip", tell=nothing, say=nothing) == urls[1]


def test_a_web_page_is_not_an_archive(server: Server, tmp_path: Path) -> None:
    server.serve(b"<html>Are you sure?", headers={"Content-Type": "text/html; charset=utf-8"})
    with pytest.raises(InputError, match="web page"):
        fetched(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    server.serve()
    free = shutil.disk_usage(tmp_path)._replace(free=299_999)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(InputError, match=r"file.zip needs 300\.0 kB"):
        fetched(server, tmp_path)
    assert waits == []


def zipped(*names: str, content: bytes = b"image") -> bytes:
    with io.BytesIO() as out:
        with zipfile.ZipFile(out, "w") as file:
            for name in names:
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return out.getvalue()


def tarred(*members: tuple[str, dict[str, Any]], content: bytes = b"image") -> bytes:
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w:gz") as file:
            for name, how in members:
                member = tarfile.TarInfo(name)
                member.size = 0 if how else len(content)
                for key, value in how.items():
                    setattr(member, key, value)
                file.addfile(member, None if how else io.BytesIO(content))
        return out.getvalue()


IMAGES = [f"kfold/{d}/dog/{i}.jpg" for d in ("art_painting", "cartoon", "photo", "sketch") for i in (1, 2)]
PACS = zipped(*IMAGES, "kfold/readme.txt", "__MACOSX/kfold/._x")
SHA256 = hashlib.sha256(PACS).hexdigest()
PLACED = sorted(["PACS/readme.txt", *(name.replace("kfold", "PACS") for name in IMAGES)])


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def from_files(name: str, folder: Path, **changes: Any) -> Download:
    """A dataset whose archives are in ``folder``; by default without checksums."""
    plain = {"checksum": "", "said_by": "", "size": None, **changes}
    sources = [replace(s, urls=((folder / s.file).as_uri(),), **plain) for s in DOWNLOADS[name].sources]
    return replace(DOWNLOADS[name], sources=tuple(sources))


@pytest.fixture
def pacs(tmp_path: Path) -> Callable[..., Download]:
    """PACS, with this content of its archive."""

    def make(content: bytes = PACS, **changes: Any) -> Download:
        (tmp_path / "PACS.zip").write_bytes(content)
        return from_files("pacs", tmp_path, **changes)

    return make


def all_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("checksum", [f"md5:{md5(PACS)}", f"sha256:{SHA256.upper()}"], ids=["md5", "sha256"])
def test_what_is_as_published_is_unpacked(
    checksum: str, pacs: Callable[..., Download], tmp_path: Path
) -> None:
    to, download = tmp_path / "to", pacs(checksum=checksum, said_by="me", size=len(PACS))
    got = get(download, to)
    assert (got.folder, all_in(to)) == (to / "PACS", PLACED)
    assert not (to / "downloads").exists()
    (one,) = got.files
    assert (one["sha256"], one["bytes"], one["checked"]) == (SHA256, len(PACS), "me")
    (tmp_path / "PACS.zip").unlink()
    again = get(download, to)
    assert (again.folder, again.files) == (to / "PACS", [])


@pytest.mark.parametrize(
    ("content", "expected", "message"),
    [
        (b"PKwrong", {"checksum": f"md5:{md5(PACS)}", "said_by": "me"}, f"not {md5(PACS)} .me"),
        (PACS, {"size": 12}, f"it has {len(PACS):,} bytes, not 12"),
        (b"<html>", {}, r"6 bytes that are no \.zip file"),
        (b"", {}, r"0 bytes that are no \.zip file"),
    ],
    ids=["checksum", "size", "page", "empty"],
)
def test_another_file_is_refused_and_the_next_call_fetches_anew(
    content: bytes, expected: dict[str, Any], message: str, pacs: Callable[..., Download], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        get(pacs(content, **expected), tmp_path / "to")
    assert all_in(tmp_path / "to") == ["downloads/PACS/PACS.zip.wrong"]
    assert len(get(pacs(checksum=f"md5:{md5(PACS)}"), tmp_path / "to").files) == 1


def test_without_a_checksum_the_first_download_is_trusted(
    pacs: Callable[..., Download], tmp_path: Path
) -> None:
    to = tmp_path / "to"
    assert get(pacs(), to).files[0]["checked"] == ""
    shutil.rmtree(to / "PACS")
    assert get(pacs(), to).files[0]["checked"] == "as it came before"
    shutil.rmtree(to / "PACS")
    with pytest.raises(InputError, match=f"not {SHA256} .*remove 'PACS.zip.sha256'"):
        get(pacs(zipped(*IMAGES, content=b"other")), to)
    assert not (to / "PACS").exists()


def test_an_archive_that_is_there_is_not_fetched(pacs: Callable[..., Download], tmp_path: Path) -> None:
    (tmp_path / "downloads/PACS").mkdir(parents=True)
    (tmp_path / "downloads/PACS/PACS.zip").write_bytes(PACS)
    assert get(pacs(b"PKother", checksum=f"md5:{md5(PACS)}"), tmp_path).files[0]["url"] == ""
    assert set(PLACED) < set(all_in(tmp_path))


# Unpacking

OUTSIDE = ["/etc/x", "../x", "a/../../x", "..", "C:/x", "\\x", "a\\..\\..\\x", ".. /x", "a/.../x"]
LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


def unpacked(folder: Path, name: str, content: bytes) -> list[str]:
    (folder / name).write_bytes(content)
    (folder / "to").mkdir(exist_ok=True)
    unpack(folder / name, folder / "to", nothing)
    return all_in(folder / "to")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("archive", ["evil.zip", "evil.tgz"])
def test_members_outside_the_folder_are_refused(name: str, archive: str, tmp_path: Path) -> None:
    content = zipped("good", name) if archive == "evil.zip" else tarred(("good", {}), (name, {}))
    with pytest.raises(InputError, match=f"{re.escape(repr(name))} in it points outside the folder"):
        unpacked(tmp_path, archive, content)
    assert all_in(tmp_path) == [archive]


@pytest.mark.parametrize(
    "how",
    [
        {"type": LINK, "linkname": "/etc"},
        {"type": LINK, "linkname": "b/../../.."},
        {"type": LINK, "linkname": ""},
        {"type": HARD, "linkname": "../secret"},
        {"type": tarfile.FIFOTYPE},
        {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
    ],
    ids=str,
)
def test_links_outside_the_folder_and_devices_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    with pytest.raises(InputError, match=r"points outside the folder|is neither a file nor a folder"):
        unpacked(tmp_path, "evil.tar.gz", tarred(("good", {}), ("a/evil", how)))
    assert list((tmp_path / "to").iterdir()) == []


def test_links_within_the_archive_are_unpacked(tmp_path: Path) -> None:
    link, hard = {"type": LINK, "linkname": "one"}, {"type": HARD, "linkname": "./a/one"}
    content = tarred(("./a/one", {}), ("./a/two", link), ("./b", hard))
    assert unpacked(tmp_path, "good.tgz", content) == ["a/one", "a/two", "b"]
    assert {(tmp_path / "to" / n).read_bytes() for n in ("a/one", "a/two", "b")} == {b"image"}


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_in_a_zip_are_refused(mode: int, tmp_path: Path) -> None:
    info, out = zipfile.ZipInfo("evil"), io.BytesIO()
    info.external_attr = (mode | 0o777) << 16
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(info, "/etc/passwd")
    with pytest.raises(InputError, match="'evil' in it is neither a file nor a folder"):
        unpacked(tmp_path, "evil.zip", out.getvalue())


NOISE = bytes(i * i * i % 253 for i in range(5000))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.zip", zipped("a", "b", content=NOISE)[:-30]),
        ("a.tar.gz", tarred(("a", {}), content=NOISE)[:-200]),
        ("a.tar", b"nonsense" * 100),
    ],
    ids=["zip", "tar.gz", "tar"],
)
def test_broken_archives_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{name}' cannot be unpacked"):
        unpacked(tmp_path, name, content)


def test_a_kill_leaves_nothing_that_looks_complete(pacs: Callable[..., Download], tmp_path: Path) -> None:
    download, to = pacs(), tmp_path / "to"
    child = os.fork()
    if not child:

        def die(file: str, doing: str, done: int, total: int | None) -> None:
            if (doing, done) == ("unpacked", 8):
                os.kill(os.getpid(), signal.SIGKILL)

        get(download, to, tell=die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with pytest.raises(InputError, match="PACS is not in"):
        load("pacs", folder=str(to))
    (tmp_path / "PACS.zip").unlink()  # the archive was complete
    get(download, to)
    assert set(all_in(to)) == {*PLACED, "downloads/PACS/PACS.zip.sha256"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interruption_leaves_the_archive_only(
    error: BaseException, pacs: Callable[..., Download], tmp_path: Path
) -> None:
    def stop(file: str, doing: str, done: int, total: int | None) -> None:
        if doing == "unpacked":
            raise error

    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InputError):
        get(pacs(), tmp_path / "to", tell=stop)
    assert all_in(tmp_path / "to") == ["downloads/PACS/PACS.zip"]


def test_another_archive_is_refused(pacs: Callable[..., Download], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not all domains of PACS are in it"):
        get(pacs(zipped("a/b.jpg")), tmp_path / "to")
    assert all_in(tmp_path / "to") == ["downloads/PACS/PACS.zip"]


def test_what_is_there_is_not_overwritten(pacs: Callable[..., Download], tmp_path: Path) -> None:
    (tmp_path / "to/PACS/photo").mkdir(parents=True)
    (tmp_path / "to/PACS/photo/mine.jpg").write_bytes(b"mine")
    with pytest.raises(InputError, match="exists but is not a complete copy of PACS"):
        get(pacs(), tmp_path / "to")
    assert all_in(tmp_path / "to") == ["PACS/photo/mine.jpg"]


def test_two_processes_do_not_fetch_the_same(pacs: Callable[..., Download], tmp_path: Path) -> None:
    def another(file: str, doing: str, done: int, total: int | None) -> None:
        with pytest.raises(InputError, match="another process is downloading"):
            get(pacs(), tmp_path / "to")

    get(pacs(), tmp_path / "to", tell=another)


@pytest.mark.parametrize("name", DOWNLOADS)
def test_declared_sources_are_sound(name: str) -> None:
    download = DOWNLOADS[name]
    for source in download.sources:
        assert source.urls
        assert all(re.fullmatch(r"https?://[\w./?=&-]+", url) for url in source.urls)
        assert re.fullmatch(r"(md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}|)", source.checksum)
        assert bool(source.said_by) == bool(source.checksum)
    if download.layout is not None:
        assert (download.layout.name, download.layout.folders[0]) == (name, download.home)


@pytest.mark.parametrize(
    ("name", "archive", "folders"),
    [
        ("vlcs", "VLCS.tar.gz", ["Caltech101", "LabelMe", "SUN09", "VOC2007"]),
        ("office-home", "OfficeHomeDataset_10072016.zip", ["Art", "Clipart", "Product", "Real World"]),
    ],
)
def test_archives_as_they_are_published(name: str, archive: str, folders: list[str], tmp_path: Path) -> None:
    names = [f"{archive.partition('.')[0]}/{folder}/dog/1.jpg" for folder in folders]
    content = zipped(*names) if archive.endswith("zip") else tarred(*((n, {}) for n in names))
    (tmp_path / archive).write_bytes(content)
    got = get(from_files(name, tmp_path), tmp_path / "to")
    assert sorted(p.parent.parent.name for p in got.folder.rglob("*.jpg")) == folders


def test_domainnet_is_six_archives_without_duplicates(tmp_path: Path) -> None:
    domains = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    for domain in domains:
        (tmp_path / f"{domain}.zip").write_bytes(zipped(*(f"{domain}/dog/{i}.jpg" for i in range(3))))
    (tmp_path / "mine").write_text("mine")
    copies = ["clipart/dog/1.jpg", "real/dog/2.jpg", "real/dog/2.jpg", "real/gone.jpg", "", "../../mine"]
    (tmp_path / "domain_net_duplicates.txt").write_text("\n".join(copies))
    got = get(from_files("domainnet", tmp_path), tmp_path / "to")
    assert set(all_in(got.folder)) == {f"{d}/dog/{i}.jpg" for d in domains for i in range(3)} - set(copies)
    assert (tmp_path / "mine").exists()


def labels(**changed: Any) -> dict[str, Any]:
    """Camera traps as LILA describes them; an image at camera 38 has two animals."""
    places = ["38", "46", 100, "43", "38", "7", "46", "46"]
    kinds = [(0, 1), (0, 2), (0, 1), (1, 3), (2, 1), (3, 2), (4, 9), (5, 1), (6, 1), (7, 2)]
    return {
        "images": [{"id": f"i{n}", "file_name": f"{n}.jpg", "location": p} for n, p in enumerate(places)],
        "categories": [{"id": i, "name": n} for i, n in {1: "bird", 2: "cat", 3: "empty", 9: "car"}.items()],
        "annotations": [{"image_id": f"i{n}", "category_id": kind} for n, kind in kinds],
        **changed,
    }


def terra(folder: Path, content: Any) -> Download:
    images = [(f"eccv_18_all_images_sm/{n}.jpg", {}) for n in range(7)]  # the last one is missing
    (folder / "eccv_18_all_images_sm.tar.gz").write_bytes(tarred(*images))
    archive = zipped("caltech_images_20210113.json", content=json.dumps(content).encode())
    (folder / "caltech_camera_traps.json.zip").write_bytes(archive)
    return from_files("terra-incognita", folder)


def test_terra_incognita_is_sorted_by_its_labels(tmp_path: Path) -> None:
    (tmp_path / "mine.jpg").write_text("mine")
    content = labels()
    content["images"][4]["file_name"] = "../../../mine.jpg"  # which stays where it is
    content["annotations"].append({"image_id": "i4", "category_id": 1})
    got = get(terra(tmp_path, content), tmp_path / "to")
    assert all_in(got.folder) == [
        *("location_100/bird/2.jpg", "location_38/bird/0.jpg", "location_38/cat/0.jpg"),
        *("location_43/cat/3.jpg", "location_46/bird/6.jpg", "location_46/empty/1.jpg"),
    ]
    assert (tmp_path / "mine.jpg").exists()


@pytest.mark.parametrize("content", [[], {}, labels(images=[{"id": 1}]), labels(categories=None)], ids=str)
def test_labels_of_another_form_are_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"caltech_images_20210113.json contains no camera trap labels"):
        get(terra(tmp_path, content), tmp_path / "to")
    assert not (tmp_path / "to/terra_incognita").exists()
