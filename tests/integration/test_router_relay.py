"""Links and relay against real group servers and a real Redis: loss, silence, moves, credit, membership. No text."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from cluster.blocks import BlockHash, chain, root
from cluster.config import RouterConfig
from cluster.errors import DeadlineExceeded, GroupLost, InvalidRequest, NoGroup, Overloaded, QuireError, SlowConsumer
from cluster.pb.common_pb2 import SamplingParams
from cluster.pb.inference_pb2 import GenerateRequest, RequestOptions
from cluster.telemetry import get_logger
from router.groups import Groups
from router.interrupt import Interrupt
from router.links import GroupLink, State
from router.relay import Relay, Routing
from router.sessions import Affinity
from router.tenants import Tenants
from router.validation import Limits, ValidRequest, complete, parse_generate
from tests.support.redis import RedisServer, running_redis
from tests.support.scripted_group import TOKEN, ScriptedGroup, eventually

SECRET = b"cluster secret"
PROMPT = list(range(100, 164))


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


_NAMES = itertools.count()


@pytest.fixture
def cluster() -> str:
    """A name of its own in the shared Redis."""
    return f"c{next(_NAMES)}"


@asynccontextmanager
async def routing(redis_server: RedisServer, cluster: str, **settings: Any) -> AsyncIterator[Routing]:
    config = RouterConfig(**{"group_silence_s": 1.0, "group_wait_s": 10.0, **settings})
    groups = Groups(redis_server.url, cluster, TOKEN, config)
    await groups.start()
    try:
        yield Routing(
            groups=groups,
            affinity=Affinity(),
            config=config,
            cluster_secret=SECRET,
            rng=random.Random(0),
            tenants=Tenants(),
        )
    finally:
        await groups.close()


def valid(seed: int = 1000, max_tokens: int = 20, **options: Any) -> ValidRequest:
    names = {field.name for field in SamplingParams.DESCRIPTOR.fields}
    sampling = SamplingParams(
        seed=seed, max_tokens=max_tokens, **{name: value for name, value in options.items() if name in names}
    )
    rest = {name: value for name, value in options.items() if name not in names}
    message = GenerateRequest(text="x", options=RequestOptions(sampling=sampling, **rest))
    return complete(parse_generate(message, "m", 49_152), PROMPT, [], Limits(max_tokens=(1 << 20,)), "tenant")


def nobody(error: QuireError) -> None:
    raise AssertionError(f"interrupted: {error}")


def relay(
    routing: Routing, request: ValidRequest | None = None, interrupt: Any = nobody, deadline: float | None = None
) -> Relay:
    return Relay(request or valid(), routing, interrupt, deadline)


async def tokens(one: Relay) -> list[int]:
    async with contextlib.aclosing(one.deltas()) as deltas:
        return [token async for delta in deltas for token in delta.token_ids]


async def exhaust(deltas: AsyncIterator[object]) -> None:
    async for _ in deltas:
        pass


async def served(routing: Routing, count: int) -> list[GroupLink]:
    await eventually(lambda: len(routing.groups.usable("m")) == count, f"{count} groups are usable")
    return routing.groups.usable("m")


def by_id(groups: list[ScriptedGroup], one: Relay) -> ScriptedGroup:
    assert one.link is not None
    group_id = one.link.record.group_id
    return next(group for group in groups if group.hello.group_id == group_id)


@asynccontextmanager
async def scripted(
    redis_server: RedisServer, cluster: str, count: int, **settings: Any
) -> AsyncIterator[list[ScriptedGroup]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(ScriptedGroup(redis_server.url, cluster, f"g{i}", **settings))
            for i in range(count)
        ]


async def test_a_request_arrives_complete_and_comes_back_whole(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        request = valid(cache_salt="salt", priority=3)
        deadline = asyncio.get_running_loop().time() + 60
        assert await tokens(relay(shared, request, deadline=deadline)) == list(range(1000, 1020))
        [submitted] = group.requests
        assert tuple(submitted.prompt) == tuple(PROMPT)
        assert (submitted.tenant, submitted.priority, submitted.outputs) == ("tenant", 3, ())
        assert submitted.root == root(SECRET, "tenant", group.hello.namespace, "", "salt")
        assert submitted.deadline is not None
        assert 50 < submitted.deadline - submitted.arrival <= 60
        assert submitted.submit_sequence == 1


async def test_a_root_depends_on_tenant_and_salt(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        for salt in ("", "a", "b"):
            await tokens(relay(shared, valid(max_tokens=1, cache_salt=salt)))
        assert len({request.root for request in group.requests}) == 3


async def test_a_request_waits_for_a_group_and_not_for_ever(redis_server: RedisServer, cluster: str) -> None:
    async with routing(redis_server, cluster) as shared:
        waiting = asyncio.create_task(tokens(relay(shared)))
        async with scripted(redis_server, cluster, 1):
            assert await waiting == list(range(1000, 1020))
    async with routing(redis_server, cluster, group_wait_s=0.2) as shared:
        with pytest.raises(NoGroup):
            await tokens(relay(shared, valid()))


@pytest.mark.parametrize("how", ["kill", "freeze", "drain", "break"])
async def test_a_request_moves_and_nothing_is_lost_or_doubled(
    redis_server: RedisServer, cluster: str, how: str
) -> None:
    async with scripted(redis_server, cluster, 3) as groups, routing(redis_server, cluster) as shared:
        await served(shared, 3)
        one = relay(shared, valid(max_tokens=1000))
        received: list[int] = []
        async for delta in one.deltas():
            received += delta.token_ids
            if len(received) == 20:
                victim = by_id(groups, one)
                if how == "kill":
                    await victim.kill()
                elif how == "freeze":
                    victim.freeze()
                elif how == "drain":
                    await victim.server.drain(0.0)
                else:
                    victim.engine.breakage = RuntimeError("a broken engine")
        assert received == list(range(1000, 2000))
        assert one.attempts == 2
        assert by_id(groups, one) is not victim
        moved = by_id(groups, one).requests[-1]
        assert moved.key.attempt == 2
        assert moved.sampling.seed == 1000
        assert list(moved.outputs[0]) == list(range(1000, 1000 + len(moved.outputs[0])))
        assert len(moved.outputs[0]) >= 20


async def test_a_request_that_kills_groups_ends(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 3) as groups, routing(redis_server, cluster, max_attempts=2) as shared:
        await served(shared, 3)
        for group in groups:
            group.engine.breakage = RuntimeError("poison")
        with pytest.raises(GroupLost) as caught:
            await tokens(relay(shared))
        assert caught.value.metadata["attempts"] == "2"
        assert sum(bool(group.requests) for group in groups) == 2


async def test_a_running_request_never_moves_to_another_namespace(redis_server: RedisServer, cluster: str) -> None:
    async with (
        ScriptedGroup(redis_server.url, cluster, "old") as old,
        routing(redis_server, cluster, group_wait_s=0.3) as shared,
    ):
        await served(shared, 1)
        one = relay(shared, valid(max_tokens=100_000))
        deltas = one.deltas()
        await anext(deltas)
        async with ScriptedGroup(redis_server.url, cluster, "new", namespace="o" * 64) as new:
            await served(shared, 2)
            await old.kill()
            with pytest.raises(GroupLost):
                await exhaust(deltas)
            assert not new.requests
            assert len(await tokens(relay(shared, valid()))) == 20  # a new request may


async def test_the_last_group_dies_and_the_stream_ends(redis_server: RedisServer, cluster: str) -> None:
    async with (
        scripted(redis_server, cluster, 1) as [group],
        routing(redis_server, cluster, group_wait_s=0.3) as shared,
    ):
        deltas = relay(shared, valid(max_tokens=100_000)).deltas()
        await anext(deltas)
        await group.kill()
        with pytest.raises(GroupLost):
            await exhaust(deltas)
        assert not shared.groups.usable("m")


async def test_a_refusal_is_the_clients_and_is_not_tried_elsewhere(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 2, vocab_size=50) as groups, routing(redis_server, cluster) as shared:
        await served(shared, 2)
        with pytest.raises(InvalidRequest) as caught:
            await tokens(relay(shared))
        assert caught.value.metadata["field"] == "prompt_token_ids"
        assert not any(group.requests for group in groups)


async def test_an_overloaded_group_is_left_for_another_once(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 2) as groups, routing(redis_server, cluster) as shared:
        links = await served(shared, 2)
        full, free = groups
        full.server._thread._max_queued = 0
        links[1]._unseen[10**6] = 10**6  # looks busy: the full one is chosen first
        assert len(await tokens(relay(shared))) == 20
        assert not full.requests
        assert len(free.requests) == 1
        free.server._thread._max_queued = 0
        with pytest.raises(Overloaded):
            await tokens(relay(shared))


async def test_what_is_given_up_is_cancelled_in_the_group(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        one = relay(shared, valid(max_tokens=1_000_000))
        async with contextlib.aclosing(one.deltas()) as deltas:
            await anext(deltas)
            assert group.server.open_requests == 1
        await eventually(lambda: group.server.open_requests == 0, "the group has dropped it")
        assert one.link is not None
        assert not one.link._attempts
        # Before the first step, too.
        group.engine.gate.clear()
        task = asyncio.create_task(tokens(relay(shared, valid(max_tokens=1_000_000))))
        await eventually(lambda: one.link is not None and one.link._attempts, "it is submitted")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        group.engine.gate.set()
        await eventually(lambda: group.server.open_requests == 0, "the group has dropped it")


async def test_a_reader_that_stops_is_ended_and_its_group_freed(redis_server: RedisServer, cluster: str) -> None:
    async with (
        scripted(redis_server, cluster, 1) as [group],
        routing(redis_server, cluster, max_buffered_events=50) as shared,
    ):
        with pytest.raises(SlowConsumer):
            await read_one_and_hang(shared)
        await eventually(lambda: group.server.open_requests == 0, "the group has dropped it")
        assert len(await tokens(relay(shared))) == 20


async def read_one_and_hang(shared: Routing) -> None:
    with Interrupt() as interrupt:
        one = relay(shared, valid(max_tokens=1_000_000), interrupt)
        async with contextlib.aclosing(one.deltas()) as deltas:
            await anext(deltas)
            await asyncio.sleep(60)


async def test_a_deadline_that_surely_passes_first_is_refused_before_any_group_hears_of_it(
    redis_server: RedisServer, cluster: str
) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        [link] = await served(shared, 1)
        await eventually(lambda: link.load.total_blocks, "a load has come")
        link.load.prefill_tokens_per_s = 1.0
        deadline = asyncio.get_running_loop().time() + 1
        with pytest.raises(DeadlineExceeded):
            await tokens(relay(shared, deadline=deadline))
        assert not group.requests


async def test_credit_holds_until_the_group_has_seen_it(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        [link] = await served(shared, 1)
        group.engine.gate.clear()
        blocked = asyncio.create_task(tokens(relay(shared, valid(max_tokens=2))))
        await eventually(group.engine.stepping.is_set, "a step hangs")
        other = asyncio.create_task(tokens(relay(shared, valid(max_tokens=2))))
        await eventually(lambda: link.view(0).sent_prefill_tokens >= len(PROMPT), "the router counts what it sent")
        group.engine.gate.set()
        await asyncio.gather(blocked, other)
        await eventually(lambda: link.view(0).sent_requests == 0, "the load frame shows both")
        assert link.load.last_submit_sequence == 2


async def test_a_prefix_draws_its_request(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 2) as groups, routing(redis_server, cluster) as shared:
        links = await served(shared, 2)
        request = valid(max_tokens=1)
        start = root(SECRET, "tenant", groups[1].hello.namespace)
        groups[1].engine.store(chain(start, PROMPT, 16))
        await tokens(relay(shared, request))  # a step, and with it the events
        await tokens(relay(shared, request))
        if not len(links[1].index):
            groups[1].server._thread.snapshot(groups[1].server.routers[0])
        await eventually(lambda: len(links[1].index) == 4, "the router knows the blocks")
        for _ in range(5):
            one = relay(shared, request)
            await tokens(one)
            assert by_id(groups, one) is groups[1]
            assert one.choice is not None
            assert one.choice.expected_cached_tokens == 64
        salted = relay(shared, valid(max_tokens=1, cache_salt="other"))
        await tokens(salted)
        assert salted.choice is not None
        assert salted.choice.expected_cached_tokens == 0


async def test_a_session_stays_where_it_was(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 3) as groups, routing(redis_server, cluster) as shared:
        await served(shared, 3)
        used = set()
        for _ in range(8):
            one = relay(shared, valid(max_tokens=1, session_id="talk"))
            await tokens(one)
            used.add(by_id(groups, one).hello.group_id)
        assert len(used) == 1


async def test_a_new_incarnation_voids_the_old_at_once(redis_server: RedisServer, cluster: str) -> None:
    async with routing(redis_server, cluster) as shared:
        async with ScriptedGroup(redis_server.url, cluster, "g") as old:
            [link] = await served(shared, 1)
            old.engine.store([BlockHash(bytes(32))])
            old.server._thread.snapshot(old.server.routers[0])
            await eventually(lambda: len(link.index) == 1, "its block is known")
            async with ScriptedGroup(redis_server.url, cluster, "g") as new:
                await eventually(lambda: link.superseded, "the old one takes nothing new")
                await eventually(lambda: len(shared.groups.usable("m")) == 1, "the new one is usable")
                [fresh] = shared.groups.usable("m")
                assert fresh.record.incarnation == new.hello.incarnation
                assert len(fresh.index) == 0
        await eventually(lambda: not shared.groups.links(), "both are forgotten")


async def test_a_lease_that_runs_out_does_not_remove_a_group_that_is_alive(
    redis_server: RedisServer, cluster: str
) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        [link] = await served(shared, 1)
        await group.withdraw()
        await eventually(lambda: not shared.groups._watcher.groups(), "the record is gone")
        assert link.usable
        assert len(await tokens(relay(shared))) == 20
        await group.kill()
        await eventually(lambda: not shared.groups.links(), "with its stream it is forgotten")


async def test_membership_is_frozen_while_redis_is_away(cluster: str) -> None:
    with running_redis() as server:
        async with scripted(server, cluster, 1), routing(server, cluster) as shared:
            await served(shared, 1)
            server.kill()
            await eventually(lambda: not shared.groups.membership_live, "the loss is noticed")
            assert len(await tokens(relay(shared))) == 20
            server.start()
            await eventually(lambda: shared.groups.membership_live, "it heals")
            assert len(await tokens(relay(shared))) == 20


async def test_a_group_that_was_only_unreachable_comes_back(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        [link] = await served(shared, 1)
        for owner in list(group.server.routers):
            group.server._streams[owner].end(GroupLost("a hiccup"))
        await eventually(lambda: link.state is State.LOST, "the loss is noticed")
        await served(shared, 1)
        assert len(await tokens(relay(shared))) == 20


async def test_a_missed_cache_event_asks_for_a_snapshot(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 1) as [group], routing(redis_server, cluster) as shared:
        [link] = await served(shared, 1)
        group.engine.store([BlockHash(bytes([number]) * 32) for number in range(5)])
        [stream] = group.server._streams.values()
        await eventually(lambda: stream.has_snapshot, "the first snapshot is out")
        stream._cache_sequence += 1  # one is lost on the way
        await tokens(relay(shared, valid(max_tokens=2)))
        await eventually(lambda: len(link.index) == 5, "a snapshot mends it")


@pytest.mark.parametrize("settings", [{"protocol_version": 99}, {"incarnation": "somebody else"}])
async def test_a_group_of_another_kind_is_not_used(
    redis_server: RedisServer, cluster: str, settings: dict[str, Any]
) -> None:
    async with (
        ScriptedGroup(redis_server.url, cluster, "g", **settings) as group,
        routing(redis_server, cluster, group_wait_s=0.5) as shared,
    ):
        if "incarnation" in settings:
            group.server._hello.incarnation = "changed"
        await eventually(lambda: shared.groups.links(), "its record is seen")
        [link] = shared.groups.links()
        await eventually(lambda: link._trouble, "it was tried")
        with pytest.raises(NoGroup):
            await tokens(relay(shared))
        assert not link.usable


async def test_a_wrong_worker_token_is_told_and_hangs_nothing(
    redis_server: RedisServer, cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = RouterConfig(group_wait_s=0.5)
    groups = Groups(redis_server.url, cluster, "wrong", config)
    get_logger("links").propagate = True
    async with ScriptedGroup(redis_server.url, cluster, "g"):
        await groups.start()
        try:
            await eventually(lambda: groups.links() and groups.links()[0]._trouble, "it was tried")
            assert "wrong or missing worker token" in groups.links()[0]._trouble
            assert not groups.usable("m")
        finally:
            await groups.close()
    assert "wrong or missing" in caplog.text


async def test_one_dead_address_does_not_hold_up_the_others(redis_server: RedisServer, cluster: str) -> None:
    async with scripted(redis_server, cluster, 2) as groups, routing(redis_server, cluster) as shared:
        await served(shared, 2)
        groups[0].freeze()
        results = await asyncio.gather(*(tokens(relay(shared, valid(seed=seed * 100))) for seed in range(12)))
        assert results == [list(range(seed * 100, seed * 100 + 20)) for seed in range(12)]
