"""Downloads: from a server on this machine that behaves badly, and what archives become."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import download as module
from shoal.data.download import Download, Source, get
from shoal.errors import InputError

CONTENT = np.random.default_rng(0).bytes(3_000_000)


class Server:
    """One file, and how often which part of it was asked for."""

    def __init__(self) -> None:
        self.content, self.etag, self.requests = CONTENT, '"one"', list[str | None]()
        self.behave: Callable[[int, Any], bool] = lambda n, handler: False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.requests.append(self.headers.get("Range"))
                if not server.behave(len(server.requests), self):
                    server.answer(self)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/file.bin"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, handler: Any, cut: int | None = None) -> None:
        asked = handler.headers.get("Range") if handler.headers.get("If-Range") == self.etag else None
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if start >= len(self.content):
            handler.send_response(416)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        body = self.content[start:]
        handler.send_response(206 if asked else 200)
        handler.send_header("ETag", self.etag)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:cut])
        if cut is not None:
            handler.close_connection = True
            handler.connection.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("pooch")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def one(url: str, checksum: str | None = None, file: str = "file.bin") -> Download:
    def find(folder: Path) -> Path | None:
        return folder / "home" if (folder / "home" / file).exists() else None

    return Download("home", (Source(file, (url,), checksum, "us"),), find)


def sha(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_a_download_resumes_after_broken_connections(server: Server, tmp_path: Path) -> None:
    server.behave = lambda n, handler: n <= 2 and (server.answer(handler, cut=1_000_000) or True)
    seen: list[int] = []
    found = get(one(server.url, sha(CONTENT)), tmp_path, lambda file, done, total: seen.append(done))
    assert (found.folder / "file.bin").read_bytes() == CONTENT
    parts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in server.requests[1:] if r]
    assert len(parts) == 2
    assert parts[0] > 900_000
    assert parts[1] > parts[0] + 900_000
    assert seen == sorted(seen)
    assert found.files[0]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert not (tmp_path / "downloads" / "home").exists()
    assert get(one(server.url), tmp_path).files == []  # it is there
    assert len(server.requests) == 3


@pytest.mark.parametrize("changed", [False, True])
def test_an_interrupted_download_resumes_if_the_file_is_the_same(
    server: Server, tmp_path: Path, changed: bool
) -> None:
    def stop(file: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(one(server.url), tmp_path, stop)
    if changed:
        server.content, server.etag = CONTENT[::-1], '"two"'
    found = get(one(server.url), tmp_path)
    assert (found.folder / "file.bin").read_bytes() == server.content
    assert server.requests == [None, f"bytes={2**16}-"]


def test_what_cannot_be_downloaded_is_said(server: Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file.bin could not be downloaded.*hash"):
        get(one(server.url, sha(b"other")), tmp_path)
    assert not (tmp_path / "home").exists()

    def page(n: int, handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    server.behave = page
    with pytest.raises(InputError, match="a web page instead of the file"):
        get(one(server.url), tmp_path)
    server.behave = lambda n, handler: handler.send_error(404) or True
    with pytest.raises(InputError, match="404"):
        get(one(server.url), tmp_path)


def archive(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as file:
            for name, content in members.items():
                file.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            if content.startswith(b"->"):
                about.type, about.linkname, about.size = tarfile.SYMTYPE, content[2:].decode(), 0
            tar.addfile(about, io.BytesIO(content))
    return path


def unpack(path: Path) -> Path:
    """Where an archive comes to that lies where it would be downloaded to."""
    source = Source(path.name, ("http://127.0.0.1:9/no",), sha(path.read_bytes()))
    return get(Download("home", (source,), lambda folder: None), path.parents[2]).folder


@pytest.mark.parametrize("file", ["a.zip", "a.tar.gz"])
def test_archives_are_unpacked_and_never_outside(file: str, tmp_path: Path) -> None:
    good = {"top/a/x.txt": b"x", "top/b/y.txt": b"y"}
    folder = unpack(archive(tmp_path / "good" / "downloads" / "home" / file, good))
    assert sorted(p.name for p in folder.iterdir()) == ["a", "b"]  # without the folder around all
    evil = ("../out.txt", b"x"), ("/tmp/out-of-shoal.txt", b"x"), ("link", b"->../../../etc")
    for n, (name, content) in enumerate(evil):
        path = archive(tmp_path / str(n) / "downloads" / "home" / file, {**good, name: content})
        with contextlib.suppress(InputError):  # refused, or unpacked inside
            unpack(path)
    assert not (tmp_path / "0" / "out.txt").exists()
    assert not Path("/tmp/out-of-shoal.txt").exists()
    assert not any(p.is_symlink() for p in tmp_path.rglob("*"))
