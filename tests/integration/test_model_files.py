"""A model's files are whole and fit its config, or loading ends in one line that names the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ModelLoadError
from tests.support.hf import CPU, our_model, random_model
from workers.model.config import ModelConfig, parse_config
from workers.model.gguf import GGUFSource
from workers.model.llama import Model
from workers.model.weights import Weights

Q = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(Q), "is missing"),
        (lambda t: t.update({Q: t[Q][:-1]}), r"shape \[47, 48\].*\[48, 48\]"),
        (lambda t: t.update({Q: t[Q].flatten()}), r"shape \[2304\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), "int8"),
        (lambda t: t[Q].__setitem__((3, 4), torch.nan), "not finite"),
    ],
)
def test_a_tensor_that_is_absent_or_misshapen_is_named(tmp_path: Path, change: Any, says: str) -> None:
    random_model(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelLoadError, match=says) as caught:
        our_model(tmp_path)
    assert Q in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    """A bias that the config does not tell of would otherwise be ignored."""
    random_model(tmp_path)
    edit(tmp_path, lambda t: t.update({Q.replace("weight", "bias"): torch.ones(48)}))
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias.*no place"):
        our_model(tmp_path)


def test_tensors_that_are_known_to_be_spare_are_left(tmp_path: Path) -> None:
    random_model(tmp_path, tie_word_embeddings=True)

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit(tmp_path, add)
    our_model(tmp_path)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    random_model(tmp_path)
    edit(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*missing"):
        our_model(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 300, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, kept: int) -> None:
    random_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        our_model(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    random_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        our_model(tmp_path)


def test_a_missing_shard_and_a_lying_index_are_refused(tmp_path: Path) -> None:
    random_model(tmp_path, shard="40KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    shards = sorted(set(listed["weight_map"].values()))
    assert len(shards) > 2

    moved = {**listed["weight_map"], Q: next(s for s in shards if s != listed["weight_map"][Q])}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ModelLoadError, match="which the index places here"):
        our_model(tmp_path)

    index.write_text("{")
    with pytest.raises(ModelLoadError, match="not an index"):
        our_model(tmp_path)

    index.write_text(json.dumps(listed))
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ModelLoadError, match=shards[1]):
        our_model(tmp_path)


# -- GGUF ------------------------------------------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path: Path, folder: Path, kind: gguf.GGMLQuantizationType, extra: Tensors | None = None) -> ModelConfig:
    """The folder's model as a GGUF file with its matrices in ``kind``."""
    config = parse_config(json.loads((folder / "config.json").read_text()))
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in {**load_file(folder / "model.safetensors"), **(extra or {})}.items():
        stem, _, suffix = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        ours = NAMES[stem] if stem in NAMES else f"blk.{layer}.{NAMES[part]}" if part in NAMES else stem
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permuted(values, config.heads if "q_proj" in name else config.kv_heads)
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{ours}.{suffix}", gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def gguf_model(path: Path, config: ModelConfig) -> Model:
    return Model(config, Weights(GGUFSource(path, config), torch.float32, CPU), torch.float32, CPU)


def wide_model(folder: Path) -> None:
    random_model(folder, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_tensors_are_the_folders_up_to_quantization(tmp_path: Path, kind: str) -> None:
    wide_model(tmp_path)
    quantization = gguf.GGMLQuantizationType[kind]
    config = write_gguf(tmp_path / "m.gguf", tmp_path, quantization)
    source = GGUFSource(tmp_path / "m.gguf", config)
    tensors = load_file(tmp_path / "model.safetensors")
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        wanted = tensor.numpy()
        heads = config.heads if "q_proj" in name else config.kv_heads if "k_proj" in name else 0
        if wanted.ndim == 2:
            stored = permuted(wanted, heads) if heads else wanted
            rounded = gguf.quants.dequantize(gguf.quants.quantize(stored, quantization), quantization)
            back = np.empty_like(wanted)
            order = permuted(np.arange(len(wanted))[:, None], heads)[:, 0] if heads else np.arange(len(wanted))
            back[order] = rounded.reshape(wanted.shape)
            wanted = back
        rows = range(len(wanted))
        assert torch.equal(source.read(name, rows, None), torch.from_numpy(wanted)), name
        # A rank's part: whole heads, or a run of columns.
        some = range(len(wanted) // 2, len(wanted)) if heads % 2 == 0 else rows
        assert torch.equal(source.read(name, some, None), torch.from_numpy(wanted[some.start :])), name
        if wanted.ndim == 2 and not heads:
            part = source.read(name, rows, range(3, 17))
            assert torch.equal(part, torch.from_numpy(wanted[:, 3:17])), name
    gguf_model(tmp_path / "m.gguf", config)


def test_a_truncated_gguf_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    wide_model(tmp_path)
    path = tmp_path / "m.gguf"
    config = write_gguf(path, tmp_path, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    for kept in (0, 3, 20, 100, 900, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:kept])
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            gguf_model(path, config)


def test_a_gguf_header_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    """It never ends in another exception, and never hangs."""
    wide_model(tmp_path)
    path = tmp_path / "m.gguf"
    config = write_gguf(path, tmp_path, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in [*range(64), *rng.integers(64, 2400, 150)]:
        for value in (0, 255, int(rng.integers(256))):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                gguf_model(path, config)
            except ModelLoadError:
                refused += 1
    assert refused > 100


def test_a_gguf_tensor_that_is_missing_or_spare_is_named(tmp_path: Path) -> None:
    wide_model(tmp_path)
    path = tmp_path / "m.gguf"
    config = write_gguf(path, tmp_path, gguf.GGMLQuantizationType.F32, {"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(ModelLoadError, match=r"attn_sinks.*no place"):
        gguf_model(path, config)
    edit(tmp_path, lambda t: t.pop(Q))
    config = write_gguf(path, tmp_path, gguf.GGMLQuantizationType.F32)
    with pytest.raises(ModelLoadError, match=r"q_proj.*missing"):
        gguf_model(path, config)


def test_a_scaled_rope_in_a_gguf_file_is_refused_not_ignored(tmp_path: Path) -> None:
    wide_model(tmp_path)
    path = tmp_path / "m.gguf"
    config = write_gguf(path, tmp_path, gguf.GGMLQuantizationType.F32, {"rope_freqs.weight": torch.ones(4)})
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        gguf_model(path, config)
