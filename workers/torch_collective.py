"""The ranks of a group over torch.distributed: NCCL between cards, gloo between CPUs that share no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from workers.collective import RanksParted

BackendName = Literal["gloo", "nccl"]


def open_store(host: str, ranks: int, timeout_s: float, port: int = 0) -> Any:
    """Where ranks find each other: the leader opens it at a free port, the others at the leader's."""
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(
        host, port, world_size=ranks, is_master=port == 0, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


class TorchCollective:
    """See Collective. One group of ranks per process."""

    shares_memory = False

    def __init__(self, backend: BackendName, store: Any, rank: int, ranks: int, timeout_s: float) -> None:
        """Waits for all ranks. Raises RanksParted where they do not come."""
        self.rank = rank
        self.ranks = ranks
        self._backend = backend
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise RanksParted(f"{backend}: rank {rank} of {ranks} did not find the others: {error}") from error

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Collective."""
        try:
            if self._backend == "nccl":
                dist.all_reduce(x)
                return x
            # Gloo's own sum adds in an order that depends on where a number lies: a row would change with its
            # neighbours.
            parts = [torch.empty_like(x) for _ in range(self.ranks)]
            dist.all_gather(parts, x.contiguous())
        except RuntimeError as error:
            raise RanksParted(f"{self._backend}: {error}") from error
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """See Collective. What is sent is padded to the widest part; what arrives is cut again."""
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        try:
            dist.gather(padded, parts)
        except RuntimeError as error:
            raise RanksParted(f"{self._backend}: {error}") from error
        if parts is None:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def abort(self) -> None:
        """Nothing here reaches who waits inside a call: the process must end, or its timeout come."""

    def close(self) -> None:
        """See Collective."""
        with contextlib.suppress(RuntimeError, ValueError):
            if dist.is_initialized():
                dist.destroy_process_group()
