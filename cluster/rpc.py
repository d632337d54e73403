"""gRPC settings that both ends of a link must agree on, and binding a port so that a taken one is noticed."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from cluster.errors import ConfigError, PortInUse

if TYPE_CHECKING:
    import grpc.aio

WORKER_PROTOCOL_VERSION = 1

MAX_WORKER_MESSAGE_BYTES = 64 << 20
"""gRPC's default of 4 MiB would refuse long prompts with log-probabilities; a bound keeps a broken peer in check."""

KEEPALIVE_MS = 10_000

# A half-dead peer (frozen, unplugged) answers no ping; both sides find out within two periods. A long prefill is no
# data for a long time, and gRPC takes pings without data for abuse (GOAWAY too_many_pings) unless both sides allow it.
# ping_timeout_ms is what really ends the connection (measured: with its default of 60 s a frozen peer lives for 60 s,
# whatever keepalive_timeout_ms says).
WORKER_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_WORKER_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_WORKER_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Two routers of one process (tests, demo) must not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
]
"""For a router's channel to a group."""

WORKER_SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_WORKER_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_WORKER_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # gRPC's default lets a second server bind the same port without a word.
    ("grpc.so_reuseport", 0),
]
"""For a group's server."""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a token."""
    return (("authorization", f"Bearer {token}"),)


def join_host_port(host: str, port: int) -> str:
    """ "host:port", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """What ``join_host_port`` joined. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Add an insecure port to a server made with ``grpc.so_reuseport`` = 0; 0 picks a free one. Returns the port.

    Raises PortInUse, or ConfigError where the address is not this host's.
    """
    try:
        bound = server.add_insecure_port(join_host_port(host, port))
    except RuntimeError as error:
        raise _why_not(host, port, str(error)) from error
    if bound == 0:
        raise _why_not(host, port, "it cannot be bound")
    return bound


def _why_not(host: str, port: int, message: str) -> PortInUse | ConfigError:
    """gRPC says only that it failed; a plain socket says why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return ConfigError(
                f"cannot listen on {join_host_port(host, port)}: {error.strerror or error}", field="host"
            )
    return PortInUse(f"port {port} on {host} is in use: {message}", field="port", value=port)
