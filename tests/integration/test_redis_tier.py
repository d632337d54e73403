"""RedisTier on every kind of Redis, and against one that is slow, late, refusing, or gone."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.blocks import BlockHash
from cluster.errors import ConfigError
from cluster.tiers import redis as tiers_redis
from cluster.tiers.chunks import HEADER_BYTES, ChunkShape, chunk_key, claim_key
from cluster.tiers.connection import connect
from cluster.tiers.redis import RedisTier, TierError
from tests.support.proxy import SlowProxy, slow_proxy
from tests.support.redis import RedisServer, Sentinel, running_cluster, running_redis, running_sentinel

SHAPE = ChunkShape(bytes(32), tokens=16, layers=4, kv_heads=3, head_dim=64, dtype="float32")
NAMES = [BlockHash(bytes([i]) * 32) for i in range(1, 9)]
TIMEOUT_S = 0.5
WHOLE = SHAPE.span(range(3))


def value(seed: int) -> bytes:
    """Of the right length, and like no other."""
    return bytes([seed]) * SHAPE.value_bytes


def tier(url: str, timeout_s: float = TIMEOUT_S) -> RedisTier:
    return RedisTier(connect(url, timeout_s), "test", SHAPE)


def fails(call: Callable[[], object]) -> str:
    """The problem that a call ends with."""
    with pytest.raises(TierError) as caught:
        call()
    return caught.value.problem


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[SlowProxy]:
    with slow_proxy(server.port) as running:
        yield running


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A self-signed one for 127.0.0.1, and a server's context with it."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kv")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / "cert.pem", folder / "key.pem"
    public.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return public, context


# -- kinds -----------------------------------------------------------------------------------------------------------

KINDS = ("redis", "unix", "rediss", "user", "sentinel", "cluster")


@pytest.fixture(params=KINDS)
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A Redis of each kind that we say we can use."""
    kind: str = request.param
    with ExitStack() as stack:
        if kind == "sentinel":
            sentinel, _, _ = stack.enter_context(running_sentinel())
            yield f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/{Sentinel.SERVICE}"
        elif kind == "cluster":
            nodes = stack.enter_context(running_cluster())
            yield "redis+cluster://127.0.0.1:1," + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        elif kind == "unix":
            stack.enter_context(running_redis("--unixsocket", str(tmp_path / "s")))
            yield f"unix://{tmp_path}/s?db=1"
        else:
            server = stack.enter_context(running_redis())
            if kind == "rediss":
                public, context = certificate(tmp_path)
                proxy = stack.enter_context(slow_proxy(server.port, context))
                yield f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={public}"
            elif kind == "user":
                with server.client() as client:
                    client.execute_command(
                        "ACL SETUSER kv on >p%:/@ss ~test:kv:* +@read +@write +@transaction +@connection"
                    )
                yield f"redis://kv:p%25%3A%2F%40ss@127.0.0.1:{server.port}/0"
            else:
                yield server.url


def test_each_kind_of_redis_does_all_that_is_asked(any_url: str) -> None:
    found = tier(any_url, 2.0)
    assert found.stored(NAMES) == tiers_redis.Presence(0, None)
    for seed, name in enumerate(NAMES[:3]):
        found.write(name, memoryview(value(seed)), 100)
    suffix, parts = b":t", (SHAPE.span(range(1)), SHAPE.span(range(1, 3)))
    fourth = memoryview(value(3))
    found.write_part(NAMES[3], suffix, 0, fourth[: parts[0].stop])
    assert found.stored(NAMES[3:4]).stored == 0
    found.write_part(NAMES[3], suffix, parts[1].start, fourth[parts[1].start :])
    assert found.stored(NAMES).stored == 3, "it shows before it is published"
    found.publish(NAMES[3], suffix, 100)
    assert found.stored(NAMES).stored == 4
    for heads in (range(3), range(2), range(1, 3)):
        for seed, parts_read in enumerate(found.read(NAMES[:4], SHAPE.span(heads))):
            assert parts_read is not None
            head, body = parts_read
            assert head == value(seed)[:HEADER_BYTES]
            assert body == value(seed)[: len(SHAPE.span(heads))]
    assert found.read(NAMES[3:5], WHOLE)[1] is None
    found.touch(NAMES[:5], [50] * 5)
    found.claim(NAMES[4:6], 60_000)
    claimed = found.stored(NAMES).claimed_s
    assert claimed is not None
    assert 50 < claimed <= 60
    found.delete(NAMES[1:2])
    assert found.stored(NAMES).stored == 1
    probe = found.probe()
    assert probe.writable
    assert probe.bytes == 1 << 20
    assert 0 < probe.round_trip_s < 1
    assert probe.seconds > 0
    found.close()


def test_a_certificate_of_somebody_else_is_no_connection(server: RedisServer, tmp_path: Path) -> None:
    _, context = certificate(tmp_path)
    with slow_proxy(server.port, context) as proxy:
        assert fails(lambda: tier(f"rediss://127.0.0.1:{proxy.port}/0").stored(NAMES)) == "connection"


def test_after_a_failover_the_new_primary_is_found() -> None:
    with running_sentinel() as (sentinel, primary, replica):
        found = tier(f"redis+sentinel://127.0.0.1:{sentinel.port}/{Sentinel.SERVICE}")
        found.write(NAMES[0], memoryview(value(0)), 100)
        primary.kill()
        assert fails(lambda: found.stored(NAMES)) == "connection"
        end = time.monotonic() + 20
        while True:
            begun = time.monotonic()
            try:
                found.write(NAMES[1], memoryview(value(1)), 100)
                break
            except TierError:
                assert time.monotonic() < end, "the new primary is not found"
                assert time.monotonic() - begun < 4 * TIMEOUT_S, "it is tried again in secret"
                time.sleep(0.1)
        with replica.client() as client:
            assert client.get(chunk_key("test", NAMES[1])) == value(1)
        found.close()


def test_a_cluster_may_come_after_the_group(server: RedisServer) -> None:
    """Redis absent at the start is no error of the start; nor is one that is no cluster yet."""
    found = tier(f"redis+cluster://127.0.0.1:{server.port}")
    assert fails(lambda: found.stored(NAMES)) == "connection"
    with running_cluster() as nodes:
        later = tier(f"redis+cluster://127.0.0.1:{nodes[0].port}")
        later.write(NAMES[0], memoryview(value(0)), 100)
        nodes[1].kill()
        begun = time.monotonic()
        problems = {fails(lambda: later.stored(NAMES * 20)) for _ in range(3)}
        assert problems <= {"connection", "timeout"}
        assert time.monotonic() - begun < 6 * TIMEOUT_S
        later.close()
    found.close()


# -- slow, late, gone ------------------------------------------------------------------------------------------------


def test_a_reply_that_drips_in_is_given_up_in_time(proxy: SlowProxy) -> None:
    """Each piece comes before a socket's timeout, the whole would take for ever."""
    found = tier(proxy.url)
    found.write(NAMES[0], memoryview(value(0)), 100)
    proxy.bytes_per_s = 100e3
    begun = time.monotonic()
    assert fails(lambda: found.read(NAMES[:1], WHOLE)) == "timeout"
    assert TIMEOUT_S * 0.9 < time.monotonic() - begun < 3 * TIMEOUT_S
    begun = time.monotonic()
    assert fails(lambda: found.read(NAMES[:1], WHOLE, 0.1)) == "timeout"
    assert time.monotonic() - begun < TIMEOUT_S, "a caller that has less time waits less"
    assert fails(found.probe) == "timeout"
    proxy.bytes_per_s = float("inf")
    assert found.read(NAMES[:1], WHOLE)[0] is not None
    found.close()


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_a_late_reply_never_reaches_the_next_caller(kind: str) -> None:
    with ExitStack() as stack:
        if kind == "redis":
            server = stack.enter_context(running_redis())
            proxy = stack.enter_context(slow_proxy(server.port))
            url = proxy.url
        else:  # one node, which tells its clients the proxy's port
            proxies: list[SlowProxy] = []

            def announced(port: int) -> int:
                proxies.append(stack.enter_context(slow_proxy(port)))
                return proxies[-1].port

            stack.enter_context(running_cluster(1, announced))
            (proxy,) = proxies
            url = f"redis+cluster://127.0.0.1:{proxy.port}"
        found = tier(url)
        for seed, name in enumerate(NAMES[:2]):
            found.write(name, memoryview(value(seed)), 100)
        for _ in range(5):
            proxy.delay_s = 1.5 * TIMEOUT_S
            begun = time.monotonic()
            # A cluster's client asks for the slots again after a timeout, in what is left of the call: in vain.
            assert fails(lambda: found.read(NAMES[:1], WHOLE)) in ("timeout", "connection")
            assert time.monotonic() - begun < 2 * TIMEOUT_S
            proxy.delay_s = 0.0
            for _ in range(3):
                (second,) = found.read(NAMES[1:2], WHOLE)
                assert second is not None
                assert second[1] == value(1)[HEADER_BYTES:]
                assert found.stored(NAMES).stored == 2
        found.close()


def test_a_late_reply_of_a_primary_behind_a_sentinel_reaches_nobody_either() -> None:
    """redis-py's connections of Sentinels stay open after an error, by themselves."""
    with running_sentinel() as (sentinel, primary, _):
        found = tier(f"redis+sentinel://127.0.0.1:{sentinel.port}/{Sentinel.SERVICE}", 0.3)
        for seed, name in enumerate(NAMES[:2]):
            found.write(name, memoryview(value(seed)), 100)
        primary.freeze()
        assert fails(lambda: found.read(NAMES[:1], WHOLE)) == "timeout"
        primary.thaw()
        (second,) = found.read(NAMES[1:2], WHOLE)
        assert second is not None
        assert second[1] == value(1)[HEADER_BYTES:]
        found.close()


def test_nothing_is_tried_twice(server: RedisServer) -> None:
    found = tier(server.url, 0.3)
    found.stored(NAMES)
    server.freeze()
    begun = time.monotonic()
    assert fails(lambda: found.stored(NAMES)) == "timeout"
    assert fails(lambda: found.write(NAMES[0], memoryview(value(0)), 9)) == "timeout"
    assert time.monotonic() - begun < 4 * 0.3
    server.thaw()
    server.kill()
    assert fails(lambda: found.stored(NAMES)) == "connection"
    server.start()
    assert found.stored(NAMES).stored == 0
    found.close()


# -- what is there ---------------------------------------------------------------------------------------------------


def test_what_is_no_chunk_is_deleted_and_counted(server: RedisServer) -> None:
    found = tier(server.url)
    for seed, name in enumerate(NAMES[:5]):
        found.write(name, memoryview(value(seed)), 100)
    with server.client() as client:
        client.set(chunk_key("test", NAMES[1]), value(1)[:-1])
        client.delete(chunk_key("test", NAMES[2]))
        client.lpush(chunk_key("test", NAMES[2]), "a list")
        client.set(chunk_key("test", NAMES[4]), value(4) + b"x")
        assert found.read(NAMES[2:3], WHOLE) == [(memoryview(b""), memoryview(b""))]
        assert found.stored(NAMES) == tiers_redis.Presence(1, None, corrupt=3)
        assert not client.exists(*(chunk_key("test", NAMES[i]) for i in (1, 2, 4)))
    assert found.stored(NAMES) == tiers_redis.Presence(1, None)
    found.close()


def test_a_missing_right_is_no_missing_chunk(server: RedisServer) -> None:
    """It would look like a cache that is always cold."""
    with server.client() as client:
        client.execute_command("ACL SETUSER nobody on >secret ~* +set +get +select +hello +auth +@connection")
    found = tier(f"redis://nobody:secret@127.0.0.1:{server.port}/0")
    assert fails(lambda: found.stored(NAMES)) == "error"
    assert fails(lambda: found.read(NAMES[:1], SHAPE.span(range(1, 2)))) == "error"
    assert fails(lambda: found.touch(NAMES[:1], [1])) == "error"
    assert fails(lambda: found.publish(NAMES[0], b":t", 1)) == "error"
    found.write(NAMES[0], memoryview(value(0)), 100)
    assert found.read(NAMES[:1], WHOLE)[0] is not None
    found.close()
    wrong = tier(f"redis://nobody:guess@127.0.0.1:{server.port}/0")
    assert fails(lambda: wrong.stored(NAMES)) == "connection"


def test_a_look_up_is_bounded_and_takes_one_round_trip(
    server: RedisServer, proxy: SlowProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_redis, "MAX_CHUNKS", 5)
    found = tier(proxy.url, 5.0)
    for name in NAMES:
        found.write(name, memoryview(value(0)), 100)
    assert found.stored(NAMES).stored == 5
    proxy.delay_s = 0.2
    begun = time.monotonic()
    assert found.stored(NAMES[:5]).stored == 5
    assert time.monotonic() - begun < 2 * 0.2, "more than one round trip"
    found.close()


# -- writing ---------------------------------------------------------------------------------------------------------


def test_what_one_rank_leaves_out_never_shows_and_goes_by_itself(server: RedisServer) -> None:
    """A marker visible before its payload: the second rank is killed in its write."""
    found = tier(server.url)
    part = SHAPE.span(range(1))
    found.write_part(NAMES[0], b":t", 0, memoryview(value(0))[: part.stop])
    assert found.stored(NAMES[:1]).stored == 0
    assert found.read(NAMES[:1], WHOLE) == [None]
    with server.client() as client:
        keys = client.keys()
        assert [0 < client.ttl(key) <= tiers_redis.TEMPORARY_S for key in keys] == [True]
        client.flushall()
    assert fails(lambda: found.publish(NAMES[0], b":t", 100)) == "error", "there is nothing to publish"
    assert found.stored(NAMES[:1]).stored == 0
    found.close()


def test_every_key_has_a_time_to_live_and_one_slot(server: RedisServer) -> None:
    found = tier(server.url)
    found.write(NAMES[0], memoryview(value(0)), 70)
    found.write_part(NAMES[1], b":t", 0, memoryview(value(1)))
    found.publish(NAMES[1], b":t", 80)
    found.claim(NAMES[2:3], 90_000)
    with server.client() as client:
        lives = {key: client.ttl(key) for key in client.scan_iter()}
    assert set(lives) == {chunk_key("test", NAMES[0]), chunk_key("test", NAMES[1]), claim_key("test", NAMES[2])}
    assert [round(life, -1) for _, life in sorted(lives.items())] == [70, 80, 90]
    found.touch(NAMES[:1], [40])
    with server.client() as client:
        assert client.ttl(chunk_key("test", NAMES[0])) <= 40
    found.close()


def test_a_replica_and_a_full_redis_refuse_writes_as_full(server: RedisServer) -> None:
    with running_redis("--replicaof", "127.0.0.1", str(server.port)) as replica:
        found = tier(replica.url)
        assert fails(lambda: found.write(NAMES[0], memoryview(value(0)), 9)) == "full"
        assert fails(lambda: found.write_part(NAMES[0], b":t", 0, memoryview(value(0)))) == "full"
        probe = found.probe()
        assert (probe.writable, probe.bytes) == (False, 0)
        assert probe.round_trip_s > 0
        found.close()
    with server.client() as client:
        client.config_set("maxmemory", "100kb")
    found = tier(server.url)
    assert fails(lambda: found.write_part(NAMES[0], b":t", 0, memoryview(value(0)))) == "full"
    assert fails(lambda: found.claim(NAMES[:1], 1000)) == "full"
    assert found.stored(NAMES).stored == 0
    found.close()


# -- URLs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/0?socket_timeout=60",
        "redis://h/0?retry_on_timeout=true",
        "redis://h/0?ssl=true",
        "redis+cluster://h:1/3",
        "redis+cluster://",
        "redis+sentinel://h:1",
        "redis+sentinel://h:1/service/x",
        "rediss://h/zero/1",
        "redis://user:geheim/x@h:1/0",
        "redis://user:geheim@h:geheim/0",
    ],
)
def test_a_url_that_would_undo_a_promise_is_refused_and_no_password_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^prefix\.redis: ") as caught:
        connect(url, 1.0)
    assert "geheim" not in str(caught.value)
