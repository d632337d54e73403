"""Between pages and the payloads of a tier: gather a chunk's pages head by head, scatter it back.

``[layers, 2, pages, kv_heads, block_tokens, head_dim]`` in memory, ``[kv_heads, layers, 2, tokens, head_dim]`` at rest.
On a CPU numpy copies runs of a page's head (some KiB each) without the interpreter's lock and on one thread: torch
would wake threads that the model's own step is using. Cards go through a copy in host memory; that has not been run on
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.tiers.chunks import CHECKSUM_BYTES, ChunkShape
from workers.attention.interface import KVPages

Bytes = npt.NDArray[np.uint8]

_BITS = {4: torch.int32, 2: torch.int16}
_LEAST_SCALE = np.float32(1e-30)


class KVCodec:
    """For one rank's pages. ``shape``: of the whole model's chunks; this rank holds ``heads`` of its KV heads."""

    def __init__(self, pages: KVPages, shape: ChunkShape, heads: range) -> None:
        self._pages = pages
        self._shape = shape
        self._heads = len(heads)
        self._on_cpu = pages.whole.device.type == "cpu"
        # numpy knows no bfloat16: numbers are moved as bits.
        self._bits: Any = pages.whole.view(_BITS[pages.whole.dtype.itemsize]).numpy() if self._on_cpu else None

    def gather(self, blocks: Sequence[int], staged: Bytes) -> None:
        """Copy pages into ``staged``, this rank's span of a value; checksums are left out."""
        if self._shape.dtype == "int8":
            self._quantize(blocks, staged)
            return
        target = self._numbers(staged, self._bits_dtype())
        for place, block in enumerate(blocks):
            np.copyto(target[:, :, :, place], self._page(block))

    def scatter(self, staged: Bytes | memoryview, blocks: Sequence[int]) -> None:
        """Copy a span back into pages."""
        data = np.frombuffer(staged, np.uint8)
        if self._shape.dtype == "int8":
            self._restore(data, blocks)
            return
        source = self._numbers(data, self._bits_dtype())
        for place, block in enumerate(blocks):
            self._set_page(block, source[:, :, :, place])

    # -- pages as [heads, layers, 2, block_tokens, head_dim] -----------------------------------------------------------

    def _page(self, block: int) -> Any:
        if self._on_cpu:
            return self._bits[:, :, block].transpose(2, 0, 1, 3, 4)
        page = self._pages.whole[:, :, block].permute(2, 0, 1, 3, 4).contiguous()
        return page.view(_BITS[page.dtype.itemsize]).cpu().numpy()

    def _set_page(self, block: int, numbers: Any) -> None:
        if self._on_cpu:
            np.copyto(self._bits[:, :, block].transpose(2, 0, 1, 3, 4), numbers)
            return
        page = torch.from_numpy(np.ascontiguousarray(numbers)).view(self._pages.whole.dtype)
        self._pages.whole[:, :, block] = page.permute(1, 2, 0, 3, 4).to(self._pages.whole.device)

    def _bits_dtype(self) -> Any:
        return {4: np.int32, 2: np.int16}[self._pages.whole.dtype.itemsize]

    # -- spans as [heads, layers, 2, blocks, block_tokens, head_dim] ---------------------------------------------------

    def _numbers(self, span: Bytes, dtype: Any) -> Any:
        """The numbers of all heads in a span, without a copy."""
        shape, block = self._shape, self._pages.block_tokens
        dims = (self._heads, shape.layers, 2, shape.tokens // block, block, shape.head_dim)
        return _strided(span, CHECKSUM_BYTES, dims, dtype, shape.stride)

    def _scales(self, span: Bytes) -> Any:
        shape, block = self._shape, self._pages.block_tokens
        dims = (self._heads, shape.layers, 2, shape.tokens // block, block, 1)
        begin = CHECKSUM_BYTES + shape.head_bytes - shape.scale_bytes
        return _strided(span, begin, dims, np.float32, shape.stride)

    def _quantize(self, blocks: Sequence[int], staged: Bytes) -> None:
        """Symmetric, a scale for each head's vector of each token: a token's numbers depend on no other's."""
        numbers, scales = self._numbers(staged, np.int8), self._scales(staged)
        for place, block in enumerate(blocks):
            exact = self._float_page(block)
            scale = np.maximum(np.abs(exact).max(axis=-1, keepdims=True) / np.float32(127), _LEAST_SCALE)
            numbers[:, :, :, place] = np.rint(exact / scale)
            scales[:, :, :, place] = scale

    def _restore(self, data: Bytes, blocks: Sequence[int]) -> None:
        numbers, scales = self._numbers(data, np.int8), self._scales(data)
        for place, block in enumerate(blocks):
            exact = numbers[:, :, :, place].astype(np.float32) * scales[:, :, :, place]
            rounded = torch.from_numpy(exact).to(self._pages.whole.dtype)
            self._set_page(block, rounded.view(_BITS[rounded.dtype.itemsize]).numpy())

    def _float_page(self, block: int) -> npt.NDArray[np.float32]:
        bits = torch.from_numpy(np.ascontiguousarray(self._page(block)))
        exact: npt.NDArray[np.float32] = bits.view(self._pages.whole.dtype).float().numpy()
        return exact


def _strided(span: Bytes, begin: int, dims: tuple[int, ...], dtype: Any, stride: int) -> Any:
    """``dims`` at ``begin`` of each head, heads ``stride`` bytes apart, the rest contiguous."""
    strides = [np.dtype(dtype).itemsize]
    for size in reversed(dims[2:]):
        strides.insert(0, strides[0] * size)
    return np.ndarray(dims, dtype, span, begin, (stride, *strides))
