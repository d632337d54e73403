"""A config is served whole or refused by name: a field that is ignored gives wrong numbers that look right."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cluster.errors import ModelLoadError
from workers.model.config import parse_config

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def smollm2(**changes: Any) -> dict[str, Any]:
    merged = {**SMOLLM2, **changes}
    return {name: value for name, value in merged.items() if value is not ...}


def test_smollm2_is_read() -> None:
    config = parse_config(SMOLLM2)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden, config.intermediate, config.vocab_size, config.max_context) == (576, 1536, 49152, 8192)
    assert config.tied_embeddings
    assert not config.qkv_bias
    assert config.eos_token_ids == (2,)
    assert (config.rope.kind, config.rope.theta) == ("default", 100000.0)
    assert (config.q_size, config.kv_size) == (576, 192)


def test_parsing_a_config_loads_no_torch() -> None:
    code = "import sys, workers.model.config; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "False"


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    new = smollm2(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling})
    old = smollm2(rope_parameters=..., rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert parse_config(new).rope == parse_config(old).rope
    assert parse_config(new).rope.original_max_context == 1024


def test_what_the_config_leaves_out_gets_the_familys_default() -> None:
    bare = smollm2(
        head_dim=..., num_key_value_heads=..., rope_parameters=..., tie_word_embeddings=..., rms_norm_eps=...,
        eos_token_id=..., architectures=..., max_position_embeddings=...,
    )  # fmt: skip
    config = parse_config(bare)
    assert (config.head_dim, config.kv_heads, config.rope.theta, config.max_context) == (64, 9, 10000.0, 2048)
    assert not config.tied_embeddings
    assert config.eos_token_ids == ()
    assert config.rms_norm_eps == 1e-6


def test_several_eos_ids_are_kept_in_order() -> None:
    assert parse_config(smollm2(eos_token_id=[2, 0])).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"model_type": ...}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "576"}, "hidden_size"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"vocab_size": True}, "vocab_size"),
        ({"eos_token_id": 49152}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "strange": 1}}, "rope strange"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "rope_theta"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_config(smollm2(**changes))
    assert caught.value.metadata["field"] == field
    assert field.split()[-1] in caught.value.message


def test_a_window_as_long_as_the_context_is_none() -> None:
    parse_config(smollm2(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8192))


def test_mistral_without_a_word_has_a_window() -> None:
    mistral = smollm2(model_type="mistral", architectures=["MistralForCausalLM"])
    assert parse_config(mistral).windows == (4096,) * 30
    assert parse_config({**mistral, "sliding_window": None}).windows == (None,) * 30
    assert parse_config({**mistral, "sliding_window": 8192}).windows == (None,) * 30, "as long as the context"
    assert parse_config({**mistral, "sliding_window": 100}).attention_text != parse_config(mistral).attention_text


def test_qwens_window_counts_only_with_its_flag_and_in_its_layers() -> None:
    qwen = smollm2(model_type="qwen2", architectures=["Qwen2ForCausalLM"], sliding_window=512)
    assert parse_config(qwen).qkv_bias
    assert parse_config(qwen).windows == (None,) * 30
    qwen["use_sliding_window"] = True
    assert parse_config(qwen).windows == (None,) * 28 + (512,) * 2
    assert parse_config({**qwen, "max_window_layers": 0}).windows == (512,) * 30
    kinds = ["sliding_attention", "full_attention"] * 15
    assert parse_config({**qwen, "layer_types": kinds}).windows == (512, None) * 15
    for wrong in (kinds[1:], ["chunked_attention"] * 30):
        with pytest.raises(ModelLoadError, match="layer_types"):
            parse_config({**qwen, "layer_types": wrong})
    with pytest.raises(ModelLoadError, match="sliding_window: 0"):
        parse_config({**qwen, "sliding_window": 0})


def test_canonical_texts_tell_settings_apart() -> None:
    plain = parse_config(SMOLLM2)
    other = parse_config(smollm2(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}))
    assert plain.rope_text == parse_config(dict(SMOLLM2)).rope_text
    assert plain.rope_text != other.rope_text
    assert plain.attention_text != parse_config(smollm2(rms_norm_eps=1e-6)).attention_text
