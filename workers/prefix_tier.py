"""The leader's side of the tier in Redis: what is where, what all ranks have done, and when Redis is left alone.

Two threads of its own talk to Redis: one looks prefixes up, while requests wait for it; one does what nobody waits for
(makes written chunks visible, keeps used ones from expiring, claims, tries a Redis that has failed). Keys and values
move on the ranks' threads. The engine's thread only gives orders and takes answers.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.blocks import BlockHash
from cluster.config import PrefixConfig
from cluster.telemetry import get_logger
from cluster.tiers.breaker import Breaker
from cluster.tiers.cost import CostModel, Decision
from cluster.tiers.redis import Presence, Probe, TierError
from workers.tier import (
    Chunk,
    Fetched,
    FetchOrder,
    LookedUp,
    StoreOrder,
    TierAnswer,
    TierLoad,
    TransferReport,
    Transfers,
)

_log = get_logger("tier")

KNOWN_CHUNKS = 200_000
"""Stored chunks that are remembered: 30 MB, and at 1 MiB each more than most Redis servers hold."""

TTL_HALVES_AT = 64
"""Chunks: this deep in a chain a chunk is kept half as long as its first."""

_TTL_LEAST_SHARE = 8
_TOUCHES_PER_TTL = 4
_CLAIM_WORTH_S = 0.1
"""A shorter computation is over before another group could have waited for it."""

_CLAIM_SLACK = 1.5
_TEND_S = 0.1
_REMEASURE_S = 30.0
"""While nothing is fetched, the link is measured this often: it may have become fast enough."""

_MAX_CHORES = 1000
_MAX_LOOKUPS = 1000
_CLOSE_S = 5.0


class TierRedis(Protocol):
    """What is needed of cluster.tiers.redis.RedisTier. Each call raises TierError, within its own timeout."""

    def stored(self, hashes: Sequence[BlockHash]) -> Presence:
        """How many of the first are there, and the claim on the next."""
        ...

    def publish(self, block_hash: BlockHash, suffix: bytes, ttl_s: int) -> None:
        """Make visible what the ranks wrote under a temporary key."""
        ...

    def touch(self, hashes: Sequence[BlockHash], ttls_s: Sequence[int]) -> None:
        """Keep for so long from now."""
        ...

    def claim(self, hashes: Sequence[BlockHash], milliseconds: int) -> None:
        """Say that these are being computed."""
        ...

    def probe(self) -> Probe:
        """Measure the link, reading and writing."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


@dataclass(slots=True)
class _Known:
    """A chunk that Redis is believed to hold. Seconds of the clock."""

    ttl_s: int
    touched_at: float


@dataclass(slots=True)
class _Order:
    """One that ranks are carrying out."""

    chunks: tuple[Chunk, ...]
    left: set[int]  # ranks that have not reported
    done: int  # chunks, by the least of those that have
    suffix: bytes = b""
    bytes: int = 0
    seconds: float = 0.0
    corrupt: set[int] = field(default_factory=set)
    problems: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Sums:
    lookups: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    dropped_chunks: int = 0
    corrupt_chunks: int = 0


class PrefixTier:
    """See Tier. ``start`` it with the ranks' ends, ``report`` to it, ``close`` it after the engine has stopped."""

    def __init__(
        self,
        redis: TierRedis,
        settings: PrefixConfig,
        *,
        chunk_tokens: int,
        value_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._redis = redis
        self._settings = settings
        self._value_bytes = value_bytes
        self._clock = clock
        self._ranks: tuple[Transfers, ...] = ()
        self._cost = CostModel()
        probe_s = settings.probe_ms / 1000
        self._reads = Breaker(settings.failures_to_open, probe_s, clock)
        self._writes = Breaker(settings.failures_to_open, probe_s, clock)
        self._lock = threading.Lock()
        # Below: under the lock.
        self._known: OrderedDict[BlockHash, _Known] = OrderedDict()
        self._claimed: dict[BlockHash, float] = {}  # by this group, and until when
        self._orders: dict[int, _Order] = {}  # fetches have the scheduler's tickets, stores negative ones
        self._answers: deque[TierAnswer] = deque()
        self._touches: dict[BlockHash, int] = {}
        self._unwritten = 0  # chunks given to the ranks and not yet reported
        self._sums = _Sums()
        self._stores = 0
        self._wake: Callable[[], None] = lambda: None
        self._measured_at = clock()
        self._lookups = _Worker("tier look-ups", _MAX_LOOKUPS)
        self._chores = _Worker("tier chores", _MAX_CHORES, every_s=_TEND_S, tend=self._tend)

    def start(self, ranks: Sequence[Transfers]) -> None:
        """Begin, with the first look at Redis on its way. ``ranks``: their ends, the leader's first."""
        self._ranks = tuple(ranks)
        self._chores.put(self._first_look)
        self._lookups.start()
        self._chores.start()

    def close(self) -> None:
        """End the threads. The ranks' ends are closed by who made them. Idempotent."""
        for worker in (self._lookups, self._chores):
            worker.stop()
        self._redis.close()

    # -- the scheduler's ---------------------------------------------------------------------------------------------

    def listen(self, wake: Callable[[], None]) -> None:
        """See Tier."""
        self._wake = wake

    def take_answers(self) -> list[TierAnswer]:
        """See Tier."""
        with self._lock:
            answers = list(self._answers)
            self._answers.clear()
        return answers

    def look_up(self, ticket: int, hashes: Sequence[BlockHash], first: int, timeout_s: float) -> bool:
        """See Tier. False while reads are left alone."""
        if self._reads.state != "closed":
            return False
        until = self._clock() + timeout_s
        asked = tuple(hashes)
        return self._lookups.put(lambda: self._look_up(ticket, asked, first, until))

    def decide(self, stored: int, first_token: int, prompt_tokens: int, budget_s: float) -> Decision:
        """See Tier."""
        with self._lock:
            return self._cost.decide(
                stored_chunks=stored,
                first_token=first_token,
                prompt_tokens=prompt_tokens,
                chunk_tokens=self.chunk_tokens,
                bytes_per_chunk=self._value_bytes,
                budget_s=budget_s,
            )

    def fetch(self, ticket: int, chunks: Sequence[Chunk], timeout_s: float) -> None:
        """See Tier."""
        order = FetchOrder(ticket, tuple(chunks), timeout_s)
        self._give(ticket, _Order(order.chunks, set(range(len(self._ranks))), len(chunks)), lambda r: r.fetch(order))

    def store(self, chunks: Sequence[Chunk], tenant: str) -> int:
        """See Tier. None while writes are left alone, and no more than fit the ranks' buffers."""
        room = self._settings.write_buffer_bytes * len(self._ranks) // self._value_bytes - self._unwritten
        taken = tuple(chunks[: max(0, room)]) if self._writes.state == "closed" else ()
        with self._lock:
            self._sums.dropped_chunks += len(chunks) - len(taken)
            self._unwritten += len(taken)
            self._stores += 1
            ticket = -self._stores
        if taken:
            suffix = secrets.token_bytes(8) if len(self._ranks) > 1 else b""
            order = StoreOrder(ticket, taken, tuple(self._ttl_s(chunk.number) for chunk in taken), suffix)
            ranks = set(range(len(self._ranks)))
            self._give(ticket, _Order(taken, ranks, len(taken), suffix), lambda r: r.stage(order))
        return len(taken)

    def is_stored(self, block_hash: BlockHash) -> bool:
        """See Tier."""
        now = self._clock()
        with self._lock:
            known = self._known.get(block_hash)
            if known is None:
                return False
            age_s = now - known.touched_at
            if age_s >= known.ttl_s:
                del self._known[block_hash]
                return False
            if age_s * _TOUCHES_PER_TTL >= known.ttl_s:
                self._touches[block_hash] = known.ttl_s
                known.touched_at = now
        return True

    def claim(self, hashes: Sequence[BlockHash], first_token: int, prompt_tokens: int) -> None:
        """See Tier."""
        seconds = self.decide(0, first_token, prompt_tokens, 0.0).compute_s
        if seconds < _CLAIM_WORTH_S or self._writes.state != "closed":
            return
        milliseconds, claimed = round(1000 * _CLAIM_SLACK * seconds), tuple(hashes)
        until = self._clock() + _CLAIM_SLACK * seconds
        with self._lock:
            self._claimed = {one: end for one, end in self._claimed.items() if end > self._clock()}
            self._claimed.update(dict.fromkeys(claimed, until))
        self._chores.put(lambda: self._redis.claim(claimed, milliseconds))

    def observe_prefill(self, tokens: int, depth: int, seconds: float) -> None:
        """See Tier."""
        with self._lock:
            self._cost.observe_prefill(tokens, depth, seconds)

    def load(self) -> TierLoad:
        """See Tier."""
        with self._lock:
            sums = self._sums
            return TierLoad(
                reads=self._reads.state,
                writes=self._writes.state,
                lookups=sums.lookups,
                failed_reads=sums.failed_reads,
                failed_writes=sums.failed_writes,
                fetched_chunks=sums.fetched_chunks,
                fetched_bytes=sums.fetched_bytes,
                stored_chunks=sums.stored_chunks,
                stored_bytes=sums.stored_bytes,
                dropped_chunks=sums.dropped_chunks,
                corrupt_chunks=sums.corrupt_chunks,
                unwritten_bytes=self._unwritten * self._value_bytes,
                fetch_bytes_per_s=self._cost.fetch_bytes_per_s,
                round_trip_ms=1000 * self._cost.round_trip_s,
            )

    # -- the ranks' --------------------------------------------------------------------------------------------------

    def report(self, rank: int, report: TransferReport) -> None:
        """What a rank has done of an order; from any thread."""
        with self._lock:
            order = self._orders.get(report.ticket)
            if order is None or rank not in order.left:
                _log.warning("rank %d reports on order %d, which it was not given", rank, report.ticket)
                return
            order.left.remove(rank)
            order.done = min(order.done, report.chunks)
            order.bytes += report.bytes
            order.seconds = max(order.seconds, report.seconds)
            order.corrupt.update(report.corrupt)
            if report.problem:
                order.problems.add(report.problem)
            if order.left:
                return
            del self._orders[report.ticket]
            finish = self._stored if report.ticket < 0 else self._fetched
            finish(report.ticket, order)
        self._wake()

    def _give(self, ticket: int, order: _Order, tell: Callable[[Transfers], None]) -> None:
        with self._lock:
            self._orders[ticket] = order
        for number, rank in enumerate(self._ranks):
            try:
                tell(rank)
            except OSError as error:  # the rank is lost; so is the group, which others notice
                _log.warning("rank %d cannot be told: %s", number, error)
                self.report(number, TransferReport(ticket, 0, 0, 0.0, problem="error"))

    def _fetched(self, ticket: int, order: _Order) -> None:
        # Under the lock.
        sums = self._sums
        sums.fetched_chunks += order.done
        sums.fetched_bytes += order.bytes
        sums.corrupt_chunks += len(order.corrupt)
        if order.done:
            self._cost.observe_fetch(order.bytes, order.seconds)
            self._measured_at = self._clock()
        self._count(self._reads, order.problems - {"late"}, "reads")
        sums.failed_reads += bool(order.problems)
        for place, chunk in enumerate(order.chunks):
            if place < order.done:
                self._know(chunk.hash, chunk.number, touch=True)
            else:
                self._known.pop(chunk.hash, None)
        self._answers.append(Fetched(ticket, order.done))

    def _stored(self, ticket: int, order: _Order) -> None:
        # Under the lock.
        self._unwritten -= len(order.chunks)
        self._sums.dropped_chunks += len(order.chunks) - order.done
        self._sums.failed_writes += bool(order.problems - {"buffer", "late"})
        self._sums.stored_bytes += order.bytes
        self._count(self._writes, order.problems - {"buffer", "late"}, "writes")
        written = order.chunks[: order.done]
        if order.suffix:
            self._chores.put(lambda: self._publish(written, order.suffix))
        else:
            self._now_stored(written)

    def _publish(self, chunks: Sequence[Chunk], suffix: bytes) -> None:
        # A chore.
        done = 0
        try:
            for chunk in chunks:
                self._redis.publish(chunk.hash, suffix, self._ttl_s(chunk.number))
                done += 1
        finally:
            with self._lock:
                self._sums.dropped_chunks += len(chunks) - done
                self._now_stored(chunks[:done])

    def _now_stored(self, chunks: Sequence[Chunk]) -> None:
        self._sums.stored_chunks += len(chunks)
        for chunk in chunks:
            self._know(chunk.hash, chunk.number)

    # -- look-ups: a thread of their own ------------------------------------------------------------------------------

    def _look_up(self, ticket: int, hashes: Sequence[BlockHash], first: int, until: float) -> None:
        answer = LookedUp(ticket, 0)
        try:
            if self._clock() < until:
                answer = self._ask(ticket, hashes, first)
        except TierError as error:
            with self._lock:
                self._sums.failed_reads += 1
                self._count(self._reads, {error.problem}, "reads")
        finally:
            with self._lock:
                self._answers.append(answer)
            self._wake()

    def _ask(self, ticket: int, hashes: Sequence[BlockHash], first: int) -> LookedUp:
        begun = time.perf_counter()
        found = self._redis.stored(hashes)
        with self._lock:
            self._sums.lookups += 1
            self._sums.corrupt_chunks += found.corrupt
            self._cost.observe_round_trip(time.perf_counter() - begun)
            self._count(self._reads, set(), "reads")
            for place, block_hash in enumerate(hashes[: found.stored]):
                self._know(block_hash, first + place, touch=True)
            for block_hash in hashes[found.stored :]:
                self._known.pop(block_hash, None)
            own = found.stored < len(hashes) and self._claimed.get(hashes[found.stored], 0.0) > self._clock()
        return LookedUp(ticket, found.stored, None if own else found.claimed_s)

    # -- chores: what nobody waits for --------------------------------------------------------------------------------

    def _first_look(self) -> None:
        if not self._measure():
            _log.warning("prefix.redis does not answer: prompts are computed, and it is tried again and again")

    def _tend(self) -> None:
        with self._lock:
            touches, self._touches = self._touches, {}
        if touches and self._writes.state == "closed":
            self._redis.touch(list(touches), list(touches.values()))
        due = self._reads.state == "closed" and self._clock() - self._measured_at > _REMEASURE_S
        if due or any(one.state != "closed" and one.allows() for one in (self._reads, self._writes)):
            self._measure()

    def _measure(self) -> bool:
        """Try Redis, and note how fast it is. Whether reads work."""
        self._measured_at = self._clock()
        try:
            probe = self._redis.probe()
        except TierError as error:
            with self._lock:
                for breaker, what in ((self._reads, "reads"), (self._writes, "writes")):
                    self._count(breaker, {error.problem}, what, at_once=True)
            return False
        with self._lock:
            self._cost.observe_round_trip(probe.round_trip_s)
            if probe.bytes:
                self._cost.observe_fetch(probe.bytes, probe.seconds)
            self._count(self._reads, set(), "reads")
            self._count(self._writes, set() if probe.writable else {"writes are refused"}, "writes", at_once=True)
        return True

    def _count(self, breaker: Breaker, problems: set[str], what: str, *, at_once: bool = False) -> None:
        """A success or a failure. Full is full: that need not be tried three times."""
        before = breaker.state
        if not problems:
            breaker.succeeded()
            if before != "closed":
                _log.info("the prefix tier's %s work again", what)
                self._known.clear()  # it may have lost everything meanwhile
            return
        for _ in range(self._settings.failures_to_open if at_once or "full" in problems else 1):
            breaker.failed()
        if before == "closed" and breaker.state != "closed":
            _log.warning("the prefix tier's %s fail (%s): left alone for a while", what, ", ".join(sorted(problems)))

    # -- what is where -----------------------------------------------------------------------------------------------

    def _know(self, block_hash: BlockHash, index: int, *, touch: bool = False) -> None:
        """``touch``: it may be old."""
        if touch and block_hash not in self._known:
            self._touches[block_hash] = self._ttl_s(index)
        known = self._known.setdefault(block_hash, _Known(self._ttl_s(index), self._clock()))
        if not touch:
            known.touched_at = self._clock()
        self._known.move_to_end(block_hash)
        if len(self._known) > KNOWN_CHUNKS:
            self._known.popitem(last=False)

    def _ttl_s(self, index: int) -> int:
        """Shorter the deeper: chains shrink from their tails."""
        whole = self._settings.ttl_s
        return max(1, whole // _TTL_LEAST_SHARE, round(whole / (1 + index / TTL_HALVES_AT)))


class _Worker:
    """One thread that does one thing after the other, whatever these raise. ``tend`` is done in between, regularly."""

    def __init__(
        self, name: str, limit: int, *, every_s: float = 3600.0, tend: Callable[[], None] = lambda: None
    ) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(limit)
        self._every_s = every_s
        self._tend = tend
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Callable[[], None]) -> bool:
        """False: it is too far behind."""
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        return True

    def stop(self) -> None:
        """Return when it has ended, or has not within seconds: then it ends by its timeouts, behind."""
        self._stopping = True
        self.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        tended_at = time.monotonic()
        while not self._stopping:
            try:
                job = self._queue.get(timeout=self._every_s)
            except queue.Empty:
                job = None
            if job is not None:
                self._try(job)
            if time.monotonic() - tended_at >= self._every_s:
                self._try(self._tend)
                tended_at = time.monotonic()

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except TierError as error:
            _log.debug("%s: %s", self._thread.name, error)
        except Exception:  # noqa: BLE001 - this thread must outlive whatever it is
            _log.exception("%s: a job failed", self._thread.name)
