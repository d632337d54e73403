"""The small operations between the products, in plain torch: the oracle of the fused ones, and what a GPU runs.

Any device, any floating dtype; they round where Hugging Face's models round.
"""

from __future__ import annotations

import torch

from workers.attention.interface import Batch
from workers.model.rope import RotaryTable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm (arXiv:1910.07467) over the last dimension of x [..., n], computed in fp32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``residual += x`` in place, then the norm of the sum."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [T, 2n] that holds gate, then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def norm_heads(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, heads: int, kv_heads: int, eps: float
) -> None:
    """Norm each head of q and of k of qkv [T, (heads + 2 kv_heads) * head_dim] in place (Qwen3)."""
    by_head = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    for weight, first, last in ((q_norm, 0, heads), (k_norm, heads, heads + kv_heads)):
        by_head[:, first:last] = rms_norm(by_head[:, first:last], weight, eps)


def rope_and_store(
    qkv: torch.Tensor, table: RotaryTable, batch: Batch, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Turn q and k of qkv [T, (heads + 2 kv_heads) * head_dim], write k and v to their pages.

    Returns q [T, heads, head_dim].
    """
    _, kv_heads, _, head_dim = keys.shape
    by_head = qkv.view(len(qkv), -1, head_dim)
    heads = by_head.shape[1] - 2 * kv_heads
    cos, sin = table.cos[batch.positions][:, None], table.sin[batch.positions][:, None]
    turned = _rotate(by_head[:, : heads + kv_heads], cos.to(qkv.dtype), sin.to(qkv.dtype))
    keys[batch.pages, :, batch.slots] = turned[:, heads:]
    values[batch.pages, :, batch.slots] = by_head[:, heads + kv_heads :]
    return turned[:, :heads]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, d]; cos, sin: [T, 1, d/2]; dimension i turns with i + d/2."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
