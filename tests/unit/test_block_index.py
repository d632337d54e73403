"""What the router believes to be in a group's pages, against a plain set, through gaps, snapshots and bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.blocks import BlockHash, chain
from cluster.pb.worker_pb2 import CacheEvents
from router.index import BlockIndex

ROOT = BlockHash(bytes(32))
CHAIN = chain(ROOT, range(64), 8)


def wire(hashes: list[BlockHash]) -> list[bytes]:
    return [block_hash[:16] for block_hash in hashes]


def filled(*, hashes: list[BlockHash] = CHAIN, max_blocks: int = 1000) -> BlockIndex:
    index = BlockIndex(max_blocks)
    assert index.apply(CacheEvents(sequence=1, snapshot=True, stored=wire(hashes)))
    return index


def test_overlap_is_the_longest_prefix_without_a_hole() -> None:
    index = filled()
    assert index.overlap(CHAIN) == 8
    assert index.overlap(CHAIN[:3]) == 3
    assert index.apply(CacheEvents(sequence=2, dropped=wire(CHAIN[2:3])))
    assert index.overlap(CHAIN) == 2
    assert index.apply(CacheEvents(sequence=3, dropped=wire(CHAIN[:1])))
    assert index.overlap(CHAIN) == 0
    assert index.overlap([]) == 0


def test_another_root_shares_nothing() -> None:
    assert filled().overlap(chain(BlockHash(b"x" * 32), range(64), 8)) == 0


def test_a_snapshot_in_parts_replaces_everything_at_its_first_part() -> None:
    index = filled()
    assert index.apply(CacheEvents(sequence=2, snapshot=True, more=True, stored=wire(CHAIN[:1])))
    assert index.overlap(CHAIN) == 1
    assert index.apply(CacheEvents(sequence=3, stored=wire(CHAIN[1:4])))
    assert index.overlap(CHAIN) == 4


def test_a_gap_voids_everything_until_the_next_snapshot() -> None:
    index = filled()
    assert not index.apply(CacheEvents(sequence=3, stored=wire(CHAIN[:1])))
    assert len(index) == 0
    assert index.apply(CacheEvents(sequence=4, stored=wire(CHAIN[:1])))
    assert index.overlap(CHAIN) == 0
    assert index.apply(CacheEvents(sequence=5, snapshot=True, stored=wire(CHAIN[:2])))
    assert index.overlap(CHAIN) == 2


def test_events_before_the_first_snapshot_mean_nothing() -> None:
    index = BlockIndex(10)
    assert index.apply(CacheEvents(sequence=1, stored=wire(CHAIN)))
    assert len(index) == 0


def test_it_is_bounded_and_keeps_the_roots_of_chains() -> None:
    index = filled(max_blocks=5)
    assert len(index) == 5
    assert index.overlap(CHAIN) == 5
    assert index.apply(CacheEvents(sequence=2, dropped=wire(CHAIN[4:5]), stored=wire(CHAIN[4:])))
    assert len(index) == 5


def test_dropped_is_applied_before_stored() -> None:
    index = filled()
    assert index.apply(CacheEvents(sequence=2, dropped=wire(CHAIN), stored=wire(CHAIN)))
    assert index.overlap(CHAIN) == 8


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7))), min_size=1, max_size=12)
)
def test_it_equals_a_plain_set(events: list[tuple[bool, set[int], set[int]]]) -> None:
    index, expected = filled(), set(range(8))
    for sequence, (snapshot, dropped, stored) in enumerate(events, start=2):
        index.apply(
            CacheEvents(
                sequence=sequence,
                snapshot=snapshot,
                dropped=[CHAIN[i][:16] for i in dropped],
                stored=[CHAIN[i][:16] for i in stored],
            )
        )
        expected = (set() if snapshot else expected - dropped) | stored
        assert len(index) == len(expected)
        assert index.overlap(CHAIN) == next((i for i in range(8) if i not in expected), 8)
