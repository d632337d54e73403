"""KV arithmetic, and what `quire plan` prints of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import kv_arithmetic as kv
from cluster.cli.program import run
from cluster.errors import ConfigError, ModelLoadError

LLAMA_7B = kv.SHAPES["llama-7b"]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}


def test_llama_7b_at_2048_tokens_in_half_precision_is_one_gibibyte() -> None:
    costs = kv.reckon(LLAMA_7B, dtype_bytes=2, tokens=2048, batch=1, block_tokens=16)
    assert costs.batch_bytes == costs.batch_block_bytes == 1 << 30
    assert costs.bytes_per_token == 2 * 32 * 32 * 128 * 2


@given(
    layers=st.integers(1, 100),
    groups=st.integers(1, 16),
    per_group=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    tokens=st.integers(1, 10_000),
    block_tokens=st.sampled_from([1, 8, 16, 100]),
    memory=st.integers(1, 1 << 40),
)
@settings(max_examples=200, deadline=None)
def test_what_fits_fits_and_one_more_does_not(
    layers: int, groups: int, per_group: int, head_dim: int, tokens: int, block_tokens: int, memory: int
) -> None:
    shape = kv.KVShape(name="x", layers=layers, heads=groups * per_group, kv_heads=groups, head_dim=head_dim)
    costs = kv.reckon(shape, dtype_bytes=2, tokens=tokens, batch=1, block_tokens=block_tokens, memory_bytes=memory)
    assert costs.memory_blocks is not None
    assert costs.memory_sequences is not None
    assert costs.memory_blocks * costs.bytes_per_block <= memory < (costs.memory_blocks + 1) * costs.bytes_per_block
    assert costs.memory_sequences * costs.sequence_bytes <= memory
    assert 0 <= costs.sequence_bytes - costs.batch_bytes < costs.bytes_per_block


@given(groups=st.integers(1, 16), per_group=st.integers(1, 16), data=st.data())
@settings(max_examples=200, deadline=None)
def test_ranks_hold_every_head_evenly_and_none_is_idle(groups: int, per_group: int, data: st.DataObject) -> None:
    shape = kv.KVShape(name="x", layers=1, heads=groups * per_group, kv_heads=groups, head_dim=1)
    tp = data.draw(st.integers(1, shape.heads))
    split = kv.heads_per_rank(shape, tp)
    assert len(split) == tp
    assert max(split) - min(split) <= 1
    assert sum(split) == max(groups, tp)


def test_three_heads_on_two_ranks_are_two_and_one_and_more_ranks_replicate() -> None:
    shape = kv.shape_of("x", CONFIG)
    assert kv.heads_per_rank(shape, 2) == [2, 1]
    assert kv.heads_per_rank(shape, 9) == [1] * 9
    with pytest.raises(ConfigError, match="1 to the 9 query heads; got 10"):
        kv.heads_per_rank(shape, 10)


def test_a_model_appears_once_among_mha_gqa_mqa() -> None:
    for kv_heads in (32, 8, 4, 1):
        found = kv.variants(replace(LLAMA_7B, kv_heads=kv_heads))
        assert [one.kind for one in found] == ["MHA", "GQA", "MQA"]
        assert sum(one.kv_heads == kv_heads for one in found) == 1
    assert len(kv.variants(kv.KVShape(name="one", layers=1, heads=1, kv_heads=1, head_dim=1))) == 1


def test_a_config_is_read_also_of_other_families_and_nested() -> None:
    assert kv.shape_of("x", CONFIG).head_dim == 64
    assert kv.shape_of("x", {"text_config": CONFIG, "model_type": "gemma3"}).kv_heads == 3
    assert kv.shape_of("x", {"n_layer": 2, "n_head": 4, "n_embd": 32}).kind == "MHA"
    with pytest.raises(ModelLoadError, match="num_hidden_layers: must be a positive integer; got 'many'"):
        kv.shape_of("x", {**CONFIG, "num_hidden_layers": "many"})
    with pytest.raises(ModelLoadError, match="says no num_attention_heads"):
        kv.shape_of("x", {"num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("24GiB", 24 << 30), ("80gb", 80 * 10**9), ("1.5 MiB", 3 << 19), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert kv.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "0", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory: must be a size"):
        kv.parse_size(text)


def test_plan_prints_one_gibibyte_from_sizes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers=32", "--heads=32", "--head-dim=128", "--tokens=2048", "--dtype=fp16", "--batch=1"]
    assert run(["plan", *flags]) == 0
    printed = capsys.readouterr().out
    assert "KV cache of 1 × 2,048 tokens: 1.00 GiB" in printed
    assert "MHA (this model)" in printed


def test_plan_reads_a_folder_that_holds_nothing_but_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for where in (tmp_path, tmp_path / "config.json"):
        arguments = [
            "plan",
            str(where),
            "--tokens",
            "1000",
            "--memory",
            "1GiB",
            "--tp",
            "2",
            "--dtype",
            "fp32",
            "--json",
        ]
        assert run(arguments) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["whole"]["bytes_per_token"] == 46_080  # facts.md's SmolLM2
        assert [rank["kv_heads"] for rank in report["ranks"]] == [2, 1]
        assert report["group"]["memory_sequences"] == report["ranks"][0]["memory_sequences"]
        mine = next(one for one in report["variants"] if one["this_model"])
        assert mine["memory_sequences"] == report["group"]["memory_sequences"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "give one of MODEL"),
        ("x --shape llama-7b", "give one of MODEL"),
        ("--shape llama-8t", "--shape: must be one of llama-7b"),
        ("--layers 4", "--heads, --head-dim: must be given too"),
        ("--layers 4 --heads 4 --kv-heads 3 --head-dim 8", "--kv-heads: must divide the 4 query heads; got 3"),
        ("--layers 0 --heads 4 --head-dim 8", "--layers: must be at least 1; got 0"),
        ("--shape llama-7b --tp 33", "--tp: must be from 1 to the 32"),
        ("--shape llama-7b --dtype fp7", "--dtype: must be one of"),
        ("--shape llama-7b --memory lots", "--memory: must be a size"),
        ("./no/such/folder", "is neither a folder or file here"),
    ],
)
def test_plan_says_in_one_line_what_is_wrong(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *flags.split()]) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
