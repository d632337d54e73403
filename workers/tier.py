"""A tier of KV blocks behind a group's pages: what the scheduler, the leader and the ranks say to each other about it.

A *chunk* is a run of whole blocks, named by the hash of its last block; a tier holds whole chunks only. All ranks of a
group take part in each order, each with its own heads, and the leader acts on the least that they report: there is no
collective in it, so ranks that see different things cannot hang. Integers, bytes and seconds only; no torch, no I/O.

    scheduler ── look_up ──▶ leader ── one round trip ──▶ Redis              (LookedUp)
    scheduler ── fetch ────▶ every rank: read, verify in a staging buffer, write pages     (Fetched: the least of them)
    scheduler ── store ────▶ every rank: copy pages to a staging buffer, now; write behind
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from cluster.blocks import BlockHash
from cluster.tiers.cost import Decision


class Chunk(NamedTuple):
    """A chunk and the pages that hold it, or are to hold it."""

    hash: BlockHash
    index: int  # in its chain; 0 holds the first tokens
    pages: tuple[int, ...]


# -- scheduler and leader --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What a tier has of a chain."""

    ticket: int
    stored: int  # chunks from the first asked for, without a gap
    claimed_s: float | None = None  # another group is computing the next one: when it should be stored


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a fetch went. Comes once."""

    ticket: int
    chunks: int  # from the first on, that every rank has verified and written to its pages


TierAnswer: TypeAlias = LookedUp | Fetched


class Tier(Protocol):
    """As the scheduler sees it. Nothing here waits; answers come with ``take_answers``, each order has one.

    Pages of a fetch belong to the tier until its Fetched has come, however long that takes.
    """

    chunk_tokens: int

    def look_up(self, ticket: int, hashes: Sequence[BlockHash], timeout_s: float) -> bool:
        """Ask what is stored of consecutive chunks. False: not now, and no answer follows."""
        ...

    def decide(self, stored: int, first_token: int, prompt_tokens: int, budget_s: float) -> Decision:
        """How many of ``stored`` chunks are worth fetching for a prompt whose tokens from ``first_token`` on (where the
        first of these chunks begins) are in no page here."""
        ...

    def fetch(self, ticket: int, chunks: Sequence[Chunk], timeout_s: float) -> None:
        """Fill pages. What is not verified by then does not count."""
        ...

    def store(self, chunks: Sequence[Chunk], tenant: str) -> int:
        """Copy full, computed pages out and write them behind; how many of the first were taken."""
        ...

    def is_stored(self, block_hash: BlockHash) -> bool:
        """Whether the tier is believed to hold it; also keeps it from expiring (rarely, behind)."""
        ...

    def claim(self, hashes: Sequence[BlockHash], first_token: int, prompt_tokens: int) -> None:
        """Tell other groups that these chunks are being computed here, from ``first_token`` on."""
        ...

    def take_answers(self) -> list[TierAnswer]:
        """What has come since the last call."""
        ...


# -- leader and ranks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Read these chunks, in this order, into these pages."""

    ticket: int
    chunks: tuple[Chunk, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy these pages now, and write them behind."""

    ticket: int
    chunks: tuple[Chunk, ...]
    ttls_s: tuple[int, ...]  # of each
    suffix: bytes  # of the temporary keys; empty: the group has one rank, which writes the final keys itself


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one rank says when an order is over; the first ``chunks`` of it are done, the rest are not.

    After a fetch's report the rank writes no page of it any more.
    """

    ticket: int
    chunks: int
    bytes: int  # over the wire
    seconds: float  # busy with it, waiting in the queue not counted
    corrupt: tuple[int, ...] = ()  # of a fetch: places in the order whose bytes failed verification (now deleted)
    problem: str = ""  # why not all were done: "" (nothing failed), or one of PROBLEMS


PROBLEMS = (
    "timeout",  # Redis did not answer in time
    "connection",  # it could not be reached, or went away
    "full",  # it has no memory left for writes, or refuses them
    "buffer",  # the rank's own staging buffers are full; Redis was not asked
    "late",  # the order waited in the queue until its time was up; Redis was not asked
    "error",  # anything else, which is in the rank's log
)
"""Of a TransferReport. A chunk that is missing or corrupt is no problem of the tier's."""

Report: TypeAlias = Callable[[TransferReport], None]


class Transfers(Protocol):
    """One rank's part in a tier. Any thread may call ``fetch``; ``stage`` is called by the thread that computes.

    Each order is answered by exactly one report, from some thread; reports of different orders come in any order.
    """

    def fetch(self, order: FetchOrder) -> None:
        """Queue it; never waits."""
        ...

    def stage(self, order: StoreOrder) -> None:
        """Copy the pages (in the order of steps: no later step may overwrite them first), then queue; never waits for
        the tier."""
        ...

    def close(self) -> None:
        """End the threads within seconds, whatever they wait for. Idempotent."""
        ...
