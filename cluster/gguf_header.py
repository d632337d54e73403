"""What a GGUF file says of itself: metadata, and where its tensors lie (versions 2 and 3 of ggml's docs/gguf.md).

The gguf package's own reader makes several arrays of every word of the vocabulary, seconds of each start, and that of
transformers imports torch, which a router must not. This one holds every tensor's place against the file's size.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from cluster.errors import ModelLoadError

_MAGIC = 0x46554747
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_FORMATS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.BOOL: "?", GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
_SIZES = {kind: struct.calcsize(f"<{form}") for kind, form in _FORMATS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor as it is stored."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]  # mapped; rows of bytes, [..., bytes of a row]


def read_tensors(path: Path) -> list[Tensor]:
    """Every tensor of the file. Raises ModelLoadError if the file is damaged or cut short."""
    with _refusing(path):
        return list(_Header(np.memmap(path, mode="r")).tensors())


def read_metadata(path: Path) -> dict[str, Any]:
    """Every value before the tensors, arrays as lists. Raises ModelLoadError as ``read_tensors``."""
    with _refusing(path):
        return _Header(np.memmap(path, mode="r")).metadata()


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise ModelLoadError(f"{path}: not a whole GGUF file: {error}", path=path) from error


class _Header:
    """A cursor over the file. Whatever does not fit raises ValueError or struct.error."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content = content
        self._bytes = content.data
        self._at = 0
        magic, version, self._tensor_count, self._value_count = self._take("<IIQQ")
        if magic != _MAGIC:
            raise ValueError("it does not begin with GGUF's mark")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; served are {_VERSIONS}")

    def metadata(self) -> dict[str, Any]:
        """In the file's order. Call it once, or ``tensors``."""
        found: dict[str, Any] = {}
        for _ in range(self._value_count):
            key = self._string()
            found[key] = self._value(GGUFValueType(self._take("<I")[0]))
        return found

    def tensors(self) -> Iterator[Tensor]:
        """In the file's order, after the metadata."""
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(self._value_count):
            key, kind = self._string(), GGUFValueType(self._take("<I")[0])
            if key == "general.alignment":
                alignment = struct.unpack_from("<I", self._bytes, self._at)[0]
            self._skip(kind)
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        infos = [self._tensor_info() for _ in range(self._tensor_count)]
        if len({name for name, *_ in infos}) < len(infos):
            raise ValueError("two tensors have one name")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            yield Tensor(name, shape, kind, self._data(name, shape, kind, start + offset))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        (dimensions,) = self._take("<I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        return name, shape[::-1], GGMLQuantizationType(kind), offset

    def _data(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> npt.NDArray[np.uint8]:
        block, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"tensor {name!r} of type {kind.name} has rows of {shape[-1]}, no multiple of {block}")
        rows = (*shape[:-1], shape[-1] // block * size)
        end = start + prod(rows)
        if end > len(self._content):
            raise ValueError(f"tensor {name!r} ends at byte {end:,}, and the file has {len(self._content):,}")
        return self._content[start:end].reshape(rows)

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        found = bytes(self._bytes[self._at : self._at + length])
        if len(found) != length:
            raise ValueError("a string goes beyond its end")
        self._at += length
        return found.decode()

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._take(f"<{_FORMATS[kind]}")[0]
        inner, count = self._array()
        if inner == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        return list(self._take(f"<{count}{_FORMATS[inner]}"))

    def _skip(self, kind: GGUFValueType) -> None:
        if kind == GGUFValueType.STRING:
            self._skip_string()
        elif kind == GGUFValueType.ARRAY:
            inner, count = self._array()
            if inner == GGUFValueType.STRING:
                for _ in range(count):
                    self._skip_string()
            else:
                self._at += count * _SIZES[inner]
        else:
            self._at += _SIZES[kind]

    def _array(self) -> tuple[GGUFValueType, int]:
        inner, count = self._take("<IQ")
        if inner == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        if count > len(self._content) - self._at:
            raise ValueError(f"an array of {count:,} values goes beyond its end")
        return GGUFValueType(inner), count

    def _skip_string(self) -> None:
        (length,) = self._take("<Q")
        self._at += length
