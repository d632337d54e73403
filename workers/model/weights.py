"""Weights from files, strictly: every tensor that is needed is there in its shape, and none is left over.

A tensor that is silently skipped, or broadcast, gives a model that runs and is wrong; so both are errors that name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import ModelLoadError

_SLAB = 1024
"""Rows that are looked at at once where a whole tensor is read for the sake of a few numbers."""


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, fp32 or as stored, on the CPU."""

    path: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every name with its shape, without reading the data."""
        ...

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        """These rows of one tensor, and of those these columns (None: all). Raises ModelLoadError for damaged data."""
        ...


class Weights:
    """Hands out each tensor once, in the dtype and on the device that the model runs in."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._shapes = dict(source.shapes())
        self._dtype = dtype
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """The tensor of this name and shape, or the part of it that is asked for: nothing else of it is read.

        Raises ModelLoadError if it is absent, or has another shape.
        """
        return self._read(name, shape, rows, columns).contiguous()

    def take_stacked(self, parts: Iterable[tuple[str, int, range]], *inner: int) -> torch.Tensor:
        """Tensors of ``(name, size, rows of it)`` one above the other, so that one product does the work of several."""
        return torch.cat([self._read(name, (size, *inner), rows, None) for name, size, rows in parts])

    def largest_of_rows(self, name: str) -> torch.Tensor:
        """The largest magnitude in each whole row of a tensor [N, K] that has not been taken yet: [N]."""
        count = self._shapes[name][0] if name in self._shapes else 0
        slabs = [range(i, min(i + _SLAB, count)) for i in range(0, count, _SLAB)]
        found = [self._source.read(name, slab, None).to(self._device, self._dtype).abs().amax(1) for slab in slabs]
        return torch.cat(found) if found else torch.zeros(0)

    def finish(self, may_be_left: Callable[[str], bool]) -> None:
        """Raise ModelLoadError if a tensor was never taken, unless the caller knows why."""
        left = sorted(name for name in self._shapes if not may_be_left(name))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelLoadError(
                f"{self._source.path}: tensor {left[0]!r}{more} has no place in this model", tensor=left[0]
            )

    def _read(self, name: str, shape: tuple[int, ...], rows: range | None, columns: range | None) -> torch.Tensor:
        found = self._shapes.pop(name, None)
        if found is None:
            raise ModelLoadError(f"{self._source.path}: tensor {name!r} is missing", tensor=name)
        if found != shape:
            raise ModelLoadError(
                f"{self._source.path}: tensor {name!r} has shape {list(found)}, and the config asks for {list(shape)}",
                tensor=name,
            )
        tensor = self._source.read(name, range(shape[0]) if rows is None else rows, columns)
        if not tensor.is_floating_point():
            raise ModelLoadError(
                f"{self._source.path}: tensor {name!r} is {tensor.dtype}; served are floating-point weights",
                tensor=name,
            )
        tensor = tensor.to(device=self._device, dtype=self._dtype)
        if not torch.isfinite(tensor).all():  # damaged, or too large for this dtype: every answer would be noise
            raise ModelLoadError(
                f"{self._source.path}: tensor {name!r} holds values that are not finite in {self._dtype}", tensor=name
            )
        return tensor


class SafetensorsSource:
    """A folder with model.safetensors, or with shards that model.safetensors.index.json lists."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files: dict[str, Any] = {}  # tensor → the open file that has it
        self._handles: dict[Path, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        listed = _index(folder)
        for file in sorted(set(listed.values())) if listed else ["model.safetensors"]:
            self._open(folder / file)
        for name, file in listed.items():
            if self._files.get(name) is not self._handles[folder / file]:
                raise ModelLoadError(f"{folder / file}: tensor {name!r}, which the index places here, is missing")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As the files' headers give them."""
        return self._shapes

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        """A view of the mapped file, or a copy."""
        try:
            file, (size, *_) = self._files[name], self._shapes[name]
            if columns is not None:
                part: torch.Tensor = file.get_slice(name)[rows.start : rows.stop, columns.start : columns.stop]
            elif rows != range(size):
                part = file.get_slice(name)[rows.start : rows.stop]
            else:
                part = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{self.path}: tensor {name!r} is damaged: {error}", tensor=name) from error
        return part

    def _open(self, file: Path) -> None:
        if not file.is_file():
            raise ModelLoadError(f"{file}: no such file; weights are read from safetensors", path=file)
        try:
            handle: Any = safe_open(file, framework="pt")
            self._handles[file] = handle
            for name in handle.keys():  # noqa: SIM118 -- not a dict: iterating it fails
                self._files[name] = handle
                self._shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: not a whole safetensors file: {error}", path=file) from error


def _index(folder: Path) -> dict[str, str]:
    """Name → file of a sharded model; empty where there is no index."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return {}
    try:
        listed = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: not an index of shards: {error}", path=path) from error
