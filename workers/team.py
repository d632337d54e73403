"""Threads that go through a step together: each does its share of an operation, and they meet behind it.

A fork and a join of OpenMP around every operation costs 10 microseconds, and a step has 300 operations: a quarter of
the time of a small one. Here the threads are forked once a step, and meet at a barrier of two atomic numbers, where who
comes early spins and then gives its core away.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.threads import kernel, parallel_kernel

TEAM_WORDS = 48
_ARRIVED, _ROUND, _BROKEN = 0, 16, 32  # each in a cache line of its own
_SPINS = 4_000
_LONGEST_WAIT = 60_000_000
"""Turns of waiting, of which those behind _SPINS give the core away: ten seconds and more, on a busy machine many more.
Nobody may wait for ever."""

_YIELDS = 2_000
_NAP_US = 50
_LONGEST_ACROSS = 12_000_000
"""Turns of waiting for another process, nearly all of them naps: ten minutes and more, since that one may be compiling.
Who watches over the ranks knows much sooner, and calls ``break_up``."""


def make_team() -> npt.NDArray[np.int64]:
    """What ``meet`` counts in."""
    return np.zeros(TEAM_WORDS, np.int64)


def break_up(team: npt.NDArray[np.int64]) -> None:
    """Let nobody wait there any more, now or later."""
    team[_BROKEN] = 1


def is_broken(team: npt.NDArray[np.int64]) -> bool:
    """Whether somebody waited in vain: then nobody waits any more, and what was computed means nothing."""
    return bool(team[_BROKEN])


def can_meet(threads: int) -> bool:
    """Try it: OpenMP may give fewer threads than it was asked for (OMP_THREAD_LIMIT), which then come one by one."""
    for _ in range(3):  # threads that are only now being made may come late
        team = make_team()
        _try(team, threads)
        if not is_broken(team):
            return True
    return False


@parallel_kernel
def _try(team: Any, threads: Any) -> None:
    for _ in numba.prange(threads):
        _wait(team, threads, 1_000_000, 1_000_000)


@kernel
def meet(team: Any, threads: Any) -> None:
    """Wait until all ``threads`` are here. What each wrote before, all read behind it."""
    _wait(team, threads, _LONGEST_WAIT, _LONGEST_WAIT)


@kernel
def meet_across(team: Any, threads: Any) -> None:
    """As ``meet``, in memory that processes share. They may be many on few cores: who has waited long sleeps."""
    _wait(team, threads, _LONGEST_ACROSS, _SPINS + _YIELDS)


@kernel
def _wait(team: Any, threads: Any, longest: Any, awake: Any) -> None:
    """``awake``: turns behind which each one is a nap."""
    if threads == 1 or _read(team, _BROKEN) != 0:
        return
    now = _read(team, _ROUND)
    if _add(team, _ARRIVED, 1) == threads - 1:
        _write(team, _ARRIVED, 0)
        _write(team, _ROUND, now + 1)
        return
    turns = 0
    while _read(team, _ROUND) == now:
        turns += 1
        if turns < _SPINS:
            _pause()
        elif turns < awake:
            _give_way()
        else:
            _nap()
        if turns > longest or _read(team, _BROKEN) != 0:
            _write(team, _BROKEN, 1)
            return


@kernel
def share(count: Any, me: Any, threads: Any) -> Any:
    """The part [start, stop) of ``count`` things that is ours."""
    return count * me // threads, count * (me + 1) // threads


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic  # type: ignore[untyped-decorator]
def _read(_typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature.args[0], *arguments), "acquire", 8)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _write(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], place, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Returns what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", place, arguments[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_typing: Any) -> Any:
    """Say that we spin."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if "x86" in llvmlite.binding.get_default_triple():
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _give_way(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _nap(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "usleep"), [ir.IntType(32)(_NAP_US)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def clock(_typing: Any) -> Any:
    """A counter that runs evenly; of what, only the machine knows."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate
