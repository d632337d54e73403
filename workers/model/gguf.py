"""Weights from a GGUF file: names and layouts turned back into Hugging Face's, quantized blocks into fp32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import ModelLoadError
from cluster.gguf_header import Tensor, read_tensors
from workers.model.config import ModelConfig

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp turns neighbouring dimensions; its converter permutes q and k for these architectures, and for no other.
_PERMUTED = ("llama", "mistral")


class GGUFSource:
    """A GGUF file as a WeightSource. The file is mapped; a tensor is dequantized when it is read."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self._config = config
        self._tensors = {_hf_name(tensor.name): tensor for tensor in read_tensors(path)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As the file's header gives them."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        """A part of one tensor in fp32, q and k in Hugging Face's order of rows: there ``rows`` must be whole heads."""
        tensor = self._tensors[name]
        try:
            with np.errstate(all="ignore"):  # Weights looks for what is not finite
                values = _dequantized(tensor, rows, columns)
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {tensor.name!r} of type {tensor.kind.name} cannot be read: {error}",
                tensor=tensor.name,
            ) from error
        head_rows = self._config.head_dim if self._is_permuted(name) else 0
        values = _unpermute(values, len(values) // head_rows) if head_rows else values
        # The map is read-only and torch warns of tensors that must not be written: a copy is ours.
        return torch.from_numpy(np.array(values, copy=not values.flags.writeable))

    def _is_permuted(self, name: str) -> bool:
        return self._config.model_type in _PERMUTED and (".q_proj." in name or ".k_proj." in name)


_SLAB = 1024
"""Rows that are dequantized at once where only some columns of them are kept."""


def _dequantized(tensor: Tensor, rows: range, columns: range | None) -> npt.NDArray[np.float32]:
    """Rows are quantized one by one, so that only those asked for are touched; columns are cut out of whole rows."""
    if len(tensor.shape) == 1:  # its bytes are one row
        vector: npt.NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.kind)
        return vector[rows.start : rows.stop]
    if columns is None:
        found: npt.NDArray[np.float32] = gguf.quants.dequantize(tensor.data[rows.start : rows.stop], tensor.kind)
        return found
    out = np.empty((len(rows), len(columns)), np.float32)
    for start in range(0, len(rows), _SLAB):
        stop = min(start + _SLAB, len(rows))
        whole = gguf.quants.dequantize(tensor.data[rows.start + start : rows.start + stop], tensor.kind)
        out[start:stop] = whole[:, columns.start : columns.stop]
    return out


def _hf_name(name: str) -> str:
    """Names that are not known stay as they are, and are refused as left over."""
    if name == "rope_freqs.weight":
        raise ModelLoadError(
            "GGUF tensor 'rope_freqs.weight': a scaled rope is served from safetensors, whose config names its kind",
            tensor=name,
        )
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{kind}"
    return name


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows (pair, half) of each head back to (half, pair)."""
    pairs = values.shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
