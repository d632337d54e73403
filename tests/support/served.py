"""``quire serve`` as a user starts it: a process of its own, with Redis, Ray, groups and a router below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cluster.errors import QuireError
from cluster.lifecycle import dies_with_parent
from cluster.pb.inference_pb2 import Cluster, Group
from router.client import Client

QUIRE = [sys.executable, "-m", "cluster.cli"]
START_S = 240.0
WAIT_S = 120.0


def run_quire(*arguments: str, stdin: str = "", timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        [*QUIRE, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
    )


class Served:
    """A running ``quire serve``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output, self.errors = folder / "stdout", folder / "stderr"
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                dies_with_parent([*QUIRE, "serve", "--port", "0", *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "QUIRE_LOG": "INFO"},
            )
        self._seen: set[psutil.Process] = set()
        self.address = self._wait_for_address()

    def client(self, api_key: str | None = None) -> Client:
        """Close it."""
        return Client(self.address, api_key)

    def descendants(self) -> set[psutil.Process]:
        """Every process below it that has ever been seen here."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._seen

    def find(self, text: str) -> psutil.Process:
        """The one living descendant whose command line holds ``text``."""
        found = [one for one in self.descendants() if text in command_line(one)]
        assert len(found) == 1, f"{text}: {[command_line(one) for one in found]}"
        return found[0]

    def redis(self, purpose: str) -> psutil.Process:
        """The embedded redis-server that is there for ``purpose``: "control" or "prefix"."""
        servers = [one for one in self.descendants() if "redis-server" in command_line(one)]
        found = [one for one in servers if f"-{purpose}-" in one.cwd()]
        assert len(found) == 1, f"{purpose}: {servers}"
        return found[0]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signal it and wait for its end; returns the exit code."""
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def left(self, timeout_s: float = 30.0) -> list[str]:
        """Command lines of the descendants that still live after a while."""
        _, alive = psutil.wait_procs([one for one in self._seen if not is_zombie(one)], timeout=timeout_s)
        return [command_line(one) for one in alive if not is_zombie(one)]

    def _wait_for_address(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            for line in self.output.read_text().splitlines():
                if line.startswith("serving on "):
                    return line.removeprefix("serving on ")
            assert self.process.poll() is None, self.errors.read_text()
            self.descendants()
            time.sleep(0.1)
        raise AssertionError(f"not serving after {START_S} s: {self.errors.read_text()}")


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """Started, and ended with the context; nothing of it may be left then."""
    served = Served(folder, *arguments)
    try:
        yield served
    finally:
        served.stop()
        left = served.left()
        for one in served.descendants():
            if is_alive(one):
                one.kill()
        assert not left, left


def command_line(process: psutil.Process) -> str:
    """Empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and not is_zombie(process)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def until(client: Client, condition: Callable[[Cluster], object], what: str, timeout_s: float = WAIT_S) -> Cluster:
    """Ask the router until ``condition`` holds of its answer. A router that is away is asked again."""
    end = time.monotonic() + timeout_s
    found: Cluster | None = None
    while time.monotonic() < end:
        try:
            found = client.cluster(timeout_s=10.0)
            if condition(found):
                return found
        except QuireError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"never: {what}; {found}")


def all_serve(count: int) -> Callable[[Cluster], bool]:
    """Exactly so many groups, each of them serving."""
    return lambda found: [group.state for group in found.groups] == [Group.SERVING] * count


def idle(found: Cluster) -> bool:
    """No page in use anywhere, and every pool adds up."""
    return all(
        group.load.used_blocks == group.load.running_requests == group.load.waiting_requests == 0
        and group.load.pool_consistent
        for group in found.groups
    )
