"""The decoder of the Llama family, one definition that the config drives. It knows tokens and pages, not sequences.

workers/model/compiled.py is the same decoder as one compiled call, for CPUs; what it computes is said here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.attention.interface import Attention, Batch, KVPages
from workers.collective import Alone, Collective
from workers.model import ops
from workers.model.config import ModelConfig
from workers.model.linear import Linear
from workers.model.parallel import Embedding, Head, Summed
from workers.model.partition import Part, part_of
from workers.model.rope import RotaryTable
from workers.model.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One block's weights, or a rank's part of them. q, k and v are one product, and so are gate and up."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Summed
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Summed


class Model:
    """Weights in ``dtype`` on ``device``, those of one rank. Holds no state of any request.

    ``config`` is of this rank's part, ``whole`` of the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8: bool = False,
        ranks: Collective | None = None,
    ) -> None:
        """Takes every tensor; ``int8`` rounds those of linear layers to 8 bits.

        Raises ModelLoadError that names a tensor which is missing, misshapen or left over; ConfigError as Linear and
        part_of.
        """
        self.ranks = ranks = ranks or Alone()
        parts = [part_of(config, rank, ranks.ranks) for rank in range(ranks.ranks)]
        part = parts[ranks.rank]
        self.whole = config
        self.config = part.config(config)
        self.dtype = dtype
        self.device = device
        self.rope = RotaryTable(config.rope, config.head_dim, config.max_context, device)
        size = (config.vocab_size, config.hidden)
        self.embedding = Embedding(weights.take("model.embed_tokens.weight", *size, rows=part.vocab), part.vocab, ranks)
        self.layers = [_layer(config, part, weights, f"model.layers.{i}", int8, ranks) for i in range(config.layers)]
        self.norm = weights.take("model.norm.weight", config.hidden)
        tied = config.tied_embeddings
        head = self.embedding.rows if tied else weights.take("lm_head.weight", *size, rows=part.vocab)
        self.layers_begun = 0
        self.head = Head(Linear(head, int8=int8), [len(one.vocab) for one in parts], ranks)
        weights.finish(lambda name: name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight"))

    @property
    def weight_bytes(self) -> int:
        """Of the linear layers: what a step reads at least."""
        linear = [
            part for layer in self.layers for part in (layer.qkv, layer.output.linear, layer.gate_up, layer.down.linear)
        ]
        return sum(part.weight_bytes for part in (*linear, self.head.linear))

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: KVPages, attention: Attention) -> torch.Tensor:
        """Compute the step's tokens in plain torch and write their keys and values.

        Returns the hidden states of ``batch.needed``, [R, hidden], from which ``logits`` makes what is drawn from.
        """
        eps = self.config.rms_norm_eps
        self.rope.cover(batch.max_position + 1)
        residual = self.embedding(batch.token_ids)
        x = ops.rms_norm(residual, self.layers[0].attention_norm, eps)
        for i, layer in enumerate(self.layers):
            self.layers_begun += 1
            x = self._attention(x, i, batch, pages, attention)
            if i + 1 == len(self.layers):  # behind the last keys and values, only what somebody looks at
                x, residual = x[batch.needed], residual[batch.needed]
            x = ops.add_rms_norm(residual, layer.output(x), layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            if i + 1 < len(self.layers):
                x = ops.add_rms_norm(residual, x, self.layers[i + 1].attention_norm, eps)
        return residual + x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of hidden states [S, hidden] that ``forward`` returned: [S, vocab_size] in fp32 on rank 0, else None.

        They may be overwritten.
        """
        found = self.head(ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps))
        return None if found is None else found.float()

    def _attention(self, x: torch.Tensor, i: int, batch: Batch, pages: KVPages, attention: Attention) -> torch.Tensor:
        config, layer, keys, values = self.config, self.layers[i], pages.keys[i], pages.values[i]
        qkv = layer.qkv(x)
        if layer.q_norm is not None and layer.k_norm is not None:
            ops.norm_heads(qkv, layer.q_norm, layer.k_norm, config.heads, config.kv_heads, config.rms_norm_eps)
        q = ops.rope_and_store(qkv, self.rope, batch, keys, values)
        return attention.attend(q, keys, values, batch, config.windows[i])


def _layer(config: ModelConfig, part: Part, weights: Weights, prefix: str, int8: bool, ranks: Collective) -> Layer:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    q_rows, kv_rows = part.q_rows(config.head_dim), part.kv_rows(config.head_dim)
    sizes = (("q", config.q_size, q_rows), ("k", config.kv_size, kv_rows), ("v", config.kv_size, kv_rows))
    bias = None
    if config.qkv_bias:
        bias = weights.take_stacked((f"{attention}.{name}_proj.bias", size, rows) for name, size, rows in sizes)
    halves = ((f"{mlp}.{half}_proj.weight", config.intermediate, part.columns) for half in ("gate", "up"))
    stacked = ((f"{attention}.{name}_proj.weight", size, rows) for name, size, rows in sizes)

    def summed(name: str, depth: int, columns: range) -> Summed:
        # A row of which we have some columns is rounded as the whole row is, or the ranks' numbers would not add up.
        largest = weights.largest_of_rows(name) if int8 and len(columns) < depth else None
        weight = weights.take(name, config.hidden, depth, columns=columns if len(columns) < depth else None)
        return Summed(Linear(weight, int8=int8, largest=largest), ranks)

    return Layer(
        attention_norm=weights.take(f"{prefix}.input_layernorm.weight", config.hidden),
        qkv=Linear(weights.take_stacked(stacked, config.hidden), bias, int8=int8),
        q_norm=weights.take(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=weights.take(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=summed(f"{attention}.o_proj.weight", config.q_size, q_rows),
        mlp_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden),
        gate_up=Linear(weights.take_stacked(halves, config.hidden), int8=int8),
        down=summed(f"{mlp}.down_proj.weight", config.intermediate, part.columns),
    )
