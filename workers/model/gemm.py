"""Our own product of activations with weights for CPUs in fp32: packed weights, and a kernel written for the registers.

A linear layer with few rows reads every weight once and does little with it; the libraries are made for square products
and lose up to half there. Here a panel of columns streams through the vector registers while up to ``MAX_ROWS`` rows
are multiplied with it, and the next panel is prefetched meanwhile: memory and arithmetic overlap (Goto and van de
Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4, with one level of blocking).

Every element of the result is one chain of fused multiply-adds over k in order, whatever the number of rows: a row's
result is the same to the last bit alone and in any batch. No library promises that.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.threads import kernel


@functools.cache
def _features() -> frozenset[str]:
    features = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, present in features.items() if present)


LANES = 16 if "avx512f" in _features() else 8
"""fp32 numbers in a vector register."""

MAX_ROWS = 14 if LANES == 16 else 6
"""Rows of a tile: with two vectors each, what fits 32 (AVX-512) or 16 registers beside the weights' and a broadcast."""

PANEL = 2 * LANES
"""Columns of a panel."""

ROWS_OF_A_TASK = 16 * MAX_ROWS
"""So that a task's activations stay in the second-level cache, and many threads find work in small layers."""


def is_supported() -> bool:
    """Whether this CPU has fused multiply-add on vectors; without it LLVM would call a function for each number."""
    return bool(_features() & {"avx512f"}) or {"avx2", "fma"} <= _features()


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
    signature = types.void(rows, prefetch, x, x_stride, w, depth, out, out_stride)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, prefetch, *rest = arguments
        end = builder.append_basic_block("end")
        choice = builder.switch(rows, end)
        for count in range(1, MAX_ROWS + 1):
            for fetch in (0, 1):
                if fetch == 0:
                    entry = builder.append_basic_block(f"rows{count}")
                    choice.add_case(ir.Constant(rows.type, count), entry)
                    builder.position_at_end(entry)
                    plain, fetching = (builder.append_basic_block(f"rows{count}.{i}") for i in (0, 1))
                    builder.cbranch(builder.icmp_signed("==", prefetch, ir.Constant(rows.type, 0)), plain, fetching)
                builder.position_at_end((plain, fetching)[fetch])
                _emit_tile(builder, count, bool(fetch), *rest)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _emit_tile(
    builder: Any, rows: int, prefetch: bool, x: Any, x_stride: Any, w: Any, depth: Any, out: Any, out_stride: Any
) -> None:
    """The loop over k of one tile: two loads of weights, one broadcast per row, two multiply-adds per row."""
    number, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(number, LANES)
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")
    x, w, out = (builder.inttoptr(address, number.as_pointer()) for address in (x, w, out))
    x_rows = [builder.gep(x, [builder.mul(x_stride, ir.Constant(index, r))]) for r in range(rows)]
    before = builder.block
    loop, done = builder.append_basic_block("k"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(index)
    k.add_incoming(ir.Constant(index, 0), before)
    sums = [[builder.phi(vector) for _ in range(2)] for _ in range(rows)]
    here = builder.gep(w, [builder.mul(k, ir.Constant(index, PANEL))])
    if prefetch:
        _emit_prefetch(builder, here, builder.mul(depth, ir.Constant(index, PANEL)))
    weights = [_load(builder, builder.gep(here, [ir.Constant(index, LANES * v)]), vector) for v in range(2)]
    grown = []
    for row in range(rows):
        value = _broadcast(builder, builder.load(builder.gep(x_rows[row], [k])), vector)
        grown.append([builder.call(fma, [value, weights[v], sums[row][v]]) for v in range(2)])
    following = builder.add(k, ir.Constant(index, 1))
    k.add_incoming(following, loop)
    for row in range(rows):
        for v in range(2):
            sums[row][v].add_incoming(ir.Constant(vector, [0.0] * LANES), before)
            sums[row][v].add_incoming(grown[row][v], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
    builder.position_at_end(done)
    for row in range(rows):
        target = builder.gep(out, [builder.mul(out_stride, ir.Constant(index, row))])
        for v in range(2):
            place = builder.gep(target, [ir.Constant(index, LANES * v)])
            builder.store(grown[row][v], builder.bitcast(place, vector.as_pointer()), align=4)


def _load(builder: Any, pointer: Any, vector: Any) -> Any:
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)


def _broadcast(builder: Any, value: Any, vector: Any) -> Any:
    lane = ir.IntType(32)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(lane, 0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(lane, LANES), [0] * LANES)
    )


def _emit_prefetch(builder: Any, here: Any, distance: Any) -> None:
    """Into the second-level cache. An address behind the last panel is harmless: a prefetch never faults."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0i8"
    )
    ahead = builder.gep(here, [distance])
    for line in range(0, PANEL, 16):
        place = builder.bitcast(builder.gep(ahead, [ir.Constant(ir.IntType(64), line)]), byte)
        builder.call(function, [place, *(ir.Constant(flag, value) for value in (0, 2, 1))])


@kernel
def _multiply(x: Any, packed: Any, out: Any) -> None:
    rows, depth, panels, columns = x.shape[0], x.shape[1], packed.shape[0], out.shape[1]
    blocks = (rows + ROWS_OF_A_TASK - 1) // ROWS_OF_A_TASK
    # All tasks of a block of rows before those of the next: its activations stay in the cache.
    for task in numba.prange(blocks * panels):
        block, panel = task // panels, task % panels
        start = block * ROWS_OF_A_TASK
        stop = min(rows, start + ROWS_OF_A_TASK)
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
