"""Who holds which page of KV memory. Integers only: the pages themselves are in the group.

A page is in exactly one state:

    free         nobody's, holds nothing
    cached       nobody's, still holds a published block; may be taken at any time, least recently used first
    used         in at least one block table; its reference count is the number of tables that it is in
    in transfer  in no block table, being filled from another tier

A block is *published* under its hash when it is full and computed. The first publisher of a hash wins; whoever
computed the same block beside it is moved onto the published page (``publish`` says which one), so that every full
block of a table is the published one. From that follow two things that need no code of their own: a parent is
referenced at least as often as its children, and, since a table is released from its tail, a parent always stands
behind its children in the order of eviction. Leaves go first, and every cached page can be taken.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.blocks import BlockHash


class InvariantViolation(RuntimeError):
    """The bookkeeping contradicts itself: a defect of ours, never of a request."""


class PoolExhausted(RuntimeError):
    """More pages were asked for than ``available``; callers look there first."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What became shareable and what no longer is, since last asked. No block is in both."""

    stored: list[BlockHash]
    dropped: list[BlockHash]


class BlockPool:
    """Pages 0 to ``num_blocks`` - 1. Every operation is O(1) per page that it names."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1; got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: page 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._transfer: set[int] = set()
        self._references = [0] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._stored: dict[BlockHash, None] = {}
        self._dropped: dict[BlockHash, None] = {}

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody uses and that still hold a published block."""
        return len(self._cached)

    @property
    def in_transfer(self) -> int:
        """Pages that are being filled from another tier."""
        return len(self._transfer)

    @property
    def used(self) -> int:
        """Pages in some block table."""
        return self.num_blocks - self.free - self.cached - self.in_transfer

    @property
    def available(self) -> int:
        """Pages that ``allocate`` can give."""
        return self.free + self.cached

    # -- taking and giving back ----------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages for one table: free ones, then the least recently used cached ones.

        Raises PoolExhausted, having taken none, when fewer are available.
        """
        blocks = self._take(count)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Put published or used pages into one more table."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def release(self, table: Sequence[int]) -> None:
        """Take pages out of one table, from its tail on: the head of a chain outlives its tail."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def begin_transfer(self, count: int) -> list[int]:
        """Take pages that another tier fills while no table names them. Raises PoolExhausted."""
        blocks = self._take(count)
        self._transfer.update(blocks)
        return blocks

    def end_transfer(self, blocks: Iterable[int], *, filled: bool) -> None:
        """The transfer is over: filled pages are in one table from now on, the others are free."""
        for block in blocks:
            self._transfer.remove(block)
            if filled:
                self._references[block] = 1
            else:
                self._free.append(block)

    def _take(self, count: int) -> list[int]:
        if count > self.available:
            raise PoolExhausted(f"{count} pages asked for, {self.available} of {self.num_blocks} available")
        return [self._free.pop() if self._free else self._evict() for _ in range(count)]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _retire(self, block: int) -> None:
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    # -- sharing -------------------------------------------------------------------------------------------------

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The page that holds this block, or None."""
        return self._block_of.get(block_hash)

    def hash_of(self, block: int) -> BlockHash | None:
        """The hash under which a page is published, or None."""
        return self._hash_of.get(block)

    def publish(self, block: int, block_hash: BlockHash) -> int:
        """Make a full, computed, used page findable; the caller's table must name the returned page in its place.

        When the hash has a page already, the caller's reference moves there and ``block`` is given back.
        """
        first = self._block_of.setdefault(block_hash, block)
        if first != block:
            self.acquire((first,))
            self.release((block,))
        elif block not in self._hash_of:
            self._hash_of[block] = block_hash
            if block_hash in self._dropped:  # dropped and stored between two looks: for everybody it was always there
                del self._dropped[block_hash]
            else:
                self._stored[block_hash] = None
        return first

    def retract(self, block: int) -> None:
        """Unpublish a used page that is in one table only; a page in several stays as it is."""
        if self._references[block] == 1 and block in self._hash_of:
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        # Stored and dropped between two looks: nobody ever knew it.
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._dropped[block_hash] = None

    def hashes(self) -> list[BlockHash]:
        """Every published block, oldest publication first."""
        return list(self._block_of)

    def take_events(self) -> CacheEvents:
        """What was published and evicted since the last call."""
        events = CacheEvents(list(self._stored), list(self._dropped))
        self._stored.clear()
        self._dropped.clear()
        return events

    # -- proof ---------------------------------------------------------------------------------------------------

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that states are exclusive and complete and that reference counts equal the live block tables.

        O(pages). Raises InvariantViolation.
        """
        references = Counter(block for table in tables for block in table)
        counted = [references[block] for block in range(self.num_blocks)]
        _require(counted == self._references, "reference counts differ from block tables", counted, self._references)
        used = {block for block, count in enumerate(self._references) if count}
        states = [*self._free, *self._cached, *self._transfer, *used]
        _require(sorted(states) == list(range(self.num_blocks)), "a page is in no state, or in two", states)
        _require(self._block_of == {h: b for b, h in self._hash_of.items()}, "hashes and pages are no bijection")
        _require(set(self._hash_of) <= set(self._cached) | used, "a page without content is published")
        _require(set(self._cached) <= set(self._hash_of), "a cached page holds nothing")


def _require(holds: bool, what: str, *details: object) -> None:
    if not holds:
        raise InvariantViolation(" ".join([what, *map(repr, details)]))
