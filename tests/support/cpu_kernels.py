"""The CPU kernels, called as their plain counterparts are: tensors in, a new tensor out."""

from __future__ import annotations

import numpy as np
import torch

from workers import tiles
from workers.attention.cpu_chunks import attend_chunks
from workers.attention.cpu_singles import EVERYTHING, attend_singles, parts_of, put_together, width_for
from workers.attention.interface import Batch
from workers.model import ops_cpu
from workers.model.rope import RotaryTable

THREADS = 3
"""The shares of so many threads are done one after the other."""


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, window: int | None) -> torch.Tensor:
    """As workers.attention.interface.Attention says."""
    plan, out = batch.plan, torch.empty_like(q)
    arrays = (q.numpy(), keys.numpy(), values.numpy())
    pages = (plan.row_starts, plan.num_computed, plan.block_starts, plan.blocks)
    seen, width = EVERYTHING if window is None else window, width_for(keys.shape[2], keys.shape[3])
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    parts, group = parts_of(plan.num_computed[batch.single_rows] + 1) * kv_heads, q.shape[1] // kv_heads
    sums, tops = np.empty((parts, group, head_dim), np.float32), np.empty((parts, group, 2), np.float32)
    for me in range(THREADS):
        attend_singles(*arrays, batch.single_rows, *pages, seen, width, sums, tops, out.numpy(), me, THREADS)
    if parts:
        for me in range(THREADS):
            put_together(batch.single_rows, *pages[:2], seen, sums, tops, out.numpy(), me, THREADS)
    for me in range(THREADS):
        attend_chunks(*arrays, batch.chunk_rows, *pages, seen, tiles.code(), out.numpy(), me, THREADS)
    return out.flatten(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    for me in range(THREADS):
        ops_cpu.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy(), me, THREADS)
    return out


def add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    for me in range(THREADS):
        ops_cpu.add_rms_norm(residual.numpy(), x.numpy(), weight.numpy(), np.float32(eps), out.numpy(), me, THREADS)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for me in range(THREADS):
        ops_cpu.silu_mul(gate_up.numpy(), out.numpy(), me, THREADS)
    return out


def norm_heads(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, heads: int, kv_heads: int, eps: float
) -> None:
    for me in range(THREADS):
        ops_cpu.norm_heads(qkv.numpy(), q_norm.numpy(), k_norm.numpy(), heads, kv_heads, np.float32(eps), me, THREADS)


def rope_and_store(
    qkv: torch.Tensor, table: RotaryTable, batch: Batch, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    q = qkv.new_empty(len(qkv), qkv.shape[1] // keys.shape[3] - 2 * keys.shape[1], keys.shape[3])
    of_batch = (batch.positions.numpy(), batch.pages.numpy(), batch.slots.numpy())
    for me in range(THREADS):
        ops_cpu.rope_and_store(
            qkv.numpy(), table.cos.numpy(), table.sin.numpy(), *of_batch, keys.numpy(), values.numpy(), q.numpy(), me,
            THREADS,
        )  # fmt: skip
    return q
