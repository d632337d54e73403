"""Stored sessions through real routers, group servers and Redis: what a turn means, who wins, what survives."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    GroupLost,
    InvalidRequest,
    NoGroup,
    PinBudget,
    QuireError,
    SessionConflict,
    SessionExists,
    SessionLimit,
    SessionNotFound,
    SessionNotStored,
    SessionStoreUnavailable,
    SessionTooLarge,
)
from cluster.lifecycle import dies_with_parent
from cluster.pb import inference_pb2_grpc
from router.auth import make_key
from router.client import AsyncClient, AsyncStream, Client, RetryPolicy
from tests.support.models import smollm2
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import SEED, Answer, World, running_router, world
from tests.support.scripted_group import TOKEN, ScriptedGroup, eventually

ONCE = RetryPolicy(attempts=1)
FOREVER = 1_000_000
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def here(redis_server: RedisServer) -> tuple[str, str]:
    """Redis, and a cluster name of the test's own."""
    return redis_server.url, f"t{next(_NAMES)}"


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """One that the test may kill."""
    with running_redis() as server:
        yield server


async def say(client: AsyncClient, messages: Any, session: str | None = "s", **options: Any) -> Answer:
    settings = {"seed": SEED, "max_tokens": 5, "timeout_s": 60.0, **options}
    return Answer([event async for event in client.chat(messages, session=session, **settings)])


async def stored(client: AsyncClient, session: str = "s") -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in (await client.get_session(session)).messages]


async def collect(stream: AsyncStream, events: list[Any]) -> None:
    """Keeps what came before an error."""
    async for event in stream:
        events.append(event)  # noqa: PERF401


def lease_ttl_ms(server: RedisServer, cluster: str) -> int:
    """Of the one lease in this cluster; -2: there is none."""
    with server.client() as client:
        found = list(client.scan_iter(f"{{{cluster}:*}}:lease:*"))
        assert len(found) <= 1
        return int(client.pttl(found[0])) if found else -2  # type: ignore[arg-type]


@asynccontextmanager
async def held_turn(running: World, session: str = "s", **options: Any) -> AsyncIterator[Any]:
    """A turn that streams and has no end, till it is cancelled."""
    settings = {"seed": SEED, "max_tokens": FOREVER, "timeout_s": 60.0, **options}
    async with running.client.chat("held", session=session, **settings) as stream:
        event = await anext(stream)
        assert event.HasField("started")
        yield stream


# -- what a turn means -----------------------------------------------------------------------------------------------


async def test_twenty_turns_send_only_what_is_new_and_equal_the_whole_conversation(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        whole = [{"role": "system", "content": "Be brief. 簡潔に。"}]
        for number in range(20):
            question = {"role": "user", "content": f"Question {number}: <|im_end|> \x00 \u2028 é 🙂 {'w ' * number}"}
            if number % 3 == 0:
                question["name"] = "Ann"
            new = [*whole, question] if number == 0 else [question]
            turn = await say(running.client, new, seed=SEED + 100 * number)
            whole = [*whole, question]
            plain = await say(running.client, whole, None, seed=SEED + 100 * number)
            of_turn, of_plain = running.groups[0].requests[-2:]
            assert of_turn.prompt == of_plain.prompt
            assert turn.tokens() == plain.tokens()
            assert turn.text() == plain.text() != ""
            assert turn.stored is not None
            assert plain.stored is None
            assert turn.kinds[-2:] == ["finished", "stored"]
            assert turn.stored.version == number + 1
            assert turn.stored.session_id == "s"
            whole.append({"role": "assistant", "content": turn.text()})
        found = await running.client.get_session("s")
        assert [
            {name: value for name, value in (("role", m.role), ("content", m.content), ("name", m.name)) if value}
            for m in found.messages
        ] == whole
        assert (found.session_id, found.version, found.model) == ("s", 20, "m")
        assert not found.pinned
        assert not found.busy
        assert 0 < found.expires_in_s <= 86_400
        assert found.created_at_s < found.used_at_s <= time.time() + 1
        tokenized = await running.client.tokenize(messages=whole)
        assert 0 < found.tokens < len(tokenized.token_ids)  # that has the beginning of an answer too


async def test_a_session_id_alone_stores_nothing(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        answer = await say(running.client, "Hello", None, session_id="s")
        assert answer.stored is None
        with pytest.raises(SessionNotFound):
            await running.client.get_session("s")


async def test_what_is_stored_is_the_text_that_was_sent(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        plain = (await say(running.client, "Hello", None, max_tokens=20)).text()
        stop = plain[10:14]
        answer = await say(running.client, "Hello", max_tokens=20, stop=[stop])
        assert answer.text() == plain[: plain.index(stop)]
        assert (await stored(running.client))[-1] == ("assistant", answer.text())
        echoed = await say(running.client, "Hello", "e", echo=True)
        assert (await stored(running.client, "e"))[-1] == (
            "assistant",
            echoed.deltas[1].text + "".join(d.text for d in echoed.deltas[2:]),
        )


async def test_a_turn_goes_where_the_last_one_went(here: tuple[str, str]) -> None:
    async with world(*here, groups=3) as running:
        first = await say(running.client, "Hello")
        assert first.started is not None
        for _ in range(4):
            turn = await say(running.client, "More")
            assert turn.started is not None
            assert turn.started.group_id == first.started.group_id
            assert turn.started.routing.decision == "session"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 2}, "options.sampling.n"),
        ({"session": ""}, "session.session_id"),
        ({"session": "é" * 129}, "session.session_id"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_no_turn_can_be(here: tuple[str, str], options: dict[str, Any], field: str) -> None:
    async with world(*here) as running:
        with pytest.raises(QuireError) as caught:
            await say(running.client, **{"messages": "Hello", **options})
        assert isinstance(caught.value, InvalidRequest)
        assert caught.value.metadata["field"] == field
        assert not running.groups[0].requests


async def test_names_may_hold_anything(here: tuple[str, str]) -> None:
    names = ["a:b", "{a}", "a\x00", "a\n*", "é🙂", " ", "*", "a" * 256]
    async with world(*here) as running:
        for name in names:
            await say(running.client, f"I am {name}", name)
        for name in names:
            assert (await stored(running.client, name))[0] == ("user", f"I am {name}")


# -- versions and concurrent turns -----------------------------------------------------------------------------------


async def test_a_turn_may_name_the_version_that_it_goes_on_from(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        with pytest.raises(SessionNotFound):
            await say(running.client, "Hello", session_version=1)
        assert (await say(running.client, "Hello", session_version=0)).stored is not None
        for wrong in (0, 2):
            with pytest.raises(SessionConflict) as caught:
                await say(running.client, "Hello", session_version=wrong)
            assert caught.value.metadata["version"] == "1"
        answer = await say(running.client, "Hello", session_version=1)
        assert answer.stored is not None
        assert answer.stored.version == 2
        assert len(running.groups[0].requests) == 2, "a refused turn was computed"


async def test_of_two_turns_at_once_one_wins_and_the_other_costs_nothing(here: tuple[str, str]) -> None:
    async with (
        world(*here) as running,
        running_router(*here) as second,
        AsyncClient(f"127.0.0.1:{second.port}") as other,
    ):
        await say(running.client, "Hello")
        await eventually(lambda: second._groups.usable("m"), "the second router has its group")
        async with held_turn(running):
            for client in (running.client, other):
                before = time.monotonic()
                with pytest.raises(SessionConflict) as caught:
                    await say(client, "Me too")
                assert time.monotonic() - before < 30
                assert caught.value.retry_after_ms > 0
            assert (await other.get_session("s")).busy
            assert (await say(other, "Hello", "another")).stored is not None
        assert len(running.groups[0].requests) == 3
        await eventually(lambda: not running.router.active_requests, "the cancelled turn has ended")
        assert (await say(other, "Now")).stored is not None


async def test_many_turns_at_once_are_stored_one_after_another(here: tuple[str, str]) -> None:
    """Each that was told that it is stored is there, whole, and nothing else is."""
    async with (
        world(*here) as running,
        running_router(*here) as second,
        AsyncClient(f"127.0.0.1:{second.port}") as other,
    ):
        await eventually(lambda: second._groups.usable("m"), "the second router has its group")
        won: list[tuple[int, str]] = []

        async def insist(client: AsyncClient, text: str) -> None:
            while True:
                try:
                    answer = await say(client, text)
                except SessionConflict:
                    await asyncio.sleep(0.01)
                else:
                    assert answer.stored is not None
                    won.append((answer.stored.version, text))
                    return

        await asyncio.gather(*(insist(other if i % 2 else running.client, f"text {i}") for i in range(12)))
        found = await stored(running.client)
        assert [content for role, content in found if role == "user"] == [text for _, text in sorted(won)]
        assert [version for version, _ in sorted(won)] == list(range(1, 13))
        assert [role for role, _ in found] == ["user", "assistant"] * 12


# -- turns that break ------------------------------------------------------------------------------------------------


async def test_a_cancelled_or_late_turn_is_not_stored(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        await say(running.client, "Hello")
        before = await stored(running.client)
        async with held_turn(running):
            pass
        await eventually(lambda: not running.router.active_requests, "the cancelled turn has ended")
        with pytest.raises(DeadlineExceeded):
            await say(running.client, "Late", max_tokens=FOREVER, timeout_s=0.5)
        await eventually(lambda: not running.router.active_requests, "the late turn has ended")
        assert await stored(running.client) == before
        assert (await say(running.client, "Again", session_version=1)).stored is not None


async def test_a_turn_whose_group_dies_is_not_stored(here: tuple[str, str]) -> None:
    async with world(*here, group_wait_s=0.3) as running:
        await say(running.client, "Hello")
        before = await stored(running.client)
        async with held_turn(running) as stream:
            await running.groups[0].kill()
            with pytest.raises((GroupLost, NoGroup)):
                async for _ in stream:
                    pass
        assert await stored(running.client) == before
        assert not (await running.client.get_session("s")).busy


async def test_a_turn_moves_with_its_group_and_is_stored(here: tuple[str, str]) -> None:
    async with world(*here, groups=2) as running:
        turn = running.client.chat("Hello", session="s", seed=SEED, max_tokens=2000, timeout_s=60.0)
        started = (await anext(turn)).started
        await next(group for group in running.groups if group.hello.group_id == started.group_id).kill()
        answer = Answer([event async for event in turn])
        assert answer.tokens() == list(range(SEED, SEED + 2000))
        assert answer.stored is not None
        assert (await stored(running.client))[-1] == ("assistant", answer.text())


async def test_a_first_turn_that_breaks_leaves_no_session(here: tuple[str, str], redis_server: RedisServer) -> None:
    async with world(*here, tenants={"*": {"max_sessions": 1}}) as running:
        async with held_turn(running):
            with pytest.raises(SessionLimit):
                await say(running.client, "Hello", "another")
        await eventually(lambda: not running.router.active_requests, "the cancelled turn has ended")
        with pytest.raises(SessionNotFound):
            await running.client.get_session("s")
        assert (await say(running.client, "Hello", "another")).stored is not None, "its place is free again"


async def test_a_router_that_goes_down_ends_turns_and_gives_their_leases_back(here: tuple[str, str]) -> None:
    async with world(*here) as running, running_router(*here) as second:
        await eventually(lambda: second._groups.usable("m"), "the second router has its group")
        async with AsyncClient(f"127.0.0.1:{second.port}", retry=ONCE) as client:
            await say(client, "Hello")
            stream = client.chat("held", session="s", max_tokens=FOREVER, timeout_s=60.0)
            await anext(stream)
            await second.drain(0.0)
            with pytest.raises(Draining):
                async for _ in stream:
                    pass
        assert (await say(running.client, "On", session_version=1)).stored is not None


async def test_the_lease_of_a_router_that_was_killed_runs_out(
    here: tuple[str, str], redis_server: RedisServer, tmp_path: Path
) -> None:
    lease_s = 3.0
    async with ScriptedGroup(*here, "g0") as group:
        with router_process(here, tmp_path, lease_s) as (process, address):
            async with AsyncClient(address, retry=RetryPolicy(attempts=8)) as client:
                await say(client, "Hello")
                stream = client.chat("held", session="s", max_tokens=FOREVER, timeout_s=60.0)
                await anext(stream)
                # As long as its router lives the lease outlasts itself.
                await asyncio.sleep(lease_s + 1.0)
                assert 0 < lease_ttl_ms(redis_server, here[1]) <= 1000 * lease_s
                process.kill()
                process.wait(10)
                with pytest.raises(QuireError):
                    await collect(stream, [])
        began = time.monotonic()
        assert lease_ttl_ms(redis_server, here[1]) <= 1000 * lease_s
        async with running_router(*here) as second, AsyncClient(f"127.0.0.1:{second.port}") as client:
            await eventually(lambda: second._groups.usable("m"), "the second router has its group")
            while True:
                try:
                    answer = await say(client, "On", session_version=1)
                    break
                except SessionConflict:
                    assert time.monotonic() - began < lease_s + 30
                    await asyncio.sleep(0.05)
            assert answer.stored is not None
            assert not group.broken


@contextmanager
def router_process(here: tuple[str, str], folder: Path, lease_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A router that can be killed, and its address."""
    config = {
        "cluster": here[1],
        "redis": here[0],
        "model": str(smollm2().path),
        "model_name": "m",
        "worker_token": TOKEN,
        "cluster_secret": "secret",
        "router": {"port": 0},
        "sessions": {"lease_s": lease_s},
    }
    file = folder / "router.yaml"
    file.write_text(json.dumps(config))
    command = dies_with_parent([sys.executable, "-m", "router.server", "--config", str(file)])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # the test's own limit ends a router that never says it
        yield process, line.split()[1]
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


async def test_deleting_a_session_ends_its_turn(here: tuple[str, str]) -> None:
    async with world(*here, sessions={"lease_s": 0.6}) as running:
        await say(running.client, "Hello")
        async with held_turn(running) as stream:
            await running.client.delete_session("s")
            await say(running.client, "A new one", session_version=0)
            with pytest.raises(SessionConflict):
                async for _ in stream:
                    pass
        assert (await stored(running.client))[0] == ("user", "A new one")
        await eventually(lambda: not running.groups[0].engine.requests, "its group computes no more")


async def test_a_session_deleted_at_the_very_end_is_not_written_to(here: tuple[str, str]) -> None:
    """A session made again has the same version, and is another one."""
    async with world(*here, sessions={"lease_s": 60.0}) as running:
        await say(running.client, "Hello")
        turn = asyncio.create_task(say(running.client, "Old", max_tokens=3000))
        await eventually(lambda: len(running.groups[0].requests) == 2, "the turn is in its group")
        await running.client.delete_session("s")
        again = await say(running.client, "New", max_tokens=1, session_version=0)
        assert again.stored is not None
        assert again.stored.version == 1
        assert not turn.done()
        with pytest.raises(SessionConflict):
            await turn
        assert (await stored(running.client))[0] == ("user", "New")


# -- Redis away ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_without_redis_turns_are_unavailable_soon_and_the_rest_goes_on(own_redis: RedisServer, how: str) -> None:
    async with world(own_redis.url, "away") as running:
        await say(running.client, "Hello")
        getattr(own_redis, how)()
        calls = [
            lambda: say(running.client, "More"),
            lambda: running.client.get_session("s"),
            lambda: running.client.delete_session("s"),
            lambda: running.client.fork_session("s", "t"),
            lambda: running.client.pin_session("s"),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(SessionStoreUnavailable) as caught:
                await call()
            assert time.monotonic() - began < 10
            assert caught.value.retry_after_ms > 0
        assert len(running.groups[0].requests) == 1
        plain = await say(running.client, "Hello", None)
        assert len(plain.tokens()) == 5
        own_redis.thaw() if how == "freeze" else own_redis.start()
        while True:
            try:
                answer = await say(running.client, "Back")
                break
            except (SessionStoreUnavailable, SessionConflict):  # a frozen Redis heard of the turn above
                await asyncio.sleep(0.1)
        assert answer.stored is not None
        assert answer.stored.version == (1 if how == "kill" else 2)


async def test_a_turn_outlives_a_redis_that_is_away_in_between(own_redis: RedisServer) -> None:
    async with world(own_redis.url, "between", sessions={"lease_s": 0.6}) as running:
        await say(running.client, "Hello")
        stream = running.client.chat("Long", session="s", seed=SEED, max_tokens=3000, timeout_s=60.0)
        await anext(stream)
        own_redis.freeze()
        await asyncio.sleep(1.2)
        own_redis.thaw()
        answer = Answer([event async for event in stream])
        assert answer.stored is not None
        assert answer.stored.version == 2


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_an_answer_that_cannot_be_stored_is_delivered_and_says_so(own_redis: RedisServer, how: str) -> None:
    async with world(own_redis.url, "lost") as running:
        await say(running.client, "Hello")
        before = await stored(running.client)
        running.groups[0].engine.gate.clear()
        stream = running.client.chat("More", session="s", seed=SEED, max_tokens=5, timeout_s=60.0)
        await eventually(lambda: len(running.groups[0].requests) == 2, "the turn is in its group")
        getattr(own_redis, how)()
        running.groups[0].engine.gate.set()
        events: list[Any] = []
        with pytest.raises(SessionNotStored) as caught:
            await collect(stream, events)
        answer = Answer(events)
        assert answer.tokens() == list(range(SEED, SEED + 5))
        assert answer.kinds[-1] == "finished"
        assert caught.value.metadata["version"] == "2"
        if how == "freeze":
            # What was on its way is not taken when it thaws: the client has been told.
            own_redis.thaw()
            await asyncio.sleep(0.5)
            assert await stored(running.client) == before


async def test_a_full_redis_stores_nothing_and_says_so(own_redis: RedisServer) -> None:
    async with world(own_redis.url, "full") as running:
        await say(running.client, "Hello")
        with own_redis.client() as client:
            client.config_set("maxmemory", 1)
            client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(SessionStoreUnavailable):
            await say(running.client, "More")
        assert len(await stored(running.client)) == 2, "reading goes on"
        with own_redis.client() as client:
            client.config_set("maxmemory", 0)
        assert (await say(running.client, "More")).stored is not None


# -- limits ----------------------------------------------------------------------------------------------------------


async def test_a_session_has_a_size(here: tuple[str, str]) -> None:
    async with world(*here, tenants={"*": {"session_bytes": 500}}) as running:
        with pytest.raises(SessionTooLarge) as caught:
            await say(running.client, "x" * 600)
        assert caught.value.metadata["limit"] == "500"
        assert "session_bytes" in caught.value.message
        assert not running.groups[0].requests, "it was computed in vain"
        await say(running.client, "y" * 300)
        before = await stored(running.client)
        with pytest.raises(SessionTooLarge):  # only its answer makes it too long: that was delivered
            await say(running.client, "z", max_tokens=100)
        assert len(running.groups[0].requests) == 2
        assert await stored(running.client) == before
        assert (await running.client.get_session("s")).bytes <= 500
        await running.client.delete_session("s")
        assert (await say(running.client, "y" * 300)).stored is not None


async def test_a_tenant_has_so_many_sessions(here: tuple[str, str]) -> None:
    async with world(*here, tenants={"*": {"max_sessions": 2}}) as running:
        await say(running.client, "Hello", "a")
        await say(running.client, "Hello", "b")
        with pytest.raises(SessionLimit) as caught:
            await say(running.client, "Hello", "c")
        assert caught.value.metadata["limit"] == "2"
        with pytest.raises(SessionLimit):
            await running.client.fork_session("a", "c")
        assert (await say(running.client, "More", "a")).stored is not None
        await running.client.delete_session("a")
        assert (await say(running.client, "Hello", "c")).stored is not None


async def test_a_session_runs_out_and_a_pinned_one_does_not(here: tuple[str, str], redis_server: RedisServer) -> None:
    async with world(*here, sessions={"ttl_s": 1}, tenants={"*": {"max_sessions": 2}}) as running:
        await say(running.client, "Keep me", "kept")
        pinned = await running.client.pin_session("kept")
        assert pinned.pinned
        assert pinned.expires_in_s == 0
        stored_again = (await say(running.client, "More", "kept")).stored
        assert stored_again is not None
        assert stored_again.expires_in_s == 0
        await say(running.client, "Hello", "brief")
        await asyncio.sleep(1.2)
        with pytest.raises(SessionNotFound):
            await running.client.get_session("brief")
        with pytest.raises(SessionNotFound):
            await say(running.client, "More", "brief", session_version=1)
        assert len(await stored(running.client, "kept")) == 4
        assert (await say(running.client, "Hello", "next")).stored is not None, "what ran out counts no more"
        assert (await running.client.pin_session("kept", pinned=False)).expires_in_s > 0
        await asyncio.sleep(1.2)
        with pytest.raises(SessionNotFound):
            await running.client.get_session("kept")
        with redis_server.client() as client:
            kept = [key for key in client.scan_iter(f"{{{here[1]}:*") if b":session:" in key or b":messages:" in key]
        assert not kept


async def test_a_turn_may_last_longer_than_the_time_to_live(here: tuple[str, str]) -> None:
    async with world(*here, sessions={"ttl_s": 1, "lease_s": 0.9}) as running:
        await say(running.client, "Hello")
        running.groups[0].engine.gate.clear()
        turn = asyncio.create_task(say(running.client, "Slow"))
        await eventually(lambda: len(running.groups[0].requests) == 2, "the turn is in its group")
        await asyncio.sleep(2.5)
        running.groups[0].engine.gate.set()
        answer = await turn
        assert answer.stored is not None
        assert answer.stored.version == 2


async def test_pins_have_a_budget(here: tuple[str, str]) -> None:
    async with world(*here, tenants={"*": {"pinned_bytes": 600}}) as running:
        for name in ("a", "b"):
            await say(running.client, "x" * 300, name)
        await running.client.pin_session("a")
        await running.client.pin_session("a")  # again: it counts once
        with pytest.raises(PinBudget) as caught:
            await running.client.pin_session("b")
        assert caught.value.metadata["limit"] == "600"
        assert not (await running.client.get_session("b")).pinned
        before = await stored(running.client, "a")
        with pytest.raises(PinBudget):  # nor may it grow beyond
            await say(running.client, "y" * 300, "a")
        assert await stored(running.client, "a") == before
        copy = await running.client.fork_session("a", "c")
        assert not copy.pinned
        assert copy.expires_in_s > 0
        await running.client.delete_session("a")
        assert (await running.client.pin_session("b")).pinned
        with pytest.raises(SessionNotFound):
            await running.client.pin_session("a")


# -- forks, deletions, tenants ---------------------------------------------------------------------------------------


async def test_a_fork_goes_its_own_way(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        await say(running.client, "Hello")
        await say(running.client, "More")
        async with held_turn(running):
            copy = await running.client.fork_session("s", "t")
        assert (copy.session_id, copy.version, copy.model, copy.busy) == ("t", 1, "m", False)
        common = await stored(running.client)
        assert await stored(running.client, "t") == common
        await eventually(lambda: not running.router.active_requests, "the held turn has ended")
        await say(running.client, "Left", "s")
        await say(running.client, "Right", "t", session_version=1)
        assert (await stored(running.client, "s"))[4] == ("user", "Left")
        assert (await stored(running.client, "t"))[4] == ("user", "Right")
        assert (await stored(running.client, "t"))[:4] == common
        for taken in ("s", "t"):
            with pytest.raises(SessionExists):
                await running.client.fork_session("s", taken)
        with pytest.raises(SessionNotFound):
            await running.client.fork_session("nobody", "u")
        with pytest.raises(SessionNotFound):
            await running.client.get_session("u")


async def test_a_deleted_session_is_gone_with_everything(here: tuple[str, str], redis_server: RedisServer) -> None:
    async with world(*here) as running:
        await say(running.client, "Hello")
        await running.client.pin_session("s")
        await running.client.delete_session("s")
        for call in (running.client.get_session, running.client.delete_session):
            with pytest.raises(SessionNotFound):
                await call("s")
        with redis_server.client() as client:
            assert not list(client.scan_iter(f"{{{here[1]}:*"))


async def test_another_tenants_session_is_none(here: tuple[str, str], tmp_path: Path) -> None:
    keys = {tenant: make_key(tenant) for tenant in ("alice", "bob")}
    file = tmp_path / "keys"
    file.write_text("\n".join(line for _, line in keys.values()) + "\n")
    async with (
        world(*here, api_keys_file=file) as running,
        AsyncClient(running.address, keys["alice"][0]) as alice,
        AsyncClient(running.address, keys["bob"][0]) as bob,
    ):
        await say(alice, "A secret")
        calls: list[Any] = [
            lambda: bob.get_session("s"),
            lambda: bob.delete_session("s"),
            lambda: bob.fork_session("s", "t"),
            lambda: bob.pin_session("s"),
            lambda: say(bob, "Hello", session_version=1),
        ]
        for call in calls:
            with pytest.raises(SessionNotFound):
                await call()
        await say(bob, "Mine")
        assert (await stored(bob))[0] == ("user", "Mine")
        assert (await stored(alice))[0] == ("user", "A secret")
        await bob.delete_session("s")
        assert len(await stored(alice)) == 2


# -- the client ------------------------------------------------------------------------------------------------------


class Broken(inference_pb2_grpc.InferenceServicer):
    """Each call ends as one whose connection broke: UNAVAILABLE, and not a word from a router."""

    def __init__(self) -> None:
        self.calls = 0

    async def _break(self, request: Any, context: Any) -> None:
        self.calls += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    Chat = DeleteSession = ForkSession = GetSession = _break


async def test_a_client_never_stores_twice() -> None:
    """A connection that broke before the first event may have broken behind the commit."""
    server, broken = grpc.aio.server(), Broken()
    inference_pb2_grpc.add_InferenceServicer_to_server(broken, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    retry = RetryPolicy(attempts=3, first_delay_s=0.01)
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retry=retry) as client:
            calls: list[tuple[Any, int]] = [
                (lambda: say(client, "Hello", "s"), 1),
                (lambda: client.delete_session("s"), 1),
                (lambda: client.fork_session("s", "t"), 1),
                (lambda: say(client, "Hello", None), 3),
                (lambda: client.get_session("s"), 3),
            ]
            for call, tries in calls:
                broken.calls = 0
                with pytest.raises(NoGroup):
                    await call()
                assert broken.calls == tries
        with Client(f"127.0.0.1:{port}", retry=retry) as plain:
            broken.calls = 0
            with pytest.raises(NoGroup):
                await asyncio.to_thread(plain.chat_text, "Hello", session="s")
            assert broken.calls == 1
    finally:
        await server.stop(None)


async def test_a_turn_that_a_router_refused_is_tried_again(here: tuple[str, str]) -> None:
    async with world(*here, max_active_requests=1) as running:
        stream = running.client.generate("Hello", max_tokens=FOREVER, timeout_s=60.0)
        await anext(stream)
        turn = asyncio.create_task(say(running.client, "Hello"))
        await asyncio.sleep(0.05)
        stream.cancel()
        assert (await turn).stored is not None
