"""The draw: argmax(logit/T + Gumbel noise) over what top-k, top-p and min-p keep, for many rows at once.

The noise of a token is a hash of (seed, sample index, position, token id) and of nothing else, so a row draws the same
token alone and in any batch, before and after preemption, on any rank. Gumbel-max: Maddison et al., "A* Sampling"
(NeurIPS 2014), section 2; the hash is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014), applied in a chain.

Every order is by logit, equal logits by the lower token id. top-k and top-p keep a prefix of that order, which is found
without sorting: see ``_border``. Arithmetic is in float64, on one thread per row.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from workers.plan import MASK_EMPTY, NOT_FINITE
from workers.threads import parallel_kernel, precise_helper

_EMPTY = MASK_EMPTY
_BROKEN = NOT_FINITE
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LOG2E_ROUNDED_DOWN = 1.4426
_HOPELESS = -42.0  # noise lies between -3.7 and 36.8: a token this far below the first is never drawn
_WEIGHTLESS = -60.0  # e**-60 of a whole vocabulary is less than the rounding of a sum that is at least 1
_SPAN = 8.0  # natural log units below the first token in which the border is looked for first
_DIGIT = 11  # bits of an order number that are looked at at once
_BLOCK = 256  # logits that are compared at once


def stream_key(seed: int, sample_index: int, position: int) -> int:
    """The 64 bits that stand for everything in the noise but the token id."""
    key = _mix_int(seed + _GOLDEN)
    key = _mix_int(key ^ (sample_index + 2 * _GOLDEN))
    return _mix_int(key ^ (position + 3 * _GOLDEN))


def gumbel(key: int, token_id: int) -> float:
    """The noise of one token; what the kernels compute."""
    v = ((_MASK >> 12) - (_mix_int(key + (token_id + 1) * _GOLDEN) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log1p(-v))


def _mix_int(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@precise_helper
def _word(key: Any, token_id: Any) -> Any:
    """52 hashed bits w; the uniform number is u = 1 - (w + 0.5) / 2**52, in which nothing rounds to 0 or 1."""
    z = key + np.uint64(token_id + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.uint64(0xFFFFFFFFFFFFF) - (z >> np.uint64(12))


@precise_helper
def _noise(word: Any) -> Any:
    """Gumbel noise, -log(-log u)."""
    return -math.log(-math.log1p(-(float(word) + 0.5) * 2.0**-52))


@precise_helper
def _peak(row: Any) -> Any:
    """The token with the largest logit; _EMPTY when all are -inf, _BROKEN when one is NaN or +inf."""
    best = np.float32(-np.inf)
    at: Any = np.int64(_EMPTY)
    for start in range(0, row.shape[0], _BLOCK):
        block = row[start : start + _BLOCK]  # indexed from 0: only then does the count become vector instructions
        # The search for the place is a block's that seldom holds a new best.
        notable = np.int32(0)
        for i in range(block.shape[0]):
            notable += np.int32(not block[i] <= best)
        if notable:
            for i in range(block.shape[0]):
                if not block[i] < np.inf:
                    return np.int64(_BROKEN)
                if block[i] > best:
                    best = block[i]
                    at = start + i
    return at


@precise_helper
def _order(logit: Any) -> Any:
    """A whole number below 2**32 that orders finite fp32 logits as they order themselves."""
    bits = np.int64(np.float32(logit).view(np.int32))  # a sign and a magnitude: -0.0 is 0.0
    return np.int64(0x80000000) + (bits if bits >= 0 else -(bits & np.int64(0x7FFFFFFF)))


@precise_helper
def _border(row: Any, weights: Any, target: Any) -> Any:
    """The smallest prefix of the order whose weights reach ``target``, as (number, ties).

    It holds every token whose order number is larger, and of those that have this number the first ``ties``. A radix
    selection: the number is found digit by digit, from sums of weights by digit. All, if the target is out of reach.
    """
    border = np.int64(0)
    reached = 0.0
    for shift in (22, 11, 0):
        sums = np.zeros(1 << _DIGIT)
        for token_id in range(row.shape[0]):
            if weights[token_id] > 0.0:
                number = _order(row[token_id])
                if number >> (shift + _DIGIT) == border:
                    sums[(number >> shift) & ((1 << _DIGIT) - 1)] += weights[token_id]
        digit = (1 << _DIGIT) - 1
        while digit > 0 and reached + sums[digit] < target:
            reached += sums[digit]
            digit -= 1
        border = (border << _DIGIT) | digit
    ties = 0
    for token_id in range(row.shape[0]):
        if reached < target and weights[token_id] > 0.0 and _order(row[token_id]) == border:
            reached += weights[token_id]
            ties += 1
    return border, ties


@precise_helper
def _inside(logit: Any, seen: Any, border: Any, ties: Any) -> Any:
    """Whether a prefix holds it, and whether (0 or 1) it stands on the border, where ``seen`` stood before it."""
    if border < 0:
        return True, 0
    number = _order(logit)
    return number > border or (number == border and seen < ties), int(number == border)


@precise_helper
def _weigh(row: Any, top: Any, temperature: Any, border: Any, ties: Any, weights: Any) -> Any:
    """Probabilities (not normalized) of a prefix into ``weights``, 0 outside; returns their sum."""
    total = 0.0
    seen = 0
    for token_id in range(row.shape[0]):
        weights[token_id] = 0.0
        x = (float(row[token_id]) - top) / temperature
        if x < _WEIGHTLESS:
            continue
        inside, tie = _inside(row[token_id], seen, border, ties)
        seen += tie
        if inside:
            weights[token_id] = math.exp(x)
            total += weights[token_id]
    return total


@precise_helper
def _limits(row: Any, top: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """The prefix that top-k and then top-p leave, as (number, ties)."""
    border, ties = np.int64(-1), 0
    weights = np.empty(row.shape[0])
    if 0 < top_k < row.shape[0]:
        for token_id in range(row.shape[0]):
            weights[token_id] = 1.0 if row[token_id] > -np.inf else 0.0
        border, ties = _border_above(row, weights, float(top_k), top - _SPAN)
    if top_p < 1.0:
        target = top_p * _weigh(row, top, temperature, border, ties, weights)
        number, count = _border_above(row, weights, target, top - _SPAN * temperature)
        # Rounding may put top_p of the sum out of reach; the prefix must not grow by that.
        if number > border or (number == border and count < ties):
            return number, count
    return border, ties


@precise_helper
def _border_above(row: Any, weights: Any, target: Any, cut: Any) -> Any:
    """``_border``, which looks only at the logits above ``cut`` if they suffice: a few hundred of a vocabulary."""
    count: Any = 0
    reached = 0.0
    for token_id in range(row.shape[0]):
        if row[token_id] >= cut:
            count += 1
            reached += weights[token_id]
    if reached < target:
        return _border(row, weights, target)
    logits, heavy = np.empty(count, np.float32), np.empty(count)
    at = 0
    for token_id in range(row.shape[0]):
        if row[token_id] >= cut:
            logits[at] = row[token_id]
            heavy[at] = weights[token_id]
            at += 1
    return _border(logits, heavy, target)


@precise_helper
def _draw_within(row: Any, peak: Any, temperature: Any, min_p: Any, key: Any, border: Any, ties: Any) -> Any:
    """In a prefix, among tokens at least ``min_p`` times as likely as the first.

    A token's noise is computed only where it could win: -log(1-u) bounds it from above.
    """
    top = float(row[peak])
    floor = max(math.log(min_p), _HOPELESS) if min_p > 0.0 else _HOPELESS
    slack = 1e-6 * (1.0 + abs(top) - floor * temperature)
    cut = np.float32(top + floor * temperature - slack)  # spares most tokens the division
    best = _noise(_word(key, peak))
    at = peak
    seen = 0
    for token_id in range(row.shape[0]):
        if row[token_id] < cut or row[token_id] == -np.inf:
            continue
        x = (float(row[token_id]) - top) / temperature
        inside, tie = _inside(row[token_id], seen, border, ties)
        seen += tie
        if not inside or x < floor or token_id == peak:
            continue
        word = _word(key, token_id)
        bits = int(min((best - x) * _LOG2E_ROUNDED_DOWN, 60.0))
        # 1 - u >= 2**-bits gives noise <= best - x.
        if bits > 0 and (bits >= 53 or word >> np.uint64(max(52 - bits, 0)) != np.uint64(0)):
            continue
        score = x + _noise(word)
        if score > best or (score == best and token_id < at):
            best = score
            at = token_id
    return at


@precise_helper
def _draw_row(row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, key: Any) -> Any:
    peak = _peak(row)
    if peak < 0 or temperature <= 0.0 or top_k == 1:
        return peak
    border, ties = np.int64(-1), 0
    if 0 < top_k < row.shape[0] or top_p < 1.0:
        border, ties = _limits(row, float(row[peak]), temperature, top_k, top_p)
    return _draw_within(row, peak, temperature, min_p, key, border, ties)


@parallel_kernel
def draw_rows(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, keys: Any, tokens: Any) -> None:
    """tokens[i] = the draw of logits[i] ([S, V] fp32) by the i-th parameters; MASK_EMPTY or NOT_FINITE."""
    for i in numba.prange(logits.shape[0]):
        tokens[i] = _draw_row(logits[i], temperature[i], top_k[i], top_p[i], min_p[i], keys[i])
