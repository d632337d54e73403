"""Connections to the KV Redis: one server, a Sentinel's master, or a cluster. Nothing is tried twice in secret, and no
call takes longer than it may, however slowly its answer drips in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import (
    Connection,
    ConnectionPool,
    PythonRespSerializer,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from cluster.errors import ConfigError

READ_BYTES = 1 << 20
"""Taken from a socket at once: values are megabytes, and redis-py's own 32 KiB would mean dozens of calls for each."""

_LONG_ARGUMENT = 6000
_SENTINEL, _CLUSTER = "redis+sentinel", "redis+cluster"
_PLAIN = ("redis", "rediss", "unix")
_TLS_OPTIONS = frozenset(
    f"ssl_{name}" for name in ("ca_certs", "ca_path", "certfile", "keyfile", "password", "cert_reqs", "check_hostname")
)
# Nothing that could undo what is promised here, such as timeouts and retries.
_OPTIONS = _TLS_OPTIONS | {"ssl", "db", "username", "password", "sentinel_username", "sentinel_password"}


def connect(url: str, timeout_s: float) -> Redis:
    """A client that connects when first used. Inside of ``limited`` each call ends, or raises, within ``timeout_s``.

    redis://[user:password@]host:port/db, rediss://…?ssl_ca_certs=FILE, unix:///path?db=0,
    redis+sentinel://[user:password@]host:port,host:port/service[/db], redis+cluster://[user:password@]host:port,host:port;
    with the last two ?ssl=true for TLS, and ?sentinel_password=… where Sentinels have one.
    Raises ConfigError for any other.
    """
    scheme = urlsplit(url).scheme if "://" in url else ""
    try:
        options = _checked_options(url)
        kind = {_SENTINEL: _by_sentinel, _CLUSTER: _cluster}.get(scheme, _single if scheme in _PLAIN else None)
        if kind is not None:
            return kind(url, options, timeout_s)
    except (ValueError, TypeError, RedisError) as error:
        why = str(error).splitlines()[0] if isinstance(error, _Wrong) else "not the URL of a Redis (%-encode passwords)"
        raise ConfigError(f"prefix.redis: {why}", field="prefix.redis") from error
    raise ConfigError(
        f"prefix.redis: must begin with {', '.join(_PLAIN)}, {_SENTINEL} or {_CLUSTER} and ://; got {scheme!r}",
        field="prefix.redis",
    )


@contextmanager
def limited(seconds: float = float("inf")) -> Iterator[None]:
    """One call: what this thread asks of a client in here ends within the client's timeout, and within ``seconds``,
    all in all. A socket's own timeout starts anew with each piece of a reply."""
    _call.begun = time.monotonic()
    _call.until = _call.begun + seconds
    try:
        yield
    finally:
        _call.begun = _call.until = float("inf")


class _Call(threading.local):
    begun = until = float("inf")


_call = _Call()


class _LimitedSocket:
    """A socket whose every wait ends where the call must. What is left of the reply then goes with the connection."""

    def __init__(self, socket: Any, timeout_s: float | None) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def recv_into(self, *buffer: Any) -> int:
        self._limit()
        count: int = self._socket.recv_into(*buffer)
        return count

    def recv(self, *size: Any) -> bytes:
        self._limit()
        data: bytes = self._socket.recv(*size)
        return data

    def sendall(self, data: Any) -> None:
        self._limit()
        self._socket.sendall(data)

    def _limit(self) -> None:
        timeout_s = float("inf") if self._timeout_s is None else self._timeout_s
        left = min(timeout_s, min(_call.begun + timeout_s, _call.until) - time.monotonic())
        if left <= 0:
            raise TimeoutError("the call took too long")
        self._socket.settimeout(None if left == float("inf") else left)


if TYPE_CHECKING:
    _Base = Connection
else:
    _Base = object


class _Limited(_Base):
    """What our connections of every kind have in common."""

    def __init__(self, **options: Any) -> None:
        # hiredis copies long arguments twice on their way out; this packer sends them from where they are.
        super().__init__(command_packer=_Packer(), **options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        return _LimitedSocket(super()._connect(), self.socket_timeout)  # type: ignore[no-untyped-call]


class _Tcp(_Limited, Connection): ...


class _Tls(_Limited, SSLConnection): ...


class _Unix(_Limited, UnixDomainSocketConnection): ...


class _Watched(_Limited, SentinelManagedConnection): ...


class _WatchedTls(_Limited, SentinelManagedSSLConnection): ...


class _Packer(PythonRespSerializer):
    """Of bytes, numbers and memoryviews."""

    def __init__(self) -> None:
        super().__init__(_LONG_ARGUMENT, _encode)


def _encode(value: bytes | memoryview | str | float) -> bytes | memoryview:
    if isinstance(value, bytes | memoryview):
        return value
    return value.encode() if isinstance(value, str) else str(value).encode()


# -- kinds -----------------------------------------------------------------------------------------------------------


def _common(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),  # redis-py's default tries again for seconds
        "socket_read_size": READ_BYTES,
        "decode_responses": False,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),  # a notice would lengthen timeouts
    }


def _single(url: str, options: dict[str, Any], timeout_s: float) -> Redis:
    parts = urlsplit(url)
    kind = {"redis": _Tcp, "rediss": _Tls, "unix": _Unix}[parts.scheme]
    if options.pop("ssl", "") and kind is not _Tls:
        raise _Wrong("ssl: say rediss:// for TLS")
    if kind is not _Unix and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise _Wrong("the database must be a number: host:port/0")  # redis-py would take the first one without a word
    plain = f"{url.partition('?')[0]}?{urlencode(options)}"
    parsed: dict[str, Any] = dict(parse_url(plain))  # type: ignore[no-untyped-call]
    parsed["connection_class"] = kind
    return Redis.from_pool(ConnectionPool(**{**_common(timeout_s), **parsed}))


def _by_sentinel(url: str, options: dict[str, Any], timeout_s: float) -> Redis:
    hosts, credentials, path = _several(url)
    if not path:
        raise _Wrong(f"the service's name is missing: {_SENTINEL}://host:port/SERVICE")
    service, _, db = path.partition("/")
    tls = {"ssl": True, **_tls(options)} if _uses_tls(options) else {}
    own = {name.removeprefix("sentinel_"): value for name, value in options.items() if name.startswith("sentinel_")}
    common = _common(timeout_s)
    watch = {name: common[name] for name in ("socket_timeout", "socket_connect_timeout", "retry")}
    sentinel: Any = Sentinel(hosts, sentinel_kwargs={**watch, **own, **tls})  # type: ignore[no-untyped-call]
    kind = _WatchedTls if tls else _Watched
    return sentinel.master_for(  # type: ignore[no-any-return]
        service, db=int(db or options.get("db", 0)), connection_class=kind, **credentials, **_tls(options), **common
    )


def _cluster(url: str, options: dict[str, Any], timeout_s: float) -> Redis:
    hosts, credentials, path = _several(url)
    if path not in ("", "0"):
        raise _Wrong("a cluster has no databases")
    kind = _Tls if _uses_tls(options) else _Tcp
    found: Any = _LateCluster(hosts, {**_common(timeout_s), **credentials, **_tls(options), "connection_class": kind})
    return found  # type: ignore[no-any-return]  # it has the calls of a Redis that are used here


class _LateCluster:
    """A cluster, asked for its slots when first used: one that is away must not keep a group from starting."""

    def __init__(self, hosts: list[tuple[str, int]], options: dict[str, Any]) -> None:
        self._hosts = hosts
        self._options = options
        self._lock = threading.Lock()
        self._client: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _found(self) -> Any:
        with self._lock:
            if self._client is None:
                nodes = [ClusterNode(host, port) for host, port in self._hosts[1:]]  # type: ignore[no-untyped-call]
                host, port = self._hosts[0]
                # Only by a URL does it take a class of connections.
                first = f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}"
                self._client = RedisCluster(url=first, startup_nodes=nodes, **self._options)
            return self._client


# -- URLs ------------------------------------------------------------------------------------------------------------


class _Wrong(ValueError):
    """Says what is wrong in words that may be shown: redis-py's own may hold a password."""


def _checked_options(url: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise _Wrong(f"unknown option {unknown[0]!r}; possible are {', '.join(sorted(_OPTIONS))}")
    return options


def _uses_tls(options: dict[str, Any]) -> bool:
    return str(options.get("ssl", "")).lower() in ("1", "true", "yes", "on")


def _tls(options: dict[str, Any]) -> dict[str, Any]:
    if not _uses_tls(options):
        return {}
    found = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
    if "ssl_check_hostname" in found:
        found["ssl_check_hostname"] = found["ssl_check_hostname"].lower() in ("1", "true", "yes", "on")
    return found


def _several(url: str) -> tuple[list[tuple[str, int]], dict[str, Any], str]:
    """Hosts, credentials, path."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    credentials = {"username": unquote(user), "password": unquote(password)}
    addresses = [urlsplit(f"redis://{name}") for name in hosts.split(",")]
    found = [(one.hostname, one.port or 6379) for one in addresses]
    if not all(host for host, _ in found):
        raise _Wrong("a host is missing: host:port,host:port")
    named = [(host, port) for host, port in found if host]
    return named, {name: value for name, value in credentials.items() if value}, parts.path.strip("/")
