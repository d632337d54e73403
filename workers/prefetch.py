"""Prefixes that a tier behind the pages may hold: looked up when a request comes, fetched while it waits, never longer
than it is told to wait. And the other way: what a step has completed is offered to the tier.

    look up ──▶ decide ──▶ fetch into pages ──▶ publish them: the request finds them like any other cached prefix
       │          │            │
       └──────────┴────────────┴── too late, nothing there, not worth it: the request goes on and computes

Pages under a fetch are in transfer until its answer has come, whatever becomes of the request. Belongs to the
scheduler; no clock, no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from cluster.blocks import BlockHash
from workers.block_pool import BlockPool
from workers.prefix_cache import PrefixCache
from workers.request import PrefixUse
from workers.sequence import RequestState, Sequence
from workers.tier import Chunk, Fetched, LookedUp, Tier

_SOONEST_S, _LATEST_S = 0.02, 0.5
"""Between two looks at a prefix that another group is computing."""


class Phase(Enum):
    """What a request waits for."""

    LOOKING = "looking"  # for the tier's answer
    AWAITING = "awaiting"  # for another group that computes the prefix
    DECIDED = "decided"  # for pages to fetch into: nothing of the tier's
    FETCHING = "fetching"


class Go(Enum):
    """What becomes of a waiting sequence in this step."""

    ON = "on"  # nothing holds it up
    WAIT = "wait"  # pass it by
    NO_ROOM = "no room"  # pages lack


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's. Chunks are counted in the request's chain; times are of the engine's clock, in seconds."""

    sequence: Sequence
    hashes: list[BlockHash]  # of the chunks from ``first`` on that the request could use
    first: int
    phase: Phase = Phase.LOOKING
    ticket: int = 0
    since: float = math.inf  # when this phase began
    until: float = math.inf  # and when the request goes on without it
    claims_until: float = math.inf  # of waiting for other groups, all in all
    chunks: int = 0  # to fetch, from ``first`` on
    spent_s: float = 0.0  # waited for the tier so far
    stored: int = 0


@dataclass(slots=True)
class _Transfer:
    """Pages that a fetch fills."""

    hashes: list[BlockHash]  # of its blocks
    pages: list[int]
    spared: int  # tokens of its first chunk that were in pages here before
    waiting: Prefetch | None  # who waits for it; None: nobody any more


@dataclass(slots=True)
class PrefetchTotals:
    """Sums since the scheduler began."""

    found_tokens: int = 0
    fetched_tokens: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0


class Prefetcher:
    """``deadline_s``: what a request waits for the tier at most, all in all; ``claim_wait_s``: and, beside it, for
    other groups that compute its prefix."""

    def __init__(
        self,
        tier: Tier,
        pool: BlockPool,
        cache: PrefixCache,
        *,
        block_tokens: int,
        deadline_s: float,
        claim_wait_s: float,
    ) -> None:
        self.totals = PrefetchTotals()
        self._tier = tier
        self._pool = pool
        self._cache = cache
        self._chunk_tokens = tier.chunk_tokens
        self._chunk_blocks = tier.chunk_tokens // block_tokens
        self._deadline_s = deadline_s
        self._claim_wait_s = claim_wait_s
        self._asked: dict[int, Prefetch] = {}  # look-ups, by ticket
        self._transfers: dict[int, _Transfer] = {}  # fetches, by ticket
        self._holds: dict[RequestState, list[int]] = {}  # pages that waiting requests have fetched and not yet taken
        self._live: dict[RequestState, Prefetch] = {}
        self._fresh: list[Prefetch] = []  # of those, not yet asked for
        self._tickets = 0

    # -- a request's way ---------------------------------------------------------------------------------------------

    def begin(self, state: RequestState) -> None:
        """A request has come: ask, when next there is a step, for what lies beyond the pages that it could share."""
        sequence = next(sample for sample in state.samples if not sample.finished)
        usable = self._cache.usable_hashes(sequence)
        first = len(self._cache.match(sequence).pages) // self._chunk_blocks
        hashes = self._chunk_hashes(usable)[first:]
        if not hashes:
            return
        state.prefix_use = PrefixUse("unavailable")
        prefetch = Prefetch(sequence, hashes, first)
        self._live[state] = prefetch
        self._fresh.append(prefetch)

    def advance(self, now: float) -> None:
        """Ask for those who have come, take in the tier's answers, and let go who has waited long enough."""
        fresh, self._fresh = self._fresh, []
        for one in fresh:
            if self._live.get(one.sequence.state) is one:  # else it has been cancelled
                one.claims_until = now + self._claim_wait_s
                self._look(one, now)
        for answer in self._tier.take_answers():
            if isinstance(answer, LookedUp):
                prefetch = self._asked.pop(answer.ticket, None)
                if prefetch is not None:
                    self._looked_up(prefetch, answer, now)
            else:
                self._fetched(answer, now)
        for prefetch in list(self._live.values()):
            if prefetch.phase != Phase.DECIDED and now >= prefetch.until:
                self._overdue(prefetch, now)

    def go(self, sequence: Sequence, now: float, spare: int) -> Go:
        """Whether a waiting sequence may be let in; begins the fetch that was decided on, where the pages for it are
        there and ``spare`` more."""
        prefetch = self._live.get(sequence.state)
        if prefetch is None:
            return Go.ON
        if prefetch.phase != Phase.DECIDED:
            return Go.WAIT
        return self._begin_fetch(prefetch, now, spare)

    def started(self, sequence: Sequence) -> None:
        """A sequence has its pages: what it held is in its table now; others may count on what it computes."""
        state = sequence.state
        self._pool.release(self._holds.pop(state, []))
        if state.admitted_at is not None or state.prefix_use is None:
            return
        done = sequence.num_computed // self._chunk_tokens
        missing = self._chunk_hashes(self._cache.usable_hashes(sequence))[done:]
        if missing:
            self._tier.claim(missing, sequence.num_computed, sequence.num_known)

    def forget(self, state: RequestState) -> None:
        """A request has ended. What is being fetched for it stays in transfer until that is over."""
        prefetch = self._live.pop(state, None)
        if prefetch is not None:
            self._asked.pop(prefetch.ticket, None)
            self._abandon(prefetch)
        self._pool.release(self._holds.pop(state, []))

    def drop_holds(self) -> bool:
        """Running sequences lack pages: what waiting ones hold becomes plain cache. Whether there was any."""
        for pages in self._holds.values():
            self._pool.release(pages)
        dropped = bool(self._holds)
        self._holds.clear()
        return dropped

    # -- what a step has completed -----------------------------------------------------------------------------------

    def offer(self, sequence: Sequence) -> None:
        """Store the chunks that are complete by now and that the tier lacks, from the first one on. Once it takes one
        no more, none behind that is offered: nobody could reach it."""
        complete = sequence.num_published // self._chunk_blocks
        while sequence.num_offered < complete and not sequence.cut_off:
            lacking: list[Chunk] = []
            for index in range(sequence.num_offered, complete):
                chunk = self._chunk(sequence, index)
                if self._tier.is_stored(chunk.hash):
                    if lacking:
                        break
                    sequence.num_offered = index + 1
                else:
                    lacking.append(chunk)
            if not lacking:
                return
            taken = self._tier.store(lacking, sequence.state.request.tenant)
            sequence.num_offered = lacking[0].number + taken
            sequence.cut_off = taken < len(lacking)

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether some request waits for the tier, or pages are in transfer."""
        return bool(self._transfers) or any(one.phase != Phase.DECIDED for one in self._live.values())

    def fetching(self) -> list[Sequence]:
        """Those who wait for a fetch."""
        return [one.waiting.sequence for one in self._transfers.values() if one.waiting is not None]

    def tables(self) -> list[list[int]]:
        """Pages that are held for waiting requests."""
        return list(self._holds.values())

    # -- look-up -----------------------------------------------------------------------------------------------------

    def _look(self, prefetch: Prefetch, now: float) -> None:
        left = self._deadline_s - prefetch.spent_s
        prefetch.ticket = self._next_ticket()
        if left <= 0 or not self._tier.look_up(prefetch.ticket, prefetch.hashes, prefetch.first, left):
            self._live.pop(prefetch.sequence.state, None)
            return
        self._asked[prefetch.ticket] = prefetch
        self._live[prefetch.sequence.state] = prefetch
        self._enter(prefetch, Phase.LOOKING, now, now + left)

    def _looked_up(self, prefetch: Prefetch, answer: LookedUp, now: float) -> None:
        self._leave(prefetch, now)
        prefetch.stored = answer.stored
        budget_s = self._deadline_s - prefetch.spent_s
        first_token, known = prefetch.first * self._chunk_tokens, prefetch.sequence.num_known
        decision = self._tier.decide(answer.stored, first_token, known, budget_s)
        if answer.claimed_s is not None and now < prefetch.claims_until:
            whole = self._tier.decide(len(prefetch.hashes), first_token, known, budget_s)
            waited_s = answer.claimed_s + whole.fetch_s + whole.compute_s
            if whole.chunks > answer.stored and waited_s < decision.fetch_s + decision.compute_s:
                again = now + min(max(answer.claimed_s / 2, _SOONEST_S), _LATEST_S)
                self._enter(prefetch, Phase.AWAITING, now, min(again, prefetch.claims_until))
                return
        prefetch.chunks = decision.chunks
        if not decision.chunks:
            self._settle(prefetch, decision.reason)
        else:
            self._enter(prefetch, Phase.DECIDED, now, now)

    def _overdue(self, prefetch: Prefetch, now: float) -> None:
        phase = prefetch.phase
        self._leave(prefetch, now)
        if phase == Phase.AWAITING:
            self._look(prefetch, now)
            return
        self._asked.pop(prefetch.ticket, None)
        self._abandon(prefetch)
        self._settle(prefetch, "deadline")

    # -- fetch -------------------------------------------------------------------------------------------------------

    def _begin_fetch(self, prefetch: Prefetch, now: float, spare: int) -> Go:
        """The pages here may have changed since the look-up: only what is still missing is fetched."""
        sequence = prefetch.sequence
        here = self._cache.match(sequence).pages
        matched = len(here)
        sequence.held_on = self._cache.awaited(sequence, matched)
        if sequence.held_on is not None:
            return Go.WAIT
        begin, end = matched // self._chunk_blocks, prefetch.first + prefetch.chunks
        if begin < prefetch.first or begin >= end:
            self._settle(prefetch, "evicted" if begin < prefetch.first else "computed_meanwhile")
            return Go.ON
        count = (end - begin) * self._chunk_blocks
        # What the fetched pages continue must not be evicted meanwhile: without it nobody could use them.
        self._pool.acquire(here)
        if count + spare > self._pool.available:
            self._pool.release(here)
            return Go.NO_ROOM
        self._holds[sequence.state] = here
        pages = self._pool.begin_transfer(count)
        blocks = self._cache.usable_hashes(sequence)[begin * self._chunk_blocks : end * self._chunk_blocks]
        chunks = [
            Chunk(
                prefetch.hashes[index - prefetch.first],
                index,
                tuple(pages[(index - begin) * self._chunk_blocks : (index - begin + 1) * self._chunk_blocks]),
            )
            for index in range(begin, end)
        ]
        spared = (matched % self._chunk_blocks) * (self._chunk_tokens // self._chunk_blocks)
        left = max(0.0, self._deadline_s - prefetch.spent_s)
        prefetch.ticket = self._next_ticket()
        self._transfers[prefetch.ticket] = _Transfer(blocks, pages, spared, prefetch)
        self._cache.promise_blocks(sequence, blocks)
        self._enter(prefetch, Phase.FETCHING, now, now + left)
        self._tier.fetch(prefetch.ticket, chunks, left)
        return Go.WAIT

    def _fetched(self, answer: Fetched, now: float) -> None:
        transfer = self._transfers.pop(answer.ticket)
        filled = answer.chunks * self._chunk_blocks
        self._pool.end_transfer(transfer.pages[:filled], filled=True)
        self._pool.end_transfer(transfer.pages[filled:], filled=False)
        pages = [
            self._pool.publish(page, block_hash)
            for page, block_hash in zip(transfer.pages[:filled], transfer.hashes, strict=False)
        ]
        prefetch = transfer.waiting
        if prefetch is None:
            self._pool.release(pages)
            return
        self._leave(prefetch, now)
        self._cache.withdraw_blocks(prefetch.sequence, transfer.hashes)
        self._holds.setdefault(prefetch.sequence.state, []).extend(pages)
        fetched = answer.chunks * self._chunk_tokens - transfer.spared
        self._settle(prefetch, "fetch" if filled else "gone", fetched_tokens=max(0, fetched))

    def _abandon(self, prefetch: Prefetch) -> None:
        """Nobody waits for its fetch any more."""
        transfer = self._transfers.get(prefetch.ticket)
        if transfer is not None and transfer.waiting is prefetch:
            transfer.waiting = None
            self._cache.withdraw_blocks(prefetch.sequence, transfer.hashes)

    # -- states ------------------------------------------------------------------------------------------------------

    def _enter(self, prefetch: Prefetch, phase: Phase, now: float, until: float) -> None:
        prefetch.phase, prefetch.since, prefetch.until = phase, now, until

    def _leave(self, prefetch: Prefetch, now: float) -> None:
        if prefetch.phase in (Phase.LOOKING, Phase.FETCHING):
            prefetch.spent_s += max(0.0, now - prefetch.since)

    def _settle(self, prefetch: Prefetch, reason: str, fetched_tokens: int = 0) -> None:
        """It goes on: with what was fetched, or without."""
        state = prefetch.sequence.state
        self._live.pop(state, None)
        totals = self.totals
        totals.found_tokens += prefetch.stored * self._chunk_tokens
        totals.fetched_tokens += fetched_tokens
        totals.waited_s += prefetch.spent_s
        totals.longest_wait_s = max(totals.longest_wait_s, prefetch.spent_s)
        state.prefix_use = PrefixUse(
            decision=reason,
            stored_tokens=prefetch.stored * self._chunk_tokens,
            fetched_tokens=fetched_tokens,
            waited_s=prefetch.spent_s,
        )

    def _chunk_hashes(self, blocks: list[BlockHash]) -> list[BlockHash]:
        return blocks[self._chunk_blocks - 1 :: self._chunk_blocks]

    def _chunk(self, sequence: Sequence, index: int) -> Chunk:
        begin, end = index * self._chunk_blocks, (index + 1) * self._chunk_blocks
        return Chunk(sequence.hashes[end - 1], index, tuple(sequence.table.view(begin, end).tolist()))

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets
