"""From files to a model in memory."""

from __future__ import annotations

import torch

from cluster.models import ModelFiles, hf_config
from workers.model.config import parse_config
from workers.model.gguf import GGUFSource
from workers.model.llama import Model
from workers.model.weights import SafetensorsSource, Weights, WeightSource


def load_model(files: ModelFiles, dtype: torch.dtype, device: torch.device, *, int8: bool) -> Model:
    """Read config and weights. Raises ModelLoadError, ConfigError; nothing of a model that failed to load is kept."""
    config = parse_config(hf_config(files))
    source: WeightSource = GGUFSource(files.path, config) if files.kind == "gguf" else SafetensorsSource(files.path)
    return Model(config, Weights(source, dtype, device), dtype, device, int8=int8)
