"""Membership with a real Redis that is killed, frozen and emptied under it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from cluster.errors import ConfigError, DependencyUnreachable
from cluster.membership import GroupRecord, Registry, Watcher, mask_url, ping
from tests.support.ports import free_port
from tests.support.redis import RedisServer, running_redis

LEASE_S = 1.0
WAIT_S = 30.0


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def record(group_id: str = "g0", incarnation: str = "i1") -> GroupRecord:
    return GroupRecord(
        group_id=group_id,
        incarnation=incarnation,
        model="m",
        namespace="0" * 64,
        address="127.0.0.1:1",
        tp=1,
        device="cpu",
        dtype="float32",
    )


@asynccontextmanager
async def watching(server: RedisServer) -> AsyncIterator[Watcher]:
    async with Watcher(server.url, "test", poll_s=0.05, timeout_s=0.3) as watcher:
        yield watcher


def registry(server: RedisServer) -> Registry:
    return Registry(server.url, "test", timeout_s=0.3)


async def sees(watcher: Watcher, *incarnations: str) -> bool:
    return await watcher.wait_for(
        lambda w: sorted(found.incarnation for found in w.groups().values()) == sorted(incarnations), WAIT_S
    )


async def test_announce_renew_and_withdraw(redis_server: RedisServer) -> None:
    async with watching(redis_server) as watcher, registry(redis_server) as one:
        assert watcher.live
        assert watcher.groups() == {}
        await one.announce(record(), LEASE_S)
        assert one.announced
        assert await sees(watcher, "i1")
        assert watcher.groups() == {"g0": record()}
        assert not await watcher.wait_for(lambda w: not w.groups(), 2.5 * LEASE_S), "it is renewed"
        await one.withdraw()
        await one.withdraw()
        assert await sees(watcher)


async def test_a_lease_that_is_not_renewed_runs_out_and_leaves_no_key(redis_server: RedisServer) -> None:
    async with watching(redis_server) as watcher:
        dead = registry(redis_server)
        await dead.announce(record(), LEASE_S)
        assert await sees(watcher, "i1")
        assert dead._task is not None
        dead._task.cancel()  # as kill -9 does
        assert await sees(watcher)
        await dead._connection.close()
        with redis_server.client() as client:
            assert client.keys("*") == []


async def test_a_new_incarnation_replaces_the_old_which_cannot_come_back(redis_server: RedisServer) -> None:
    changes: list[str] = []
    old, new = registry(redis_server), registry(redis_server)
    async with Watcher(redis_server.url, "test", poll_s=0.05, on_change=lambda: changes.append("change")) as watcher:
        await old.announce(record(incarnation="old"), LEASE_S)
        assert await sees(watcher, "old")
        before = len(changes)
        await new.announce(record(incarnation="new"), LEASE_S)
        assert await sees(watcher, "new")
        assert len(changes) > before
        assert not await watcher.wait_for(lambda w: w.groups()["g0"].incarnation == "old", 2 * LEASE_S)
        assert new.announced
        assert not old.announced
        await old.close()  # its own record is long gone: the new one stays
        assert not await watcher.wait_for(lambda w: "g0" not in w.groups(), 2 * LEASE_S)
        await new.close()
        assert await sees(watcher)


async def test_clusters_on_one_redis_do_not_see_each_other(redis_server: RedisServer) -> None:
    async with Registry(redis_server.url, "one") as one, Watcher(redis_server.url, "two", poll_s=0.05) as two:
        await one.announce(record(), LEASE_S)
        assert not await two.wait_for(lambda w: bool(w.groups()), 0.5)


async def test_membership_is_frozen_while_redis_is_dead_and_survives_that_it_comes_back_empty(
    redis_server: RedisServer,
) -> None:
    gone = asyncio.Event()
    async with watching(redis_server) as watcher, registry(redis_server) as alive:
        await alive.announce(record("alive", "a"), LEASE_S)
        dead = registry(redis_server)
        await dead.announce(record("dead", "d"), LEASE_S)
        assert await sees(watcher, "a", "d")
        watcher._on_change = lambda: gone.set() if "alive" not in watcher.groups() else None
        redis_server.kill()
        assert await watcher.wait_for(lambda w: not w.live, WAIT_S)
        assert dead._task is not None
        dead._task.cancel()
        await asyncio.sleep(2 * LEASE_S)  # both leases would have run out
        assert sorted(watcher.groups()) == ["alive", "dead"], "frozen"
        assert not alive.announced
        redis_server.start()
        assert await watcher.wait_for(lambda w: w.live, WAIT_S)
        assert await sees(watcher, "a"), "after one lease of grace only the living one is left"
        assert alive.announced
        assert not gone.is_set(), "the living one never left"
        await dead._connection.close()


async def test_a_restart_so_quick_that_no_look_failed_still_gets_its_grace(redis_server: RedisServer) -> None:
    async with Watcher(redis_server.url, "test", poll_s=1.0, timeout_s=0.3) as watcher, registry(redis_server) as one:
        gone = asyncio.Event()
        watcher._on_change = lambda: gone.set() if watcher.groups() == {} else None
        await one.announce(record(), 2.0)
        assert await sees(watcher, "i1")
        redis_server.kill()
        redis_server.start()
        assert not await watcher.wait_for(lambda w: not w.groups(), 3.0)
        assert not gone.is_set()


async def test_a_frozen_redis_blocks_nothing_and_is_seen(redis_server: RedisServer) -> None:
    async with watching(redis_server) as watcher, registry(redis_server) as one:
        await one.announce(record(), LEASE_S)
        assert await sees(watcher, "i1")
        redis_server.freeze()
        assert await watcher.wait_for(lambda w: not w.live, WAIT_S)
        assert await watcher.wait_for(lambda w: not one.announced or not w.live, WAIT_S)
        await asyncio.sleep(1.5 * LEASE_S)
        assert sorted(watcher.groups()) == ["g0"]
        redis_server.thaw()
        assert await watcher.wait_for(lambda w: w.live, WAIT_S)
        assert not await watcher.wait_for(lambda w: not w.groups(), 2 * LEASE_S)
        assert one.announced


async def test_redis_away_at_the_start_heals(redis_server: RedisServer) -> None:
    redis_server.kill()
    async with watching(redis_server) as watcher, registry(redis_server) as one:
        await one.announce(record(), LEASE_S)
        assert not watcher.live
        assert not one.announced
        redis_server.start()
        assert await sees(watcher, "i1")


async def test_closing_with_redis_frozen_ends_in_time(redis_server: RedisServer) -> None:
    one = registry(redis_server)
    await one.announce(record(), LEASE_S)
    redis_server.freeze()
    await asyncio.wait_for(one.close(), WAIT_S)
    redis_server.thaw()


async def test_a_redis_that_is_full_refuses_and_heals(redis_server: RedisServer) -> None:
    async with watching(redis_server) as watcher, registry(redis_server) as one:
        with redis_server.client() as client:
            client.config_set("maxmemory", 1)
            await one.announce(record(), LEASE_S)
            assert not one.announced
            client.config_set("maxmemory", 0)
        assert await sees(watcher, "i1")


async def test_records_that_cannot_be_read_are_skipped_and_newer_fields_ignored(redis_server: RedisServer) -> None:
    async with watching(redis_server) as watcher, registry(redis_server) as one:
        await one.announce(record(), 60)
        with redis_server.client() as client:
            value = client.get("{test}:groups:g0")
            assert isinstance(value, bytes)
            newer = value.replace(b'"g0"', b'"g1"').replace(b"{", b'{"colour": "blue", ', 1)
            wrong = value.replace(b'"i1"', b"5").replace(b'"g0"', b'"g2"')
            assert b"5" in wrong
            endless = value.replace(b'"g0"', b'"g3"').replace(b'"lease_s": 60', b'"lease_s": Infinity')
            records = {"g1": newer, "bad": b"{}", "worse": b"no json", "g2": wrong, "g3": endless, "list": b"[1]"}
            for name, text in records.items():
                client.set(f"{{test}}:groups:{name}", text)
                client.sadd("{test}:groups", name)
        assert await watcher.wait_for(lambda w: sorted(w.groups()) == ["g0", "g1"], WAIT_S)
        assert watcher.groups()["g1"] == dataclasses.replace(record(), group_id="g1")


async def test_ping_answers_or_says_why_without_the_password(redis_server: RedisServer) -> None:
    await ping(redis_server.url)
    with pytest.raises(DependencyUnreachable) as caught:
        await ping(f"redis://user:hunter2@127.0.0.1:{free_port()}/0", timeout_s=1.0)
    assert "hunter2" not in caught.value.message
    assert "127.0.0.1" in caught.value.message
    with redis_server.client() as client:
        client.config_set("requirepass", "another")
    with pytest.raises(DependencyUnreachable) as caught:
        await ping(f"redis://:hunter2@127.0.0.1:{redis_server.port}/0", timeout_s=1.0)
    assert "hunter2" not in caught.value.message
    redis_server.freeze()
    with pytest.raises(DependencyUnreachable):
        await ping(f"redis://:another@127.0.0.1:{redis_server.port}/0", timeout_s=0.2)
    redis_server.thaw()


@pytest.mark.parametrize("url", ["http://host", "", "redis://:pw@host:notaport/0"])
async def test_a_malformed_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await ping(url)
    assert "pw" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://me:s3:cr@et@host", "rediss://me:***@host"),
        ("redis://host/0?password=secret", "redis://host/0"),
    ],
)
def test_masked_urls(url: str, shown: str) -> None:
    assert mask_url(url) == shown
