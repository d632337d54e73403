"""Log-probabilities of given tokens and of the most likely ones, of raw logits, for many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from workers.request import Logprob, PositionLogprobs
from workers.threads import exp32, helper, parallel_kernel, precise_helper

_LEAST = float(np.finfo(np.float32).min)
"""A probability of 0, for wires that know no infinity."""


def position_logprobs(
    logits: npt.NDArray[np.float32], tokens: Sequence[int], tops: Sequence[int]
) -> tuple[PositionLogprobs, ...]:
    """Of row i of ``logits`` ([L, V], finite or -inf, one finite at least): of tokens[i], and of the tops[i] largest.

    Ranks count from 1, by logit and then by the lower id. Every log-probability is finite.
    """
    if not tokens:
        return ()
    width = min(max(tops), logits.shape[1])
    best = np.empty((len(tokens), width), np.int64)
    ranks, normalizers = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.float64)
    _measure(logits, np.array(tokens, np.int64), np.array(tops, np.int64), best, ranks, normalizers)

    def entry(row: int, token: int, rank: int) -> Logprob:
        return Logprob(token, max(float(logits[row, token]) - float(normalizers[row]), _LEAST), rank)

    return tuple(
        PositionLogprobs(
            entry(row, token, int(ranks[row])),
            tuple(entry(row, other, rank + 1) for rank, other in enumerate(best[row, :top].tolist())),
        )
        for row, (token, top) in enumerate(zip(tokens, tops, strict=True))
    )


@helper
def _sum_exp(row: Any, peak: Any) -> Any:
    """Sum of e**(logit - peak); in parts, so that no rounding of fp32 adds up."""
    total = 0.0
    for start in range(0, row.shape[0], 256):
        part = np.float32(0.0)
        for i in range(start, min(start + 256, row.shape[0])):
            part += exp32(row[i] - peak)
        total += float(part)
    return total


@precise_helper
def _rank(row: Any, token: Any) -> Any:
    rank = np.int64(1)
    value = row[token]
    for i in range(token):
        rank += np.int64(row[i] >= value)
    for i in range(token + 1, row.shape[0]):
        rank += np.int64(row[i] > value)
    return rank


@precise_helper
def _largest(row: Any, best: Any) -> None:
    """Ids of the largest into ``best`` ([N]), largest first, by insertion: few of the vocabulary ever get in."""
    count = 0
    for token in range(row.shape[0]):
        if count == best.shape[0] and (count == 0 or not row[token] > row[best[count - 1]]):
            continue
        count = min(count + 1, best.shape[0])
        at = count - 1
        while at > 0 and row[token] > row[best[at - 1]]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = token


@parallel_kernel
def _measure(logits: Any, tokens: Any, tops: Any, best: Any, ranks: Any, normalizers: Any) -> None:
    for i in numba.prange(logits.shape[0]):
        row = logits[i]
        peak = np.float32(np.max(row))
        normalizers[i] = float(peak) + np.log(_sum_exp(row, peak))
        ranks[i] = _rank(row, tokens[i])
        _largest(row, best[i, : min(tops[i], best.shape[1])])
