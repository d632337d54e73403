"""The router's side of the worker protocol, as plainly as can be, for tests of a group's server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from cluster.errors import QuireError, from_rpc_error
from cluster.pb import common_pb2, worker_pb2, worker_pb2_grpc
from cluster.rpc import WORKER_CHANNEL_OPTIONS, WORKER_PROTOCOL_VERSION, bearer

ROOT = bytes(range(32))
WAIT_S = 60.0


class StubRouter:
    """One stream. Everything received is kept: ``deltas`` by (request id, attempt), the latest ``load``, the blocks."""

    def __init__(self, address: str, token: str, router_id: str = "router", *, read: bool = True) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=WORKER_CHANNEL_OPTIONS)
        stub = worker_pb2_grpc.WorkerGroupStub(self._channel)
        self.call: Any = stub.Connect(metadata=bearer(token))
        self._router_id = router_id
        self._reads = read
        self._sequence = itertools.count(1)
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self.hello = worker_pb2.GroupHello()
        self.load = common_pb2.GroupLoad()
        self.loads = 0
        self.deltas: dict[tuple[str, int], list[worker_pb2.SequenceDelta]] = {}
        self.step_frames: list[worker_pb2.Step] = []
        self.blocks: set[bytes] = set()
        self.cache_frames: list[worker_pb2.CacheEvents] = []
        self.error: QuireError | None = None
        self.ended = False

    async def __aenter__(self) -> StubRouter:
        await self.send(
            hello=worker_pb2.RouterHello(router_id=self._router_id, protocol_version=WORKER_PROTOCOL_VERSION)
        )
        frame = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert frame.WhichOneof("frame") == "hello"
        self.hello = frame.hello
        if self._reads:
            self.start_reading()
        return self

    def start_reading(self) -> None:
        self._reader = asyncio.create_task(self._read())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Vanish, as a killed router does."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self.call.cancel()
        await self._channel.close()

    async def send(self, **frame: Any) -> None:
        await asyncio.wait_for(self.call.write(worker_pb2.RouterFrame(**frame)), WAIT_S)

    async def submit(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), **settings: Any) -> None:
        """``max_tokens``, ``seed`` and other sampling settings by name; the rest are fields of Submit."""
        names = {field.name for field in worker_pb2.Submit.DESCRIPTOR.fields}
        fields = {name: value for name, value in settings.items() if name in names}
        sampling = {"max_tokens": 4, "seed": 0, "temperature": 0.0}
        sampling |= {name: value for name, value in settings.items() if name not in names}
        await self.send(
            submit=worker_pb2.Submit(
                **{
                    "request_id": request_id,
                    "attempt": 1,
                    "sequence": next(self._sequence),
                    "model": self.hello.model,
                    "prompt_token_ids": prompt,
                    "sampling": common_pb2.SamplingParams(**sampling),
                    "tenant": "anonymous",
                    "root": ROOT,
                    **fields,
                }
            )
        )

    async def cancel(self, request_id: str, attempt: int = 1) -> None:
        await self.send(cancel=worker_pb2.Cancel(request_id=request_id, attempt=attempt))

    def tokens(self, request_id: str, attempt: int = 1, index: int = 0) -> list[int]:
        deltas = self.deltas.get((request_id, attempt), [])
        return [token for delta in deltas if delta.index == index for token in delta.token_ids]

    def end(self, request_id: str, attempt: int = 1) -> worker_pb2.SequenceDelta | None:
        """The delta that ended it (its last sample), if any did."""
        ends = [delta for delta in self.deltas.get((request_id, attempt), []) if delta.WhichOneof("end")]
        return ends[-1] if ends else None

    async def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until ``condition()`` holds, looked at after each frame. Fails, with ``what``, when it never does."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"never: {what}; error {self.error}, load {self.load}") from None

    async def finish(self, request_id: str, attempt: int = 1) -> worker_pb2.SequenceDelta:
        await self.wait(lambda: self.end(request_id, attempt) or self.ended, f"{request_id} ends")
        ended = self.end(request_id, attempt)
        assert ended is not None, f"the stream ended first: {self.error}"
        return ended

    async def _read(self) -> None:
        try:
            while (frame := await self.call.read()) is not grpc.aio.EOF:
                self._take(frame)
                self._news.set()
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        finally:
            self.ended = True
            self._news.set()

    def _take(self, frame: worker_pb2.GroupFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "step":
            self.step_frames.append(frame.step)
            for delta in frame.step.deltas:
                self.deltas.setdefault((delta.request_id, delta.attempt), []).append(delta)
        elif kind == "load":
            self.load = frame.load
            self.loads += 1
        elif kind == "cache":
            self.cache_frames.append(frame.cache)
            assert frame.cache.sequence == len(self.cache_frames), "a gap in the cache events"
            if frame.cache.snapshot:
                self.blocks = set()
            self.blocks |= set(frame.cache.stored)
            self.blocks -= set(frame.cache.dropped)
        else:
            raise AssertionError(f"unexpected frame {kind}")
