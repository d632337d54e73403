"""The small operations fused for a CPU in fp32: each reads and writes memory once. Must equal ops.TorchOps."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from workers.attention.interface import Batch
from workers.model.rope import RotaryTable
from workers.threads import exp32, kernel


@kernel
def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in numba.prange(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[t, i] * x[t, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[t, i] = weight[i] * (x[t, i] * scale)


@kernel
def _add_rms_norm(residual: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in numba.prange(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            value = residual[t, i] + x[t, i]
            residual[t, i] = value
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[t, i] = weight[i] * (residual[t, i] * scale)


@kernel
def _silu_mul(gate_up: Any, out: Any) -> None:
    half = out.shape[1]
    for t in numba.prange(out.shape[0]):
        for i in range(half):
            gate = gate_up[t, i]
            out[t, i] = gate / (np.float32(1) + exp32(-gate)) * gate_up[t, half + i]


@kernel
def _rope_and_store(
    qkv: Any, cos: Any, sin: Any, positions: Any, pages: Any, slots: Any, keys: Any, values: Any, q: Any
) -> None:
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, half = keys.shape[1], head_dim // 2
    for t in numba.prange(q.shape[0]):
        position, page, slot = positions[t], pages[t], slots[t]
        for h in range(heads + kv_heads):
            base = h * head_dim
            target = q[t, h] if h < heads else keys[page, h - heads, slot]
            for i in range(half):
                low, high = qkv[t, base + i], qkv[t, base + half + i]
                target[i] = low * cos[position, i] - high * sin[position, i]
                target[half + i] = high * cos[position, i] + low * sin[position, i]
        for h in range(kv_heads):
            base = (heads + kv_heads + h) * head_dim
            for i in range(head_dim):
                values[page, h, slot, i] = qkv[t, base + i]


class CpuOps:
    """fp32 on a CPU; tensors must be contiguous."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        out = torch.empty_like(x)
        _rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def add_rms_norm(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        out = torch.empty_like(residual)
        _add_rms_norm(residual.numpy(), x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _silu_mul(gate_up.numpy(), out.numpy())
        return out

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        table: RotaryTable,
        batch: Batch,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See Ops."""
        _, kv_heads, _, head_dim = keys.shape
        q = qkv.new_empty(len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)
        _rope_and_store(
            qkv.numpy(),
            table.cos.numpy(),
            table.sin.numpy(),
            batch.positions.numpy(),
            batch.pages.numpy(),
            batch.slots.numpy(),
            keys.numpy(),
            values.numpy(),
            q.numpy(),
        )
        return q
