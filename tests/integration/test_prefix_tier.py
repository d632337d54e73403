"""Groups that share prefixes through a real Redis: what one computed, another fetches, and only what is its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from cluster.config import ClusterConfig, parse
from cluster.pb import common_pb2
from cluster.tiers.chunks import HEADER_BYTES
from tests.support.models import tiny_llama
from tests.support.redis import RedisServer, running_redis
from tests.support.stub_router import StubRouter
from workers.leader import Leader, open_ranks, start_leader
from workers.rank import spawned

TOKEN = "worker-token"
CHUNK = 32
PROMPT = [(37 * i + i * i) % 900 for i in range(200)]
FULL = 192  # of those, in whole chunks that can be used

_numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")).path)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def cluster() -> str:
    """The prefix of this test's keys."""
    return f"tier{next(_numbers)}"


def configured(path: str, redis: str | None, cluster: str, *, tp: int = 1, **settings: Any) -> ClusterConfig:
    engine = {"max_context_tokens": 2048, "kv_memory_bytes": 16 << 20, "threads": 1, "device": "cpu"}
    return parse(
        {
            "model": path,
            "model_name": "tiny",
            "worker_token": TOKEN,
            "cluster": cluster,
            "tp": tp,
            "engine": {**engine, **settings.pop("engine", {})},
            "worker": {"heartbeat_ms": 50},
            "prefix": {"redis": redis, "chunk_tokens": CHUNK, "probe_ms": 100, **settings},
        }
    )


@asynccontextmanager
async def group(config: ClusterConfig, name: str = "g") -> AsyncIterator[StubRouter]:
    """A leader with its ranks, and a router that is connected to it."""
    async with AsyncExitStack() as stack:
        listener = open_ranks(config)
        if listener is not None:
            stack.enter_context(spawned(config, listener.address))
        leader: Leader = await start_leader(config, name, listener)
        stack.push_async_callback(leader.stop)
        yield await stack.enter_async_context(StubRouter(leader.address, TOKEN))


async def ask(router: StubRouter, name: str, prompt: list[int] = PROMPT, **settings: Any) -> common_pb2.CachedTokens:
    """Run to the end; returns where its prompt came from."""
    await router.submit(name, prompt=prompt, **{"max_tokens": 8, "ignore_eos": True, **settings})
    end = await router.finish(name)
    assert end.HasField("finished"), end
    return end.finished.usage.cached_tokens


async def stored(router: StubRouter, chunks: int) -> None:
    await router.wait(lambda: router.load.tier.stored_chunks >= chunks, f"{chunks} chunks are stored")


async def test_what_one_group_computed_another_fetches(model: str, redis_server: RedisServer, cluster: str) -> None:
    config = configured(model, redis_server.url, cluster)
    async with group(config) as first:
        assert (await ask(first, "a")).redis == 0
        await stored(first, 6)
        expected = first.tokens("a")
        prefix = first.deltas["a", 1][0].admitted.prefix
        assert prefix.decision == "nothing_stored"
    async with group(config, "other") as second:
        cached = await ask(second, "b")
        assert (cached.redis, cached.group) == (FULL, 0)
        assert second.tokens("b") == expected
        prefix = second.deltas["b", 1][0].admitted.prefix
        assert (prefix.decision, prefix.stored_tokens, prefix.fetched_tokens) == ("fetch", FULL, FULL)
        again = await ask(second, "c")
        assert (again.redis, again.group) == (0, FULL)
        load = second.load
        assert load.tier_prompt_tokens == FULL
        assert load.tier.fetched_chunks == FULL // CHUNK
        assert load.tier.reads == load.tier.writes == "closed"
        assert load.tier.fetch_bytes_per_s > 0


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_groups_of_any_size_share(
    model: str, redis_server: RedisServer, cluster: str, before: int, after: int
) -> None:
    """The ranks disagree about the length of a hit and hang in a collective: they do not, and they need not agree."""
    async with group(configured(model, redis_server.url, cluster, tp=before)) as first:
        await ask(first, "a")
        await stored(first, 6)
        expected = first.tokens("a")
    async with group(configured(model, redis_server.url, cluster, tp=after)) as second:
        assert (await ask(second, "b")).redis == FULL
        assert second.tokens("b") == expected
        await second.wait(lambda: second.load.in_transfer_blocks == 0, "no page is in transfer")
        assert second.load.pool_consistent


async def test_roots_that_differ_share_nothing(model: str, redis_server: RedisServer, cluster: str) -> None:
    """Two tenants with the same prompt: no key of one is read, waited for or counted for the other."""
    config = configured(model, redis_server.url, cluster)
    async with group(config) as router:
        await ask(router, "mine", root=b"m" * 32, tenant="me")
        await stored(router, 6)
        with redis_server.client() as client:
            mine = set(client.scan_iter(f"{cluster}:kv:*"))
            with client.monitor() as heard:
                assert (await ask(router, "yours", root=b"y" * 32, tenant="you")).redis == 0
                await stored(router, 12)
                client2 = redis_server.client()
                client2.echo("the end")
                client2.close()
                named = set()
                for command in heard.listen():
                    if "the end" in command["command"]:
                        break
                    named |= {word for word in command["command"].split() if f"{cluster}:kv:" in word}
        assert named
        assert not {key.decode() for key in mine} & named
        assert router.tokens("mine") == router.tokens("yours")
        async with group(config, "other") as other:
            assert (await ask(other, "shared", root=b"m" * 32, tenant="third")).redis == FULL


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"dtype": "bfloat16"}},
        {"engine": {"weights": "int8"}},
        {"engine": {"block_tokens": 32}},
        {"chunk_tokens": 64},
        {"dtype": "int8"},
    ],
)
async def test_whatever_changes_the_numbers_changes_the_namespace(
    model: str, redis_server: RedisServer, cluster: str, change: dict[str, Any]
) -> None:
    """Model, weights, dtype or adapter missing from the key: another model's KV is loaded."""
    async with (
        group(configured(model, None, cluster)) as plain,
        group(configured(model, None, cluster, **change)) as other,
    ):
        assert plain.hello.namespace != other.hello.namespace


async def test_other_weights_under_the_same_name_are_another_namespace(
    model: str, cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Stale KV after a weight update."""
    updated = str(tiny_llama(tmp_path_factory.mktemp("updated"), seed=1).path)
    async with group(configured(model, None, cluster)) as old, group(configured(updated, None, cluster)) as new:
        assert old.hello.model == new.hello.model
        assert old.hello.namespace != new.hello.namespace


async def test_even_under_one_root_another_namespaces_chunk_is_not_taken(
    model: str, redis_server: RedisServer, cluster: str
) -> None:
    async with group(configured(model, redis_server.url, cluster)) as plain:
        await ask(plain, "a")
        await stored(plain, 6)
    async with group(configured(model, redis_server.url, cluster, engine={"attention": "reference"})) as same:
        assert (await ask(same, "b")).redis == FULL, "kernels differ in rounding only"
    async with group(configured(model, redis_server.url, cluster, engine={"weights": "int8"})) as other:
        assert (await ask(other, "c")).redis == 0
        assert other.load.tier.corrupt_chunks == 1


async def test_a_damaged_value_is_computed_again_and_stored_right(
    model: str, redis_server: RedisServer, cluster: str
) -> None:
    config = configured(model, redis_server.url, cluster)
    async with group(config) as first:
        await ask(first, "a")
        await stored(first, 6)
        expected = first.tokens("a")
    with redis_server.client() as client:
        for key in client.scan_iter(f"{cluster}:kv:*"):
            if not key.endswith(b":claim"):
                client.setrange(key, HEADER_BYTES + 100, b"damage")
    async with group(config, "other") as second:
        assert (await ask(second, "b")).redis == 0
        assert second.tokens("b") == expected
        assert second.load.tier.corrupt_chunks == 1
        await stored(second, 1)


async def test_redis_away_at_the_start_is_a_warning_and_it_is_used_when_it_comes(model: str, cluster: str) -> None:
    with running_redis() as server:
        server.kill()
        async with group(configured(model, server.url, cluster)) as router:
            assert (await ask(router, "a")).redis == 0
            await router.wait(lambda: router.load.tier.reads == "open", "reads are left alone")
            assert not router.deltas["a", 1][0].admitted.prefix.stored_tokens
            server.start()
            await router.wait(lambda: router.load.tier.reads == router.load.tier.writes == "closed", "they are back")
            await ask(router, "b", prompt=PROMPT[::-1])
            await stored(router, 6)


async def test_a_prompt_that_is_computed_in_no_time_claims_nothing(
    model: str, redis_server: RedisServer, cluster: str
) -> None:
    async with group(configured(model, redis_server.url, cluster)) as router:
        await ask(router, "measures", prompt=PROMPT[::-1])
        await ask(router, "computes")
        await stored(router, 12)
        with redis_server.client() as client:
            assert not list(client.scan_iter(f"{cluster}:kv:*:claim"))


async def test_without_a_tier_nothing_of_it_is_there(model: str, redis_server: RedisServer, cluster: str) -> None:
    for config in (
        configured(model, None, cluster),
        configured(model, redis_server.url, cluster, enabled=False),
        configured(model, redis_server.url, cluster, engine={"prefix_cache": False}),
    ):
        async with group(config) as router:
            await ask(router, "a")
            assert not router.load.HasField("tier")
            assert not router.deltas["a", 1][0].admitted.HasField("prefix")
    with redis_server.client() as client:
        assert not list(client.scan_iter(f"{cluster}:kv:*"))
