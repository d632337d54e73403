"""Equal prefixes share pages: finding, publishing, and waiting for blocks that somebody is computing.

Blocks are named by the hash chain of cluster/blocks.py under the request's root, so requests of different cache
domains, adapters or salts never meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cluster.blocks import BlockHash, chain
from workers.block_pool import BlockPool, InvariantViolation
from workers.sequence import Sequence


class Prefix(NamedTuple):
    """Where a sequence can begin: pages that it may share, the tokens whose KV it then has, and a page to copy."""

    pages: list[int]
    num_tokens: int
    partial: int | None = None  # whose first slots hold the last num_tokens % block_tokens of them


def fork(sequence: Sequence, block_tokens: int) -> Prefix | None:
    """What another sample of the request has computed of the prompt; None while none that runs has all but the last
    token, which is computed again for its logits. Needs no hashes: it works without a prefix cache too."""
    wanted = len(sequence.state.prompt) - 1
    for sample in sequence.state.samples:
        if len(sample.table) and sample.num_computed >= wanted:
            full, rest = divmod(wanted, block_tokens)
            pages: list[int] = sample.table.view(0, full + bool(rest)).tolist()
            return Prefix(pages[:full], wanted, pages[full] if rest else None)
    return None


class PrefixCache:
    """The hashes in a pool. When not ``enabled`` nothing is hashed, found or published."""

    def __init__(self, pool: BlockPool, block_tokens: int, *, enabled: bool) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._enabled = enabled
        # Blocks that a running sequence will publish, since all their tokens are known and being computed. An entry
        # lives exactly as long as its sequence runs and has not published it: whoever waits for one waits for
        # something that happens, or sees the entry go.
        self._promised: dict[BlockHash, Sequence] = {}

    def match(self, sequence: Sequence) -> Prefix:
        """The longest published prefix of tokens whose logits nobody needs.

        Those of the last known token always are, so a full hit still computes one.
        """
        found: list[int] = []
        for block_hash in self.usable_hashes(sequence):
            block = self._pool.lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return Prefix(found, len(found) * self._block_tokens)

    def awaited(self, sequence: Sequence, num_matched: int) -> BlockHash | None:
        """The first block that ``sequence`` lacks, when another running sequence is about to publish it."""
        usable = self.usable_hashes(sequence)
        if num_matched < len(usable) and usable[num_matched] in self._promised:
            return usable[num_matched]
        return None

    def is_promised(self, block_hash: BlockHash | None) -> bool:
        """Whether a running sequence is still about to publish this block."""
        return block_hash is not None and block_hash in self._promised

    def promise(self, sequence: Sequence) -> None:
        """A sequence begins to run: its full blocks that nobody has will come."""
        self.promise_blocks(sequence, sequence.hashes[sequence.num_published :])

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence stops running: what it has not published will not come from it."""
        self.withdraw_blocks(sequence, sequence.hashes[sequence.num_published :])

    def promise_blocks(self, sequence: Sequence, blocks: Iterable[BlockHash]) -> None:
        """Blocks that come from elsewhere, for a sequence that waits for them; ``withdraw_blocks`` ends it."""
        for block_hash in blocks:
            self._promised.setdefault(block_hash, sequence)

    def withdraw_blocks(self, sequence: Sequence, blocks: Iterable[BlockHash]) -> None:
        """They have come, or will not."""
        for block_hash in blocks:
            if self._promised.get(block_hash) is sequence:
                del self._promised[block_hash]

    def count_published(self, sequence: Sequence, num_pages: int) -> int:
        """How many of the first pages of a table hold published blocks of the sequence."""
        if not self._enabled:
            return 0
        self._extend_hashes(sequence, num_pages)
        table = sequence.table.view(0, num_pages).tolist()
        published = [self._pool.hash_of(page) == sequence.hashes[i] for i, page in enumerate(table)]
        return published.index(False) if False in published else num_pages

    def publish(self, sequence: Sequence) -> None:
        """Publish the blocks of a sequence that are full and computed by now (a step was committed)."""
        if not self._enabled:
            return
        full = sequence.num_computed // self._block_tokens
        if full > len(sequence.hashes):
            self._extend_hashes(sequence, full)
        for index in range(sequence.num_published, full):
            self._publish_one(sequence, index)

    def retract(self, sequence: Sequence) -> None:
        """Nobody may find what a sequence has published, or found: its pages may hold NaN. The sequence must end now.

        What others have in their tables stays: they meet the same NaN, and the last of them retracts it.
        """
        for block in sequence.table.view(0, sequence.num_published).tolist():
            self._pool.retract(block)

    def check(self, running: list[Sequence], fetching: list[Sequence]) -> None:
        """Every published block of a table is the pool's own, and only who runs, or waits for a fetch, promises."""
        for sequence in running:
            table = sequence.table.view(0, sequence.num_published).tolist()
            if any(self._pool.hash_of(block) != sequence.hashes[i] for i, block in enumerate(table)):
                raise InvariantViolation(f"a table names a page that does not hold its block: {table}")
        if not all(sequence in running or sequence in fetching for sequence in self._promised.values()):
            raise InvariantViolation("a sequence that neither runs nor fetches promises blocks")

    def _publish_one(self, sequence: Sequence, index: int) -> None:
        block_hash = sequence.hashes[index]
        own = int(sequence.table.view()[index])
        shared = self._pool.publish(own, block_hash)
        if shared != own:
            sequence.table.replace(index, shared)
        if self._promised.get(block_hash) is sequence:
            del self._promised[block_hash]
        sequence.num_published = index + 1

    def usable_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Of the full blocks that a sequence need not compute where they are found; none without a cache."""
        if not self._enabled:
            return []
        self._extend_hashes(sequence, sequence.num_known // self._block_tokens)
        return sequence.hashes[: sequence.num_reusable // self._block_tokens]

    def _extend_hashes(self, sequence: Sequence, full: int) -> None:
        """Hash what became full since the last call; nothing is hashed twice."""
        done = len(sequence.hashes)
        if full > done:
            start = sequence.hashes[-1] if done else sequence.state.request.root
            tokens = sequence.tokens(done * self._block_tokens, full * self._block_tokens)
            sequence.hashes.extend(chain(start, tokens.tolist(), self._block_tokens))
