"""Models by hub id: from the local cache without asking, and from hubs that refuse, are gone, or say nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest

REVISION = "0" * 40
ID = "owner/model"

# The library reads its environment when it is imported: a process for each case.
_CODE = """
import sys
from cluster import models
from cluster.errors import ModelLoadError
models._HUB_TIMEOUT_S = 1
try:
    print("found", models.resolve(sys.argv[1]))
except ModelLoadError as error:
    print("refused", error.message)
"""


class _Hub(ThreadingHTTPServer):
    def __init__(self, behaviour: Literal["silent", "absent"]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = behaviour
        self.asked: list[str] = []
        self.ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub = self.server
        assert isinstance(hub, _Hub)
        hub.asked.append(self.path)
        if hub.behaviour == "silent":
            hub.ended.wait(120)
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def running_hub(behaviour: Literal["silent", "absent"]) -> Iterator[_Hub]:
    hub = _Hub(behaviour)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        hub.shutdown()
        hub.server_close()
        thread.join(10)


def _resolve(home: Path, endpoint: str, model: str = ID, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, model],
        env={**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment},
        capture_output=True,
        text=True,
        timeout=90,  # the wait of the hub's is longer
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _cached(home: Path, *files: str) -> Path:
    """A snapshot in the local hub cache, as a download leaves it."""
    repository = home / "hub" / "models--owner--model"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_a_whole_model_in_the_cache_is_taken_without_asking(tmp_path: Path) -> None:
    snapshot = _cached(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    with running_hub("silent") as hub:
        said = _resolve(tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert said.startswith("found")
    assert str(snapshot) in said
    assert f"name='{ID}'" in said
    assert hub.asked == []


def test_a_cache_without_weights_is_no_model_and_the_hub_is_asked(tmp_path: Path) -> None:
    _cached(tmp_path, "config.json", "tokenizer.json")
    with running_hub("absent") as hub:
        said = _resolve(tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert said.startswith(f"refused model: '{ID}': ")
    assert hub.asked


def test_a_hub_that_does_not_know_the_model_says_so(tmp_path: Path) -> None:
    with running_hub("absent") as hub:
        said = _resolve(tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert said.startswith(f"refused model: '{ID}': the hub refuses it: ")


def test_a_hub_that_takes_the_connection_and_says_nothing_is_given_up(tmp_path: Path) -> None:
    with running_hub("silent") as hub:
        said = _resolve(tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert said.startswith(f"refused model: '{ID}': it is not in the local hub cache")
    assert "give a folder" in said
    assert hub.asked


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_hub_the_way_out_is_named(tmp_path: Path, offline: str) -> None:
    with running_hub("absent") as hub:
        gone = f"http://127.0.0.1:{hub.server_port}"
    said = _resolve(tmp_path, gone, HF_HUB_OFFLINE=offline)
    assert said.startswith(f"refused model: '{ID}': it is not in the local hub cache")
    assert "give a folder" in said
