"""Kernels by their addresses: compiled code calls them without becoming one piece of code with them.

numba links a function's code into each of its callers and optimizes the whole again: a loop over layers that calls all
kernels would compile every one of them twice, for half a minute at a machine's first start.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

Call = Callable[[Any, Any], None]
"""For compiled code: ``call(code, (arguments ...))``, where ``code`` is what ``Kernels.addresses`` returned."""

FAILED = 0
"""The place in ``code`` that is not 0 once a kernel has raised something (it had no memory): who called compiled code
looks there, since nobody there does."""


class Kernels:
    """The kernels that some compiled code calls."""

    def __init__(self) -> None:
        self._kernels: list[tuple[Any, tuple[types.Type, ...], Call]] = []

    def add(self, kernel: Any, *arguments: types.Type) -> Call:
        """One for arguments of these types, which returns nothing."""
        call = _caller(FAILED + 1 + len(self._kernels), arguments)
        self._kernels.append((kernel, arguments, call))
        return call

    def addresses(self, without: Container[Call] = frozenset()) -> npt.NDArray[np.int64]:
        """Compiles the kernels, or reads them from the cache, but for those that are not called."""
        found = [0 if call in without else _address(kernel, types_) for kernel, types_, call in self._kernels]
        return np.array([0, *found], np.int64)


def pointer_to(kind: types.Type) -> Callable[[Any], Any]:
    """For compiled code: an address as a pointer to numbers of this kind, of which ``numba.carray`` makes an array."""

    @intrinsic  # type: ignore[untyped-decorator]
    def at(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.misc.CPointer(kind)(types.int64), generate

    found: Callable[[Any], Any] = at
    return found


def _address(kernel: Any, arguments: tuple[types.Type, ...]) -> int:
    """Of a compiled kernel; it lives as long as the process."""
    kernel.compile(arguments)
    compiled = kernel.overloads[arguments]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def _caller(index: int, expected: tuple[types.Type, ...]) -> Call:
    @intrinsic  # type: ignore[untyped-decorator]
    def call(_typing: Any, code: Any, values: Any) -> Any:
        if len(values) != len(expected):
            raise TypeError(f"{len(values)} arguments for a kernel that takes {len(expected)}")

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code, packed = arguments
            addresses = context.make_array(signature.args[0])(context, builder, code).data
            address = builder.load(builder.gep(addresses, [ir.Constant(ir.IntType(64), index)]))
            given = zip(cgutils.unpack_tuple(builder, packed, len(expected)), signature.args[1], expected, strict=True)
            values = [context.cast(builder, value, kind, wanted) for value, kind, wanted in given]
            status = _call(context, builder, address, expected, values)
            with builder.if_then(builder.icmp_signed("!=", status, status.type(0)), likely=False):
                builder.store(ir.IntType(64)(1), builder.gep(addresses, [ir.IntType(64)(FAILED)]))
            return context.get_dummy_value()

        return types.void(code, values), generate

    found: Call = call
    return found


def _call(context: Any, builder: Any, address: Any, kinds: tuple[types.Type, ...], values: list[Any]) -> Any:
    """By numba's convention: where the result goes, where an exception goes, the arguments. Returns the status."""
    convention = context.call_conv
    function = convention.get_function_type(types.none, kinds)
    places = [cgutils.alloca_once(builder, argument.pointee) for argument in function.args[:2]]
    passed = convention._get_arg_packer(kinds).as_arguments(builder, values)
    return builder.call(builder.inttoptr(address, ir.PointerType(function)), [*places, *passed])
