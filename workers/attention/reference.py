"""The oracle: gathers each row's pages and writes softmax(q k^T) v out in full. Right on any device, in any dtype."""

from __future__ import annotations

import torch

from workers.attention.interface import Batch


def gather(pages: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` slots of a row's pages, ``[kv_heads, length, head_dim]``."""
    _, kv_heads, _, head_dim = pages.shape
    return pages[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length]


class ReferenceAttention:
    """Plain torch, one row after the other; scores and softmax in fp32."""

    name = "reference"

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, window: int | None
    ) -> torch.Tensor:
        """See Attention."""
        plan = batch.plan
        out = torch.empty_like(q)
        for row in range(plan.num_rows):
            start, end = plan.row_starts[row], plan.row_starts[row + 1]
            used, first = batch.used_pages(row, keys.shape[2], window)
            length = batch.length(row) - first
            hidden = ~visible(batch.positions[start:end] - first, length, window)
            out[start:end] = _attend(q[start:end], gather(keys, used, length), gather(values, used, length), hidden)
        return out.flatten(1)


def visible(positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """[n, length]: whether the token at each of ``positions`` [n] sees key j."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """q: [n, heads, d]; k, v: [kv_heads, length, d]; hidden: [n, length]. Returns [n, heads, d]."""
    n, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.float().view(n, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("nkgd,kld->nkgl", grouped, k.float()) * head_dim**-0.5
    scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
    out = torch.einsum("nkgl,kld->nkgd", scores.softmax(-1), v.float())
    return out.reshape(n, heads, head_dim).to(q.dtype)
