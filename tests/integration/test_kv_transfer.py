"""Ranks that write chunks to a real Redis and read them back: every layout, every damage, every way to be refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cluster.blocks import BlockHash
from cluster.tiers.chunks import HEADER_BYTES, ChunkShape, StoredDType, chunk_key
from cluster.tiers.connection import connect
from cluster.tiers.redis import RedisTier, TierError
from tests.support.proxy import slow_proxy
from tests.support.redis import RedisServer, running_redis
from workers import kv_transfer
from workers.attention.interface import KVPages
from workers.kv_transfer import RankTransfers
from workers.tier import Chunk, FetchOrder, StoreOrder, TransferReport

LAYERS, HEADS, BLOCK, DIM, BLOCKS = 3, 3, 8, 16, 24
SHAPE = ChunkShape(bytes(32), tokens=16, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32")
TIMEOUT_S = 0.5
CHUNKS = tuple(Chunk(BlockHash(bytes([i]) * 32), i, (2 * i, 2 * i + 1)) for i in range(4))
ELSEWHERE = tuple(Chunk(chunk.hash, chunk.number, (23 - 2 * i, 22 - 2 * i)) for i, chunk in enumerate(CHUNKS))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


def whole(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(LAYERS, 2, BLOCKS, HEADS, BLOCK, DIM).to(dtype)


class Rank:
    """One rank's pages and its end of the tier."""

    def __init__(
        self, url: str, heads: range, numbers: torch.Tensor | None = None, *, shape: ChunkShape = SHAPE,
        buffer_bytes: int = 1 << 30, stores: bool = True, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.pages = KVPages(LAYERS, (BLOCKS, len(heads), BLOCK, DIM), dtype, torch.device("cpu"))
        if numbers is not None:
            self.pages.whole.copy_(numbers[:, :, :, heads.start : heads.stop])
        self.news = threading.Condition()
        self.reports: list[TransferReport] = []
        reads, writes = (RedisTier(connect(url, TIMEOUT_S), "test", shape) for _ in range(2))
        self.end = RankTransfers(
            self.pages, reads, writes, shape=shape, heads=heads, stored_heads=heads if stores else range(0),
            buffer_bytes=buffer_bytes, report=self._take,
        )  # fmt: skip

    def _take(self, report: TransferReport) -> None:
        with self.news:
            self.reports.append(report)
            self.news.notify_all()

    def done(self, ticket: int) -> TransferReport:
        def mine() -> list[TransferReport]:
            return [one for one in self.reports if one.ticket == ticket]

        with self.news:
            assert self.news.wait_for(mine, 20), "no report"
        (found,) = mine()
        return found

    def store(self, ticket: int = 1, suffix: bytes = b"", chunks: tuple[Chunk, ...] = CHUNKS) -> TransferReport:
        self.end.stage(StoreOrder(ticket, chunks, (100,) * len(chunks), suffix))
        return self.done(ticket)

    def fetch(self, ticket: int = 2, chunks: tuple[Chunk, ...] = ELSEWHERE, timeout_s: float = 10) -> TransferReport:
        self.end.fetch(FetchOrder(ticket, chunks, timeout_s))
        return self.done(ticket)

    def holds(self, numbers: torch.Tensor, heads: range, chunks: int = len(CHUNKS)) -> bool:
        """Whether the pages elsewhere are those of the chunks."""
        return all(
            torch.equal(self.pages.whole[:, :, there], numbers[:, :, here, heads.start : heads.stop])
            for source, target in list(zip(CHUNKS, ELSEWHERE, strict=True))[:chunks]
            for here, there in zip(source.pages, target.pages, strict=True)
        )


@pytest.fixture
def made() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tier ")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_one_rank_writes_it_reads_back_bit_for_bit(
    server: RedisServer, made: list[Rank], dtype: torch.dtype
) -> None:
    name: StoredDType = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    shape, numbers = replace(SHAPE, dtype=name), whole(dtype)
    rank = Rank(server.url, range(HEADS), numbers, shape=shape, dtype=dtype)
    made.append(rank)
    stored = rank.store()
    assert (stored.chunks, stored.problem) == (4, "")
    assert stored.bytes == 4 * shape.value_bytes
    fetched = rank.fetch()
    assert (fetched.chunks, fetched.problem, fetched.corrupt) == (4, "", ())
    assert rank.holds(numbers, range(HEADS))
    with server.client() as client:
        for chunk in CHUNKS:
            assert 90 < client.ttl(chunk_key("test", chunk.hash)) <= 100


def test_int8_at_rest_is_close_and_a_quarter(server: RedisServer, made: list[Rank]) -> None:
    shape, numbers = replace(SHAPE, dtype="int8"), whole()
    numbers[0, 0, 0, 0, 0] = 0  # a vector of zeros has no scale
    numbers[1, 1, 1, 1, 1] *= 1000  # and a large one must not spoil its neighbours
    rank = Rank(server.url, range(HEADS), numbers, shape=shape)
    made.append(rank)
    assert rank.store().chunks == rank.fetch().chunks == 4
    for source, target in zip(CHUNKS, ELSEWHERE, strict=True):
        for here, there in zip(source.pages, target.pages, strict=True):
            exact = numbers[:, :, here]
            error = (rank.pages.whole[:, :, there] - exact).abs().amax(-1)
            assert bool((error <= exact.abs().amax(-1) / 254 * 1.001).all())
    assert shape.value_bytes < SHAPE.value_bytes / 3


@pytest.mark.parametrize("writers", [[range(3)], [range(2), range(2, 3)], [range(1), range(1, 2), range(2, 3)]])
@pytest.mark.parametrize("readers", [[range(3)], [range(2), range(2, 3)], [range(1), range(1, 2), range(2, 3)]])
def test_what_some_ranks_write_any_number_of_ranks_reads(
    server: RedisServer, made: list[Rank], writers: list[range], readers: list[range]
) -> None:
    numbers = whole()
    leader = RedisTier(connect(server.url, TIMEOUT_S), "test", SHAPE)
    suffix = b":t" if len(writers) > 1 else b""
    for heads in writers:
        if suffix:
            assert leader.stored([chunk.hash for chunk in CHUNKS]).stored == 0, "it shows before it is whole"
        made.append(Rank(server.url, heads, numbers))
        assert made[-1].store(suffix=suffix).chunks == 4
    for chunk in CHUNKS if suffix else ():
        leader.publish(chunk.hash, suffix, 100)
    assert leader.stored([chunk.hash for chunk in CHUNKS]).stored == 4
    for heads in readers:
        made.append(Rank(server.url, heads))
        assert made[-1].fetch().chunks == 4
        assert made[-1].holds(numbers, heads)
    leader.close()


def test_a_rank_that_holds_a_copy_writes_nothing_and_reads(server: RedisServer, made: list[Rank]) -> None:
    """Fewer KV heads than ranks: several hold the same one."""
    numbers = whole()
    made.append(Rank(server.url, range(HEADS), numbers, stores=False))
    assert made[0].store().chunks == 4
    with server.client() as client:
        assert client.dbsize() == 0
    made.append(Rank(server.url, range(HEADS), numbers))
    assert made[1].store().bytes > 0
    assert made[0].fetch().chunks == 4


@pytest.mark.parametrize("place", [0, 50, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 20, SHAPE.value_bytes - 1])
def test_a_flipped_byte_is_found_counted_and_deleted(server: RedisServer, made: list[Rank], place: int) -> None:
    numbers = whole()
    rank = Rank(server.url, range(HEADS), numbers)
    made.append(rank)
    rank.store()
    key = chunk_key("test", CHUNKS[2].hash)
    with server.client() as client:
        value = bytearray(client.get(key))  # type: ignore[arg-type]
        value[place] ^= 4
        client.set(key, bytes(value))
        fetched = rank.fetch()
        assert (fetched.chunks, fetched.corrupt, fetched.problem) == (2, (2,), "")
        assert rank.holds(numbers, range(HEADS), 2)
        untouched = [page for chunk in ELSEWHERE[2:] for page in chunk.pages]
        assert not bool((rank.pages.whole[:, :, untouched] != numbers[:, :, untouched]).any()), "a byte reached a page"
        assert not client.exists(key)


def test_swapped_and_cut_values_are_found(server: RedisServer, made: list[Rank]) -> None:
    rank = Rank(server.url, range(HEADS), whole())
    made.append(rank)
    keys = [chunk_key("test", chunk.hash) for chunk in CHUNKS]
    with server.client() as client:
        rank.store()
        first, second = client.get(keys[0]), client.get(keys[1])
        client.set(keys[0], second)  # type: ignore[arg-type]
        client.set(keys[1], first)  # type: ignore[arg-type]
        assert rank.fetch(2).corrupt == (0,)
        rank.store(3)
        client.set(keys[1], client.get(keys[1])[:-1])  # type: ignore[index]
        assert rank.fetch(4).corrupt == (1,)
        rank.store(5)
        client.delete(keys[3])
        gone = rank.fetch(6)
        assert (gone.chunks, gone.corrupt, gone.problem) == (3, (), "")
        client.delete(keys[0])
        client.lpush(keys[0], "no string at all")
        assert rank.fetch(7).chunks == 0


def test_a_value_of_another_length_is_not_there_and_goes(server: RedisServer, made: list[Rank]) -> None:
    rank = Rank(server.url, range(HEADS), whole())
    made.append(rank)
    rank.store()
    tier = RedisTier(connect(server.url, TIMEOUT_S), "test", SHAPE)
    names = [chunk.hash for chunk in CHUNKS]
    with server.client() as client:
        client.set(chunk_key("test", names[1]), b"short")
        assert tier.stored(names).stored == 1
        assert not client.exists(chunk_key("test", names[1]))
    assert tier.stored(names[2:]).stored == 2
    tier.close()


def test_claims_are_seen_until_they_run_out(server: RedisServer) -> None:
    tier = RedisTier(connect(server.url, TIMEOUT_S), "test", SHAPE)
    names = [chunk.hash for chunk in CHUNKS]
    assert tier.stored(names).claimed_s is None
    tier.claim(names, 60_000)
    tier.claim(names, 90_000)
    found = tier.stored(names).claimed_s
    assert found is not None
    assert 50 < found <= 60, "the first to claim it computes it"
    tier.close()


def test_a_full_redis_refuses_writes_and_reads_go_on(made: list[Rank]) -> None:
    """Redis answers OOM and the engine dies."""
    with running_redis("--maxmemory-policy", "noeviction") as server:
        rank = Rank(server.url, range(HEADS), whole())
        made.append(rank)
        assert rank.store(1, chunks=CHUNKS[:1]).chunks == 1
        with server.client() as client:
            client.config_set("maxmemory", "100kb")  # less than it takes by itself
        refused = rank.store(3)
        assert (refused.chunks, refused.problem) == (0, "full")
        assert rank.fetch(4, ELSEWHERE[:1]).chunks == 1
        with pytest.raises(TierError, match="full"):
            RedisTier(connect(server.url, TIMEOUT_S), "test", SHAPE).write(CHUNKS[3].hash, memoryview(bytes(9)), 5)
        assert not RedisTier(connect(server.url, TIMEOUT_S), "test", SHAPE).probe().writable


def test_a_frozen_redis_costs_its_timeout_and_a_late_reply_reaches_nobody(
    server: RedisServer, made: list[Rank]
) -> None:
    """A reply that arrives after a timeout goes to the next caller."""
    numbers = whole()
    rank = Rank(server.url, range(HEADS), numbers)
    made.append(rank)
    rank.store()
    server.freeze()
    begun = time.monotonic()
    frozen = rank.fetch(2, ELSEWHERE[:1])
    assert (frozen.chunks, frozen.problem) == (0, "timeout")
    assert time.monotonic() - begun < 10 * TIMEOUT_S
    assert rank.store(3, chunks=CHUNKS[:1]).problem == "timeout"
    server.thaw()
    time.sleep(0.2)  # the old replies are under way now
    assert rank.fetch(4).chunks == 4
    assert rank.holds(numbers, range(HEADS))
    assert rank.store(5).chunks == 4


def test_a_dead_redis_is_a_problem_of_the_order_and_not_of_the_thread(server: RedisServer, made: list[Rank]) -> None:
    """One exception kills the I/O thread for good."""
    rank = Rank(server.url, range(HEADS), whole())
    made.append(rank)
    server.kill()
    assert rank.store(1).problem == "connection"
    assert rank.fetch(2).problem == "connection"
    broken = (Chunk(CHUNKS[0].hash, 0, (10_000, 10_001)),)  # a page that is not there
    server.start()
    assert rank.store(3).chunks == 4
    assert rank.fetch(4, broken).problem == "error"
    assert rank.fetch(5).chunks == 4


def test_buffers_are_bounded_and_come_back(server: RedisServer, made: list[Rank]) -> None:
    """Pinned buffers leak."""
    rank = Rank(server.url, range(HEADS), whole(), buffer_bytes=2 * SHAPE.value_bytes)
    made.append(rank)
    for ticket in range(20):
        found = rank.store(ticket)
        assert (found.chunks, found.problem) == (2, "buffer")
    server.kill()
    for ticket in range(20, 25):
        assert rank.store(ticket).problem == "connection"
    server.start()
    assert rank.store(30).chunks == 2


def test_an_order_that_waited_too_long_is_not_begun(server: RedisServer, made: list[Rank]) -> None:
    rank = Rank(server.url, range(HEADS), whole())
    made.append(rank)
    rank.store()
    assert rank.fetch(2, timeout_s=0.0).problem == "late"


def test_a_fetch_ends_at_its_deadline_and_keeps_what_is_verified(
    server: RedisServer, made: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "_READ_AT_ONCE_BYTES", 1)
    numbers = whole()
    with slow_proxy(server.port) as proxy:
        rank = Rank(proxy.url, range(HEADS), numbers)
        made.append(rank)
        assert rank.store().chunks == 4
        assert rank.fetch(2, ELSEWHERE[:1]).chunks == 1  # connected
        rank.pages.whole[:, :, 16:] = 0
        proxy.bytes_per_s = SHAPE.value_bytes / 0.3
        begun = time.monotonic()
        cut = rank.fetch(3, timeout_s=0.8)
        assert 0.6 < time.monotonic() - begun < 1.2
        assert (cut.chunks, cut.corrupt, cut.problem) == (2, (), "timeout")
        assert rank.holds(numbers, range(HEADS), 2)
        assert not bool(rank.pages.whole[:, :, 18:20].any()), "bytes of a later chunk reached a page"
        proxy.bytes_per_s = float("inf")
        assert rank.fetch(4).chunks == 4
        assert rank.holds(numbers, range(HEADS))


def test_an_order_that_cannot_be_staged_is_answered_and_leaves_no_buffer_behind(
    server: RedisServer, made: list[Rank]
) -> None:
    """The thread of the steps brings it: an exception there would end the group."""
    rank = Rank(server.url, range(HEADS), whole(), buffer_bytes=2 * SHAPE.value_bytes)
    made.append(rank)
    broken = (CHUNKS[0], Chunk(CHUNKS[1].hash, 1, (10_000, 10_001)))
    for ticket in range(5):
        found = rank.store(ticket, chunks=broken)
        assert (found.chunks, found.problem) == (0, "error")
    assert rank.store(10, chunks=CHUNKS[:2]).chunks == 2


def test_orders_after_the_end_are_answered_too(server: RedisServer) -> None:
    rank = Rank(server.url, range(HEADS), whole(), buffer_bytes=2 * SHAPE.value_bytes)
    rank.end.close()
    assert [rank.store(ticket).problem for ticket in range(3)] == ["error"] * 3
    assert rank.fetch(5).problem == "error"
    rank.end.close()


def test_it_ends_within_seconds_although_redis_is_frozen(server: RedisServer) -> None:
    rank = Rank(server.url, range(HEADS), whole())
    server.freeze()
    rank.end.fetch(FetchOrder(1, ELSEWHERE, 100.0))
    rank.end.stage(StoreOrder(2, CHUNKS, (9,) * 4, b""))
    begun = time.monotonic()
    rank.end.close()
    assert time.monotonic() - begun < 8
    assert {rank.done(ticket).problem for ticket in (1, 2)} <= {"timeout", "error"}
