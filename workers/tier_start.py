"""Putting a group's tier together: each rank's end of it, and the leader's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cluster.config import ClusterConfig
from cluster.models import ModelFiles
from cluster.tiers.chunks import ChunkShape, StoredDType
from cluster.tiers.connection import connect
from cluster.tiers.redis import RedisTier
from workers.identity import chunk_tokens, dtype_name, namespace
from workers.model.partition import part_of
from workers.prefix_tier import PrefixTier
from workers.tier import Report, Transfers

if TYPE_CHECKING:
    from workers.model.llama import Model
    from workers.runner import Runner


def has_tier(config: ClusterConfig) -> bool:
    """Whether a group of this configuration has one."""
    return config.prefix.enabled and config.prefix.redis is not None and config.engine.prefix_cache


def make_transfers(config: ClusterConfig, files: ModelFiles, model: Model, runner: Runner, report: Report) -> Transfers:
    """A rank's end. Raises ConfigError for a bad URL; that Redis is away is no error."""
    from workers.kv_transfer import RankTransfers

    shape = _shape(config, files, model)
    rank, heads = model.ranks.rank, part_of(model.whole, model.ranks.rank, config.tp).kv_heads
    holders = [other for other in range(config.tp) if part_of(model.whole, other, config.tp).kv_heads == heads]
    return RankTransfers(
        runner.pages,
        _open(config, shape),
        _open(config, shape),
        shape=shape,
        heads=heads,
        stored_heads=heads if rank == holders[0] else range(0),
        buffer_bytes=config.prefix.write_buffer_bytes,
        report=report,
    )


def make_tier(config: ClusterConfig, files: ModelFiles, model: Model) -> PrefixTier:
    """The leader's side, not yet started. Raises as ``make_transfers``."""
    shape = _shape(config, files, model)
    return PrefixTier(_open(config, shape), config.prefix, chunk_tokens=shape.tokens, value_bytes=shape.value_bytes)


def _open(config: ClusterConfig, shape: ChunkShape) -> RedisTier:
    assert config.prefix.redis is not None
    return RedisTier(connect(config.prefix.redis, config.prefix.deadline_ms / 1000), config.cluster, shape)


def _shape(config: ClusterConfig, files: ModelFiles, model: Model) -> ChunkShape:
    whole = model.whole
    return ChunkShape(
        namespace=bytes.fromhex(namespace(config, files, whole, model.dtype)),
        tokens=chunk_tokens(config, whole, model.dtype),
        layers=whole.layers,
        kv_heads=whole.kv_heads,
        head_dim=whole.head_dim,
        dtype="int8" if config.prefix.dtype == "int8" else cast(StoredDType, dtype_name(model.dtype)),
    )
