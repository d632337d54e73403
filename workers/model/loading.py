"""From files to a model in memory."""

from __future__ import annotations

import torch

from cluster.errors import OutOfMemory
from cluster.models import ModelFiles, hf_config
from workers.collective import Collective
from workers.model.config import parse_config
from workers.model.gguf import GGUFSource
from workers.model.llama import Model
from workers.model.weights import SafetensorsSource, Weights, WeightSource


def load_model(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, *, int8: bool, ranks: Collective | None
) -> Model:
    """Read config and weights; nothing of a model that failed to load is kept.

    Raises ModelLoadError, ConfigError, OutOfMemory.
    """
    config = parse_config(hf_config(files))
    source: WeightSource = GGUFSource(files.path, config) if files.kind == "gguf" else SafetensorsSource(files.path)
    try:
        return Model(config, Weights(source, dtype, device), dtype, device, int8=int8, ranks=ranks)
    except MemoryError as error:
        raise OutOfMemory(f"{files.path}: no memory for its weights; free some, or take a smaller model") from error
