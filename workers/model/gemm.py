"""Our own product of activations with weights for CPUs in fp32: packed weights, and a kernel written for the registers.

A linear layer with few rows reads every weight once and does little with it; the libraries are made for square products
and lose up to half there. Here a panel of columns streams through the vector registers while up to ``MAX_ROWS`` rows
are multiplied with it, and the next panel is prefetched meanwhile: memory and arithmetic overlap (Goto and van de
Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4, with one level of blocking).

Every element of the result is one chain of fused multiply-adds over k in order, whatever the number of rows: a row's
result is the same to the last bit alone and in any batch. No library promises that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic

from workers import vectors
from workers.threads import kernel
from workers.vectors import LANES

MAX_ROWS = 14 if LANES == 16 else 6
"""Rows of a tile: with two vectors each, what fits 32 (AVX-512) or 16 registers beside the weights' and a broadcast."""

PANEL = 2 * LANES
"""Columns of a panel."""

ROWS_OF_A_TASK = 16 * MAX_ROWS
"""So that a task's activations stay in the second-level cache, and many threads find work in small layers."""


def is_supported() -> bool:
    """Whether this CPU has fused multiply-add on vectors."""
    return vectors.HAS_FMA


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] → panels [ceil(N / PANEL), K, PANEL], missing columns zero."""
    rows, depth = weight.shape
    panels = -(-rows // PANEL)
    padded = torch.zeros(panels * PANEL, depth, dtype=torch.float32)
    padded[:rows] = weight
    # torch's own memory begins at a multiple of 64 bytes, so that no vector lies across two cache lines.
    return padded.view(panels, PANEL, depth).transpose(1, 2).contiguous()


def multiply(x: torch.Tensor, packed: torch.Tensor, columns: int) -> torch.Tensor:
    """x [M, K] times the packed weight's transpose: [M, columns]. ``x`` is contiguous fp32."""
    out = x.new_empty(len(x), columns)
    _multiply(x.numpy(), packed.numpy(), out.numpy())
    return out


@intrinsic  # type: ignore[untyped-decorator]
def _tile(
    typing: Any, rows: Any, prefetch: Any, x: Any, x_stride: Any, w: Any, depth: Any, out: Any, out_stride: Any
) -> Any:
    """out[0:rows, 0:PANEL] = x[0:rows, 0:depth] @ w[0:depth, 0:PANEL], from addresses; strides in numbers.

    ``prefetch``: whether to touch what lies one panel behind ``w``. All arguments are int64.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, prefetch, *rest = arguments

        def of_rows(count: int) -> None:
            vectors.switch(builder, prefetch, {yes: partial(_emit_tile, builder, count, yes, *rest) for yes in (0, 1)})

        vectors.switch(builder, rows, {count: partial(of_rows, count) for count in range(1, MAX_ROWS + 1)})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


def _emit_tile(
    builder: Any, rows: int, prefetch: int, x: Any, x_stride: Any, w: Any, depth: Any, out: Any, out_stride: Any
) -> None:
    """The loop over k of one tile: two loads of weights, one broadcast per row, two multiply-adds per row."""
    x, w, out = (vectors.pointer(builder, address) for address in (x, w, out))
    x_rows = [vectors.offset(builder, x, builder.mul(x_stride, vectors.constant(r))) for r in range(rows)]
    with vectors.Loop(builder, depth, 1, [vectors.zeros(LANES)] * (2 * rows)) as loop:
        here = vectors.offset(builder, w, builder.mul(loop.index, vectors.constant(PANEL)))
        if prefetch:  # an address behind the last panel is harmless
            ahead = vectors.offset(builder, here, builder.mul(depth, vectors.constant(PANEL)))
            for line in range(0, PANEL, 16):
                vectors.prefetch(builder, vectors.offset(builder, ahead, line))
        weights = [vectors.load(builder, vectors.offset(builder, here, LANES * v), LANES) for v in range(2)]
        grown = []
        for row in range(rows):
            number = builder.load(vectors.offset(builder, x_rows[row], loop.index))
            value = vectors.broadcast(builder, number, LANES)
            sums = loop.values[2 * row : 2 * row + 2]
            grown += [vectors.fused_multiply_add(builder, value, *pair) for pair in zip(weights, sums, strict=True)]
        loop.carry(grown)
    for row in range(rows):
        target = vectors.offset(builder, out, builder.mul(out_stride, vectors.constant(row)))
        for v in range(2):
            vectors.store(builder, loop.results[2 * row + v], vectors.offset(builder, target, LANES * v))


@kernel
def _multiply(x: Any, packed: Any, out: Any) -> None:
    rows, depth, panels, columns = x.shape[0], x.shape[1], packed.shape[0], out.shape[1]
    blocks = (rows + ROWS_OF_A_TASK - 1) // ROWS_OF_A_TASK
    # All tasks of a block of rows before those of the next: its activations stay in the cache.
    for task in numba.prange(blocks * panels):
        block, panel = task // panels, task % panels
        start, stop = rows * block // blocks, rows * (block + 1) // blocks
        weights = packed.ctypes.data + panel * depth * PANEL * 4
        if (panel + 1) * PANEL <= columns:
            _rows(x, start, stop, depth, weights, out.ctypes.data + 4 * (start * columns + panel * PANEL), columns)
        else:  # the last panel is wider than what is left of the result
            whole = np.empty((stop - start, PANEL), np.float32)
            _rows(x, start, stop, depth, weights, whole.ctypes.data, PANEL)
            left = columns - panel * PANEL
            for row in range(stop - start):
                for column in range(left):
                    out[start + row, panel * PANEL + column] = whole[row, column]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _rows(x: Any, start: Any, stop: Any, depth: Any, weights: Any, target: Any, stride: Any) -> None:
    """One panel for rows [start, stop), in tiles as even as possible; the last one fetches the next panel."""
    tiles = (stop - start + MAX_ROWS - 1) // MAX_ROWS
    row = start
    for tile in range(tiles):
        count = (stop - row + tiles - tile - 1) // (tiles - tile)
        _tile(
            np.int64(count), np.int64(tile == tiles - 1), np.int64(x.ctypes.data + 4 * row * depth), np.int64(depth),
            np.int64(weights), np.int64(depth), np.int64(target + 4 * (row - start) * stride), np.int64(stride),
        )  # fmt: skip
        row += count
