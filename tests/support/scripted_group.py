"""A whole group without a model: a real group server around a scripted engine, announced in a real Redis.

Tokens count up from the request's seed, through moves too, so that a test knows every token of every stream.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from cluster.config import WorkerConfig
from cluster.membership import GroupRecord, Registry
from cluster.pb import worker_pb2
from cluster.rpc import WORKER_PROTOCOL_VERSION
from tests.support.scripted_engine import ScriptedEngine
from workers.request import Output, Request
from workers.server import GroupServer

TOKEN = "worker-token"
WAIT_S = 60.0


LARGEST_TOKEN = 40_000


class ResumingEngine(ScriptedEngine):
    """Goes on behind the output that a moved request brings along, as the real draw does."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.submitted = [*getattr(self, "submitted", []), request]
        self.done[request.key] = len(request.outputs[0]) if request.outputs else 0

    def step(self, now: float) -> list[Output]:
        return [
            replace(output, token_ids=tuple(token % LARGEST_TOKEN for token in output.token_ids))
            for output in super().step(now)
        ]


class ScriptedGroup:
    """``async with`` starts and announces it; ``kill`` ends it as kill -9 does, ``freeze`` as SIGSTOP does."""

    def __init__(self, redis_url: str, cluster: str, group_id: str, **settings: Any) -> None:
        """``settings``: fields of GroupHello, or of WorkerConfig."""
        names = {field.name for field in worker_pb2.GroupHello.DESCRIPTOR.fields}
        hello: dict[str, Any] = {
            "protocol_version": WORKER_PROTOCOL_VERSION,
            "group_id": group_id,
            "incarnation": secrets.token_hex(16),
            "model": "m",
            "namespace": "n" * 64,
            "block_tokens": 16,
            "total_blocks": 100,
            "max_context_tokens": 1 << 20,
            "vocab_size": 49_152,
            "max_running": 32,
            "max_batch_tokens": 512,
            "max_waiting": 1000,
            "tp": 1,
            "device": "cpu",
            "dtype": "float32",
            "heartbeat_ms": 50,
        }
        self.hello = worker_pb2.GroupHello(**hello | {key: val for key, val in settings.items() if key in names})
        worker = {key: value for key, value in settings.items() if key not in names}
        self.config = WorkerConfig(heartbeat_ms=self.hello.heartbeat_ms, **worker)
        self.engine = ResumingEngine()
        self.address = ""
        self.broken: list[BaseException] = []
        self._registry = Registry(redis_url, cluster)

    async def __aenter__(self) -> ScriptedGroup:
        self.server = GroupServer(cast(Any, self.engine), self.hello, TOKEN, self.config, on_broken=self.broken.append)
        port = await self.server.start(self.config.host)
        self.address = f"{self.config.host}:{port}"
        await self._registry.announce(self.record, lease_s=2.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.engine.gate.set()
        await self._registry.close()
        await self.server.stop()

    @property
    def record(self) -> GroupRecord:
        return GroupRecord(
            group_id=self.hello.group_id,
            incarnation=self.hello.incarnation,
            model=self.hello.model,
            namespace=self.hello.namespace,
            address=self.address,
            tp=self.hello.tp,
            device=self.hello.device,
            dtype=self.hello.dtype,
        )

    @property
    def requests(self) -> list[Request]:
        """Everything that was ever submitted."""
        return list(getattr(self.engine, "submitted", []))

    async def kill(self) -> None:
        """The port and every stream are gone at once, and nobody says goodbye; the record stays for its lease."""
        await self.server._server.stop(None)

    def freeze(self) -> None:
        """Connections stay open, and nothing is ever sent again."""
        self.engine.gate.clear()
        task = self.server._beating
        assert task is not None
        task.cancel()

    async def withdraw(self) -> None:
        """Leave Redis and go on serving."""
        await self._registry.withdraw()


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition()`` holds; fails, with ``what``, when it never does."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - of parts that set no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None
