"""Where the tensors lie in a GGUF file (versions 2 and 3 of ggml's docs/gguf.md).

The gguf package's own reader makes an object of every word of the vocabulary, seconds of each start; this one steps
over the metadata, and holds every tensor's place against the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from cluster.errors import ModelLoadError

_MAGIC = 0x46554747
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SIZES = {
    GGUFValueType.UINT8: 1, GGUFValueType.INT8: 1, GGUFValueType.BOOL: 1, GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2, GGUFValueType.UINT32: 4, GGUFValueType.INT32: 4, GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8, GGUFValueType.INT64: 8, GGUFValueType.FLOAT64: 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor as it is stored."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]  # mapped; rows of bytes, [..., bytes of a row]


def read_tensors(path: Path) -> list[Tensor]:
    """Every tensor of the file. Raises ModelLoadError if the file is damaged or cut short."""
    try:
        content = np.memmap(path, mode="r")
        return list(_Header(content).tensors())
    except (OSError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise ModelLoadError(f"{path}: not a whole GGUF file: {error}", path=path) from error


class _Header:
    """A cursor over the file. Whatever does not fit raises ValueError or struct.error."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content = content
        self._bytes = content.data
        self._at = 0

    def tensors(self) -> Iterator[Tensor]:
        """In the file's order, after the metadata."""
        magic, version, tensor_count, value_count = self._take("<IIQQ")
        if magic != _MAGIC:
            raise ValueError("it does not begin with GGUF's mark")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; served are {_VERSIONS}")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(value_count):
            key, kind = self._string(), GGUFValueType(self._take("<I")[0])
            if key == "general.alignment":
                alignment = struct.unpack_from("<I", self._bytes, self._at)[0]
            self._skip(kind)
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        infos = [self._tensor_info() for _ in range(tensor_count)]
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

    def _take(self, form: str) -> tuple[int, ...]:
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

    def _skip(self, kind: GGUFValueType) -> None:
        if kind == GGUFValueType.STRING:
            (length,) = self._take("<Q")
            self._at += length
        elif kind == GGUFValueType.ARRAY:
            inner, count = self._take("<IQ")
            self._skip_array(GGUFValueType(inner), count)
        else:
            self._at += _SIZES[kind]

    def _skip_array(self, kind: GGUFValueType, count: int) -> None:
        if kind in _SIZES:
            self._at += count * _SIZES[kind]
            return
        for _ in range(count):
            self._skip(kind)
