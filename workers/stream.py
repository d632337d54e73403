"""One router's stream: what is open on it, and what waits to be sent, bounded in bytes and in order.

    on_report ─▶ [step][cache][step][LOAD][snapshot][step] ─▶ frames() ─▶ gRPC, as fast as the router reads

Loads are a mark in the queue, made when they are sent: a slow router gets fewer and never an old one. A snapshot is a
mark too, cut into frames when its turn comes: its hashes exist anyway, so it does not count against the bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.blocks import BlockHash
from cluster.errors import InvalidRequest, QuireError, SlowConsumer
from cluster.pb import common_pb2, worker_pb2
from workers.request import Failed, Finished, Output
from workers.wire import failure, to_delta, to_wire_hashes

CHUNK_HASHES = 4096
"""Hashes of one cache frame: 64 KiB of them, so that a long snapshot does not hold up the tokens behind it for long."""


class _Mark(Enum):
    LOAD = "load"
    END = "end"


@dataclass(frozen=True, slots=True)
class _Snapshot:
    hashes: Sequence[BlockHash]


@dataclass(slots=True)
class _Open:
    attempt: int
    samples: int  # that have not ended


class RouterStream:
    """Lives on the event loop. ``ended`` resolves when the stream must be closed at once, with the reason."""

    def __init__(self, owner: str, max_bytes: int, load: Callable[[RouterStream], common_pb2.GroupLoad]) -> None:
        self.owner = owner
        self.ended: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()
        self.farewell: QuireError | None = None
        self.last_submit_sequence = 0
        self.has_snapshot = False  # before it there is nothing that events could be added to
        self.sent_load: tuple[int | bool, ...] = ()
        self.load_time = float("-inf")
        self._load = load
        self._max_bytes = max_bytes
        self._open: dict[str, _Open] = {}
        self._queue: deque[worker_pb2.GroupFrame | _Snapshot | _Mark] = deque()
        self._load_queued = False
        self._bytes = 0
        self._ready = asyncio.Event()
        self._cache_sequence = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def open_request(self, request_id: str, attempt: int, samples: int) -> int | None:
        """Note a submit. Returns the older attempt that it replaces, which must be cancelled; None without one.

        Raises InvalidRequest for an attempt that is not newer than the open one.
        """
        known = self._open.get(request_id)
        if known is not None and attempt <= known.attempt:
            raise InvalidRequest.of("attempt", attempt, f"must be above {known.attempt}, which is running")
        self._open[request_id] = _Open(attempt, samples)
        return known.attempt if known is not None else None

    def close_request(self, request_id: str, attempt: int) -> bool:
        """Forget a request, so that nothing of it is sent any more; False when it was not open."""
        known = self._open.get(request_id)
        if known is None or known.attempt != attempt:
            return False
        del self._open[request_id]
        return True

    def _admits(self, output: Output) -> bool:
        """Whether the router still waits for this; an older attempt's output, or a cancelled one's, is dropped here."""
        known = self._open.get(output.key.request_id)
        if known is None or known.attempt != output.key.attempt:
            return False
        if isinstance(output.end, Finished):
            known.samples -= 1
        if isinstance(output.end, Failed) or not known.samples:
            del self._open[output.key.request_id]
        return True

    # -- what is to be sent ------------------------------------------------------------------------------------------

    def send_step(self, step: int, outputs: Iterable[Output]) -> None:
        """One frame with all that a step did for this router."""
        deltas = [to_delta(output) for output in outputs if self._admits(output)]
        if deltas:
            self._push(worker_pb2.GroupFrame(step=worker_pb2.Step(step=step, deltas=deltas)))

    def send_failure(self, request_id: str, attempt: int, error: QuireError) -> None:
        """The end of a request that did not reach the engine."""
        self._push(worker_pb2.GroupFrame(step=worker_pb2.Step(deltas=[failure(request_id, attempt, error)])))

    def send_events(self, stored: Sequence[BlockHash], dropped: Sequence[BlockHash]) -> None:
        """What changed since the snapshot, or since the last call. No block is in both lists."""
        for start in range(0, max(len(stored), len(dropped)), CHUNK_HASHES):
            some = slice(start, start + CHUNK_HASHES)
            events = worker_pb2.CacheEvents(stored=to_wire_hashes(stored[some]), dropped=to_wire_hashes(dropped[some]))
            self._push(worker_pb2.GroupFrame(cache=events))

    def send_snapshot(self, hashes: Sequence[BlockHash]) -> None:
        """All blocks that can be shared."""
        self.has_snapshot = True
        self._queue.append(_Snapshot(hashes))
        self._ready.set()

    def send_load(self) -> None:
        """The group's load, as it will be when its turn comes."""
        if not self._load_queued:
            self._load_queued = True
            self._queue.append(_Mark.LOAD)
            self._ready.set()

    def finish(self, error: QuireError) -> None:
        """Close the stream with ``error`` once everything queued has been sent."""
        if self.farewell is None:
            self.farewell = error
            self._queue.append(_Mark.END)
            self._ready.set()

    def end(self, error: QuireError) -> None:
        """Close the stream with ``error`` at once; what is queued is dropped."""
        self._queue.clear()
        if not self.ended.done():
            self.ended.set_result(error)

    def _push(self, frame: worker_pb2.GroupFrame) -> None:
        if self.ended.done() or self.farewell is not None:
            return
        self._bytes += frame.ByteSize()
        if self._bytes > self._max_bytes:
            self.end(SlowConsumer(f"the router left more than {self._max_bytes} bytes unread", limit=self._max_bytes))
            return
        self._queue.append(frame)
        self._ready.set()

    # -- sending -----------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncIterator[worker_pb2.GroupFrame]:
        """Everything in order, for ever, or until ``finish``."""
        while True:
            while self._queue:
                item = self._queue.popleft()
                if item is _Mark.END:
                    return
                for frame in self._expanded(item):
                    yield frame
            self._ready.clear()
            await self._ready.wait()

    def _expanded(self, item: worker_pb2.GroupFrame | _Snapshot | _Mark) -> Iterator[worker_pb2.GroupFrame]:
        if isinstance(item, _Mark):
            self._load_queued = False
            yield worker_pb2.GroupFrame(load=self._load(self))
        elif isinstance(item, _Snapshot):
            for frame in _snapshot_frames(item.hashes):
                yield self._numbered(frame)
        else:
            self._bytes -= item.ByteSize()
            yield self._numbered(item) if item.HasField("cache") else item

    def _numbered(self, frame: worker_pb2.GroupFrame) -> worker_pb2.GroupFrame:
        # Numbered when sent: queueing order is sending order, and a frame that is never sent leaves no gap.
        self._cache_sequence += 1
        frame.cache.sequence = self._cache_sequence
        return frame


def _snapshot_frames(hashes: Sequence[BlockHash]) -> Iterator[worker_pb2.GroupFrame]:
    """At least one frame: an empty snapshot is news too. Only the first says "snapshot": there a router begins anew."""
    for start in range(0, max(1, len(hashes)), CHUNK_HASHES):
        end = start + CHUNK_HASHES
        yield worker_pb2.GroupFrame(
            cache=worker_pb2.CacheEvents(
                snapshot=start == 0, more=end < len(hashes), stored=to_wire_hashes(hashes[start:end])
            )
        )
