"""What a step is to the model, where its keys and values live, and what an attention backend does with both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import OutOfMemory, ProtocolError
from workers import memory
from workers.plan import Int32, RankPlan

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A RankPlan with every position and slot spelled out. Tensors are int64 on the model's device.

    The model's rows are the T tokens of the plan, one after the other; sequences matter to attention alone, which finds
    them in ``plan``.
    """

    plan: RankPlan
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    pages: torch.Tensor  # [T] where each token's keys and values are written
    slots: torch.Tensor  # [T] and in which slot of the page
    needed: torch.Tensor  # [R] the tokens whose hidden states somebody looks at, ascending
    last_tokens: torch.Tensor  # [S] of those, the one whose logits each draw needs
    max_position: int
    single_rows: Int64  # rows of one token
    chunk_rows: Int64  # rows of several

    def length(self, row: int) -> int:
        """Tokens of a row whose keys are in pages when it attends: those of before, and the step's own."""
        plan = self.plan
        return int(plan.num_computed[row] + plan.row_starts[row + 1] - plan.row_starts[row])

    def hidden_of_scores(self) -> list[slice]:
        """Where the hidden states of each score's tokens are among the needed ones."""
        row_starts = self.plan.row_starts
        starts = [int(torch.searchsorted(self.needed, int(row_starts[row]) + first)) for row, first, _ in self._spans()]
        return [slice(start, start + count) for start, (_, _, count) in zip(starts, self._spans(), strict=True)]

    def _spans(self) -> list[list[int]]:
        spans: list[list[int]] = self.plan.scored.tolist()
        return spans

    def used_pages(self, row: int, block_tokens: int, window: int | None = None) -> tuple[torch.Tensor, int]:
        """The pages that hold what the row sees, in order, as an int64 tensor on the model's device; and the position
        that the first of them begins with."""
        seen = 0 if window is None else max(0, int(self.plan.num_computed[row]) + 1 - window)
        skipped = seen // block_tokens
        first = self.plan.block_starts[row]
        used = self.plan.blocks[first + skipped : first + -(-self.length(row) // block_tokens)]
        return torch.from_numpy(used.astype(np.int64)).to(self.token_ids.device), skipped * block_tokens


def spell_out(plan: RankPlan, block_tokens: int, device: torch.device) -> Batch:
    """Make a Batch.

    Raises ProtocolError if a row feeds a position that its pages do not hold: it would be written into a neighbour's.
    """
    plan = _owned(plan)
    lengths = np.diff(plan.row_starts)
    rows = np.repeat(np.arange(plan.num_rows), lengths)
    positions = plan.num_computed[rows] + np.arange(plan.num_tokens, dtype=np.int64) - plan.row_starts[rows]
    entries = plan.block_starts[rows] + positions // block_tokens
    if np.any(entries >= plan.block_starts[rows + 1]):
        row = int(rows[np.argmax(entries >= plan.block_starts[rows + 1])])
        raise ProtocolError(f"plan of step {plan.step}: row {row} has fewer pages than its positions need", row=row)
    last = plan.row_starts[plan.draw_rows + 1] - 1
    needed = np.zeros(plan.num_tokens, np.bool_)
    needed[last] = True
    for row, first, count in plan.scored.tolist():
        start = plan.row_starts[row] + first
        needed[start : start + count] = True

    def tensor(values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return Batch(
        plan=plan,
        token_ids=tensor(plan.token_ids),
        positions=tensor(positions),
        pages=tensor(plan.blocks[entries]),
        slots=tensor(positions % block_tokens),
        needed=tensor(np.flatnonzero(needed)),
        last_tokens=tensor((np.cumsum(needed) - 1)[last]),
        max_position=int(positions.max(initial=0)),
        single_rows=np.flatnonzero(lengths == 1),
        chunk_rows=np.flatnonzero(lengths > 1),
    )


def _owned(plan: RankPlan) -> RankPlan:
    """Kernels are compiled for contiguous, writable arrays; for others they would be compiled again, in mid-service."""
    return replace(
        plan,
        row_starts=np.array(plan.row_starts, np.int32),
        num_computed=np.array(plan.num_computed, np.int32),
        block_starts=np.array(plan.block_starts, np.int32),
        blocks=np.array(plan.blocks, np.int32),
    )


class KVPages:
    """The keys and values of every layer: ``[num_blocks, kv_heads, block_tokens, head_dim]`` each, allocated once, and
    together: ``whole`` is ``[layers, 2, num_blocks, kv_heads, block_tokens, head_dim]``.

    Head-major inside a page, so that one head's slots are one run of memory, for a kernel as for a rank's share.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Raises OutOfMemory. Pages start as zeros: a slot that was never written must not hold a NaN."""
        try:
            self.whole = _zeros((layers, 2, *shape), dtype, device)
        except (MemoryError, RuntimeError) as error:  # torch.cuda.OutOfMemoryError is a RuntimeError
            size = 2 * layers * int(np.prod(shape)) * dtype.itemsize
            raise OutOfMemory(
                f"no memory for KV pages of {size:,} bytes on {device}; set engine.kv_memory_bytes to less",
                bytes=size,
            ) from error
        self.keys = [self.whole[layer, 0] for layer in range(layers)]
        self.values = [self.whole[layer, 1] for layer in range(layers)]

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self.keys[0].shape[0]

    @property
    def block_tokens(self) -> int:
        """Slots of a page."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Of all pages of all layers."""
        return self.whole.nbytes

    def copy(self, copies: Int32) -> None:
        """Copy whole pages, ``[C, 2]`` of (from, to), as if all were read before any is written."""
        if not len(copies):
            return
        pairs = torch.from_numpy(copies.astype(np.int64)).to(self.keys[0].device)
        for pages in (*self.keys, *self.values):
            pages[pairs[:, 1]] = pages[pairs[:, 0]]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return memory.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


class Attention(Protocol):
    """Softmax attention of each token over the positions of its row up to its own."""

    name: str

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, window: int | None
    ) -> torch.Tensor:
        """``q``: [T, heads, head_dim]; ``keys``, ``values``: one layer's pages, the step's own already written.

        ``window``: how many positions a token sees, its own among them; None: all up to its own. Returns
        [T, heads * head_dim]. Query head h reads KV head ``h // (heads // kv_heads)``; scores are scaled by
        ``head_dim ** -0.5``.
        """
        ...
