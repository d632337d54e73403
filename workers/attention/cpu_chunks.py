"""Attention on a CPU in fp32 for rows of several tokens: chunks of prompts.

FlashAttention's scheme (Dao et al., arXiv:2205.14135): a block of queries passes over blocks of slots, keeps for every
row the largest score so far, the sum of weights and the weighted values, and rescales when a larger score comes. No
score matrix of the prompt is ever made, and both products are tiles in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.team import share
from workers.threads import exp32, helper, kernel
from workers.tiles import MAX_ROWS, PANEL, add_tile, tile

QUERIES = 64
"""Tokens of a block of queries: the slots that it sees are brought into panels once for all of them."""

SLOTS = 128
"""Slots of a block, a multiple of every page: keys, values, scores and sums of a block stay in the second-level cache.
Blocks begin at multiples of it, so that a token's result is the same however its prompt was cut into chunks (of more
than one token: a single one is another kernel's, which rounds otherwise)."""


@kernel
def attend_chunks(
    q: Any, keys: Any, values: Any, rows: Any, row_starts: Any, num_computed: Any, block_starts: Any, blocks: Any,
    window: Any, tiles: Any, out: Any, me: Any, threads: Any,
) -> None:  # fmt: skip
    """The share of thread ``me`` of ``rows`` of ``q`` [T, heads, head_dim] over their pages into ``out``, which has its
    shape; ``tiles``: workers.tiles.code.

    Work items are (row, block of queries, KV head), given to threads in runs of about as many scores.
    """
    kv_heads = keys.shape[1]
    total = np.int64(0)
    for r in rows:
        total += kv_heads * _scores_of(row_starts[r + 1] - row_starts[r], num_computed[r], window)
    first, last = share(total, me, threads)
    before = np.int64(0)
    for r in rows:
        for start in range(row_starts[r], row_starts[r + 1], QUERIES):
            count = min(QUERIES, row_starts[r + 1] - start)
            position = np.int64(num_computed[r] + start - row_starts[r])
            cost = _scores_of(count, position, window)
            for kv_head in range(kv_heads):
                if first <= before + cost // 2 < last:
                    _attend_block(
                        q, np.int64(start), np.int64(count), position, keys, values, blocks, np.int64(block_starts[r]),
                        np.int64(kv_head), window, tiles, out,
                    )  # fmt: skip
                before += cost


@helper
def _scores_of(count: Any, position: Any, window: Any) -> Any:
    """About how many slots ``count`` tokens from ``position`` on see together. Adds up over blocks of queries."""
    total = np.int64(0)
    for start in range(0, count, QUERIES):
        some = min(QUERIES, count - start)
        total += some * min(np.int64(position + start + some), np.int64(window + some))
    return total


@helper
def _attend_block(
    q: Any, token: Any, count: Any, position: Any, keys: Any, values: Any, blocks: Any, first_block: Any, kv_head: Any,
    window: Any, tiles: Any, out: Any,
) -> None:  # fmt: skip
    """``count`` tokens from q[token] on, the first at ``position``, over one KV head. A row is (query head, token)."""
    head_dim = keys.shape[3]
    group, wide = q.shape[1] // keys.shape[1], (head_dim + PANEL - 1) // PANEL * PANEL
    first, end = max(np.int64(0), position + 1 - window), position + count
    packed_keys = np.empty((SLOTS // PANEL, head_dim, PANEL), np.float32)
    packed_values = np.zeros((wide // PANEL, SLOTS, PANEL), np.float32)
    scores = np.empty((group * count, SLOTS), np.float32)
    sums = np.zeros((group * count, wide), np.float32)
    tops, totals = np.full(group * count, -np.inf, np.float32), np.zeros(group * count, np.float32)
    for begin in range(first // SLOTS * SLOTS, end, SLOTS):
        filled = min(SLOTS, end - begin)
        skipped = max(np.int64(0), first - begin)
        _pack_keys(keys, blocks, first_block, kv_head, begin, skipped, filled, packed_keys)
        _pack_values(values, blocks, first_block, kv_head, begin, skipped, filled, packed_values)
        _one_block(
            q, token, count, position, kv_head, begin, filled, window, packed_keys, packed_values, tiles, scores, sums,
            tops, totals,
        )  # fmt: skip
    for g in range(group):
        for t in range(count):
            inverse = np.float32(1) / totals[g * count + t]
            for i in range(head_dim):
                out[token + t, kv_head * group + g, i] = sums[g * count + t, i] * inverse


@helper
def _one_block(
    q: Any, token: Any, count: Any, position: Any, kv_head: Any, begin: Any, filled: Any, window: Any,
    packed_keys: Any, packed_values: Any, tiles: Any, scores: Any, sums: Any, tops: Any, totals: Any,
) -> None:  # fmt: skip
    """The slots [begin, begin + filled) for all rows, a tile of tokens at a time."""
    group, head_dim, wide = scores.shape[0] // count, q.shape[2], sums.shape[1]
    count_of_tiles = (count + MAX_ROWS - 1) // MAX_ROWS
    stride = q.shape[1] * head_dim
    for g in range(group):
        queries = q.ctypes.data + 4 * head_dim * (token * q.shape[1] + kv_head * group + g)
        for i in range(count_of_tiles):
            start, stop = count * i // count_of_tiles, count * (i + 1) // count_of_tiles
            depth = min(filled, position + stop - begin)  # slots that its last token sees
            if depth <= 0 or begin + SLOTS <= position + start + 1 - window:
                continue
            rows, row = np.int64(stop - start), g * count + start
            target = scores.ctypes.data + 4 * SLOTS * row
            for panel in range((depth + PANEL - 1) // PANEL):
                tile(tiles, (
                    rows, 0, queries + 4 * stride * start, stride,
                    packed_keys.ctypes.data + 4 * head_dim * PANEL * panel, head_dim, target + 4 * PANEL * panel, SLOTS,
                ))  # fmt: skip
            for t in range(start, stop):
                seen = position + t + 1 - begin
                lowest, highest = max(np.int64(0), seen - window), min(depth, seen)
                _weigh(scores, sums, tops, totals, g * count + t, lowest, highest, depth, head_dim)
            for panel in range(wide // PANEL):
                add_tile(tiles, (
                    rows, target, SLOTS, packed_values.ctypes.data + 4 * SLOTS * PANEL * panel, depth,
                    sums.ctypes.data + 4 * (wide * row + PANEL * panel), wide,
                ))  # fmt: skip


@helper
def _weigh(
    scores: Any, sums: Any, tops: Any, totals: Any, row: Any, lowest: Any, highest: Any, depth: Any, head_dim: Any
) -> None:
    """Make a row's scores of slots [lowest, highest) weights, and those of its other slots below ``depth`` zero."""
    for s in range(min(lowest, depth)):
        scores[row, s] = np.float32(0)
    for s in range(max(highest, 0), depth):
        scores[row, s] = np.float32(0)
    if highest <= lowest:
        return
    seen = scores[row, lowest:highest]  # a view, whose indices begin at 0: else the loops become no vectors
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    top = seen[0]
    for s in range(1, seen.shape[0]):
        top = max(top, seen[s])
    top = max(top * scale, tops[row])
    total = np.float32(0)
    for s in range(seen.shape[0]):
        weight = exp32(seen[s] * scale - top)
        seen[s] = weight
        total += weight
    if totals[row] > 0:
        factor = exp32(tops[row] - top)
        total += totals[row] * factor
        for i in range(sums.shape[1]):
            sums[row, i] *= factor
    tops[row], totals[row] = top, total


@helper
def _pack_keys(
    keys: Any, blocks: Any, first_block: Any, kv_head: Any, begin: Any, skipped: Any, filled: Any, packed: Any
) -> None:
    """Slots [begin + skipped, begin + filled) of one head, transposed into panels; zeros where nobody looks."""
    block_tokens, head_dim = keys.shape[2], keys.shape[3]
    for s in range((filled + PANEL - 1) // PANEL * PANEL):
        page = blocks[first_block + (begin + min(s, filled - 1)) // block_tokens]
        slot = (begin + s) % block_tokens
        if skipped <= s < filled:
            for i in range(head_dim):
                packed[s // PANEL, i, s % PANEL] = keys[page, kv_head, slot, i]
        else:
            for i in range(head_dim):
                packed[s // PANEL, i, s % PANEL] = np.float32(0)


@helper
def _pack_values(
    values: Any, blocks: Any, first_block: Any, kv_head: Any, begin: Any, skipped: Any, filled: Any, packed: Any
) -> None:
    """The same slots' values in panels of columns. What is not seen is zero: it may be a NaN, and weighs 0."""
    block_tokens, head_dim = values.shape[2], values.shape[3]
    for s in range(filled):
        page = blocks[first_block + (begin + s) // block_tokens]
        slot = (begin + s) % block_tokens
        if s >= skipped:
            for i in range(head_dim):
                packed[i // PANEL, s, i % PANEL] = values[page, kv_head, slot, i]
        else:
            for i in range(head_dim):
                packed[i // PANEL, s, i % PANEL] = np.float32(0)
