"""y = W x + b for many rows, by the kernel that suits the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Linear:
    """A weight [N, K], and a bias [N] or None. Called with x [T, K]; gives [T, N].

    On a CPU in fp32: our own kernel where the CPU has the vectors for it, else oneDNN with the weight in its blocked
    order (F.linear loses up to half between 4 and 32 rows). Anything else is torch's own.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._multiply = _choose(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._multiply(x)
        return out if self._bias is None else out.add_(self._bias)


def _choose(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda x: torch.nn.functional.linear(x, weight)
    from workers.model import gemm  # numba is imported only where its kernels run

    if gemm.is_supported():
        packed, columns = gemm.pack(weight), len(weight)
        return lambda x: gemm.multiply(x, packed, columns)
    mkldnn: Any = torch.backends.mkldnn
    if mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
    return lambda x: torch.nn.functional.linear(x, weight)
