"""Connections to the KV Redis: one server, a Sentinel's master, or a cluster. Nothing is tried twice in secret."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import ConnectionPool, PythonRespSerializer, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from cluster.errors import ConfigError

READ_BYTES = 1 << 20
"""Taken from a socket at once: values are megabytes, and redis-py's own 32 KiB would mean dozens of calls for each."""

_LONG_ARGUMENT = 6000
_SENTINEL, _CLUSTER = "redis+sentinel", "redis+cluster"
_PLAIN = ("redis", "rediss", "unix")


def connect(url: str, timeout_s: float) -> Redis:
    """A client whose every call ends within about ``timeout_s`` seconds, or raises. It connects when first used.

    redis://[user:password@]host:port/db, rediss://…?ssl_ca_certs=FILE, unix:///path,
    redis+sentinel://[user:password@]host:port,host:port/service, redis+cluster://[user:password@]host:port,host:port.
    Raises ConfigError for any other.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),  # redis-py's default tries again for seconds
        "socket_read_size": READ_BYTES,
        "decode_responses": False,
    }
    scheme = urlsplit(url).scheme
    try:
        if scheme in _PLAIN:
            # hiredis copies long arguments twice on their way out; this packer sends them from where they are.
            pool = ConnectionPool.from_url(url, command_packer=_Packer(), **options)
            return Redis.from_pool(pool)
        if scheme == _SENTINEL:
            return _by_sentinel(url, options)
        if scheme == _CLUSTER:
            return _cluster(url, options)
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigError(f"prefix.redis: {str(error).splitlines()[0]}", field="prefix.redis") from error
    raise ConfigError(
        f"prefix.redis: must begin with {', '.join(_PLAIN)}, {_SENTINEL} or {_CLUSTER} and ://; got {scheme!r}",
        field="prefix.redis",
    )


class _Packer(PythonRespSerializer):
    """Of bytes, numbers and memoryviews."""

    def __init__(self) -> None:
        super().__init__(_LONG_ARGUMENT, _encode)


def _encode(value: bytes | memoryview | str | float) -> bytes | memoryview:
    if isinstance(value, bytes | memoryview):
        return value
    return value.encode() if isinstance(value, str) else str(value).encode()


def _by_sentinel(url: str, options: dict[str, Any]) -> Redis:
    hosts, credentials, path = _several(url)
    if not path:
        raise ValueError(f"the service's name is missing: {_SENTINEL}://host:port/SERVICE")
    service, _, db = path.partition("/")
    watch = {"socket_timeout": options["socket_timeout"], "socket_connect_timeout": options["socket_timeout"]}
    sentinel: Any = Sentinel(hosts, sentinel_kwargs=watch)  # type: ignore[no-untyped-call]
    found: Redis = sentinel.master_for(service, db=int(db or 0), **credentials, **options)
    return found


def _cluster(url: str, options: dict[str, Any]) -> Redis:
    hosts, credentials, _ = _several(url)
    nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
    # It asks a node for the slots at once: a cluster that is away at the start is an error of the start.
    found: Any = RedisCluster(startup_nodes=nodes, **credentials, **options)
    return found  # type: ignore[no-any-return]  # it has the calls of a Redis that are used here


def _several(url: str) -> tuple[list[tuple[str, int]], dict[str, Any], str]:
    """Hosts, credentials, path. The first host stands for all in what redis-py parses."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    names = hosts.split(",")
    first = urlunsplit(("redis", f"{login}{at}{names[0]}", "", parts.query, ""))
    options: dict[str, Any] = dict(parse_url(first))  # type: ignore[no-untyped-call]
    parsed = {name: value for name, value in options.items() if name not in ("host", "port", "db")}
    addresses = [urlsplit(f"redis://{name}") for name in names]
    return [(one.hostname or "127.0.0.1", one.port or 6379) for one in addresses], parsed, parts.path.strip("/")
