"""From a configuration to the parts of an engine: what a served group and an engine in the caller's process share.

Imports torch inside its functions: a configuration can be looked at without it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cluster.config import ClusterConfig, EngineConfig
from cluster.errors import ConfigError
from workers.admission import EngineSettings

if TYPE_CHECKING:
    import torch

    from workers.model.config import ModelConfig
    from workers.model.llama import Model
    from workers.runner import Runner


def choose_device(config: EngineConfig) -> torch.device:
    """Where the model runs. Raises ConfigError when CUDA is asked for and there is none."""
    import torch

    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise ConfigError("engine.device: cuda is asked for, and there is no CUDA device here", field="engine.device")
    return torch.device("cuda", 0) if found and config.device != "cpu" else torch.device("cpu")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Of weights and KV; auto is float32 on a CPU and bfloat16 on a card."""
    import torch

    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def free_bytes(device: torch.device) -> int:
    """Memory that KV pages could take now."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(psutil.virtual_memory().available, _cgroup_free_bytes())


def _cgroup_free_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container's limit leaves; beyond it the kernel kills us without a word. Without a limit: a huge number."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        return sys.maxsize if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return sys.maxsize


def choose_context(config: EngineConfig, trained: int) -> int:
    """Prompt plus output. Raises ConfigError for more than the model was trained for."""
    wanted = config.max_context_tokens
    if wanted is not None and wanted > trained:
        raise ConfigError(
            f"engine.max_context_tokens: {wanted} is more than the {trained} that the model was trained for",
            field="engine.max_context_tokens",
            value=wanted,
            limit=trained,
        )
    return wanted or trained


def make_settings(cluster: ClusterConfig, model: ModelConfig) -> EngineSettings:
    """What the engine is told. Raises ConfigError as ``choose_context``."""
    config, prefix = cluster.engine, cluster.prefix
    return EngineSettings(
        block_tokens=config.block_tokens,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_context_tokens=choose_context(config, model.max_context),
        prefix_cache=config.prefix_cache,
        eos_token_ids=frozenset(model.eos_token_ids),
        vocab_size=model.vocab_size,
        step_target_s=None if config.step_target_ms is None else config.step_target_ms / 1000,
        tier_deadline_s=prefix.deadline_ms / 1000,
        claim_wait_s=prefix.claim_wait_ms / 1000,
    )


def make_runner(model: Model, config: EngineConfig, num_blocks: int) -> Runner:
    """The model with its pages and its sampler. Raises OutOfMemory, ConfigError."""
    from workers.runner import Runner
    from workers.sampler import Sampler

    return Runner(
        model,
        block_tokens=config.block_tokens,
        num_blocks=num_blocks,
        attention=config.attention,
        sampler=Sampler(model.config.vocab_size, model.config.eos_token_ids),
    )
