"""How a model computes, chosen once for a device and a dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.config import AttentionName
from cluster.errors import ConfigError
from workers.attention.interface import Attention
from workers.attention.reference import ReferenceAttention
from workers.model.ops import Ops, TorchOps


@dataclass(frozen=True, slots=True)
class Backend:
    """The small operations, and attention."""

    ops: Ops
    attention: Attention


def choose(name: AttentionName, device: torch.device, dtype: torch.dtype) -> Backend:
    """``auto``: the fused kernels on a CPU in fp32, the reference anywhere else.

    Raises ConfigError if ``cpu`` is asked for where it cannot run.
    """
    fused = device.type == "cpu" and dtype == torch.float32
    if name == "cpu" and not fused:
        raise ConfigError(
            f"engine.attention: 'cpu' runs in float32 on a CPU, not in {str(dtype).removeprefix('torch.')} on {device}",
            field="engine.attention",
        )
    if name == "reference" or not fused:
        return Backend(TorchOps(), ReferenceAttention())
    # numba is imported only where its kernels run.
    from workers.attention.cpu import CpuAttention
    from workers.model.ops_cpu import CpuOps

    return Backend(CpuOps(), CpuAttention())
