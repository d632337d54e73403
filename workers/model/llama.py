"""The decoder of the Llama family, one definition that the config drives. It knows tokens and pages, not sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.attention.interface import Batch, KVPages
from workers.model.backend import Backend
from workers.model.config import ModelConfig
from workers.model.linear import Linear
from workers.model.ops import Ops
from workers.model.rope import RotaryTable
from workers.model.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One block's weights. q, k and v are one product, and so are gate and up."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Model:
    """Weights in ``dtype`` on ``device``. Holds no state of any request."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Takes every tensor. Raises ModelLoadError that names one that is missing, misshapen or left over."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self._rope = RotaryTable(config.rope, config.head_dim, config.max_context, device)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden)
        self._layers = [_layer(config, weights, f"model.layers.{i}") for i in range(config.layers)]
        self._norm = weights.take("model.norm.weight", config.hidden)
        tied = config.tied_embeddings
        head = self._embedding if tied else weights.take("lm_head.weight", config.vocab_size, config.hidden)
        self._head = Linear(head)
        weights.finish(lambda name: name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight"))

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: KVPages, backend: Backend) -> torch.Tensor:
        """Compute the step's tokens and write their keys and values.

        Returns the hidden state of each, [T, hidden], from which ``logits`` makes those that are needed.
        """
        config, ops = self.config, backend.ops
        self._rope.cover(batch.max_position + 1)
        residual = torch.nn.functional.embedding(batch.token_ids, self._embedding)
        x = ops.rms_norm(residual, self._layers[0].attention_norm, config.rms_norm_eps)
        for i, layer in enumerate(self._layers):
            x = layer.output(self._attention(x, i, batch, pages, backend))
            x = ops.add_rms_norm(residual, x, layer.mlp_norm, config.rms_norm_eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            if i + 1 < config.layers:
                x = ops.add_rms_norm(residual, x, self._layers[i + 1].attention_norm, config.rms_norm_eps)
        return residual + x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Of hidden states [S, hidden] that ``forward`` returned: [S, vocab_size] in fp32; may be overwritten."""
        return self._head(backend.ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()

    def _attention(self, x: torch.Tensor, i: int, batch: Batch, pages: KVPages, backend: Backend) -> torch.Tensor:
        layer, keys, values = self._layers[i], pages.keys[i], pages.values[i]
        qkv = layer.qkv(x)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(qkv, layer.q_norm, layer.k_norm, backend.ops)
        q = backend.ops.rope_and_store(qkv, self._rope, batch, keys, values)
        return backend.attention.attend(q, keys, values, batch, self.config.windows[i])

    def _norm_heads(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, ops: Ops) -> None:
        """Norm each head of q and of k in place (Qwen3)."""
        config = self.config
        q, k = qkv[:, : config.q_size], qkv[:, config.q_size : config.q_size + config.kv_size]
        for part, weight in ((q, q_norm), (k, k_norm)):
            flat = part.reshape(-1, config.head_dim)
            part.copy_(ops.rms_norm(flat, weight, config.rms_norm_eps).view(part.shape))


def _layer(config: ModelConfig, weights: Weights, prefix: str) -> Layer:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    sizes = (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size))
    bias = None
    if config.qkv_bias:
        bias = weights.take_stacked((f"{attention}.{part}_proj.bias", size) for part, size in sizes)
    halves = ((f"{mlp}.{part}_proj.weight", config.intermediate) for part in ("gate", "up"))
    qkv = weights.take_stacked(((f"{attention}.{part}_proj.weight", size) for part, size in sizes), config.hidden)
    return Layer(
        attention_norm=weights.take(f"{prefix}.input_layernorm.weight", config.hidden),
        qkv=Linear(qkv, bias),
        q_norm=weights.take(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=weights.take(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=Linear(weights.take(f"{attention}.o_proj.weight", config.hidden, config.q_size)),
        mlp_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden),
        gate_up=Linear(weights.take_stacked(halves, config.hidden)),
        down=Linear(weights.take(f"{mlp}.down_proj.weight", config.hidden, config.intermediate)),
    )
