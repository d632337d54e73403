"""Redis killed, frozen, slowed, filled and emptied under random requests: the same tokens, nobody waits too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from cluster.config import parse
from tests.support.models import tiny_llama
from tests.support.proxy import SlowProxy, slow_proxy
from tests.support.redis import RedisServer, running_redis
from tests.support.stub_router import StubRouter
from workers.leader import start_leader

TOKEN, CHUNK, DEADLINE_MS = "worker-token", 32, 300
REQUESTS = 200
SLACK_MS = 200.0
"""A step of somebody else's may be under way when a deadline passes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Slow enough that a fetch is worth it."""
    return str(tiny_llama(tmp_path_factory.mktemp("tiny"), layers=4, hidden=256, heads=4).path)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru") as running:
        yield running


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[SlowProxy]:
    with slow_proxy(server.port) as running:
        yield running


@asynccontextmanager
async def group(model: str, redis: str | None, name: str) -> AsyncIterator[StubRouter]:
    """With hardly more pages than one request takes: what is not in Redis is computed again and again."""
    config = parse(
        {
            "model": model,
            "model_name": "tiny",
            "worker_token": TOKEN,
            "cluster": "faults",
            "engine": {"device": "cpu", "threads": 1, "max_context_tokens": 512, "kv_memory_bytes": 24 * 64 << 10},
            "worker": {"heartbeat_ms": 50},
            "prefix": {"redis": redis, "chunk_tokens": CHUNK, "deadline_ms": DEADLINE_MS, "probe_ms": 100},
        }
    )
    leader = await start_leader(config, name)
    try:
        async with StubRouter(leader.address, TOKEN) as router:
            yield router
    finally:
        await leader.stop()


def workload(seed: int) -> list[dict[str, Any]]:
    """Prompts that share beginnings, greedy and seeded."""
    chance = random.Random(seed)
    stems = [[chance.randrange(900) for _ in range(length)] for length in (64, 96, 160, 224)]
    made = []
    for number in range(REQUESTS):
        prompt = chance.choice(stems)[: chance.choice([40, 100, 1000])] + [chance.randrange(900) for _ in range(20)]
        made.append(
            {
                "prompt": prompt,
                "max_tokens": chance.randint(1, 12),
                "temperature": chance.choice([0.0, 0.9]),
                "seed": number,
                "ignore_eos": True,
            }
        )
    return made


async def run(
    routers: list[StubRouter], asked: list[dict[str, Any]], between: Callable[[int], Awaitable[None]]
) -> None:
    """Four at a time, over the groups in turn; ``between`` is called before each four."""
    for begin in range(0, len(asked), 4):
        await between(begin)
        for number in range(begin, begin + 4):
            await routers[number % len(routers)].submit(f"r{number}", **asked[number])
        for number in range(begin, begin + 4):
            end = await routers[number % len(routers)].finish(f"r{number}")
            assert end.HasField("finished"), end


async def expected_tokens(model: str, asked: list[dict[str, Any]]) -> list[list[int]]:
    async with group(model, None, "alone") as router:

        async def nothing(_: int) -> None:
            """Redis is not there."""

        await run([router], asked, nothing)
        return [router.tokens(f"r{number}") for number in range(len(asked))]


async def test_whatever_redis_does_the_tokens_are_the_same(model: str, server: RedisServer, proxy: SlowProxy) -> None:
    """A frozen Redis hangs every request and the breaker never opens: it opens, and closes again."""
    asked = workload(5)
    expected = await expected_tokens(model, asked)
    opened: set[str] = set()

    async def trouble(begin: int) -> None:
        for router in routers:
            opened.update(what for what in ("reads", "writes") if getattr(router.load.tier, what) == "open")
        if begin == 40:
            server.kill()
        elif begin == 60:
            server.start()
        elif begin == 80:
            server.freeze()
        elif begin == 100:
            server.thaw()
        elif begin == 120:
            proxy.delay_s, proxy.bytes_per_s = 0.02, 2e5
        elif begin == 140:
            proxy.delay_s, proxy.bytes_per_s = 0.0, float("inf")
            with server.client() as client:
                client.config_set("maxmemory-policy", "noeviction")
                client.config_set("maxmemory", "100kb")
        elif begin == 168:
            with server.client() as client:
                client.flushall()
                client.config_set("maxmemory", "6mb")
        if begin in (60, 100, 168):
            await asyncio.gather(*(healed(router) for router in routers))

    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(group(model, proxy.url, name)) for name in ("one", "two")]
        await run(routers, asked, trouble)
        await asyncio.gather(*(healed(router) for router in routers))
        for number, tokens in enumerate(expected):
            assert routers[number % 2].tokens(f"r{number}") == tokens, number
        assert opened == {"reads", "writes"}
        fetched = sum(router.load.tier.fetched_tokens for router in routers)
        longest = max(router.load.tier.longest_wait_ms for router in routers)
        print(f"{fetched} tokens fetched, longest wait {longest:.0f} ms of {DEADLINE_MS} ms allowed")
        assert fetched > 200
        assert longest <= DEADLINE_MS + SLACK_MS
        for router in routers:
            await at_rest(router)


async def at_rest(router: StubRouter) -> None:
    await router.wait(
        lambda: router.load.in_transfer_blocks == router.load.used_blocks == 0 and router.load.pool_consistent,
        "no page is in use or in transfer",
    )


async def healed(router: StubRouter) -> None:
    await router.wait(lambda: router.load.tier.reads == router.load.tier.writes == "closed", "the breakers close")
