"""Which part of a model a rank holds: tensor parallelism as Megatron-LM has it (Shoeybi et al., 2019, section 3).

Attention is split by heads and the MLP by columns, so that a layer needs two sums over the ranks: behind the output of
its attention and behind its MLP. The vocabulary is split by rows. Any number of ranks up to the query heads will do:
where it does not divide, some ranks hold a little more. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cluster.errors import ConfigError
from workers.model.config import ModelConfig

UNIT = 64
"""Columns of the MLP stay together in runs of this many where there are enough: 8-bit activations share a scale by 64
of them (workers/model/gemm8.py), and a scale that no cut goes through is the same for every number of ranks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share, as ranges of the whole model's numbers."""

    rank: int
    ranks: int
    heads: range
    """Query heads."""
    kv_heads: range
    """One or more; with more ranks than KV heads several ranks hold the same one, each for some of its query heads."""
    columns: range
    """Of the MLP's inner layer."""
    vocab: range
    """Rows of the embedding and of the head."""

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The model as this rank computes it. Hidden size and vocabulary stay: every rank sees whole rows of those."""
        return replace(whole, heads=len(self.heads), kv_heads=len(self.kv_heads), intermediate=len(self.columns))

    def q_rows(self, head_dim: int) -> range:
        """Rows of the query projection, and columns of the output projection."""
        return range(self.heads.start * head_dim, self.heads.stop * head_dim)

    def kv_rows(self, head_dim: int) -> range:
        """Rows of the key projection, and of the value projection."""
        return range(self.kv_heads.start * head_dim, self.kv_heads.stop * head_dim)


def part_of(config: ModelConfig, rank: int, ranks: int) -> Part:
    """What ``rank`` of ``ranks`` holds. Raises ConfigError where there are more ranks than a model can keep busy."""
    limits = ((config.heads, "query heads"), (config.intermediate, "columns of the MLP"), (config.vocab_size, "tokens"))
    for limit, what in limits:
        if ranks > limit:
            raise ConfigError(
                f"tp: {ranks} ranks, but the model has {limit} {what}; set tp to {limit} at most",
                field="tp",
                value=ranks,
                limit=limit,
            )
    heads, kv_heads = _heads(config, rank, ranks)
    unit = UNIT if config.intermediate >= UNIT * ranks and config.intermediate % UNIT == 0 else 1
    columns = _runs(config.intermediate // unit, ranks)[rank]
    return Part(
        rank=rank,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        columns=range(columns.start * unit, columns.stop * unit),
        vocab=_runs(config.vocab_size, ranks)[rank],
    )


def _heads(config: ModelConfig, rank: int, ranks: int) -> tuple[range, range]:
    """Whole KV heads with their query heads; or, with too few of them, some query heads of one KV head."""
    group = config.heads // config.kv_heads
    if ranks <= config.kv_heads:
        kv_heads = _runs(config.kv_heads, ranks)[rank]
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    for kv_head, sharers in enumerate(_runs(ranks, config.kv_heads)):
        if rank in sharers:
            heads = _runs(group, len(sharers))[rank - sharers.start]
            first = kv_head * group
            return range(first + heads.start, first + heads.stop), range(kv_head, kv_head + 1)
    raise AssertionError("every rank is in some run")


def _runs(count: int, parts: int) -> Sequence[range]:
    """``range(count)`` in contiguous runs, as even as possible, the longer ones first."""
    size, longer = divmod(count, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(starts)]
