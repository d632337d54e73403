"""y = W x + b for many rows, by the kernel that suits the machine."""

from __future__ import annotations

from typing import Any

import torch


class Linear:
    """A weight [N, K], and a bias [N] or None. Called with x [T, K]; gives [T, N].

    On a CPU in fp32 the weight is kept in oneDNN's blocked order: of the kernels measured, the one that is within a
    tenth of the best for every number of rows (F.linear loses up to half between 4 and 32 rows).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_onednn()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return torch.nn.functional.linear(x, self._weight, self._bias)


def _has_onednn() -> bool:
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
