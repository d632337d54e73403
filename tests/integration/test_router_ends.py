"""How a router's streams end from outside: clients that leave, are late or do not read; drains, ports, no groups."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    NoGroup,
    Overloaded,
    PortInUse,
    SlowConsumer,
    from_rpc_error,
)
from cluster.pb import inference_pb2_grpc
from cluster.pb.inference_pb2 import GenerateRequest, RequestOptions
from router.client import AsyncClient, RetryPolicy
from tests.support.ports import occupied_port
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import SEED, ask, health, running_router, world
from tests.support.scripted_group import eventually

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
    return redis_server.url, f"s{next(_NAMES)}"


# -- ends from outside -----------------------------------------------------------------------------------------------


async def test_a_cancelled_stream_frees_its_group(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        async with running.client.generate("x", max_tokens=FOREVER) as stream:
            await anext(stream)
            assert running.groups[0].server.open_requests == 1
        await eventually(lambda: running.groups[0].server.open_requests == 0, "the group dropped it")
        await eventually(lambda: running.router.active_requests == 0, "the router did too")


async def test_a_client_that_vanishes_frees_its_group(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        gone = AsyncClient(running.address)
        streams = [gone.generate("x", max_tokens=FOREVER) for _ in range(5)]
        for stream in streams:
            await anext(stream)
        await gone.close()
        await eventually(lambda: running.groups[0].server.open_requests == 0, "the group dropped them")
        await eventually(lambda: running.router.active_requests == 0, "the router did too")


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_deadline_ends_it_even_when_the_group_is_silent(here: tuple[str, str], frozen: bool) -> None:
    async with world(*here, group_silence_s=60.0) as running:
        if frozen:
            running.groups[0].freeze()
        with pytest.raises(DeadlineExceeded):
            await running.client.generate("x", max_tokens=FOREVER, timeout_s=0.2).text()
        await eventually(lambda: running.router.active_requests == 0, "the router dropped it")
        running.groups[0].engine.gate.set()
        await eventually(lambda: running.groups[0].server.open_requests == 0, "the group dropped it")


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_a_client_that_does_not_read_is_ended_and_nobody_else(here: tuple[str, str]) -> None:
    async with world(*here, max_buffered_events=20) as running:
        # A small window that does not grow: what the client does not read stays in the router.
        small = {"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 1024}
        async with running.channel(**small) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            running.groups[0].engine.wide = 500  # tokens that fill the window soon
            options = RequestOptions()
            options.sampling.max_tokens = FOREVER
            call = stub.Generate(GenerateRequest(text="x", options=options))
            await call.read()
            await eventually(lambda: running.groups[0].server.open_requests == 0, "the group dropped it")
            with pytest.raises(grpc.RpcError) as caught:
                await read_all(call)
        assert isinstance(from_rpc_error(caught.value), SlowConsumer)
        running.groups[0].engine.wide = 1
        assert len((await ask(running)).tokens()) == 20


async def test_a_full_router_refuses_at_once_with_a_hint(here: tuple[str, str]) -> None:
    async with world(*here, max_active_requests=2) as running, AsyncClient(running.address, retry=ONCE) as client:
        running.groups[0].engine.gate.clear()
        streams = [running.client.generate("x", max_tokens=2, seed=SEED) for _ in range(2)]
        await eventually(lambda: running.router.active_requests == 2, "both are in")
        with pytest.raises(Overloaded) as caught:
            await client.generate_text("x")
        assert caught.value.retry_after_ms >= 100
        running.groups[0].engine.gate.set()
        assert [await stream.text() for stream in streams] == [running.text([SEED, SEED + 1])] * 2
        assert await client.generate_text("x", max_tokens=1)


async def test_drain_finishes_what_runs_and_refuses_what_comes(here: tuple[str, str]) -> None:
    async with (
        world(*here) as running,
        AsyncClient(running.address, retry=ONCE) as client,
        running.channel() as channel,
    ):
        stream = client.generate("x", max_tokens=300, seed=SEED)
        first = await anext(stream)
        assert first.HasField("started")
        draining = asyncio.create_task(running.router.drain(60))
        await eventually(lambda: running.router._draining, "it drains")
        with pytest.raises(Draining):
            await client.generate_text("x")
        assert await health(channel) == "NOT_SERVING"
        assert await stream.text() == running.text(range(SEED, SEED + 300))
        await draining


async def test_what_is_not_done_after_the_drain_is_unavailable_and_never_cancelled(here: tuple[str, str]) -> None:
    async with world(*here) as running, AsyncClient(running.address, retry=ONCE) as client:
        stream = client.generate("x", max_tokens=FOREVER)
        await anext(stream)
        await running.router.drain(0.1)
        with pytest.raises(Draining) as caught:
            await stream.text()
        assert caught.value.code == "UNAVAILABLE"
        await eventually(lambda: running.groups[0].server.open_requests == 0, "the group dropped it")


async def test_a_stop_without_drain_says_unavailable_too(here: tuple[str, str]) -> None:
    async with world(*here) as running, AsyncClient(running.address, retry=ONCE) as client:
        stream = client.generate("x", max_tokens=FOREVER)
        await anext(stream)
        await running.router.stop()
        with pytest.raises(Draining):
            await stream.text()


async def test_a_port_in_use_is_one_clear_line(here: tuple[str, str]) -> None:
    before = len(asyncio.all_tasks())
    with occupied_port() as port:
        with pytest.raises(PortInUse) as caught:
            async with running_router(*here, port=port):
                pytest.fail("it started")
        assert str(port) in caught.value.message
        assert "\n" not in caught.value.message
    assert len(asyncio.all_tasks()) == before


async def test_two_routers_cannot_share_a_port(here: tuple[str, str]) -> None:
    async with running_router(*here) as first:
        with pytest.raises(PortInUse):
            async with running_router(*here, port=first.port):
                pytest.fail("it started")


async def test_no_group_is_unavailable_and_not_for_ever(here: tuple[str, str]) -> None:
    async with (
        running_router(*here, group_wait_s=0.2) as router,
        AsyncClient(f"127.0.0.1:{router.port}", retry=ONCE) as client,
    ):
        with pytest.raises(NoGroup):
            await client.generate_text("x")
        assert (await client.tokenize("x")).token_ids  # what needs no group works
        assert (await client.model()).groups == 0


async def test_one_line_tells_of_each_request_and_nothing_of_its_text(
    here: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        async with world(*here) as running:
            await ask(running, "SECRET PROMPT", request_id="good\nid")
            async with running.client.generate("SECRET", max_tokens=FOREVER, request_id="left") as stream:
                await anext(stream)
            await eventually(lambda: "request=left" in caplog.text, "its end is logged")
    lines = [record.getMessage() for record in caplog.records if "request=" in record.getMessage()]
    assert len(lines) == 2
    assert "request=good\\nid outcome=OK finish=length" in lines[0]
    assert "completion_tokens=20" in lines[0]
    assert "outcome=CANCELLED" in lines[1]
    assert "SECRET" not in caplog.text
