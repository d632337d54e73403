"""Models for tests: the real one, and small ones of random weights with the real one's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.models import ModelFiles, resolve
from router.tokenizer import Tokenizer

REAL = "smollm2-135m"


def smollm2() -> ModelFiles:
    """SmolLM2-135M-Instruct, fetched once into the cache folder."""
    return resolve(REAL)


def tiny_llama(
    folder: Path, *, layers: int = 2, hidden: int = 64, heads: int = 4, kv_heads: int = 2, seed: int = 0
) -> ModelFiles:
    """Write a Llama of random weights in Hugging Face form, with SmolLM2's tokenizer and chat template, to ``folder``.

    Weights are wide, so that the next token depends on all that came before.
    """
    tokenizer = Tokenizer(smollm2())
    _write_tokenizer(folder, tokenizer)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(tokenizer.eos_token_ids),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(config, seed), folder / "model.safetensors")
    return ModelFiles(folder.name, folder, "hf")


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "chat_template": tokenizer._outer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    q, kv = (sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value"))
    random = torch.Generator().manual_seed(seed)

    def wide(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (1.5 / columns**0.5)

    weights = {"model.embed_tokens.weight": wide(sizes["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "self_attn.q_proj.weight": wide(q, hidden),
            layer + "self_attn.k_proj.weight": wide(kv, hidden),
            layer + "self_attn.v_proj.weight": wide(kv, hidden),
            layer + "self_attn.o_proj.weight": wide(hidden, q),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
            layer + "mlp.gate_proj.weight": wide(inner, hidden),
            layer + "mlp.up_proj.weight": wide(inner, hidden),
            layer + "mlp.down_proj.weight": wide(hidden, inner),
        }
    return weights
