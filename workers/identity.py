"""Which KV blocks a group's are equal to: the namespace of what it computes, and the chunks that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.blocks import Namespace
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.models import ModelFiles, tokenizer_digest, weights_digest
from cluster.tiers.chunks import chunk_tokens_for

if TYPE_CHECKING:
    import torch

    from workers.model.config import ModelConfig


def dtype_name(dtype: torch.dtype) -> str:
    """As in configurations: "float32"."""
    return str(dtype).removeprefix("torch.")


def chunk_tokens(config: ClusterConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Tokens of a chunk. ``model``: whole, not a rank's part. Raises ConfigError where a chunk would cut blocks."""
    block_tokens, wanted = config.engine.block_tokens, config.prefix.chunk_tokens
    if wanted is None:
        return chunk_tokens_for(2 * model.layers * model.kv_heads * model.head_dim * dtype.itemsize, block_tokens)
    if wanted < block_tokens:
        raise ConfigError(
            f"prefix.chunk_tokens: must be at least engine.block_tokens, {block_tokens}; got {wanted}",
            field="prefix.chunk_tokens",
            value=wanted,
            limit=block_tokens,
        )
    return wanted


def namespace(config: ClusterConfig, files: ModelFiles, model: ModelConfig, dtype: torch.dtype) -> str:
    """The digest over all that decides whether two blocks may be exchanged. ``model``: whole, not a rank's part."""
    at_rest = "" if config.prefix.dtype == "auto" else f" at rest {config.prefix.dtype}"
    return Namespace(
        model=files.name,
        weights_digest=weights_digest(files),
        quantization=_quantization(config),
        compute_dtype=dtype_name(dtype),
        kv_dtype=dtype_name(dtype) + at_rest,
        tokenizer_digest=tokenizer_digest(files),
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        rope=model.rope_text,
        attention=model.attention_text,
        block_tokens=config.engine.block_tokens,
        chunk_tokens=chunk_tokens(config, model, dtype),
    ).digest()


def _quantization(config: ClusterConfig) -> str:
    """Quantized files are computed in the compute dtype. 8-bit activations are rounded where ranks part, so that groups
    of different sizes compute slightly different numbers."""
    if config.engine.weights != "int8":
        return "none"
    return "int8" if config.tp == 1 else f"int8 on {config.tp} ranks"
