"""The Python client, sync and async: against a router, and against a server that refuses as often as a test wants."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    GroupLost,
    InvalidRequest,
    NoGroup,
    Overloaded,
    QuireError,
    abort,
)
from cluster.pb import inference_pb2, inference_pb2_grpc
from cluster.pb.inference_pb2 import Delta, GenerateEvent
from router.client import AsyncClient, Client, RetryPolicy
from tests.support.ports import free_port
from tests.support.redis import RedisServer, running_redis
from tests.support.routers import World, world
from tests.support.scripted_group import eventually

FOREVER = 1_000_000
SEED = 5000
FAST = RetryPolicy(attempts=3, first_delay_s=0.02)
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def here(redis_server: RedisServer) -> tuple[str, str]:
    return redis_server.url, f"k{next(_NAMES)}"


async def in_thread(running: World, work: Any) -> Any:
    """Run ``work(client)`` with a sync client, away from the router's event loop."""

    def run() -> Any:
        with Client(running.address) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_a_sync_stream_is_read_event_by_event(here: tuple[str, str]) -> None:
    async with world(*here) as running:

        def work(client: Client) -> list[str | None]:
            events = list(client.chat("Hi", max_tokens=3, seed=SEED))
            assert "".join(event.delta.text for event in events) == client.chat_text("Hi", max_tokens=3, seed=SEED)
            assert client.generate_text([5, 6], max_tokens=3, seed=SEED) == running.text(range(SEED, SEED + 3))
            return [event.WhichOneof("event") for event in events]

        assert await in_thread(running, work) == ["started", "delta", "delta", "delta", "finished"]


async def test_sync_single_answers(here: tuple[str, str]) -> None:
    async with world(*here) as running:

        def work(client: Client) -> None:
            ids = client.tokenize("Hello world").token_ids
            assert client.detokenize(ids) == "Hello world"
            assert len(client.tokenize(messages=[("user", "Hi")]).token_ids) > len(ids)
            assert [model.name for model in client.models()] == ["m"]
            assert client.model().name == "m"
            assert [group.group_id for group in client.cluster().groups] == ["g0"]

        await in_thread(running, work)


async def test_a_sync_stream_is_given_up_in_every_way(here: tuple[str, str]) -> None:
    async with world(*here) as running:

        def by_cancel(client: Client) -> None:
            stream = client.generate("x", max_tokens=FOREVER)
            next(stream)
            threading.Timer(0.1, stream.cancel).start()
            for _ in stream:  # it ends, and by no error
                pass
            stream.cancel()

        def by_leaving(client: Client) -> None:
            with client.generate("x", max_tokens=FOREVER) as stream:
                next(stream)

        def by_dropping(client: Client) -> None:
            stream = client.generate("x", max_tokens=FOREVER)
            next(stream)
            del stream
            gc.collect()

        def by_closing(client: Client) -> None:
            next(client.generate("x", max_tokens=FOREVER))
            client.close()

        for way in (by_cancel, by_leaving, by_dropping, by_closing):
            await in_thread(running, way)
            await eventually(lambda: running.groups[0].server.open_requests == 0, f"{way.__name__} frees the group")


async def test_an_async_stream_is_given_up_in_every_way(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        client = running.client

        async def by_cancel() -> None:
            stream = client.generate("x", max_tokens=FOREVER)
            await anext(stream)
            asyncio.get_running_loop().call_later(0.1, stream.cancel)
            async for _ in stream:  # it ends, and by no error
                pass

        async def by_leaving() -> None:
            async with client.generate("x", max_tokens=FOREVER) as stream:
                await anext(stream)

        async def by_cancelling_the_task() -> None:
            task = asyncio.create_task(client.generate("x", max_tokens=FOREVER).text())
            await eventually(lambda: running.groups[0].server.open_requests == 1, "it runs")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()

        for way in (by_cancel, by_leaving, by_cancelling_the_task):
            await way()
            await eventually(lambda: running.groups[0].server.open_requests == 0, f"{way.__name__} frees the group")


async def test_deadlines_of_calls_and_of_clients(here: tuple[str, str]) -> None:
    async with world(*here) as running:

        def work(client: Client) -> None:
            with pytest.raises(DeadlineExceeded):
                client.generate("x", max_tokens=FOREVER, timeout_s=0.2).text()
            with Client(running.address, timeout_s=0.2) as hurried, pytest.raises(DeadlineExceeded):
                hurried.generate_text("x", max_tokens=FOREVER)

        await in_thread(running, work)
        await eventually(lambda: running.groups[0].server.open_requests == 0, "the group dropped them")


async def test_a_wrong_option_is_raised_by_the_call_itself(here: tuple[str, str]) -> None:
    async with world(*here) as running:
        with pytest.raises(InvalidRequest, match="temprature"):
            running.client.chat("x", temprature=1)


def test_nobody_there_is_an_error_and_no_hang() -> None:
    with Client(f"127.0.0.1:{free_port()}", retry=FAST) as client:
        with pytest.raises(NoGroup):
            client.chat_text("x")
        with pytest.raises(NoGroup):
            client.models()


# -- retries ---------------------------------------------------------------------------------------------------------


class Moody(inference_pb2_grpc.InferenceServicer):
    """Ends calls with ``errors`` in turn (None: an answer), then well; ``late``: an error after the first event."""

    def __init__(self, *errors: QuireError | None, late: QuireError | None = None) -> None:
        self.errors = list(errors)
        self.late = late
        self.calls = 0

    async def _refuse(self, context: Any) -> None:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            await abort(context, error)

    async def Generate(self, request: Any, context: Any) -> None:
        await self._refuse(context)
        await context.write(GenerateEvent(delta=Delta(text="hello")))
        if self.late is not None:
            await abort(context, self.late)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        await self._refuse(context)
        return inference_pb2.ListModelsResponse()


@asynccontextmanager
async def serving(servicer: Moody) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call_in_every_way(address: str, retry: RetryPolicy) -> list[Any]:
    """Sync and async, a stream and a single answer; results or errors."""

    def sync(work: Any) -> Any:
        with Client(address, retry=retry) as client:
            return work(client)

    async with AsyncClient(address, retry=retry) as client:
        calls = [
            asyncio.to_thread(sync, lambda c: c.generate_text("x")),
            asyncio.to_thread(sync, lambda c: c.models()),
            client.generate_text("x"),
            client.models(),
        ]
        return [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls]


async def test_a_refusal_that_time_mends_is_tried_again() -> None:
    servicer = Moody(*[Draining("x"), Overloaded("x", retry_after_ms=30), None] * 4)
    async with serving(servicer) as address:
        assert await call_in_every_way(address, FAST) == ["hello", [], "hello", []]
        assert servicer.calls == 12


async def test_not_for_ever() -> None:
    servicer = Moody(*[Overloaded("x")] * 100)
    async with serving(servicer) as address:
        assert [type(result) for result in await call_in_every_way(address, FAST)] == [Overloaded] * 4
        assert servicer.calls == 12


async def test_what_time_does_not_mend_is_not_tried_again() -> None:
    for error in (InvalidRequest("x"), GroupLost("x"), QuireError("x")):
        servicer = Moody(*[error] * 4)
        async with serving(servicer) as address:
            assert [type(result) for result in await call_in_every_way(address, FAST)] == [type(error)] * 4
            assert servicer.calls == 4


async def test_a_stream_that_has_begun_is_never_begun_again() -> None:
    servicer = Moody(late=Draining("x"))
    async with serving(servicer) as address:
        for _ in range(2):
            async with AsyncClient(address, retry=FAST) as client:
                stream = client.generate("x")
                assert (await anext(stream)).delta.text == "hello"
                with pytest.raises(Draining):
                    await anext(stream)
        results = await call_in_every_way(address, FAST)
        assert [type(results[0]), type(results[2])] == [Draining, Draining]
        assert servicer.calls == 6


async def test_a_cancel_ends_the_wait_for_a_retry() -> None:
    servicer = Moody(*[Overloaded("x", retry_after_ms=600_000)] * 4)
    patient = RetryPolicy(attempts=3)
    async with serving(servicer) as address:
        with Client(address, retry=patient) as client:
            stream = client.generate("x")
            reading = asyncio.create_task(asyncio.to_thread(list, stream))
            await eventually(lambda: servicer.calls == 1, "it was refused")
            await asyncio.sleep(0.2)
            stream.cancel()
            assert await asyncio.wait_for(reading, 20) == []
        async with AsyncClient(address, retry=patient) as client:
            waiting = client.generate("x")
            reading = asyncio.create_task(waiting.text())
            await eventually(lambda: servicer.calls == 2, "it was refused")
            await asyncio.sleep(0.2)
            waiting.cancel()
            assert await asyncio.wait_for(reading, 20) == ""
        assert servicer.calls == 2, "nobody called again"


async def test_retries_end_with_the_deadline() -> None:
    servicer = Moody(*[Overloaded("x", retry_after_ms=60_000)] * 100)
    async with serving(servicer) as address, AsyncClient(address, retry=FAST, timeout_s=30) as client:
        with pytest.raises(Overloaded):
            await client.generate_text("x")
        assert servicer.calls == 1
