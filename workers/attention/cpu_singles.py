"""Attention on a CPU in fp32 for rows of one token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import intrinsic

from workers import vectors
from workers.team import share
from workers.threads import exp32, helper, kernel

WIDTHS = tuple(sorted({vectors.LANES, 8, 1}, reverse=True))
"""Lanes that the kernel is written for: it takes the most that divide a page's slots and a head's numbers."""

COLUMNS = 4
"""Vectors of values that are summed side by side: each has to wait for its own last sum."""

SEGMENT = 512
"""Slots that are attended at once, a multiple of every page."""

EVERYTHING = 2**31 - 1
"""A window of any context."""


def width_for(block_tokens: int, head_dim: int) -> int:
    """Lanes for pages of this shape."""
    return next(width for width in WIDTHS if block_tokens % width == 0 and head_dim % width == 0)


def parts_of(lengths: npt.NDArray[np.integer]) -> int:
    """How many segments the rows that see so many slots have together, at most; those of one segment do not count."""
    segments = (lengths.astype(np.int64) - 1) // SEGMENT + 1
    return int(segments[segments > 1].sum())


@kernel
def attend_singles(
    q: Any, keys: Any, values: Any, rows: Any, row_starts: Any, num_computed: Any, block_starts: Any, blocks: Any,
    window: Any, width: Any, sums: Any, tops: Any, out: Any, me: Any, threads: Any,
) -> None:  # fmt: skip
    """The share of thread ``me`` of ``rows`` of one token each.

    Work items are (row, KV head, segment of its slots), given to threads in runs of about as many slots that are seen.
    A row of several segments leaves them in ``sums`` [parts * kv_heads, group, head_dim] and ``tops`` [..., group, 2],
    from which ``put_together`` makes the result (Flash-Decoding, Dao et al., 2023): one long row keeps all threads
    busy. Segments begin at multiples of SEGMENT, so that a result does not depend on the batch or the threads.
    """
    kv_heads = keys.shape[1]
    total = np.int64(0)
    for r in rows:
        total += min(np.int64(num_computed[r] + 1), window)
    begin, end = share(total * kv_heads, me, threads)
    before, part = np.int64(0), np.int64(0)
    for r in rows:
        length = np.int64(num_computed[r] + 1)
        first, several = max(np.int64(0), length - window), _segments(length, window) > 1
        for kv_head in range(kv_heads):
            for segment in range(first // SEGMENT, (length - 1) // SEGMENT + 1):
                low, high = max(first, segment * SEGMENT), min(length, (segment + 1) * SEGMENT)
                if begin <= before + (high - low) // 2 < end:
                    _attend_segment(
                        q, np.int64(row_starts[r]), keys, values, blocks, np.int64(block_starts[r]), low, high,
                        np.int64(kv_head), width, several, part, sums, tops, out,
                    )  # fmt: skip
                before += high - low
                part += several


@kernel
def put_together(
    rows: Any, row_starts: Any, num_computed: Any, window: Any, sums: Any, tops: Any, out: Any, me: Any, threads: Any
) -> None:
    """The share of thread ``me`` of rows of several segments: their weighted values, scaled to the largest score."""
    group, head_dim = sums.shape[1], sums.shape[2]
    part, item = np.int64(0), np.int64(0)
    for r in rows:
        count = _segments(np.int64(num_computed[r] + 1), window)
        if count == 1:
            continue
        for kv_head in range(out.shape[1] // group):
            if item % threads == me:
                for g in range(group):
                    _put_together(sums, tops, part, count, g, row_starts[r], kv_head * group + g, head_dim, out)
            item += 1
            part += count


@helper
def _put_together(
    sums: Any, tops: Any, part: Any, count: Any, g: Any, row: Any, head: Any, head_dim: Any, out: Any
) -> None:
    top = tops[part, g, 0]
    for p in range(part + 1, part + count):
        top = max(top, tops[p, g, 0])
    total = np.float32(0)
    for i in range(head_dim):
        out[row, head, i] = np.float32(0)
    for p in range(part, part + count):
        factor = exp32(tops[p, g, 0] - top) * tops[p, g, 1]
        total += factor
        for i in range(head_dim):
            out[row, head, i] += factor * sums[p, g, i]
    for i in range(head_dim):
        out[row, head, i] /= total


@helper
def _segments(length: Any, window: Any) -> Any:
    """How many segments the slots [length - window, length) lie in."""
    return (length - 1) // SEGMENT - max(np.int64(0), length - window) // SEGMENT + 1


# Below, pages and queries go by whole with indices, or as addresses, never as slices: a slice counts references,
# atomically, and the threads would fight for that one counter.


@helper
def _attend_segment(
    q: Any, token: Any, keys: Any, values: Any, blocks: Any, first_block: Any, first: Any, length: Any, kv_head: Any,
    width: Any, several: Any, part: Any, sums: Any, tops: Any, out: Any,
) -> None:  # fmt: skip
    """One token's query heads over one KV head's slots [first, length): all scores, their softmax, the sum of values.

    Other slots count for nothing: their scores are not read again, their values never, since a NaN that a broken
    sequence left there would spread even with a weight of 0.
    """
    block_tokens, head_dim = keys.shape[2], keys.shape[3]
    group = q.shape[1] // keys.shape[1]
    begin = first // block_tokens * block_tokens  # the position that scores[:, 0] is about
    scores = np.empty((group, (length + block_tokens - 1) // block_tokens * block_tokens - begin), np.float32)
    _score_pages(q, token, keys, blocks, first_block, begin, length, kv_head, width, scores)
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    for g in range(group):
        top, total = _softmax(scores[g, first - begin : length - begin], scale)
        if several:
            tops[part, g, 0], tops[part, g, 1] = top, total
    if several:
        _sum_pages(scores, values, blocks, first_block, begin, first, length, kv_head, width, part, np.int64(0), sums)
    else:
        _sum_pages(
            scores, values, blocks, first_block, begin, first, length, kv_head, width, token, kv_head * group, out
        )


# Who takes an array's address gets the array as an argument: numba gives an array back behind the last line that names
# it, and knows nothing of addresses. They are taken once, since each look counts a reference too.


@helper
def _score_pages(
    q: Any, token: Any, keys: Any, blocks: Any, first_block: Any, begin: Any, length: Any, kv_head: Any, width: Any,
    scores: Any,
) -> None:  # fmt: skip
    """scores [group, length - begin and more] of the slots from ``begin``, where a page begins, not yet scaled."""
    kv_heads, block_tokens, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    group = scores.shape[0]
    page_bytes, last_page = 4 * block_tokens * head_dim, (length - 1) // block_tokens
    queries = q.ctypes.data + 4 * head_dim * (token * q.shape[1] + kv_head * group)
    all_keys, target = keys.ctypes.data + page_bytes * kv_head, scores.ctypes.data
    for b in range(begin // block_tokens, last_page + 1):
        page = all_keys + page_bytes * kv_heads * blocks[first_block + b]
        _prefetch(all_keys + page_bytes * kv_heads * blocks[first_block + min(b + 1, last_page)], page_bytes)
        for g in range(group):
            for s in range(0, min(block_tokens, length - b * block_tokens), width):
                _scores(
                    width, queries + 4 * head_dim * g, page + 4 * head_dim * s, head_dim,
                    target + 4 * (scores.shape[1] * g + b * block_tokens - begin + s),
                )  # fmt: skip


@helper
def _sum_pages(
    weights: Any, values: Any, blocks: Any, first_block: Any, begin: Any, first: Any, length: Any, kv_head: Any,
    width: Any, row: Any, head: Any, out: Any,
) -> None:  # fmt: skip
    """out[row, head:] = the values of slots [first, length), weighted; weights[:, 0] is about ``begin``."""
    kv_heads, block_tokens, head_dim = values.shape[1], values.shape[2], values.shape[3]
    group = weights.shape[0]
    for g in range(group):
        for i in range(head_dim):
            out[row, head + g, i] = np.float32(0)
    page_bytes, last_page = 4 * block_tokens * head_dim, (length - 1) // block_tokens
    target = out.ctypes.data + 4 * head_dim * (row * out.shape[1] + head)
    all_values, source = values.ctypes.data + page_bytes * kv_head, weights.ctypes.data
    for b in range(begin // block_tokens, last_page + 1):
        page = all_values + page_bytes * kv_heads * blocks[first_block + b]
        _prefetch(all_values + page_bytes * kv_heads * blocks[first_block + min(b + 1, last_page)], page_bytes)
        skipped = max(0, first - b * block_tokens)
        filled = min(block_tokens, length - b * block_tokens) - skipped
        for g in range(group):
            _add_weighted(
                width, source + 4 * (weights.shape[1] * g + b * block_tokens - begin + skipped), filled,
                page + 4 * head_dim * skipped, head_dim, target + 4 * head_dim * g,
            )  # fmt: skip


@helper
def _softmax(scores: Any, scale: Any) -> Any:
    """In place; returns the largest score, scaled, and the sum that was divided by. (A view, so that its indices begin
    at 0: where they might be negative no loop becomes vectors.)"""
    top = scores[0]
    for s in range(1, scores.shape[0]):
        top = max(top, scores[s])
    total = np.float32(0)
    for s in range(scores.shape[0]):
        weight = exp32((scores[s] - top) * scale)
        scores[s] = weight
        total += weight
    inverse = np.float32(1) / total
    for s in range(scores.shape[0]):
        scores[s] *= inverse
    return top * scale, total


@helper
def _add_weighted(width: Any, weights: Any, filled: Any, page: Any, head_dim: Any, target: Any) -> None:
    """target [head_dim] += weights [filled] @ page [filled, head_dim]; addresses."""
    wide = head_dim // (COLUMNS * width) * COLUMNS * width
    for column in range(0, wide, COLUMNS * width):
        _weighted_sum(width, COLUMNS, weights, filled, page + 4 * column, head_dim, target + 4 * column)
    for column in range(wide, head_dim, width):
        _weighted_sum(width, 1, weights, filled, page + 4 * column, head_dim, target + 4 * column)


@intrinsic  # type: ignore[untyped-decorator]
def _scores(typing: Any, width: Any, query: Any, keys: Any, head_dim: Any, scores: Any) -> Any:
    """scores [width] = keys [width, head_dim] @ query [head_dim], from addresses."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        width, *rest = arguments
        vectors.switch(builder, width, {lanes: partial(_emit_scores, builder, lanes, *rest) for lanes in WIDTHS})
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _emit_scores(builder: Any, lanes: int, query: Any, keys: Any, head_dim: Any, scores: Any) -> None:
    """Each slot's product in one register; then all of them are added up across together."""
    query, keys, scores = (vectors.pointer(builder, address) for address in (query, keys, scores))
    slots = [vectors.offset(builder, keys, builder.mul(head_dim, vectors.constant(s))) for s in range(lanes)]
    with vectors.Loop(builder, head_dim, lanes, [vectors.zeros(lanes)] * lanes) as loop:
        part = vectors.load(builder, vectors.offset(builder, query, loop.index), lanes)
        loaded = [vectors.load(builder, vectors.offset(builder, slot, loop.index), lanes) for slot in slots]
        loop.carry([vectors.fused_multiply_add(builder, part, *pair) for pair in zip(loaded, loop.values, strict=True)])
    vectors.store(builder, vectors.sums_across(builder, loop.results), scores)


@intrinsic  # type: ignore[untyped-decorator]
def _weighted_sum(
    typing: Any, width: Any, columns: Any, weights: Any, filled: Any, values: Any, head_dim: Any, target: Any
) -> Any:
    """target [columns * width] += weights [filled] @ values [filled, columns * width], rows ``head_dim`` apart."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        width, columns, *rest = arguments

        def of_width(lanes: int) -> None:
            each = {count: partial(_emit_weighted_sum, builder, lanes, count, *rest) for count in (1, COLUMNS)}
            vectors.switch(builder, columns, each)

        vectors.switch(builder, width, {lanes: partial(of_width, lanes) for lanes in WIDTHS})
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _emit_weighted_sum(
    builder: Any, lanes: int, columns: int, weights: Any, filled: Any, values: Any, head_dim: Any, target: Any
) -> None:
    weights, values, target = (vectors.pointer(builder, address) for address in (weights, values, target))
    places = [vectors.offset(builder, target, lanes * c) for c in range(columns)]
    with vectors.Loop(builder, filled, 1, [vectors.load(builder, place, lanes) for place in places]) as loop:
        weight = vectors.broadcast(builder, builder.load(vectors.offset(builder, weights, loop.index)), lanes)
        slot = vectors.offset(builder, values, builder.mul(loop.index, head_dim))
        parts = [vectors.load(builder, vectors.offset(builder, slot, lanes * c), lanes) for c in range(columns)]
        loop.carry(
            [vectors.fused_multiply_add(builder, weight, *pair) for pair in zip(parts, loop.values, strict=True)]
        )
    for value, place in zip(loop.results, places, strict=True):
        vectors.store(builder, value, place)


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, address: Any, size: Any) -> Any:
    """Bring ``size`` bytes (of a page) nearer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, size = arguments
        numbers = builder.sdiv(size, vectors.constant(4))
        with vectors.Loop(builder, numbers, 16, []) as loop:
            vectors.prefetch(builder, vectors.offset(builder, vectors.pointer(builder, address), loop.index))
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
