"""Attention on a CPU in fp32: a fused kernel for rows of one token, gathered pages and torch's kernel for chunks."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from workers.attention.interface import Batch
from workers.attention.reference import gather
from workers.threads import exp32, helper, kernel


class CpuAttention:
    """Reads decode rows' pages where they lie; must equal ReferenceAttention."""

    name = "cpu"

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See Attention."""
        plan = batch.plan
        out = torch.empty_like(q)
        if len(batch.single_rows):
            _decode(
                q.numpy(), keys.numpy(), values.numpy(), batch.single_rows, plan.row_starts, plan.num_computed,
                plan.block_starts, plan.blocks, numba.get_num_threads(), out.numpy(),
            )  # fmt: skip
        for row in batch.chunk_rows:
            self._chunk(int(row), q, keys, values, batch, out)
        return out.flatten(1)

    def _chunk(
        self, row: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """One row of many tokens, over its earlier pages too."""
        plan = batch.plan
        start, end = plan.row_starts[row], plan.row_starts[row + 1]
        length, used = batch.length(row), batch.used_pages(row, keys.shape[2])
        mask = None
        if plan.num_computed[row]:
            mask = torch.arange(length) <= batch.positions[start:end, None]
        out[start:end] = torch.nn.functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            gather(keys, used, length)[None],
            gather(values, used, length)[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)


@kernel
def _decode(
    q: Any, keys: Any, values: Any, rows: Any, row_starts: Any, num_computed: Any, block_starts: Any, blocks: Any,
    threads: Any, out: Any,
) -> None:  # fmt: skip
    """Work items are (row, KV head), given to threads in runs of about equal length in tokens."""
    kv_heads = keys.shape[1]
    total = np.int64(0)
    for r in rows:
        total += num_computed[r] + 1
    total *= kv_heads
    for thread in numba.prange(threads):
        first, last = total * thread // threads, total * (thread + 1) // threads
        before = np.int64(0)
        for r in rows:
            length = num_computed[r] + 1
            for kv_head in range(kv_heads):
                middle = before + length // 2
                if first <= middle < last:
                    _attend_one(q, row_starts[r], keys, values, blocks, block_starts[r], length, kv_head, out)
                before += length


# Below, arrays go by whole with indices, never as slices: a slice counts references to the pages, atomically, and the
# threads would fight for that one counter.


@helper
def _attend_one(
    q: Any, token: Any, keys: Any, values: Any, blocks: Any, first_block: Any, length: Any, kv_head: Any, out: Any
) -> None:
    """One token's query heads over one KV head: online softmax (arXiv:1805.02867), page by page."""
    block_tokens, head_dim = keys.shape[2], keys.shape[3]
    group = q.shape[1] // keys.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    weights = np.empty(block_tokens, np.float32)
    best = np.full(group, -np.inf, np.float32)
    norm = np.zeros(group, np.float32)
    acc = np.zeros((group, head_dim), np.float32)
    for b in range((length + block_tokens - 1) // block_tokens):
        page = blocks[first_block + b]
        filled = min(block_tokens, length - b * block_tokens)
        for g in range(group):
            top = max(best[g], _scores(q, token, kv_head * group + g, keys, page, kv_head, filled, scale, weights))
            shrink = exp32(best[g] - top)
            best[g] = top
            norm[g] = norm[g] * shrink + _exponentials(weights, filled, top)
            _accumulate(weights, values, page, kv_head, filled, shrink, acc, g)
    for g in range(group):
        inverse = np.float32(1) / norm[g]
        for i in range(head_dim):
            out[token, kv_head * group + g, i] = acc[g, i] * inverse


# Four slots at a time: a query, and the sum of values, then go through the registers once for four tokens. Slots
# behind ``filled`` are never read: a NaN that a broken sequence left there would spread even with a weight of 0.


@helper
def _scores(
    q: Any, token: Any, head: Any, keys: Any, page: Any, kv_head: Any, filled: Any, scale: Any, scores: Any
) -> Any:
    """Fill ``scores``; returns the largest."""
    head_dim = q.shape[2]
    for s in range(0, filled - 3, 4):
        a = b = c = d = np.float32(0)
        for i in range(head_dim):
            x = q[token, head, i]
            a += x * keys[page, kv_head, s, i]
            b += x * keys[page, kv_head, s + 1, i]
            c += x * keys[page, kv_head, s + 2, i]
            d += x * keys[page, kv_head, s + 3, i]
        scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = a * scale, b * scale, c * scale, d * scale
    for s in range(filled // 4 * 4, filled):
        a = np.float32(0)
        for i in range(head_dim):
            a += q[token, head, i] * keys[page, kv_head, s, i]
        scores[s] = a * scale
    top = scores[0]
    for s in range(1, filled):
        top = max(top, scores[s])
    return top


@helper
def _exponentials(scores: Any, filled: Any, top: Any) -> Any:
    """Scores to e**(score - top), in place; returns their sum."""
    total = np.float32(0)
    for s in range(filled):
        weight = exp32(scores[s] - top)
        scores[s] = weight
        total += weight
    return total


@helper
def _accumulate(weights: Any, values: Any, page: Any, kv_head: Any, filled: Any, shrink: Any, acc: Any, g: Any) -> None:
    """acc[g] = acc[g] * shrink + weights @ the page's values."""
    head_dim = acc.shape[1]
    for i in range(head_dim):
        acc[g, i] *= shrink
    for s in range(0, filled - 3, 4):
        a, b, c, d = weights[s], weights[s + 1], weights[s + 2], weights[s + 3]
        for i in range(head_dim):
            acc[g, i] += (
                a * values[page, kv_head, s, i]
                + b * values[page, kv_head, s + 1, i]
                + c * values[page, kv_head, s + 2, i]
                + d * values[page, kv_head, s + 3, i]
            )
    for s in range(filled // 4 * 4, filled):
        for i in range(head_dim):
            acc[g, i] += weights[s] * values[page, kv_head, s, i]
