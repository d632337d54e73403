"""A real redis-server for tests, which they can kill, freeze and start again. Nothing restarts it behind their back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from cluster.lifecycle import dies_with_parent, find_redis_server, free_port, terminate


class RedisServer:
    """One server at one port. ``start`` after ``kill`` brings an empty one back at the same port."""

    def __init__(self, *options: str) -> None:
        """``options``: more of redis-server's, as on its command line."""
        self.port = free_port()
        self._options = options
        self._folder = tempfile.mkdtemp(prefix="quire-test-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Return when it answers."""
        argv = [str(find_redis_server()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen(
            dies_with_parent([*argv, "--appendonly", "no", "--dir", self._folder, *self._options]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + 20
        while True:
            try:
                with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                    client.ping()
                    return
            except redis.RedisError:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """kill -9: everything in it is lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain synchronous client; close it."""
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            terminate(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def running_redis(*options: str) -> Iterator[RedisServer]:
    """A server on a free port, ended with the context."""
    server = RedisServer(*options)
    try:
        server.start()
        yield server
    finally:
        server.close()
