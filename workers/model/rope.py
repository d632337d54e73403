"""Rotary position embedding: the angle of each pair of a head's dimensions at each position.

RoFormer (arXiv:2104.09864), in the half-rotated form of Hugging Face: dimension i turns with dimension i + d/2.
"""

from __future__ import annotations

import math

import torch

from workers.model.config import RopeConfig


class RotaryTable:
    """cos and sin, ``[positions, head_dim / 2]`` in fp32, grown as positions are met (a context may be 128k long)."""

    def __init__(self, config: RopeConfig, head_dim: int, max_context: int, device: torch.device) -> None:
        self._frequencies, self._scale = frequencies(config, head_dim)
        self._max_context = max_context
        self._device = device
        self.cos = torch.empty(0, head_dim // 2, device=device)
        self.sin = torch.empty(0, head_dim // 2, device=device)

    def cover(self, positions: int) -> None:
        """Make rows 0 ... positions - 1 valid."""
        if positions <= len(self.cos):
            return
        rows = min(max(positions, 2 * len(self.cos), 1024), max(self._max_context, positions))
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), self._frequencies)
        self.cos = (angles.cos() * self._scale).to(self._device)
        self.sin = (angles.sin() * self._scale).to(self._device)


def frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, ``[head_dim / 2]`` fp32 on the CPU, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(plain, config), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config, head_dim), _yarn_scale(config)
    return plain, 1.0


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended (the Llama 3.1 release's formula)."""
    turns = config.original_max_context * plain / (2 * math.pi)  # in the context that it was trained on
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(plain: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """NTK by parts (YaRN, arXiv:2309.00071, section 3.2)."""

    def dimension_of(turns: float) -> float:
        """The pair that turns so often over the original context."""
        return head_dim * math.log(config.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _yarn_scale(config: RopeConfig) -> float:
    """The factor on cos and sin that keeps attention's entropy (YaRN, section 3.4)."""

    def scale(weight: float = 1.0) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale()
