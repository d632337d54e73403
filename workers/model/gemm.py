"""Our own product of activations with weights for CPUs in fp32: packed weights, and a kernel written for the registers.

A linear layer with few rows reads every weight once and does little with it; the libraries are made for square products
and lose up to half there. Here a panel of columns is multiplied with all rows, tile by tile (workers/tiles.py), while
the next panel is fetched: memory and arithmetic overlap. A row's result is the same to the last bit alone and in any
batch; no library promises that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from workers import memory, vectors
from workers.team import share
from workers.threads import helper, kernel, parallel_kernel
from workers.tiles import MAX_ROWS, PANEL, code, tile

ROWS_OF_A_TASK = 16 * MAX_ROWS
"""So that a task's activations stay in the second-level cache, and many threads find work in small layers."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [N, K] as panels [ceil(N / PANEL), K, PANEL], missing columns zero."""

    weights: torch.Tensor
    columns: int


def is_supported() -> bool:
    """Whether this CPU has fused multiply-add on vectors."""
    return vectors.HAS_FMA


def pack(weight: torch.Tensor) -> Packed:
    """Lay a weight [N, K] out for the kernel."""
    rows, depth = weight.shape
    panels = -(-rows // PANEL)
    padded = torch.zeros(panels * PANEL, depth, dtype=torch.float32)
    padded[:rows] = weight
    return Packed(memory.kept(padded.view(panels, PANEL, depth).transpose(1, 2)), rows)


def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x [M, K] times the weight's transpose: [M, N]. ``x`` is contiguous fp32."""
    out = x.new_empty(len(x), packed.columns)
    _multiply(x.numpy(), packed.weights.numpy(), code(), out.numpy(), numba.get_num_threads())
    return out


@parallel_kernel
def _multiply(x: Any, packed: Any, tiles: Any, out: Any, threads: Any) -> None:
    for me in numba.prange(threads):
        multiply_rows(x, packed, tiles, out, me, threads)


@kernel
def multiply_rows(x: Any, packed: Any, tiles: Any, out: Any, me: Any, threads: Any) -> None:
    """The share of thread ``me`` of x [M, K] times packed panels into ``out`` [M, N]; ``tiles``: workers.tiles.code."""
    rows, depth, panels, columns = x.shape[0], x.shape[1], packed.shape[0], out.shape[1]
    blocks = (rows + ROWS_OF_A_TASK - 1) // ROWS_OF_A_TASK
    # All tasks of a block of rows before those of the next: its activations stay in the cache.
    begin, end = share(blocks * panels, me, threads)
    for task in range(begin, end):
        block, panel = task // panels, task % panels
        start, stop = rows * block // blocks, rows * (block + 1) // blocks
        weights = packed.ctypes.data + panel * depth * PANEL * 4
        source = x.ctypes.data + 4 * start * depth
        if (panel + 1) * PANEL <= columns:
            target = out.ctypes.data + 4 * (start * columns + panel * PANEL)
            _rows(source, np.int64(stop - start), np.int64(depth), weights, tiles, target, np.int64(columns))
        else:  # the last panel is wider than what is left of the result
            whole = np.empty((stop - start, PANEL), np.float32)
            _rows_into(source, depth, weights, tiles, whole)
            for row in range(stop - start):
                for column in range(columns - panel * PANEL):
                    out[start + row, panel * PANEL + column] = whole[row, column]


@helper
def _rows_into(x: Any, depth: Any, weights: Any, tiles: Any, out: Any) -> None:
    """(An array's address is taken where the array is an argument, so that it lives until the end.)"""
    _rows(x, np.int64(out.shape[0]), np.int64(depth), weights, tiles, out.ctypes.data, np.int64(PANEL))


@helper
def _rows(x: Any, rows: Any, depth: Any, weights: Any, tiles: Any, target: Any, stride: Any) -> None:
    """One panel for so many rows, in tiles as even as possible; the last one fetches the next panel."""
    count_of_tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    row = np.int64(0)
    for i in range(count_of_tiles):
        count = (rows - row + count_of_tiles - i - 1) // (count_of_tiles - i)
        last = np.int64(i == count_of_tiles - 1)
        tile(tiles, (count, last, x + 4 * row * depth, depth, weights, depth, target + 4 * row * stride, stride))
        row += count
