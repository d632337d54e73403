"""Random models that transformers writes and reads, and our way to the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from workers.model.config import parse_config
from workers.model.llama import Model
from workers.model.weights import SafetensorsSource, Weights

CPU = torch.device("cpu")


def random_model(folder: Path, *, family: str = "llama", shard: str = "1GB", seed: int = 0, **config: Any) -> Any:
    """Write a small fp32 model of random weights to ``folder``; returns transformers' own, ready to run."""
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,  # wide, so that a wrong order of heads or a lost bias shows in the logits
    }
    made = transformers.AutoConfig.for_model(family, **{**settings, **config})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # ones and zeros by default: neither would be missed
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(folder, max_shard_size=shard)
    return model


def our_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU, *, int8: bool = False
) -> Model:
    """The folder through our loader."""
    config = parse_config(json.loads((folder / "config.json").read_text()))
    return Model(config, Weights(SafetensorsSource(folder), dtype, device), dtype, device, int8=int8)
