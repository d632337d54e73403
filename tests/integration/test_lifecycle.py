"""Processes that must end, and the embedded redis-server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from cluster.errors import DependencyUnreachable
from cluster.lifecycle import EmbeddedRedis, dies_with_parent, find_redis_server, kill_tree, terminate
from tests.support.ports import occupied_port

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def eventually(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def started(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


def test_terminate_kills_what_ignores_sigterm_and_is_idempotent() -> None:
    process = started(STUBBORN)
    terminate(process, timeout_s=0.3)
    assert process.returncode is not None
    terminate(process, timeout_s=0.3)
    assert gone(process.pid)


def test_kill_tree_ends_children_of_children() -> None:
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"
    process = started(child)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    kill_tree(process.pid, timeout_s=0.5)
    process.wait(10)
    assert all(gone(member.pid) for member in family)
    kill_tree(process.pid)


def test_a_child_dies_with_its_parent_even_by_sigkill() -> None:
    script = (
        "import subprocess, sys, time\n"
        "from cluster.lifecycle import dies_with_parent\n"
        "child = subprocess.Popen(dies_with_parent([sys.executable, '-c', 'import time; time.sleep(600)']))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    # It must have become the program: before that it might not yet have asked for the signal.
    eventually(lambda: "time.sleep(600)" in psutil.Process(child).cmdline()[-1], "the child runs")
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    eventually(lambda: gone(child), "the child is gone")


def test_a_child_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    argv = dies_with_parent([sys.executable, "-c", f"open({str(marker)!r}, 'w')"])
    argv[3] = "1"  # as if another process had started it
    assert subprocess.run(argv, stderr=subprocess.DEVNULL, check=False, timeout=30).returncode != 0
    assert not marker.exists()


def test_the_redis_server_is_found_and_runs() -> None:
    version = subprocess.run([find_redis_server(), "--version"], capture_output=True, check=True, timeout=30).stdout
    assert b"server v" in version


def test_embedded_redis_answers_restarts_and_leaves_nothing() -> None:
    with EmbeddedRedis() as embedded:
        folder = embedded._folder
        assert folder is not None
        first = embedded.pid
        assert first is not None
        with redis.Redis.from_url(embedded.url) as client:
            assert client.ping()
            client.set("a", "1")
        with redis.Redis(port=embedded.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: embedded.restarts == 1 and _answers(embedded.url), "it comes back at the same URL")
        with redis.Redis.from_url(embedded.url) as client:
            assert client.get("a") is None
        last = embedded.pid
        assert last != first
    assert last is not None
    assert gone(last)
    assert not folder.exists()
    embedded.stop()


def test_embedded_redis_is_tried_on_when_it_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of processes, or of disk, for a moment: the supervisor lives on and says why."""
    with EmbeddedRedis() as embedded:
        tried: list[int] = []

        def broken() -> None:
            tried.append(1)
            if len(tried) == 1:
                raise OSError(11, "no more processes")
            raise DependencyUnreachable("redis-server: not found")

        assert embedded.pid is not None
        with monkeypatch.context() as patched:
            patched.setattr(embedded, "_spawn", broken)
            os.kill(embedded.pid, signal.SIGKILL)
            eventually(lambda: len(tried) >= 3, "it is tried again and again")
        eventually(lambda: _answers(embedded.url), "it comes back")


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=1) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def test_embedded_redis_dies_with_a_killed_process() -> None:
    script = (
        "import time\nfrom cluster.lifecycle import EmbeddedRedis\n"
        "print(EmbeddedRedis().start().pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    eventually(lambda: gone(child), "redis is gone")
    left = list(Path(tempfile.gettempdir()).glob(f"quire-redis-{parent.pid}-*"))
    assert left
    with EmbeddedRedis():
        assert not left[0].exists(), "the next one cleans up after it"


def test_embedded_redis_on_a_port_in_use_says_so() -> None:
    with occupied_port() as port:
        embedded = EmbeddedRedis(port=port)
        with pytest.raises(DependencyUnreachable):
            embedded.start()
        assert embedded.pid is None
        assert embedded._folder is not None
        assert not embedded._folder.exists()
