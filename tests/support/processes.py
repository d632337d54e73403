"""Groups and routers as processes of their own, as in a cluster, so that tests can kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.lifecycle import dies_with_parent

START_S = 120.0


class Process:
    """Prints "NAME ADDRESS" on its first line when it is ready."""

    def __init__(self, module: str, config: dict[str, Any], folder: Path, *arguments: str) -> None:
        file = folder / f"{module}-{'-'.join(arguments)}.json"
        file.write_text(json.dumps(config))  # JSON is YAML
        argv = [sys.executable, "-m", module, "--config", str(file), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "QUIRE_LOG": "WARNING"}
        self._process = subprocess.Popen(
            dies_with_parent(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
        )
        self.address = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line, f"it ended with {self._process.wait(10)}"
        self.address = line.split()[1]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def groups(config: dict[str, Any], folder: Path, *group_ids: str) -> Iterator[list[Process]]:
    """Started side by side; ended with the context."""
    started = [Process("workers.leader", config, folder, "--group-id", group_id) for group_id in group_ids]
    try:
        for process in started:
            process.wait_ready()
        yield started
    finally:
        for process in started:
            process.kill()


@contextmanager
def router(config: dict[str, Any], folder: Path) -> Iterator[Process]:
    """Ended with the context."""
    process = Process("router.server", config, folder)
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()
