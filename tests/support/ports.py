"""Ports for tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.lifecycle import free_port

__all__ = ["free_port", "occupied_port"]


@contextmanager
def occupied_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port on which something listens while the context lasts."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        yield int(listener.getsockname()[1])
