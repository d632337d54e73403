"""y = W x + b for many rows, by the kernel that suits the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from workers.model import gemm, gemm8


class Linear:
    """A weight [N, K], and a bias [N] or None. Called with x [T, K]; gives [T, N].

    On a CPU in fp32: our own kernels where the CPU has the vectors for them, else oneDNN with the weight in its blocked
    order (F.linear loses up to half between 4 and 32 rows). Anything else is torch's own.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        int8: bool = False,
        largest: torch.Tensor | None = None,
    ) -> None:
        """``int8``: round the weight to 8 bits; ``largest``: see gemm8.pack. Raises ConfigError where that cannot be
        computed."""
        self.bias = bias
        self.weight_bytes = weight.numel() if int8 else weight.nbytes
        self.packed: gemm.Packed | gemm8.Packed | None = None
        self._multiply = self._choose(weight, int8, largest)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._multiply(x)
        return out if self.bias is None else out.add_(self.bias)

    def _choose(
        self, weight: torch.Tensor, int8: bool, largest: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        if int8:
            return self._choose_int8(weight, on_cpu, largest)
        if not on_cpu:
            return lambda x: torch.nn.functional.linear(x, weight)
        from workers.model import gemm  # numba is imported only where its kernels run

        if gemm.is_supported():
            packed = self.packed = gemm.pack(weight)
            return lambda x: gemm.multiply(x, packed)
        mkldnn: Any = torch.backends.mkldnn
        if mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
        return lambda x: torch.nn.functional.linear(x, weight)

    def _choose_int8(
        self, weight: torch.Tensor, on_cpu: bool, largest: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        where = f"not in {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        if on_cpu:
            from workers.model import gemm8

            if gemm8.is_supported():
                packed = self.packed = gemm8.pack(weight, largest)
                return lambda x: gemm8.multiply(x, packed)
            where = "and this CPU has no AVX2"
        raise ConfigError(
            f"engine.weights: 'int8' is computed on x86 CPUs with engine.dtype float32, {where}; leave it at auto",
            field="engine.weights",
        )
