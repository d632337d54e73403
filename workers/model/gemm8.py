"""Products with weights of 8 bits on CPUs: integers inside, fp32 outside.

Weights are scaled per output channel, activations per token and ``GROUP`` numbers of it: one scale for a whole token
loses what stands beside an outlier (SmolLM2's perplexity grows by 4.6 % instead of 1.2 %), and one for several tokens
would let a row change with its neighbours. Within a group the sums are exact integers, and groups are added in order:
a row's result is the same to the last bit alone and in any batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from workers import memory, vectors
from workers.native import Kernels
from workers.team import share
from workers.threads import helper, kernel, parallel_kernel
from workers.vectors import BYTE, HAS_VNNI, INT32, LANES

GROUP = 64
"""Numbers of a token that share a scale."""

PANEL = 2 * LANES
"""Columns of a panel."""

MAX_ROWS = 7 if LANES == 16 else 3
"""Rows of a tile: with two vectors of integers and two of sums each, what fits the registers."""

ROWS_OF_A_TASK = 32 * MAX_ROWS

STEP = 4 if HAS_VNNI else 2
"""Numbers of a token that one instruction multiplies."""

_OFFSET = 128 if HAS_VNNI else 0
"""The instruction takes weights without a sign: they are kept with this added, and sums begin below zero instead."""

ACTIVATION = torch.int8 if HAS_VNNI else torch.int16


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [N, K]: bytes [ceil(N / PANEL), padded K / STEP, PANEL, STEP], and a scale for each column."""

    weights: torch.Tensor
    scales: torch.Tensor
    columns: int


def is_supported() -> bool:
    """Whether this CPU has the instructions."""
    return HAS_VNNI or "avx2" in vectors.features()


def pack(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Packed:
    """Round a weight [N, K] to 8 bits, by the largest number of each row, and lay it out for the kernel.

    ``largest``: those numbers, where ``weight`` is some columns of rows that are longer.
    """
    rows, depth = weight.shape
    panels, padded = -(-rows // PANEL), -(-depth // GROUP) * GROUP
    scales = torch.zeros(panels * PANEL)
    scales[:rows] = (weight.abs().amax(1) if largest is None else largest).clamp(
        min=torch.finfo(torch.float32).tiny
    ) / 127
    whole = torch.zeros(panels * PANEL, padded, dtype=torch.int16)
    whole[:rows, :depth] = (weight / scales[:rows, None]).round_()
    kept = (whole + _OFFSET).to(torch.uint8 if _OFFSET else torch.int8)
    laid_out = kept.view(torch.int8).view(panels, PANEL, padded // STEP, STEP).transpose(1, 2)
    return Packed(memory.kept(laid_out), scales, rows)


def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x [M, K] times the weight's transpose: [M, N]. ``x`` is contiguous fp32."""
    groups = packed.weights.shape[1] * STEP // GROUP
    out = x.new_empty(len(x), packed.columns)
    quantized = torch.empty(len(x), groups * GROUP, dtype=ACTIVATION)
    scales, starts = x.new_empty(len(x), groups), torch.empty(len(x), groups, dtype=torch.int32)
    _multiply(
        x.numpy(), quantized.numpy(), scales.numpy(), starts.numpy(), packed.weights.numpy(), packed.scales.numpy(),
        code(), out.numpy(), numba.get_num_threads(),
    )  # fmt: skip
    return out


@parallel_kernel
def _multiply(
    x: Any, quantized: Any, scales: Any, starts: Any, weights: Any, column_scales: Any, tiles: Any, out: Any,
    threads: Any,
) -> None:  # fmt: skip
    for me in numba.prange(threads):
        quantize_rows(x, quantized, scales, starts, me, threads)
    for me in numba.prange(threads):
        multiply_rows(quantized, scales, starts, weights, column_scales, tiles, out, me, threads)


@kernel
def quantize_rows(x: Any, quantized: Any, scales: Any, starts: Any, me: Any, threads: Any) -> None:
    """The share of thread ``me`` of x [M, K] → ``quantized`` [M, groups * GROUP]; the others are [M, groups]."""
    begin, end = share(x.shape[0], me, threads)
    for t in range(begin, end):
        for group in range(scales.shape[1]):
            _quantize(x, t, group, quantized, scales, starts)


@helper
def _quantize(x: Any, t: Any, group: Any, quantized: Any, scales: Any, starts: Any) -> None:
    """One group of one token. What is not finite makes its scale a NaN, and with it the token's result."""
    begin = group * GROUP
    count = min(GROUP, x.shape[1] - begin)
    top, broken = np.float32(0), np.float32(0)
    for i in range(count):
        top = max(top, abs(x[t, begin + i]))
        broken += x[t, begin + i] * np.float32(0)
    scale = np.float32(127) / top if top > np.float32(1e-30) else np.float32(0)
    total = np.int32(0)
    for i in range(count):
        value = np.rint(x[t, begin + i] * scale)
        quantized[t, begin + i] = np.int32(value)
        total += np.int32(value)
    for i in range(count, GROUP):
        quantized[t, begin + i] = 0
    scales[t, group] = top / np.float32(127) + broken
    starts[t, group] = -np.int32(_OFFSET) * total


@kernel
def multiply_rows(
    quantized: Any, scales: Any, starts: Any, weights: Any, column_scales: Any, tiles: Any, out: Any, me: Any,
    threads: Any,
) -> None:  # fmt: skip
    """The share of thread ``me`` of tokens as ``quantize_rows`` left them times a packed weight into ``out`` [M, N].

    ``tiles``: ``code``.
    """
    rows, panels, columns = quantized.shape[0], weights.shape[0], out.shape[1]
    blocks = (rows + ROWS_OF_A_TASK - 1) // ROWS_OF_A_TASK
    begin, end = share(blocks * panels, me, threads)
    for task in range(begin, end):
        block, panel = task // panels, task % panels
        start, stop = rows * block // blocks, rows * (block + 1) // blocks
        if (panel + 1) * PANEL <= columns:
            target = out.ctypes.data + 4 * (start * columns + panel * PANEL)
            _rows(
                quantized, scales, starts, start, np.int64(stop - start), weights, column_scales, panel, tiles, target,
                np.int64(columns),
            )  # fmt: skip
        else:  # the last panel is wider than what is left of the result
            whole = np.empty((stop - start, PANEL), np.float32)
            _rows_into(quantized, scales, starts, start, weights, column_scales, panel, tiles, whole)
            for row in range(stop - start):
                for column in range(columns - panel * PANEL):
                    out[start + row, panel * PANEL + column] = whole[row, column]


@helper
def _rows_into(
    quantized: Any, scales: Any, starts: Any, start: Any, weights: Any, column_scales: Any, panel: Any, tiles: Any,
    out: Any,
) -> None:  # fmt: skip
    """(An array's address is taken where the array is an argument, so that it lives until the end.)"""
    _rows(
        quantized, scales, starts, start, np.int64(out.shape[0]), weights, column_scales, panel, tiles, out.ctypes.data,
        np.int64(PANEL),
    )  # fmt: skip


@helper
def _rows(
    quantized: Any, scales: Any, starts: Any, start: Any, rows: Any, weights: Any, column_scales: Any, panel: Any,
    tiles: Any, target: Any, stride: Any,
) -> None:  # fmt: skip
    """One panel for so many tokens, in tiles as even as possible; the last one fetches the next panel."""
    count_of_tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    groups, depth = scales.shape[1], quantized.shape[1]
    row = np.int64(0)
    for i in range(count_of_tiles):
        count = (rows - row + count_of_tiles - i - 1) // (count_of_tiles - i)
        token = start + row
        tile(tiles, (
            count, np.int64(i == count_of_tiles - 1), quantized.ctypes.data + quantized.itemsize * token * depth,
            quantized.itemsize * depth, scales.ctypes.data + 4 * token * groups,
            starts.ctypes.data + 4 * token * groups, groups, weights.ctypes.data + panel * PANEL * depth,
            column_scales.ctypes.data + 4 * panel * PANEL, target + 4 * row * stride, stride,
        ))  # fmt: skip
        row += count


@intrinsic  # type: ignore[untyped-decorator]
def _tile(
    typing: Any, rows: Any, prefetch: Any, x: Any, x_stride: Any, scales: Any, starts: Any, groups: Any, w: Any,
    column_scales: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[0:rows, 0:PANEL] from addresses; ``x_stride`` in bytes, ``out_stride`` in numbers. All are int64.

    ``prefetch``: whether to touch what lies one panel behind ``w``.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, prefetch, *rest = arguments

        def of_rows(count: int) -> None:
            vectors.switch(
                builder, prefetch, {yes: partial(_emit_tile, builder, count, bool(yes), *rest) for yes in (0, 1)}
            )

        vectors.switch(builder, rows, {count: partial(of_rows, count) for count in range(1, MAX_ROWS + 1)})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


@kernel
def _tile_of(
    rows: Any, prefetch: Any, x: Any, x_stride: Any, scales: Any, starts: Any, groups: Any, w: Any, column_scales: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    _tile(rows, prefetch, x, x_stride, scales, starts, groups, w, column_scales, out, out_stride)


_kernels = Kernels()
tile = _kernels.add(_tile_of, *[types.int64] * 11)
code = functools.cache(_kernels.addresses)
"""What ``multiply_rows`` is given."""


def _emit_tile(
    builder: Any, rows: int, prefetch: bool, x: Any, x_stride: Any, scales: Any, starts: Any, groups: Any, w: Any,
    column_scales: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """A loop over groups around one over their steps: integers inside, and after each group fp32 sums."""
    constant = vectors.constant
    integers, floats = ir.VectorType(INT32, LANES), vectors.vector_of(LANES)
    weight = integers if HAS_VNNI else ir.VectorType(BYTE, 2 * LANES)
    panel_bytes = builder.mul(groups, constant(GROUP * PANEL))
    rows_of_x = [builder.add(x, builder.mul(x_stride, constant(row))) for row in range(rows)]
    bytes_of_step = 4  # of a token: 4 int8, or 2 int16
    with vectors.Loop(builder, groups, 1, [vectors.zeros(LANES)] * (2 * rows)) as over:
        beside = [
            builder.mul(builder.add(over.index, builder.mul(groups, constant(row))), constant(4)) for row in range(rows)
        ]
        begun = [
            vectors.broadcast(builder, vectors.load_as(builder, INT32, builder.add(starts, place)), LANES)
            for place in beside
        ]
        steps = constant(GROUP // STEP)
        with vectors.Loop(builder, steps, 1, [one for one in begun for _ in range(2)]) as inner:
            step = builder.add(builder.mul(over.index, steps), inner.index)
            here = builder.add(w, builder.mul(step, constant(PANEL * STEP)))
            if prefetch:  # an address behind the last panel is harmless
                ahead = builder.add(here, panel_bytes)
                for line in range(0, PANEL * STEP, 64):
                    vectors.prefetch(builder, vectors.pointer(builder, builder.add(ahead, constant(line))))
            loaded = [vectors.load_as(builder, weight, builder.add(here, constant(LANES * STEP * v))) for v in range(2)]
            grown = []
            for row in range(rows):
                place = builder.add(rows_of_x[row], builder.mul(step, constant(bytes_of_step)))
                number = vectors.load_as(builder, INT32, place)
                sums = inner.values[2 * row : 2 * row + 2]
                grown += [vectors.add_products(builder, *pair, number) for pair in zip(sums, loaded, strict=True)]
            inner.carry(grown)
        totals = []
        for row in range(rows):
            scale = vectors.broadcast(
                builder, vectors.load_as(builder, vectors.NUMBER, builder.add(scales, beside[row])), LANES
            )
            for v in range(2):
                whole = builder.sitofp(inner.results[2 * row + v], floats)
                totals.append(vectors.fused_multiply_add(builder, whole, scale, over.values[2 * row + v]))
        over.carry(totals)
    for v in range(2):
        factors = vectors.load_as(builder, floats, builder.add(column_scales, constant(4 * LANES * v)))
        for row in range(rows):
            target = vectors.pointer(builder, builder.add(out, builder.mul(out_stride, constant(4 * row))))
            product = builder.fmul(over.results[2 * row + v], factors)
            vectors.store(builder, product, vectors.offset(builder, target, LANES * v))
