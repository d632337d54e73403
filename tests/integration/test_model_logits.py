"""Logits equal transformers' for every kind of model that a config can ask for, by both attention backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import AttentionName
from tests.support.hf import our_model, random_model
from tests.support.plans import GreedySampler, Row, Stepper
from workers.model.llama import Model
from workers.runner import Runner

TOLERANCE = 1e-4
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "sharded": {"shard": "40KB"},
    "heads wider than hidden": {"head_dim": 16},
    "one layer": {"num_hidden_layers": 1},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "rope llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    "rope yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN}},
    "rope yarn untruncated": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, "truncate": False, **YARN}},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral with a window": {"family": "mistral", "sliding_window": 21},
    "mistral with a tiny window": {"family": "mistral", "sliding_window": 3},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "qwen2 with windows": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3 with windows": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def logits_of(model: Model, attention: AttentionName, tokens: list[int]) -> torch.Tensor:
    """Logits after every token: the first half in one chunk, then token by token. [len - half + 1, vocab]."""
    sampler = GreedySampler()
    stepper = Stepper(Runner(model, block_tokens=8, num_blocks=24, attention=attention, sampler=sampler))
    half = len(tokens) // 2
    row = Row(tokens[:half])
    stepper.step([(row, half)])
    found = [sampler.logits]
    for token in tokens[half:]:
        row.tokens.append(token)
        stepper.step([(row, 1)])
        found.append(sampler.logits)
    return torch.cat(found)


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers(tmp_path: Path, kind: str, attention: AttentionName) -> None:
    theirs = random_model(tmp_path, **MODELS[kind])
    if kind == "sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens])).logits[0, len(tokens) // 2 - 1 :]
    model = our_model(tmp_path)
    assert any(model.config.windows) == ("window" in kind)
    found = logits_of(model, attention, tokens)
    assert want.std() > 0.5, "logits too flat to tell a wrong model"
    assert (found - want).abs().max() < TOLERANCE
    best = want.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE
    assert clear.float().mean() > 0.9
    assert torch.equal(found.argmax(-1)[clear], want.argmax(-1)[clear]), "the greedy tokens"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    random_model(tmp_path)
    tokens = list(range(40, 80))
    exact = logits_of(our_model(tmp_path), "reference", tokens)
    rough = logits_of(our_model(tmp_path, dtype), "auto", tokens)
    assert rough.dtype == torch.float32
    spread = (exact - exact.mean()).norm()
    assert 0 < (rough - exact).norm() / spread < 0.05
