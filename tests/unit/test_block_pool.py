"""The pool of pages: exclusive states, references equal tables, leaves first, events that tell the truth."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.blocks import BlockHash
from tests.support.paged_group import CacheReplica
from workers.block_pool import BlockPool, CacheEvents, InvariantViolation, PoolExhausted


def name_of(chain: tuple[int, ...]) -> BlockHash:
    return BlockHash(hashlib.sha256(bytes(chain)).digest())


def publish_chain(pool: BlockPool, chain: tuple[int, ...]) -> list[int]:
    """A table of fresh pages for a chain, each published in order."""
    table = pool.allocate(len(chain))
    return [pool.publish(block, name_of(chain[: i + 1])) for i, block in enumerate(table)]


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_unpublished_pages_become_free_and_published_ones_cached() -> None:
    pool = BlockPool(4)
    table = [*publish_chain(pool, (1,)), *pool.allocate(1)]
    assert (pool.free, pool.cached, pool.used) == (2, 0, 2)
    pool.release(table)
    assert (pool.free, pool.cached, pool.used) == (3, 1, 0)
    assert pool.lookup(name_of((1,))) == table[0]
    pool.check([])


def test_allocation_beyond_what_is_available_takes_nothing() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    with pytest.raises(PoolExhausted):
        pool.allocate(2)
    pool.check([table])
    assert pool.available == 1


def test_eviction_takes_leaves_first_and_the_least_recently_used_chain_first() -> None:
    pool = BlockPool(4)
    old, new = publish_chain(pool, (1, 1)), publish_chain(pool, (2, 2))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_a_hit_makes_a_chain_recent() -> None:
    pool = BlockPool(4)
    old, new = publish_chain(pool, (1, 1)), publish_chain(pool, (2, 2))
    pool.release(old)
    pool.release(new)
    pool.acquire(old)
    pool.release(old)
    assert pool.allocate(2) == [new[1], new[0]]


def test_the_first_publisher_of_a_hash_wins_and_the_second_moves_onto_its_page() -> None:
    pool = BlockPool(4)
    first = publish_chain(pool, (1,))
    second = publish_chain(pool, (1,))
    assert first == second
    pool.check([first, second])
    assert pool.used == 1


def test_a_block_stored_and_dropped_between_two_looks_is_never_told() -> None:
    pool = BlockPool(1)
    pool.release(publish_chain(pool, (1,)))
    table = pool.allocate(1)
    events = pool.take_events()
    assert (events.stored, events.dropped) == ([], [])
    pool.release(table)
    pool.release(publish_chain(pool, (1,)))
    assert pool.take_events().stored == [name_of((1,))]
    pool.allocate(1)
    assert pool.take_events().dropped == [name_of((1,))]


def test_a_block_dropped_and_stored_again_between_two_looks_stays_known() -> None:
    pool, replica = BlockPool(1), CacheReplica()
    pool.release(publish_chain(pool, (1,)))
    replica.apply(pool.take_events())
    pool.release(pool.allocate(1))
    pool.release(publish_chain(pool, (1,)))
    events = pool.take_events()
    assert events == CacheEvents([], []), "for everybody who looks it was always there"
    replica.apply(events)
    assert replica.known == {name_of((1,))}


def test_a_page_in_one_table_is_retracted_and_one_in_several_stays() -> None:
    pool = BlockPool(4)
    own, shared = publish_chain(pool, (1, 2))
    pool.acquire([shared])
    pool.retract(own)
    pool.retract(shared)
    assert [pool.hash_of(own), pool.hash_of(shared)] == [None, name_of((1, 2))]
    pool.release([own, shared])
    assert (pool.free, pool.used) == (3, 1)
    pool.retract(shared)
    pool.release([shared])
    assert (pool.free, pool.hashes()) == (4, [])
    pool.check([])


def test_a_transfer_ends_in_a_table_or_free() -> None:
    pool = BlockPool(4)
    blocks = pool.begin_transfer(3)
    assert (pool.free, pool.in_transfer, pool.used) == (1, 3, 0)
    pool.check([])
    pool.end_transfer(blocks[:1], filled=True)
    pool.end_transfer(blocks[1:], filled=False)
    pool.check([blocks[:1]])
    assert (pool.free, pool.in_transfer, pool.used) == (3, 0, 1)


@pytest.mark.parametrize("tables", [[], [[0, 1]], [[0], [0]]])
def test_check_finds_tables_that_differ_from_references(tables: list[list[int]]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(InvariantViolation, match="reference counts"):
        pool.check(tables)


def test_check_finds_a_page_that_was_given_back_twice() -> None:
    pool = BlockPool(4)
    table = pool.allocate(1)
    pool.release(table)
    pool.release(table)
    with pytest.raises(InvariantViolation):
        pool.check([])


@dataclass(eq=False)
class Table:
    """A sequence as the pool sees it: a chain of blocks, of which the first ones are published."""

    chain: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    published: int = 0


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with chains over a small alphabet, so that prefixes, duplicates and evictions are frequent."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.replica = CacheReplica()
        self.tables: list[Table] = []
        self.transfers: list[list[int]] = []

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def begin(self, chain: tuple[int, ...]) -> None:
        table = Table(chain)
        for end in range(1, len(chain) + 1):
            block = self.pool.lookup(name_of(chain[:end]))
            if block is None:
                break
            table.blocks.append(block)
        table.published = len(table.blocks)
        self.pool.acquire(table.blocks)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        count = min(count, len(table.chain) + 1 - len(table.blocks))
        if count <= self.pool.available:
            table.blocks += self.pool.allocate(count)
        else:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        full = min(len(table.blocks), len(table.chain))
        for index in range(table.published, full):
            table.blocks[index] = self.pool.publish(table.blocks[index], name_of(table.chain[: index + 1]))
        table.published = full

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table.blocks)

    @rule(count=st.integers(1, 3))
    def begin_transfer(self, count: int) -> None:
        if count <= self.pool.available:
            self.transfers.append(self.pool.begin_transfer(count))

    @precondition(lambda self: self.transfers)
    @rule(filled=st.booleans())
    def end_transfer(self, filled: bool) -> None:
        blocks = self.transfers.pop()
        self.pool.end_transfer(blocks, filled=filled)
        if filled:
            self.tables.append(Table((), blocks))

    @rule()
    def tell(self) -> None:
        self.replica.apply(self.pool.take_events())
        assert self.replica.known == set(self.pool.hashes())

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check([table.blocks for table in self.tables])
            assert self.pool.in_transfer == sum(map(len, self.transfers))

    @invariant()
    def every_prefix_of_a_published_chain_is_published(self) -> None:
        """Leaves go first: no block is left whose parent was evicted before it."""
        if hasattr(self, "pool"):
            chains = {chain[:end] for chain in _ALL_CHAINS for end in range(1, len(chain) + 1)}
            present = {chain for chain in chains if self.pool.lookup(name_of(chain)) is not None}
            assert all(len(chain) == 1 or chain[:-1] in present for chain in present)


_ALL_CHAINS = [tuple((number >> bit) & 1 for bit in range(5)) for number in range(32)]

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
