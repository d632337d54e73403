"""The ranks of a group on one host, in CPU memory that they share.

A sum is one exchange: every rank writes its part into a slot of its own, all meet, and every rank adds the slots up in
the order of ranks, so that all get the same bits. Slots lie twice, and are used in turn: who writes into one again has
met the others since they read it. (Gloo needs 1.3 ms for what takes 3 µs here, and a step has two sums a layer.)

The memory has no name in the file system. Ranks open it through the leader's process, and with the last of them it is
gone, however they end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workers.collective import RanksParted
from workers.team import TEAM_WORDS, break_up, is_broken, meet_across
from workers.threads import kernel

_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the memory must hold."""

    ranks: int
    tokens: int
    """Of a step at most."""
    hidden: int
    width: int
    """The largest part of the vocabulary."""
    rows: int = 64
    """Logits that are gathered at once."""

    @property
    def slot_bytes(self) -> int:
        """Of one rank's part of a sum."""
        return _whole_pages(4 * self.tokens * self.hidden)

    @property
    def logits_bytes(self) -> int:
        """Of one rank's logits."""
        return _whole_pages(4 * self.rows * self.width)

    @property
    def size(self) -> int:
        """Of all: two places to meet, then slots, then logits."""
        return _PAGE + 2 * self.ranks * (self.slot_bytes + self.logits_bytes)


class Region:
    """The memory, made by the leader. Keep it until all ranks have opened it."""

    def __init__(self, shape: Shape) -> None:
        """Raises OSError where the system has no such memory."""
        self.shape = shape
        self._file: int | None = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
        os.ftruncate(self._file, shape.size)

    @property
    def path(self) -> str:
        """For the other ranks, who must be of the same user on the same host, in the same container."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Nobody can open it any more; who has goes on. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class SharedMemory:
    """See Collective. In fp32; other dtypes are converted on the way."""

    shares_memory = True

    def __init__(self, path: str, shape: Shape, rank: int) -> None:
        """Raises OSError where it cannot be opened."""
        self.rank = rank
        self.ranks = shape.ranks
        self.threads = 0
        """Of all ranks together, once the leader has told: those of compiled steps, who meet at ``team``."""
        self.shape = shape
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(file, shape.size)
        finally:
            os.close(file)
        whole = np.frombuffer(self._memory, np.uint8)
        self.address = whole.ctypes.data
        self.team = whole[: 8 * TEAM_WORDS].view(np.int64)
        self._callers = whole[_PAGE // 2 : _PAGE // 2 + 8 * TEAM_WORDS].view(np.int64)
        slots, logits = shape.slot_bytes, shape.logits_bytes
        self._slots = whole[_PAGE : _PAGE + 2 * self.ranks * slots].reshape(2, self.ranks, slots)
        self._logits = whole[_PAGE + 2 * self.ranks * slots :].reshape(2, self.ranks, logits)
        self._sums = 0
        self._gatherings = 0

    @property
    def slots_address(self) -> int:
        """For kernels: slot ``turn % 2 * ranks + rank`` lies that many times ``shape.slot_bytes`` behind it."""
        return self.address + _PAGE

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Collective."""
        slots = self._slots[self._sums % 2]
        self._sums += 1
        _numbers(slots[self.rank], x.shape).copy_(x)
        self._meet()
        total = _numbers(slots[0], x.shape).clone()
        for other in range(1, self.ranks):
            total += _numbers(slots[other], x.shape)
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """See Collective."""
        rows = self.shape.rows
        whole = torch.empty(len(x), sum(widths)) if self.rank == 0 else None
        for start in range(0, len(x), rows):
            self._gather(x[start : start + rows], widths, None if whole is None else whole[start : start + rows])
        return whole

    def _gather(self, x: torch.Tensor, widths: Sequence[int], whole: torch.Tensor | None) -> None:
        places = self._logits[self._gatherings % 2]
        self._gatherings += 1
        if whole is None:
            _numbers(places[self.rank], x.shape).copy_(x)
        self._meet()
        if whole is not None:
            parts = [x, *(_numbers(places[r], (len(x), widths[r])) for r in range(1, self.ranks))]
            torch.cat(parts, dim=1, out=whole)

    def _meet(self) -> None:
        _meet_alone(self._callers, self.ranks)
        self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raises RanksParted once somebody has waited in vain, or ``abort`` was called."""
        if is_broken(self.team) or is_broken(self._callers):
            raise RanksParted("a rank of the group did not come to where the others waited for it")

    def abort(self) -> None:
        """See Collective."""
        break_up(self.team)
        break_up(self._callers)

    def close(self) -> None:
        """Who is still in a call must not be: the memory itself goes with the last array on it."""
        self.abort()


def _numbers(place: np.ndarray[Any, np.dtype[np.uint8]], shape: Sequence[int]) -> torch.Tensor:
    count = int(np.prod(tuple(shape)))
    return torch.from_numpy(place[: 4 * count].view(np.float32)).view(tuple(shape))


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


@kernel
def _meet_alone(team: Any, ranks: Any) -> None:
    meet_across(team, ranks)
