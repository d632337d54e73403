"""Chunks in Redis: what leaders and ranks ask of it, each in one round trip and within the client's timeout.

A value appears whole or not at all: one rank sets it, several write their ranges of a temporary key that the leader
then renames. An eviction takes a value whole. Every key has a time to live.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from redis import Redis
from redis.exceptions import (
    ClusterError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.blocks import BlockHash
from cluster.tiers.chunks import HEADER_BYTES, ChunkShape, chunk_key, claim_key
from cluster.tiers.connection import limited

MAX_CHUNKS = 8192
"""Of one look-up; what lies behind is computed."""

TEMPORARY_S = 30
"""A temporary key that nobody renames goes by itself."""

_PROBE_BYTES = 1 << 20
_PROBE_S = 10
_REFUSALS = ("OOM", "MISCONF", "READONLY", "NOREPLICAS")

Problem: TypeAlias = Literal["timeout", "connection", "full", "error"]


class TierError(Exception):
    """Redis did not do it. ``problem`` is one of workers.tier.PROBLEMS."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(f"{problem}: {message}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Presence:
    """What is there of a chain: so many of the first chunks, and a claim on the next that lasts so long.

    ``corrupt``: values behind them that had another length, or were no strings; they are deleted.
    """

    stored: int
    claimed_s: float | None
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """How fast the link is: ``bytes`` were read in ``seconds``; none where writes are refused."""

    round_trip_s: float
    bytes: int
    seconds: float
    writable: bool


class RedisTier:
    """One connection's worth: a thread has its own. Every call raises TierError."""

    def __init__(self, client: Redis, cluster: str, shape: ChunkShape) -> None:
        self._client = client
        self._cluster = cluster
        self._shape = shape

    # -- what is there -----------------------------------------------------------------------------------------------

    def stored(self, hashes: Sequence[BlockHash]) -> Presence:
        """How many of the first are there whole, and for how long the next is claimed. One round trip."""
        asked = hashes[:MAX_CHUNKS]

        def ask(pipe: Any) -> None:
            for block_hash in asked:
                pipe.strlen(self._key(block_hash))
                pipe.pttl(claim_key(self._cluster, block_hash))

        answers = self._answers(ask)
        lengths, claims = answers[::2], answers[1::2]
        odd = [name for name, length in zip(asked, lengths, strict=True) if length not in (0, self._shape.value_bytes)]
        if odd:  # cut off, or of another kind
            self.delete(odd)
        whole = [length == self._shape.value_bytes for length in lengths]
        if False not in whole:
            return Presence(len(asked), None)
        count = whole.index(False)
        claim = claims[count]
        return Presence(count, claim / 1000 if isinstance(claim, int) and claim > 0 else None, len(odd))

    def touch(self, hashes: Sequence[BlockHash], ttls_s: Sequence[int]) -> None:
        """Keep them for so long from now."""

        def ask(pipe: Any) -> None:
            for block_hash, ttl_s in zip(hashes, ttls_s, strict=True):
                pipe.expire(self._key(block_hash), ttl_s)

        self._done(ask)

    def claim(self, hashes: Sequence[BlockHash], milliseconds: int) -> None:
        """Say that they are being computed, unless somebody says so already."""

        def ask(pipe: Any) -> None:
            for block_hash in hashes:
                pipe.set(claim_key(self._cluster, block_hash), b"1", px=milliseconds, nx=True)

        self._done(ask)

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Nobody finds them any more."""

        def ask(pipe: Any) -> None:
            for block_hash in hashes:
                pipe.delete(self._key(block_hash))

        self._done(ask)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(
        self, hashes: Sequence[BlockHash], span: range, limit_s: float = float("inf")
    ) -> list[tuple[memoryview, memoryview] | None]:
        """Of each the header and the bytes of ``span``, unverified and possibly fewer; None where it is not there. One
        round trip, given up after ``limit_s`` where that is less than the client's timeout."""
        whole = span.start == HEADER_BYTES and span.stop == self._shape.value_bytes
        joined = span.start == HEADER_BYTES

        def ask(pipe: Any) -> None:
            for block_hash in hashes:
                key = self._key(block_hash)
                if whole:
                    pipe.get(key)  # Redis sends it from where it is; a range it would copy first
                elif joined:
                    pipe.getrange(key, 0, span.stop - 1)
                else:
                    pipe.getrange(key, 0, HEADER_BYTES - 1)
                    pipe.getrange(key, span.start, span.stop - 1)

        answers = self._answers(ask, limit_s)
        if not joined:
            return [_parts(*pair) for pair in zip(answers[::2], answers[1::2], strict=True)]
        return [_parts(answer, None) for answer in answers]

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, block_hash: BlockHash, value: memoryview, ttl_s: int) -> None:
        """The whole value at once."""
        with _one_call():
            self._client.set(self._key(block_hash), value, ex=ttl_s)

    def write_part(self, block_hash: BlockHash, suffix: bytes, offset: int, part: memoryview) -> None:
        """A part of the temporary key."""
        key = self._key(block_hash) + suffix

        def ask(pipe: Any) -> None:
            pipe.setrange(key, offset, part)
            pipe.expire(key, TEMPORARY_S)

        self._done(ask)

    def publish(self, block_hash: BlockHash, suffix: bytes, ttl_s: int) -> None:
        """All parts are written: the temporary key becomes the chunk."""
        key = self._key(block_hash)

        def ask(pipe: Any) -> None:
            # Not ``rename``, which redis-py refuses in a cluster, whatever the slots.
            pipe.execute_command("RENAME", key + suffix, key)
            pipe.expire(key, ttl_s)

        self._done(ask, transaction=True)

    # -- the link ----------------------------------------------------------------------------------------------------

    def probe(self) -> Probe:
        """Measure a round trip; write, read and remove a value of a chunk's size."""
        key = f"{self._cluster}:kv:probe:{secrets.token_hex(8)}".encode()
        with _one_call():
            self._client.strlen(key)
            begun = time.perf_counter()
            self._client.strlen(key)
            round_trip_s = time.perf_counter() - begun
        try:
            with _one_call():
                self._client.set(key, bytes(_PROBE_BYTES), ex=_PROBE_S)
        except TierError as error:
            if error.problem == "full":
                return Probe(round_trip_s, 0, 0.0, writable=False)
            raise
        with _one_call():
            begun = time.perf_counter()
            found = self._client.get(key)
            seconds = time.perf_counter() - begun
            self._client.delete(key)
        return Probe(round_trip_s, len(found) if isinstance(found, bytes) else 0, seconds, writable=True)

    def close(self) -> None:
        """Idempotent."""
        self._client.close()

    def _key(self, block_hash: BlockHash) -> bytes:
        return chunk_key(self._cluster, block_hash)

    def _done(self, ask: Callable[[Any], None], *, transaction: bool = False) -> None:
        """Send what ``ask`` puts into a pipeline. The first refusal raises."""
        with _one_call():
            pipe: Any = self._client.pipeline(transaction=transaction)
            ask(pipe)
            for answer in pipe.execute(raise_on_error=False):
                if isinstance(answer, Exception):
                    raise answer

    def _answers(self, ask: Callable[[Any], None], limit_s: float = float("inf")) -> list[Any]:
        """What comes back, in order. A value of another kind is an exception in its place: it is the value that is
        wrong; any other refusal raises, lest a missing right look like a missing chunk."""
        with _one_call(limit_s):
            pipe: Any = self._client.pipeline(transaction=False)
            ask(pipe)
            answers: list[Any] = pipe.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not _wrong_type(answer):
                    raise answer
        return answers


def _wrong_type(answer: object) -> bool:
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def _parts(first: Any, second: Any) -> tuple[memoryview, memoryview] | None:
    if not first:  # a GET's None, a GETRANGE's nothing
        return None
    if _wrong_type(first) or _wrong_type(second):
        return memoryview(b""), memoryview(b"")
    view = memoryview(first)
    return (view[:HEADER_BYTES], view[HEADER_BYTES:]) if second is None else (view, memoryview(second))


@contextmanager
def _one_call(limit_s: float = float("inf")) -> Iterator[None]:
    """Bounded, and in our own errors."""
    try:
        with limited(limit_s):
            yield
    except (RedisError, RedisClusterException, OSError) as error:  # the second is none of the first
        raise _translate(error) from error


def _translate(error: Exception) -> TierError:
    text = str(error) or type(error).__name__
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return TierError("timeout", text)
    if isinstance(error, OutOfMemoryError | ReadOnlyError):
        return TierError("full", text)
    if isinstance(error, RedisConnectionError | RedisClusterException | ClusterError | OSError):
        return TierError("connection", text)
    if isinstance(error, ResponseError) and text.startswith(_REFUSALS):
        return TierError("full", text)
    return TierError("error", text)
