"""A rank's own end of the tier: one thread that reads, one that writes, and nothing that can stop either for good.

What is read is verified where it arrived before a byte of it reaches a page. What is written is copied out of the pages
at once, by the thread that computes, into buffers whose number is bounded; checksums and Redis come behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from cluster.blocks import BlockHash
from cluster.telemetry import get_logger
from cluster.tiers.chunks import CHECKSUM_BYTES, HEADER_BYTES, ChunkShape, CorruptChunk, check_header, checksum, header
from cluster.tiers.redis import TierError
from workers.attention.interface import KVPages
from workers.kv_codec import Bytes, KVCodec
from workers.tier import Chunk, FetchOrder, Report, StoreOrder, TransferReport

_log = get_logger("tier")

_READ_AT_ONCE_BYTES = 2 << 20
"""Of one round trip: between two a fetch looks at its deadline."""

_CLOSE_S = 5.0


class ChunkStore(Protocol):
    """What is needed of cluster.tiers.redis.RedisTier. Each call raises TierError, within its own timeout."""

    def read(self, hashes: list[BlockHash], span: range, limit_s: float) -> list[tuple[memoryview, memoryview] | None]:
        """Header and span of each; raises after ``limit_s`` at the latest."""
        ...

    def write(self, block_hash: BlockHash, value: memoryview, ttl_s: int) -> None:
        """A whole value."""
        ...

    def write_part(self, block_hash: BlockHash, suffix: bytes, offset: int, part: memoryview) -> None:
        """A part of a temporary one."""
        ...

    def delete(self, hashes: list[BlockHash]) -> None:
        """Forget these."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class RankTransfers:
    """See Transfers. ``reads`` and ``writes`` are two connections, so that neither waits for the other.

    The rank holds ``heads`` of the whole model's KV heads and writes ``stored_heads`` of them: all, or none where
    another rank holds the same. ``buffer_bytes`` bounds what is staged and not yet written.
    """

    def __init__(
        self,
        pages: KVPages,
        reads: ChunkStore,
        writes: ChunkStore,
        *,
        shape: ChunkShape,
        heads: range,
        stored_heads: range,
        buffer_bytes: int,
        report: Report,
    ) -> None:
        self._codec = KVCodec(pages, shape, heads)
        self._reads, self._writes = reads, writes
        self._shape = shape
        self._heads = heads
        self._span = shape.span(heads)
        self._stores = bool(stored_heads)
        self._report = report
        # A whole value begins with its header, and so does the part of the rank that holds the first head.
        self._lead = HEADER_BYTES if heads.start == 0 else 0
        self._staging = _Staging(self._lead + len(self._span), buffer_bytes)
        self._closing = False
        self._lock = threading.Lock()  # no order comes behind the end of a queue, where nobody would answer it
        self._to_read: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True)
            for jobs, name in ((self._to_read, "tier reads"), (self._to_write, "tier writes"))
        ]
        for thread in self._threads:
            thread.start()

    def fetch(self, order: FetchOrder) -> None:
        """See Transfers."""
        until = time.monotonic() + order.timeout_s
        self._put(self._to_read, order.ticket, lambda done: self._fetch(order, until, done))

    def stage(self, order: StoreOrder) -> None:
        """See Transfers."""
        if not self._stores:
            self._report(TransferReport(order.ticket, len(order.chunks), 0, 0.0))
            return
        staged: list[Bytes] = []
        failed = False
        try:
            for chunk in order.chunks:
                buffer = self._staging.take()
                if buffer is None:
                    break
                staged.append(buffer)
                self._codec.gather(chunk.pages, buffer[self._lead :])
        except Exception:  # noqa: BLE001 - it is the thread of the steps, and a step needs no tier
            _log.exception("order %d cannot be staged", order.ticket)
            self._staging.give_back(staged)
            staged, failed = [], True
        self._put(self._to_write, order.ticket, lambda done: self._store(order, staged, done, failed=failed))

    def close(self) -> None:
        """See Transfers."""
        with self._lock:
            self._closing = True
            for jobs in (self._to_read, self._to_write):
                jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._reads.close()
        self._writes.close()

    def _put(
        self, jobs: queue.SimpleQueue[Callable[[], None] | None], ticket: int, carry_out: Callable[[_Done], None]
    ) -> None:
        with self._lock:
            if not self._closing:
                jobs.put(lambda: self._answered(ticket, carry_out))
                return
        self._report(TransferReport(ticket, 0, 0, 0.0, problem="error"))

    # -- both threads ------------------------------------------------------------------------------------------------

    def _work(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()

    def _answered(self, ticket: int, carry_out: Callable[[_Done], None]) -> None:
        """Exactly one report, whatever happens."""
        done, begun = _Done(), time.perf_counter()
        try:
            if self._closing:
                done.problem = "error"
            else:
                carry_out(done)
        except TierError as error:
            done.problem = error.problem
        except Exception:  # noqa: BLE001 - the thread must outlive it, and the leader must hear of it
            _log.exception("order %d failed", ticket)
            done.problem = "error"
        seconds = time.perf_counter() - begun
        try:
            self._report(TransferReport(ticket, done.chunks, done.bytes, seconds, tuple(done.corrupt), done.problem))
        except Exception:  # noqa: BLE001
            _log.exception("order %d could not be reported", ticket)

    # -- the reading thread -------------------------------------------------------------------------------------------

    def _fetch(self, order: FetchOrder, until: float, done: _Done) -> None:
        if time.monotonic() >= until:
            done.problem = "late"
            return
        at_once = max(1, _READ_AT_ONCE_BYTES // len(self._span))
        for begin in range(0, len(order.chunks), at_once):
            left_s = until - time.monotonic()
            if left_s <= 0 or self._closing:
                return  # what is there is kept
            some = order.chunks[begin : begin + at_once]
            found = self._reads.read([chunk.hash for chunk in some], self._span, left_s)
            for chunk, parts in zip(some, found, strict=True):
                if parts is None or not self._take(chunk, *parts, done):
                    return

    def _take(self, chunk: Chunk, head: memoryview, body: memoryview, done: _Done) -> bool:
        """Verify, then write pages. False where it is not what it should be; it is deleted then."""
        try:
            check_header(self._shape, chunk.hash, head)
            self._verify(chunk.hash, body)
        except CorruptChunk as error:
            _log.warning("chunk %s is corrupt (%s): deleted", chunk.hash.hex()[:16], error)
            done.corrupt.append(done.chunks)
            self._reads.delete([chunk.hash])
            return False
        self._codec.scatter(body, chunk.pages)
        done.chunks += 1
        done.bytes += len(head) + len(body)
        return True

    def _verify(self, block_hash: BlockHash, body: memoryview) -> None:
        if len(body) != len(self._span):
            raise CorruptChunk(f"{len(body)} bytes instead of {len(self._span)}")
        for place, head in enumerate(self._heads):
            begin = place * self._shape.stride
            payload = body[begin + CHECKSUM_BYTES : begin + self._shape.stride]
            if checksum(block_hash, head, payload) != body[begin : begin + CHECKSUM_BYTES]:
                raise CorruptChunk(f"head {head}")

    # -- the writing thread -------------------------------------------------------------------------------------------

    def _store(self, order: StoreOrder, staged: list[Bytes], done: _Done, *, failed: bool) -> None:
        try:
            for chunk, ttl_s, buffer in zip(order.chunks, order.ttls_s, staged, strict=False):
                if self._closing:
                    return
                self._write(chunk.hash, ttl_s, order.suffix, buffer)
                done.chunks += 1
                done.bytes += len(buffer)
            if len(staged) < len(order.chunks):
                done.problem = "error" if failed else "buffer"
        finally:
            self._staging.give_back(staged)

    def _write(self, block_hash: BlockHash, ttl_s: int, suffix: bytes, buffer: Bytes) -> None:
        view = memoryview(buffer)  # type: ignore[arg-type]  # it is a buffer
        view[: self._lead] = header(self._shape, block_hash)[: self._lead]
        for place, head in enumerate(self._heads):
            begin = self._lead + place * self._shape.stride
            payload = view[begin + CHECKSUM_BYTES : begin + self._shape.stride]
            view[begin : begin + CHECKSUM_BYTES] = checksum(block_hash, head, payload)
        if suffix:
            self._writes.write_part(block_hash, suffix, self._span.start - self._lead, view)
        else:
            self._writes.write(block_hash, view, ttl_s)


class _Done:
    """How far an order has come."""

    def __init__(self) -> None:
        self.chunks = 0
        self.bytes = 0
        self.corrupt: list[int] = []
        self.problem = ""


class _Staging:
    """Buffers of one size, at most ``limit_bytes`` of them; made when first needed, then used again."""

    def __init__(self, size: int, limit_bytes: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._left = limit_bytes // size
        self._free: list[Bytes] = []

    def take(self) -> Bytes | None:
        """None: all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._left:
                return None
            self._left -= 1
        return np.empty(self._size, np.uint8)

    def give_back(self, buffers: list[Bytes]) -> None:
        """After use; whoever gave them has no more of them."""
        with self._lock:
            self._free.extend(buffers)
