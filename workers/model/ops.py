"""The small operations between the products, in plain torch: the oracle of the fused ones, and what a GPU runs."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.attention.interface import Batch
from workers.model.rope import RotaryTable


class Ops(Protocol):
    """T tokens at a time. Results are new tensors, except where it is said."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square norm (arXiv:1910.07467) over the last dimension of x [T, n], computed in fp32."""
        ...

    def add_rms_norm(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``residual += x`` in place, then the norm of the sum."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of [T, 2n] that holds gate, then up."""
        ...

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        table: RotaryTable,
        batch: Batch,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Turn q and k of qkv [T, (heads + 2 kv_heads) * head_dim], write k and v to their pages.

        Returns q [T, heads, head_dim].
        """
        ...


class TorchOps:
    """Any device, any floating dtype; rounds where Hugging Face's models round."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

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
