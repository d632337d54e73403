"""Vector instructions for the CPU kernels: the parts of LLVM that numba does not offer, as few as they need.

LLVM turns simple loops into vectors by itself, but not as a kernel for the registers needs them: it takes vectors half
as wide as the machine's, adds each one up across its lanes, and keeps addresses where sums should be. The kernels say
it themselves, through functions that emit code (``numba.extending.intrinsic``) and take addresses as int64.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils

INDEX = ir.IntType(64)
NUMBER = ir.FloatType()
INT32, INT16, BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)


@functools.cache
def features() -> frozenset[str]:
    """What code may use, by LLVM's names: what this CPU can do, or what NUMBA_CPU_FEATURES says instead."""
    if numba.config.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in numba.config.CPU_FEATURES.split(",") if name.startswith("+"))
    present = {name for name, is_there in llvmlite.binding.get_host_cpu_features().items() if is_there}
    return frozenset(name for name in present if numba.config.ENABLE_AVX or not name.startswith("avx"))


LANES = 16 if {"avx512f", "avx512bw", "avx512vl"} <= features() else 8
"""fp32 numbers in the widest vector register."""

HAS_FMA = LANES == 16 or {"avx2", "fma"} <= features()
"""Whether a multiply-add on vectors is one instruction; where it is not, ``llvm.fma`` is a call for each number."""

HAS_VNNI = "avx512vnni" in features() if LANES == 16 else "avxvnni" in features()
"""Whether four products of bytes, added up, are one instruction."""


def constant(value: int) -> Any:
    """An address or a count."""
    return ir.Constant(INDEX, value)


def vector_of(lanes: int) -> Any:
    """The type of ``lanes`` fp32 numbers."""
    return ir.VectorType(NUMBER, lanes)


def zeros(lanes: int) -> Any:
    """A vector of zeros."""
    return ir.Constant(vector_of(lanes), [0.0] * lanes)


def pointer(builder: Any, address: Any) -> Any:
    """An int64 as a pointer to fp32 numbers."""
    return builder.inttoptr(address, NUMBER.as_pointer())


def offset(builder: Any, base: Any, numbers: Any) -> Any:
    """The pointer ``numbers`` (an int or a value) behind ``base``."""
    return builder.gep(base, [constant(numbers) if isinstance(numbers, int) else numbers])


def load(builder: Any, place: Any, lanes: int) -> Any:
    """``lanes`` numbers from a pointer of any alignment."""
    return builder.load(builder.bitcast(place, vector_of(lanes).as_pointer()), align=4)


def load_as(builder: Any, kind: Any, address: Any) -> Any:
    """A value of an LLVM type from an address (int64) of any alignment."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, place: Any) -> None:
    """A vector to a pointer of any alignment."""
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)


def broadcast(builder: Any, value: Any, lanes: int) -> Any:
    """One number into every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return shuffle(builder, one, undefined, [0] * lanes)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """The lanes of ``a`` and then ``b``, by their numbers."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the CPU can."""
    name = f"llvm.{'fma' if HAS_FMA else 'fmuladd'}.v{a.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def add_products(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """int32 sums [LANES] + for each lane the products of its bytes, with those of ``x`` (an int32 of the same for all).

    With VNNI ``weights`` are [LANES] of four unsigned bytes and ``x`` four signed ones. Without, ``weights`` are
    [2 * LANES] signed bytes, two a lane, and ``x`` two int16, since the older instruction for bytes saturates.
    """
    spread = broadcast(builder, x, LANES)
    if HAS_VNNI:
        kind = sums.type
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, [sums, weights, spread])
    pairs = ir.VectorType(INT16, 2 * LANES)
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(sums.type, [pairs] * 2), name)
    return builder.add(sums, builder.call(function, [builder.sext(weights, pairs), builder.bitcast(spread, pairs)]))


def sums_across(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of n vectors of n lanes (a power of two), as one vector in the same order."""
    while len(vectors) > 1:
        lanes = vectors[0].type.count
        vectors = [
            builder.fadd(*(shuffle(builder, a, b, list(range(first, 2 * lanes, 2))) for first in (0, 1)))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def prefetch(builder: Any, place: Any) -> None:
    """Bring a cache line into the second-level cache. It never faults, wherever the pointer leads."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0i8"
    )
    builder.call(function, [builder.bitcast(place, byte), *(ir.Constant(flag, value) for value in (0, 2, 1))])


class Loop:
    """A loop of emitted code over ``index`` = 0, step, … while below ``end`` (once at least), with values carried on.

    Used as ``with Loop(builder, end, step, initial) as loop: … loop.carry(new values)``; afterwards ``loop.results``.
    """

    def __init__(self, builder: Any, end: Any, step: int, initial: list[Any]) -> None:
        self._builder, self._end, self._step = builder, end, step
        self._initial = initial
        self.results: list[Any] = []

    def __enter__(self) -> Loop:
        builder = self._builder
        before = builder.block
        self._body = builder.append_basic_block("loop")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(INDEX)
        self.index.add_incoming(constant(0), before)
        self.values = [builder.phi(value.type) for value in self._initial]
        for phi, value in zip(self.values, self._initial, strict=True):
            phi.add_incoming(value, before)
        return self

    def carry(self, values: list[Any]) -> None:
        """What ``values`` are in the next round, and ``results`` after the last."""
        self.results = values

    def __exit__(self, *_: object) -> None:
        builder = self._builder
        following = builder.add(self.index, constant(self._step))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.values, self.results, strict=True):
            phi.add_incoming(value, builder.block)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self._end), self._body, after)
        builder.position_at_end(after)


def switch(builder: Any, value: Any, cases: dict[int, Any]) -> None:
    """Emit each case's code (a function without arguments), of which the one that ``value`` names runs; else none."""
    end = builder.append_basic_block("end")
    choice = builder.switch(value, end)
    for number, emit in cases.items():
        block = builder.append_basic_block(f"case{number}")
        choice.add_case(ir.Constant(value.type, number), block)
        builder.position_at_end(block)
        emit()
        builder.branch(end)
    builder.position_at_end(end)
