"""What a router believes to be in one group's pages: a set of block hashes, fed by the group's cache events.

It is as of the last frame and may be wrong by what happened since; a wrong entry costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.blocks import WIRE_HASH_BYTES, BlockHash
from cluster.pb import worker_pb2


class BlockIndex:
    """Of one stream to one incarnation. Holds at most ``max_blocks`` hashes of WIRE_HASH_BYTES bytes each."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: set[bytes] = set()
        self._sequence = 0
        self._valid = False  # a snapshot has begun, and no event was missed since

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, events: worker_pb2.CacheEvents) -> bool:
        """Take events in; False when some were missed: then nothing is known until the next snapshot begins."""
        in_order = events.sequence == self._sequence + 1
        self._sequence = events.sequence
        if events.snapshot:
            self._hashes.clear()
            self._valid = True
        elif not in_order:
            self.clear()
            return False
        if self._valid:
            self._hashes.difference_update(events.dropped)
            self._store(events.stored)
        return True

    def clear(self) -> None:
        """Forget everything, until the next snapshot."""
        self._hashes.clear()
        self._valid = False

    def overlap(self, chain: Sequence[BlockHash]) -> int:
        """How many of the chain's first blocks are there. A block without all before it is of no use."""
        for count, block_hash in enumerate(chain):
            if block_hash[:WIRE_HASH_BYTES] not in self._hashes:
                return count
        return len(chain)

    def _store(self, stored: Sequence[bytes]) -> None:
        room = self._max_blocks - len(self._hashes)
        if len(stored) <= room:
            self._hashes.update(stored)
            return
        # Full: the newer is left out. Dropping the oldest instead would cut chains at their root.
        for block_hash in stored:
            if len(self._hashes) >= self._max_blocks:
                return
            self._hashes.add(block_hash)
