"""A tier in memory over PagedGroups: it keeps what they compute, and does its part as badly as a test likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from cluster.blocks import BlockHash
from cluster.tiers.cost import Decision
from tests.support.paged_group import PagedGroup
from workers.tier import Chunk, Fetched, LookedUp, TierAnswer, TierLoad


class Manner(NamedTuple):
    """How it does the next thing."""

    delay: int = 0  # looks at its answers before this one is there
    at_most: int = 1000  # chunks
    refuses: bool = False
    claimed_s: float | None = None


class Store:
    """What several groups share: the contents of each chunk's pages."""

    def __init__(self) -> None:
        self.chunks: dict[BlockHash, np.ndarray] = {}  # type: ignore[type-arg]
        self.claims: set[BlockHash] = set()


class ScriptedTier:
    """See workers.tier.Tier. ``manners``: of each look-up, fetch and store, in the order of their coming."""

    def __init__(
        self,
        group: PagedGroup,
        store: Store,
        chunk_tokens: int = 8,
        manners: Iterator[Manner] | None = None,
        worth: Callable[[int], int] = lambda stored: stored,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.group, self.store_of = group, store
        self.lookups = 0
        self.fetch_delay = 0
        """Beside its manners: more looks that each fetch takes."""
        self.fetched: list[Chunk] = []
        self.under_way: dict[int, tuple[Chunk, ...]] = {}
        self._manners = manners or repeat(Manner())
        self._worth = worth
        self._waiting: list[tuple[int, Callable[[], TierAnswer]]] = []
        self._looks = 0

    def look_up(self, ticket: int, hashes: Sequence[BlockHash], first: int, timeout_s: float) -> bool:
        manner = next(self._manners)
        if manner.refuses:
            return False
        self.lookups += 1

        def answer() -> TierAnswer:
            there = [one in self.store_of.chunks for one in hashes]
            stored = there.index(False) if False in there else len(there)
            claimed = stored < len(hashes) and hashes[stored] in self.store_of.claims
            return LookedUp(ticket, min(stored, manner.at_most), manner.claimed_s if claimed else None)

        self._later(manner.delay, answer)
        return True

    def decide(self, stored: int, first_token: int, prompt_tokens: int, budget_s: float) -> Decision:
        chunks = min(stored, self._worth(stored))
        rest = max(0, prompt_tokens - first_token - chunks * self.chunk_tokens)
        return Decision(chunks, 0.001 * chunks, 1.0 * rest, "fetch" if chunks else "compute_is_faster")

    def fetch(self, ticket: int, chunks: Sequence[Chunk], timeout_s: float) -> None:
        manner = next(self._manners)
        self.under_way[ticket] = tuple(chunks)

        def answer() -> TierAnswer:
            del self.under_way[ticket]
            done = 0
            for chunk in chunks:
                contents = self.store_of.chunks.get(chunk.hash)
                if contents is None or done == manner.at_most:
                    break
                self.group.pages[list(chunk.pages)] = contents
                done += 1
            self.fetched += chunks[:done]
            return Fetched(ticket, done)

        self._later(manner.delay + self.fetch_delay, answer)

    def store(self, chunks: Sequence[Chunk], tenant: str) -> int:
        manner = next(self._manners)
        taken = 0 if manner.refuses else min(len(chunks), manner.at_most)
        for chunk in chunks[:taken]:
            self.store_of.chunks[chunk.hash] = self.group.pages[list(chunk.pages)].copy()
        return taken

    def is_stored(self, block_hash: BlockHash) -> bool:
        return block_hash in self.store_of.chunks

    def claim(self, hashes: Sequence[BlockHash], first_token: int, prompt_tokens: int) -> None:
        self.store_of.claims.update(hashes)

    def take_answers(self) -> list[TierAnswer]:
        self._looks += 1
        due = [answer for at, answer in self._waiting if at <= self._looks]
        self._waiting = [(at, answer) for at, answer in self._waiting if at > self._looks]
        return [answer() for answer in due]

    def observe_prefill(self, tokens: int, depth: int, seconds: float) -> None:
        """Its decisions are the test's."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Who steps does not sleep."""

    def load(self) -> TierLoad:
        return TierLoad(
            reads="closed", writes="closed", lookups=self.lookups, failed_reads=0, failed_writes=0,
            fetched_chunks=len(self.fetched), fetched_bytes=0, stored_chunks=0, stored_bytes=0, dropped_chunks=0,
            corrupt_chunks=0, unwritten_bytes=0, fetch_bytes_per_s=0.0, round_trip_ms=0.0,
        )  # fmt: skip

    def _later(self, delay: int, answer: Callable[[], TierAnswer]) -> None:
        self._waiting.append((self._looks + 1 + delay, answer))
