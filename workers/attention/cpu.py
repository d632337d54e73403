"""Attention on a CPU in fp32: a fused kernel for rows of one token, gathered pages and torch's kernel for chunks."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from workers.attention.interface import Batch
from workers.attention.reference import gather
from workers.plan import Int32
from workers.threads import inline, kernel


class CpuAttention:
    """Reads decode rows' pages where they lie; must equal ReferenceAttention."""

    name = "cpu"

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See Attention."""
        plan = batch.plan
        lengths = np.diff(plan.row_starts)
        out = torch.empty_like(q)
        single = np.flatnonzero(lengths == 1).astype(np.int32)
        if len(single):
            _decode(
                q.numpy(), keys.numpy(), values.numpy(), single, plan.row_starts, plan.num_computed,
                plan.block_starts, plan.blocks, numba.get_num_threads(), out.numpy(),
            )  # fmt: skip
        for row in np.flatnonzero(lengths > 1):
            self._chunk(int(row), q, keys, values, batch, out)
        return out.flatten(1)

    def _chunk(
        self, row: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """One row of many tokens, over its earlier pages too."""
        plan = batch.plan
        start, end = plan.row_starts[row], plan.row_starts[row + 1]
        computed = int(plan.num_computed[row])
        length = computed + int(end - start)
        used = torch.from_numpy(_used_blocks(plan.block_starts, plan.blocks, row, length, keys.shape[2]))
        mask = None
        if computed:
            mask = torch.arange(length) <= batch.positions[start:end, None]
        out[start:end] = torch.nn.functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            gather(keys, used, length)[None],
            gather(values, used, length)[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)


def _used_blocks(block_starts: Int32, blocks: Int32, row: int, length: int, block_tokens: int) -> Any:
    first = block_starts[row]
    return blocks[first : first + -(-length // block_tokens)].astype(np.int64)


@inline
def exp32(x: Any) -> Any:
    """e**x in fp32 for x <= 0. See ops_cpu.exp32."""
    return np.exp(x)


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
                    _attend_one(
                        q[row_starts[r]],
                        keys,
                        values,
                        blocks[block_starts[r] : block_starts[r + 1]],
                        length,
                        kv_head,
                        out[row_starts[r]],
                    )
                before += length


@numba.njit(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _attend_one(q: Any, keys: Any, values: Any, blocks: Any, length: Any, kv_head: Any, out: Any) -> None:
    """One token's query heads over one KV head: online softmax (arXiv:1805.02867), page by page."""
    block_tokens, head_dim = keys.shape[2], keys.shape[3]
    group = q.shape[0] // keys.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    scores = np.empty(block_tokens, np.float32)
    best = np.full(group, -np.inf, np.float32)
    norm = np.zeros(group, np.float32)
    acc = np.zeros((group, head_dim), np.float32)
    for b in range((length + block_tokens - 1) // block_tokens):
        page_keys, page_values = keys[blocks[b], kv_head], values[blocks[b], kv_head]
        filled = min(block_tokens, length - b * block_tokens)
        for g in range(group):
            head = q[kv_head * group + g]
            top = best[g]
            for s in range(filled):
                dot = np.float32(0)
                for i in range(head_dim):
                    dot += head[i] * page_keys[s, i]
                scores[s] = dot * scale
                top = max(top, scores[s])
            shrink = np.exp(best[g] - top)
            best[g] = top
            sum_ = np.float32(0)
            for s in range(filled):
                scores[s] = np.exp(scores[s] - top)
                sum_ += scores[s]
            norm[g] = norm[g] * shrink + sum_
            for i in range(head_dim):
                acc[g, i] *= shrink
            for s in range(filled):
                p = scores[s]
                for i in range(head_dim):
                    acc[g, i] += p * page_values[s, i]
    for g in range(group):
        inverse = np.float32(1) / norm[g]
        for i in range(head_dim):
            out[kv_head * group + g, i] = acc[g, i] * inverse
