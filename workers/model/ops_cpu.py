"""The small operations fused for a CPU in fp32: each reads and writes memory once. Must equal workers/model/ops.py.

Each does the share of thread ``me`` of ``threads`` (workers/team.py): its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.team import share
from workers.threads import exp32, helper, kernel


@kernel
def take_rows(source: Any, rows: Any, out: Any, me: Any, threads: Any) -> None:
    """out[i] = source[rows[i]]"""
    start, stop = share(rows.shape[0], me, threads)
    for t in range(start, stop):
        for i in range(source.shape[1]):
            out[t, i] = source[rows[t], i]


@kernel
def take_some_rows(source: Any, rows: Any, first: Any, out: Any, me: Any, threads: Any) -> None:
    """out[i] = source[rows[i] - first], zeros where ``source`` has no such row."""
    start, stop = share(rows.shape[0], me, threads)
    for t in range(start, stop):
        row = rows[t] - first
        here = 0 <= row < source.shape[0]
        for i in range(source.shape[1]):
            out[t, i] = source[row, i] if here else np.float32(0)


@kernel
def sum_slots(slots: Any, out: Any, me: Any, threads: Any) -> None:
    """out [T, n] = slots[0, :T * n] + slots[1, :T * n] + ..., in that order."""
    start, stop = share(out.shape[0], me, threads)
    size = out.shape[1]
    for t in range(start, stop):
        for i in range(size):
            out[t, i] = slots[0, t * size + i]
        for other in range(1, slots.shape[0]):
            for i in range(size):
                out[t, i] += slots[other, t * size + i]


@kernel
def add(x: Any, y: Any, out: Any, me: Any, threads: Any) -> None:
    """out = x + y"""
    start, stop = share(x.shape[0], me, threads)
    for t in range(start, stop):
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] + y[t, i]


@kernel
def add_bias(x: Any, bias: Any, me: Any, threads: Any) -> None:
    """x += bias, in place."""
    start, stop = share(x.shape[0], me, threads)
    for t in range(start, stop):
        for i in range(x.shape[1]):
            x[t, i] += bias[i]


@kernel
def rms_norm(x: Any, weight: Any, eps: Any, out: Any, me: Any, threads: Any) -> None:
    """Root mean square norm of each row of x [T, n]."""
    start, stop = share(x.shape[0], me, threads)
    for t in range(start, stop):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[t, i] * x[t, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[t, i] = weight[i] * (x[t, i] * scale)


@kernel
def add_rms_norm(residual: Any, x: Any, weight: Any, eps: Any, out: Any, me: Any, threads: Any) -> None:
    """``residual += x`` in place, then the norm of the sum."""
    start, stop = share(x.shape[0], me, threads)
    for t in range(start, stop):
        total = np.float32(0)
        for i in range(x.shape[1]):
            value = residual[t, i] + x[t, i]
            residual[t, i] = value
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[t, i] = weight[i] * (residual[t, i] * scale)


@kernel
def silu_mul(gate_up: Any, out: Any, me: Any, threads: Any) -> None:
    """``silu(gate) * up`` of [T, 2n] that holds gate, then up."""
    half = out.shape[1]
    start, stop = share(out.shape[0], me, threads)
    for t in range(start, stop):
        for i in range(half):
            gate = gate_up[t, i]
            out[t, i] = gate / (np.float32(1) + exp32(-gate)) * gate_up[t, half + i]


@kernel
def norm_heads(qkv: Any, q_norm: Any, k_norm: Any, heads: Any, kv_heads: Any, eps: Any, me: Any, threads: Any) -> None:
    """Norm each head of q and of k of qkv [T, (heads + 2 kv_heads) * head_dim] in place."""
    start, stop = share(qkv.shape[0], me, threads)
    for t in range(start, stop):
        for h in range(heads):
            _norm_head(qkv, t, h, q_norm, eps)
        for h in range(heads, heads + kv_heads):
            _norm_head(qkv, t, h, k_norm, eps)


@helper
def _norm_head(qkv: Any, t: Any, h: Any, weight: Any, eps: Any) -> None:
    head_dim = weight.shape[0]
    base = h * head_dim
    total = np.float32(0)
    for i in range(head_dim):
        total += qkv[t, base + i] * qkv[t, base + i]
    scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
    for i in range(head_dim):
        qkv[t, base + i] = weight[i] * (qkv[t, base + i] * scale)


@kernel
def rope_and_store(
    qkv: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    pages: Any,
    slots: Any,
    keys: Any,
    values: Any,
    q: Any,
    me: Any,
    threads: Any,
) -> None:
    """Turn q and k of qkv [T, (heads + 2 kv_heads) * head_dim]: q to ``q`` [T, heads, head_dim], k and v to pages."""
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, half = keys.shape[1], head_dim // 2
    start, stop = share(q.shape[0], me, threads)
    for t in range(start, stop):
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
