"""A real redis-server for tests, which they can kill, freeze and start again. Nothing restarts it behind their back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from cluster.lifecycle import dies_with_parent, find_redis_server, free_port, terminate


class RedisServer:
    """One server at one port. ``start`` after ``kill`` brings an empty one back at the same port."""

    def __init__(self, *options: str) -> None:
        """``options``: more of redis-server's, as on its command line."""
        self.port = free_port()
        while "--cluster-enabled" in options and self.port > 65_535 - 10_000:  # a node takes that one further up too
            self.port = free_port()
        self.options = options
        self._folder = tempfile.mkdtemp(prefix="quire-test-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Its own, for as long as it is not closed."""
        return Path(self._folder)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Return when it answers."""
        argv = [str(find_redis_server()), *self._files, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen(
            dies_with_parent([*argv, "--appendonly", "no", "--dir", self._folder, *self.options]),
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


class Sentinel(RedisServer):
    """One that watches a primary alone, and takes it for dead after half a second."""

    SERVICE = "quire"

    def __init__(self, primary: RedisServer) -> None:
        super().__init__()
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {self.SERVICE} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {self.SERVICE} 500\n"
            f"sentinel failover-timeout {self.SERVICE} 2000\n"
        )
        self._files = (str(config), "--sentinel")


@contextmanager
def running_sentinel() -> Iterator[tuple[Sentinel, RedisServer, RedisServer]]:
    """A sentinel, its primary, and a replica that is in step."""
    with ExitStack() as stack:
        primary = stack.enter_context(running_redis())
        replica = stack.enter_context(running_redis("--replicaof", "127.0.0.1", str(primary.port)))
        until(lambda: _info(replica, "replication").get("master_link_status") == "up")
        sentinel = Sentinel(primary)
        stack.callback(sentinel.close)
        sentinel.start()
        with sentinel.client() as client:
            until(lambda: len(client.sentinel_slaves(Sentinel.SERVICE)) == 1)
        yield sentinel, primary, replica


@contextmanager
def running_cluster(nodes: int = 3, announced: Callable[[int], int] | None = None) -> Iterator[list[RedisServer]]:
    """A Redis Cluster without replicas, all of whose slots are served. ``announced``: what port a node tells of, by its
    own."""
    with ExitStack() as stack:
        servers = [RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "2000") for _ in range(nodes)]
        for server in servers:
            stack.callback(server.close)
            if announced is not None:
                server.options += ("--cluster-announce-port", str(announced(server.port)))
            server.start()
        for number, server in enumerate(servers):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(16384)[number::nodes])
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)
        for server in servers:
            until(lambda server=server: _cluster_is_whole(server, nodes))  # type: ignore[misc]
        yield servers


def _cluster_is_whole(server: RedisServer, nodes: int) -> bool:
    with server.client() as client:
        found = client.execute_command("CLUSTER INFO")
    return bool(found["cluster_state"] == "ok" and int(found["cluster_known_nodes"]) == nodes)


def _info(server: RedisServer, section: str) -> dict[str, object]:
    with server.client() as client:
        found: dict[str, object] = client.info(section)  # type: ignore[assignment]
    return found


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return when it is so, which must be soon."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.05)
