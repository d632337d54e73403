"""Routers in the test's own process, with the real tokenizer of SmolLM2, which is loaded once."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import parse
from cluster.pb.inference_pb2 import GenerateEvent
from router.client import AsyncClient
from router.served import ServedModel
from router.server import RouterServer
from router.tokenizer import Tokenizer
from tests.support.models import smollm2
from tests.support.scripted_group import TOKEN, ScriptedGroup, eventually

VOCAB_SIZE = 49_152
SEED = 5000
"""Of ``ask``: scripted groups count up from it."""


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(smollm2())


@asynccontextmanager
async def running_router(
    redis_url: str,
    cluster: str,
    *,
    sessions: dict[str, Any] | None = None,
    tenants: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[RouterServer]:
    """A router that serves the model "m"; ``settings`` are fields of RouterConfig, the others sections of their own."""
    config = parse(
        {
            "cluster": cluster,
            "redis": redis_url,
            "worker_token": TOKEN,
            "cluster_secret": "secret",
            "sessions": sessions or {},
            "tenants": tenants or {},
            "router": {"port": 0, "group_silence_s": 1.0, **settings},
        }
    )
    server = RouterServer(config, ServedModel("m", tokenizer(), VOCAB_SIZE, 8192))
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


@dataclass
class World:
    """A router and its groups."""

    router: RouterServer
    groups: list[ScriptedGroup]
    client: AsyncClient

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.router.port}"

    def channel(self, **options: int) -> grpc.aio.Channel:
        """A plain channel of its own, with gRPC's options."""
        return grpc.aio.insecure_channel(
            self.address, options=[("grpc.use_local_subchannel_pool", 1), *options.items()]
        )

    def text(self, ids: list[int] | range) -> str:
        """What these tokens look like."""
        return tokenizer().decode(list(ids), skip_special_tokens=True)


@asynccontextmanager
async def world(
    redis_url: str, cluster: str, groups: int = 1, *, hello: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[World]:
    """``groups`` scripted groups and a router that is connected to all of them, and a client."""
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(ScriptedGroup(redis_url, cluster, f"g{i}", **hello or {}))
            for i in range(groups)
        ]
        router = await stack.enter_async_context(running_router(redis_url, cluster, **settings))
        await eventually(lambda: len(router._groups.usable("m")) == groups, "all groups are connected")
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{router.port}"))
        yield World(router, running, client)


class Answer:
    """Everything that came over one stream."""

    def __init__(self, events: list[GenerateEvent]) -> None:
        self.kinds = [event.WhichOneof("event") for event in events]
        self.started = next((event.started for event in events if event.HasField("started")), None)
        self.deltas = [event.delta for event in events if event.HasField("delta")]
        self.finished = [event.finished for event in events if event.HasField("finished")]
        self.stored = next((event.stored for event in events if event.HasField("stored")), None)

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]


async def ask(running: World, prompt: Any = "Hello", **options: Any) -> Answer:
    stream = running.client.generate(prompt, **{"seed": SEED, "max_tokens": 20, "timeout_s": 60.0, **options})
    return Answer([event async for event in stream])


async def health(channel: grpc.aio.Channel, service: str = "") -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
