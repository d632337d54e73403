"""Quotas, accounting and cache domains of tenants, through a real router."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import InvalidRequest, NoGroup, QuotaExceeded
from router.auth import make_key
from router.client import AsyncClient, RetryPolicy
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import SEED, World, world
from tests.support.scripted_group import eventually

FOREVER = 1_000_000
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def here(redis_server: RedisServer) -> tuple[str, str]:
    """Redis, and a cluster name of the test's own."""
    return redis_server.url, f"q{next(_NAMES)}"


@asynccontextmanager
async def tenants_of(
    here: tuple[str, str], folder: Path, *names: str, **settings: Any
) -> AsyncIterator[tuple[World, list[AsyncClient]]]:
    """A router with keys, and a client for each tenant."""
    keys = [make_key(name) for name in names]
    file = folder / "keys"
    file.write_text("\n".join(line for _, line in keys) + "\n")
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(world(*here, api_keys_file=file, **settings))
        clients = [AsyncClient(running.address, key, retry=RetryPolicy(attempts=1)) for key, _ in keys]
        yield running, [await stack.enter_async_context(client) for client in clients]


async def generate(client: AsyncClient, prompt: Any, **options: Any) -> str:
    return await client.generate_text(prompt, **{"seed": SEED, "max_tokens": 20, "timeout_s": 60.0, **options})


async def test_each_tenant_sees_what_it_has_used_and_nothing_of_others(here: tuple[str, str], tmp_path: Path) -> None:
    async with tenants_of(here, tmp_path, "alice", "bob") as (_, [alice, bob]):
        await generate(alice, [1] * 40)
        await generate(alice, [1] * 10, n=2, max_tokens=5)
        used = (await alice.cluster()).usage
        assert (used.tenant, used.requests, used.prompt_tokens, used.output_tokens) == ("alice", 2, 50, 30)
        assert used.refusals == used.active_requests == used.cached_group_tokens == used.cached_redis_tokens == 0
        assert not used.HasField("tokens_left")
        seen = (await bob.cluster()).usage
        assert (seen.tenant, seen.requests, seen.prompt_tokens, seen.output_tokens) == ("bob", 0, 0, 0)
        assert "alice" not in str(await bob.cluster())


async def test_requests_in_flight_have_a_quota_of_their_own(here: tuple[str, str], tmp_path: Path) -> None:
    quotas = {"alice": {"max_active_requests": 1}}
    async with tenants_of(here, tmp_path, "alice", "bob", tenants=quotas) as (running, [alice, bob]):
        async with alice.generate("Hello", max_tokens=FOREVER, timeout_s=60.0) as stream:
            await anext(stream)
            assert (await alice.cluster()).usage.active_requests == 1
            with pytest.raises(QuotaExceeded) as caught:
                await generate(alice, "Me too")
            assert caught.value.metadata["quota"] == "max_active_requests"
            assert caught.value.retry_after_ms > 0
            await generate(bob, "Hello")
        assert (await alice.cluster()).usage.refusals == 1
        await eventually(lambda: not running.router.active_requests, "the held request has ended")
        await generate(alice, "Now")


async def test_tokens_have_a_quota_and_a_hint_when_there_are_some_again(here: tuple[str, str], tmp_path: Path) -> None:
    quotas = {"*": {"tokens_per_minute": 100}}
    async with tenants_of(here, tmp_path, "alice", "bob", tenants=quotas) as (running, [alice, bob]):
        await generate(alice, [1] * 80, max_tokens=60)
        left = (await alice.cluster()).usage.tokens_left
        assert -40 <= left <= -30
        before = len(running.groups[0].requests)
        with pytest.raises(QuotaExceeded) as caught:
            await generate(alice, "More")
        assert caught.value.metadata["quota"] == "tokens_per_minute"
        assert 15_000 < caught.value.retry_after_ms <= 25_000
        assert len(running.groups[0].requests) == before
        assert (await alice.tokenize("That costs nothing")).token_ids
        await generate(bob, "Hello")


async def test_a_request_that_no_group_took_costs_nothing(here: tuple[str, str], tmp_path: Path) -> None:
    quotas = {"*": {"tokens_per_minute": 1000}}
    hello = {"max_context_tokens": 2000}
    async with tenants_of(here, tmp_path, "alice", tenants=quotas, hello=hello, group_wait_s=0.2) as (running, [alice]):
        with pytest.raises(InvalidRequest):
            await generate(alice, [1] * 3000)
        await running.groups[0].kill()
        await eventually(lambda: not running.router._groups.usable("m"), "the router knows")
        with pytest.raises(NoGroup):
            await generate(alice, [1] * 500)
        used = (await alice.cluster()).usage
        assert used.tokens_left == 1000
        assert (used.prompt_tokens, used.output_tokens) == (0, 0)


async def test_tenants_share_prefixes_only_in_a_shared_domain(here: tuple[str, str], tmp_path: Path) -> None:
    sections = {"alice": {"cache_domain": "carol"}, "bob": {"cache_domain": "carol"}}
    names = ("alice", "bob", "carol", "dave")
    async with tenants_of(here, tmp_path, *names, tenants=sections) as (running, clients):
        for client in clients:
            await generate(client, [1] * 40)
        roots = [request.root for request in running.groups[0].requests]
        assert roots[0] == roots[1]
        assert len(set(roots)) == 3
