"""Which part of a model each rank holds: nothing twice, nothing left out, nothing empty, as even as can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.kv_arithmetic import KVShape, heads_per_rank
from workers.model.config import ModelConfig, RopeConfig
from workers.model.partition import UNIT, Part, part_of

SMALL = ModelConfig(
    model_type="llama",
    layers=2,
    hidden=48,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49_152,
    max_context=128,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    rope=RopeConfig(kind="default", theta=10_000.0),
    windows=(None, None),
    eos_token_ids=(0,),
)


def parts_of(config: ModelConfig, ranks: int) -> list[Part]:
    return [part_of(config, rank, ranks) for rank in range(ranks)]


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 12))
    heads = kv_heads * draw(st.integers(1, 8))
    sizes = {"intermediate": draw(st.integers(96, 4000)), "vocab_size": draw(st.integers(96, 5000))}
    return replace(SMALL, heads=heads, kv_heads=kv_heads, **sizes)


@given(config=configs(), data=st.data())
def test_parts_are_the_whole_for_any_number_of_ranks(config: ModelConfig, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, config.heads))
    parts = parts_of(config, ranks)
    group = config.heads // config.kv_heads
    for whole, shares in (
        (config.heads, [part.heads for part in parts]),
        (config.intermediate, [part.columns for part in parts]),
        (config.vocab_size, [part.vocab for part in parts]),
    ):
        assert list(chain(*shares)) == list(range(whole)), "in order, once each"
        assert all(shares)
    for part in parts:
        assert {head // group for head in part.heads} == set(part.kv_heads), "a rank has the KV heads of its queries"
        local = part.config(config)
        assert local.heads % local.kv_heads == 0
    assert [len(part.kv_heads) for part in parts] == heads_per_rank(
        KVShape(name="", layers=1, heads=config.heads, kv_heads=config.kv_heads, head_dim=64), ranks
    ), "as `quire plan` says"
    sizes = [len(part.vocab) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [(2, [6, 3], [2, 1]), (3, [3, 3, 3], [1, 1, 1]), (4, [2, 1, 3, 3], [1, 1, 1, 1]), (9, [1] * 9, [1] * 9)],
)
def test_three_kv_heads_on_some_ranks(ranks: int, heads: list[int], kv_heads: list[int]) -> None:
    """Fewer KV heads than ranks: a head is held by several, each for some of its queries."""
    parts = parts_of(SMALL, ranks)
    assert [len(part.heads) for part in parts] == heads
    assert [len(part.kv_heads) for part in parts] == kv_heads


@given(ranks=st.integers(1, 9))
def test_no_scale_of_8_bit_activations_is_cut(ranks: int) -> None:
    assert all(part.columns.start % UNIT == 0 == part.columns.stop % UNIT for part in parts_of(SMALL, ranks))


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp: 10 ranks, but the model has 9 query heads; set tp to 9 at most"):
        part_of(SMALL, 0, 10)
