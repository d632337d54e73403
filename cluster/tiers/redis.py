"""Chunks in Redis: what leaders and ranks ask of it, each in one round trip and within the connection's timeout.

A value appears whole or not at all: one rank sets it, several write their ranges of a temporary key that the leader
then renames. An eviction takes a value whole. Every key has a time to live.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.blocks import BlockHash
from cluster.tiers.chunks import HEADER_BYTES, ChunkShape, chunk_key, claim_key

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
    """What is there of a chain: so many of the first chunks, and a claim on the next that lasts so long."""

    stored: int
    claimed_s: float | None


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
        pipe = self._pipeline()
        for block_hash in asked:
            pipe.strlen(self._key(block_hash))
            pipe.pttl(claim_key(self._cluster, block_hash))
        answers = self._execute(pipe)
        lengths, claims = answers[::2], answers[1::2]
        whole = [length == self._shape.value_bytes for length in lengths]
        count = whole.index(False) if False in whole else len(whole)
        if count == len(asked):
            return Presence(count, None)
        if lengths[count] != 0:  # cut off, or of another kind
            self.delete([asked[count]])
        claim = claims[count]
        return Presence(count, claim / 1000 if isinstance(claim, int) and claim > 0 else None)

    def touch(self, hashes: Sequence[BlockHash], ttls_s: Sequence[int]) -> None:
        """Keep them for so long from now."""
        pipe = self._pipeline()
        for block_hash, ttl_s in zip(hashes, ttls_s, strict=True):
            pipe.expire(self._key(block_hash), ttl_s)
        self._execute(pipe)

    def claim(self, hashes: Sequence[BlockHash], milliseconds: int) -> None:
        """Say that they are being computed, unless somebody says so already."""
        pipe = self._pipeline()
        for block_hash in hashes:
            pipe.set(claim_key(self._cluster, block_hash), b"1", px=milliseconds, nx=True)
        self._execute(pipe)

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Nobody finds them any more."""
        pipe = self._pipeline()
        for block_hash in hashes:
            pipe.delete(self._key(block_hash))
        self._execute(pipe)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, hashes: Sequence[BlockHash], span: range) -> list[tuple[memoryview, memoryview] | None]:
        """Of each the header and the bytes of ``span``; None where it is not there. One round trip."""
        whole = span.start == HEADER_BYTES and span.stop == self._shape.value_bytes
        joined = span.start == HEADER_BYTES
        pipe = self._pipeline()
        for block_hash in hashes:
            key = self._key(block_hash)
            if whole:
                pipe.get(key)  # Redis sends it from where it is; a range it would copy first
            elif joined:
                pipe.getrange(key, 0, span.stop - 1)
            else:
                pipe.getrange(key, 0, HEADER_BYTES - 1)
                pipe.getrange(key, span.start, span.stop - 1)
        answers = self._execute(pipe)
        if not joined:
            return [_parts(*pair) for pair in zip(answers[::2], answers[1::2], strict=True)]
        return [_parts(answer, None) for answer in answers]

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, block_hash: BlockHash, value: memoryview, ttl_s: int) -> None:
        """The whole value at once."""
        with _translated():
            self._client.set(self._key(block_hash), value, ex=ttl_s)

    def write_part(self, block_hash: BlockHash, suffix: bytes, offset: int, part: memoryview) -> None:
        """A part of the temporary key."""
        key = self._key(block_hash) + suffix
        pipe = self._pipeline()
        pipe.setrange(key, offset, part)
        pipe.expire(key, TEMPORARY_S)
        for answer in self._execute(pipe):
            if isinstance(answer, Exception):
                raise _translate(answer)

    def publish(self, block_hash: BlockHash, suffix: bytes, ttl_s: int) -> None:
        """All parts are written: the temporary key becomes the chunk."""
        key = self._key(block_hash)
        pipe = self._client.pipeline(transaction=True)
        pipe.rename(key + suffix, key)
        pipe.expire(key, ttl_s)
        for answer in self._execute(pipe):
            if isinstance(answer, Exception):
                raise _translate(answer)

    # -- the link ----------------------------------------------------------------------------------------------------

    def probe(self) -> Probe:
        """Measure a round trip; write, read and remove a value of a chunk's size."""
        key = f"{self._cluster}:kv:probe:{secrets.token_hex(8)}".encode()
        with _translated():
            self._client.strlen(key)
            begun = time.perf_counter()
            self._client.strlen(key)
            round_trip_s = time.perf_counter() - begun
        try:
            with _translated():
                self._client.set(key, bytes(_PROBE_BYTES), ex=_PROBE_S)
        except TierError as error:
            if error.problem == "full":
                return Probe(round_trip_s, 0, 0.0, writable=False)
            raise
        with _translated():
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

    def _pipeline(self) -> Any:
        return self._client.pipeline(transaction=False)

    def _execute(self, pipe: Any) -> list[Any]:
        """Answers in order; a command's own refusal is an exception in its place."""
        with _translated():
            answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, RedisConnectionError | RedisTimeoutError):  # as a cluster's pipeline tells it
                raise _translate(answer)
        return answers


def _parts(first: Any, second: Any) -> tuple[memoryview, memoryview] | None:
    if not isinstance(first, bytes) or len(first) < HEADER_BYTES:
        return None
    view = memoryview(first)
    if second is None:
        return view[:HEADER_BYTES], view[HEADER_BYTES:]
    return (view, memoryview(second)) if isinstance(second, bytes) else None


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise _translate(error) from error


def _translate(error: Exception) -> TierError:
    text = str(error) or type(error).__name__
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return TierError("timeout", text)
    if isinstance(error, OutOfMemoryError | ReadOnlyError):
        return TierError("full", text)
    if isinstance(error, RedisConnectionError | RedisClusterException | OSError):
        return TierError("connection", text)
    if isinstance(error, ResponseError) and text.startswith(_REFUSALS):
        return TierError("full", text)
    return TierError("error", text)
