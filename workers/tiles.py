"""Products of matrices in the registers: up to ``MAX_ROWS`` rows times one panel of columns.

A panel of the right-hand matrix streams through the vector registers while the sums of all rows stay in them (Goto and
van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4). Every element of the result is one
chain of fused multiply-adds over k in order, whatever the number of rows: a row's result is the same to the last bit
alone and in any batch.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from workers import vectors
from workers.native import Kernels
from workers.threads import kernel
from workers.vectors import LANES

MAX_ROWS = 14 if LANES == 16 else 6
"""Rows of a tile: with two vectors each, what fits 32 (AVX-512) or 16 registers beside the weights' and a broadcast."""

PANEL = 2 * LANES
"""Columns of a panel, which lies in memory as [k, PANEL]."""


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
            each = {yes: partial(_emit_tile, builder, count, bool(yes), False, *rest) for yes in (0, 1)}
            vectors.switch(builder, prefetch, each)

        vectors.switch(builder, rows, {count: partial(of_rows, count) for count in range(1, MAX_ROWS + 1)})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add_tile(typing: Any, rows: Any, x: Any, x_stride: Any, w: Any, depth: Any, out: Any, out_stride: Any) -> Any:
    """As ``_tile`` without prefetch, added to what ``out`` holds."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        cases = {n: partial(_emit_tile, builder, n, False, True, *rest) for n in range(1, MAX_ROWS + 1)}
        vectors.switch(builder, rows, cases)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@kernel
def _tile_of(
    rows: Any, prefetch: Any, x: Any, x_stride: Any, w: Any, depth: Any, out: Any, out_stride: Any
) -> None:  # fmt: skip
    _tile(rows, prefetch, x, x_stride, w, depth, out, out_stride)


@kernel
def _add_tile_of(rows: Any, x: Any, x_stride: Any, w: Any, depth: Any, out: Any, out_stride: Any) -> None:
    _add_tile(rows, x, x_stride, w, depth, out, out_stride)


_kernels = Kernels()
tile = _kernels.add(_tile_of, *[types.int64] * 8)
"""For kernels: ``tile(code, (the arguments of _tile))``."""
add_tile = _kernels.add(_add_tile_of, *[types.int64] * 7)
code = functools.cache(_kernels.addresses)
"""What kernels that use tiles are given."""


def _emit_tile(
    builder: Any, rows: int, prefetch: bool, add: bool, x: Any, x_stride: Any, w: Any, depth: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    """The loop over k of one tile: two loads of weights, one broadcast per row, two multiply-adds per row."""
    x, w, out = (vectors.pointer(builder, address) for address in (x, w, out))
    x_rows = [vectors.offset(builder, x, builder.mul(x_stride, vectors.constant(r))) for r in range(rows)]
    out_rows = [vectors.offset(builder, out, builder.mul(out_stride, vectors.constant(r))) for r in range(rows)]
    targets = [vectors.offset(builder, row, LANES * v) for row in out_rows for v in range(2)]
    initial = [vectors.load(builder, t, LANES) if add else vectors.zeros(LANES) for t in targets]
    with vectors.Loop(builder, depth, 1, initial) as loop:
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
    for total, target in zip(loop.results, targets, strict=True):
        vectors.store(builder, total, target)
