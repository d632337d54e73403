"""A RankPlan as bytes: a header of counts, then its arrays, all little-endian 32-bit integers."""

from __future__ import annotations

import struct

import numpy as np

from cluster.errors import ProtocolError
from workers.plan import Int32, RankPlan

PLAN_VERSION = 1

_HEADER = struct.Struct("<HqIIIIII")  # version, step, then T, R, B, C, S, N
_INT32 = np.dtype("<i4")


def encode(plan: RankPlan) -> bytes:
    """About 4 bytes a token and 12 a row, and 4 for each page of each row."""
    counts = (len(plan.token_ids), plan.num_rows, len(plan.blocks), len(plan.copies), len(plan.draw_rows),
              len(plan.scored))  # fmt: skip
    arrays = (plan.token_ids, plan.row_starts, plan.num_computed, plan.block_starts, plan.blocks, plan.copies,
              plan.draw_rows, plan.scored)  # fmt: skip
    parts = [array.astype(_INT32, copy=False).tobytes() for array in arrays]
    return b"".join((_HEADER.pack(PLAN_VERSION, plan.step, *counts), *parts))


def decode(data: bytes) -> RankPlan:
    """Raises ProtocolError for another version, and where counts and length do not agree."""
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a plan of {len(data)} bytes has no header")
    version, step, tokens, rows, blocks, copies, draws, scores = _HEADER.unpack_from(data)
    if version != PLAN_VERSION:
        raise ProtocolError(f"a plan of version {version}; this rank knows version {PLAN_VERSION}")
    sizes = (tokens, rows + 1, rows, rows + 1, blocks, 2 * copies, draws, 3 * scores)
    if len(data) != _HEADER.size + 4 * sum(sizes):
        raise ProtocolError(f"a plan of {len(data)} bytes that speaks of {_HEADER.size + 4 * sum(sizes)}")
    numbers = np.frombuffer(data, _INT32, offset=_HEADER.size).astype(np.int32)
    arrays: list[Int32] = np.split(numbers, np.cumsum(sizes)[:-1])
    return RankPlan(
        step=step,
        token_ids=arrays[0],
        row_starts=arrays[1],
        num_computed=arrays[2],
        block_starts=arrays[3],
        blocks=arrays[4],
        copies=arrays[5].reshape(-1, 2),
        draw_rows=arrays[6],
        scored=arrays[7].reshape(-1, 3),
    )
