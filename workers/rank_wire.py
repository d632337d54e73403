"""What leader and ranks say to each other: frames over a socket, and how a rank proves that it may join.

A frame is a length, a kind, and a body: JSON for what is said once at the start, packed integers for what is said in
every step. Nothing is pickled. A rank proves that it knows the group's token without sending it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from cluster.errors import ProtocolError

RANK_PROTOCOL_VERSION = 1

_HEADER = struct.Struct("<IB")
_LONGEST = 64 << 20
_STEP = struct.Struct("<q")


class Kind(IntEnum):
    """Of a frame."""

    CHALLENGE = 1
    """Leader, first: bytes that the rank signs."""
    HELLO = 2
    """Rank: who it is."""
    WELCOME = 3
    """Leader, when all are there: how ranks exchange numbers."""
    READY = 4
    """Rank, when it has loaded its part: what it has room for."""
    START = 5
    """Leader: the number of pages, the least of all ranks'."""
    PLAN = 6
    """Leader: a step, as in workers/plan_wire.py."""
    DONE = 7
    """Rank: the step that it has computed; the start's own trial step is -1."""
    FAILED = 8
    """Rank: why it computes no more."""
    BEAT = 9
    """Rank, all the time: a number that grows while it gets on."""
    STOP = 10
    """Leader: the end."""
    FETCH = 11
    """Leader: read chunks from the tier, as in workers/tier_wire.py; at any time, beside the steps."""
    STORE = 12
    """Leader: copy pages out and write them, in the order of the plans."""
    TRANSFERRED = 13
    """Rank: what became of a FETCH or STORE."""


class Connection:
    """One socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Raises OSError."""
        with self._sending:
            self._socket.sendall(_HEADER.pack(len(body), kind) + body)

    def send_json(self, kind: Kind, fields: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self.send(kind, json.dumps(fields).encode())

    def send_number(self, kind: Kind, number: int) -> None:
        """Raises OSError."""
        self.send(kind, _STEP.pack(number))

    def receive(self, timeout_s: float | None) -> tuple[Kind, bytes]:
        """The next frame. Raises EOFError at the end, TimeoutError, OSError, ProtocolError."""
        self._socket.settimeout(timeout_s)
        length, kind = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > _LONGEST:
            raise ProtocolError(f"a frame of {length} bytes from a rank; no frame is longer than {_LONGEST}")
        try:
            return Kind(kind), self._exactly(length)
        except ValueError as error:
            raise ProtocolError(f"a frame of unknown kind {kind}") from error

    def expect(self, kind: Kind, timeout_s: float) -> bytes:
        """The body of the next frame, which must be of this kind; beats are passed over.

        Raises as ``receive``, and ProtocolError with what the other side says where it has failed.
        """
        while True:
            found, body = self.receive(timeout_s)
            if found == kind:
                return body
            if found == Kind.FAILED:
                raise ProtocolError(body.decode(errors="replace"))
            if found != Kind.BEAT:
                raise ProtocolError(f"{found.name} came where {kind.name} was expected")

    def expect_json(self, kind: Kind, timeout_s: float) -> dict[str, Any]:
        """As ``expect``."""
        try:
            fields = json.loads(self.expect(kind, timeout_s))
        except ValueError as error:
            raise ProtocolError(f"{kind.name} holds no JSON") from error
        if not isinstance(fields, dict):
            raise ProtocolError(f"{kind.name} holds no JSON object")
        return fields

    def close(self) -> None:
        """Also wakes who waits in ``receive``. Idempotent."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the connection was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def number_of(body: bytes) -> int:
    """What ``send_number`` packed. Raises ProtocolError."""
    if len(body) != _STEP.size:
        raise ProtocolError(f"a number of {len(body)} bytes")
    found: int = _STEP.unpack(body)[0]
    return found


def proof(token: str, challenge: bytes, rank: int) -> str:
    """That the sender knows the token."""
    return hmac.new(token.encode(), b"quire-rank\0%d\0" % rank + challenge, hashlib.sha256).hexdigest()


def host_identity() -> str:
    """Equal in two processes that can open each other's memory: same running system, same container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} without /proc"
