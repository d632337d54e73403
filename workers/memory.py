"""Large memory on CPUs in huge pages: weights and KV pages are read from end to end in every step.

With pages of 4 KiB the caches for addresses hold a thousandth of a model, and the hardware's prefetching ends at each
page: reads are slower by a tenth and more, and the first write to each page costs a call into the kernel.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import torch

_HUGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 64  # a cache line: no vector lies across two

_lock = threading.Lock()
_left = np.zeros(0, np.uint8)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """On the CPU. Memory is taken from the system only as it is written to. Raises MemoryError."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(_take(size)).view(dtype).view(shape) if size else torch.zeros(shape, dtype=dtype)


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a CPU tensor."""
    return zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _take(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros. Small ones share a mapping, which is given back when the last of them is gone."""
    global _left
    rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if len(_left) < rounded:
            if rounded > _CHUNK // 2:
                return _map(rounded)[:size]
            _left = _map(_CHUNK)
        found, _left = _left[:size], _left[rounded:]
        return found


def _map(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros from the system, from the beginning of a huge page on."""
    try:
        region = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size:,} bytes") from error
    with contextlib.suppress(OSError, AttributeError):  # a system without them, or not Linux
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + size]
