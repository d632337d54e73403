"""The draw: argmax(logit/T + Gumbel noise) over what top-k, top-p and min-p keep, for many rows at once.

The noise of a token is a hash of (seed, sample index, position, token id) and of nothing else, so a row draws the same
token alone and in any batch, before and after preemption, on any rank. Gumbel-max: Maddison et al., "A* Sampling"
(NeurIPS 2014), section 2; the hash is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014), applied in a chain.

Every order is by logit, equal logits by the lower token id. Arithmetic is in float64, on one thread per row.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from workers.plan import MASK_EMPTY, NOT_FINITE
from workers.threads import kernel, precise_helper

_EMPTY = MASK_EMPTY
_BROKEN = NOT_FINITE
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LOG2E_ROUNDED_DOWN = 1.4426
_FIRST_SPAN = 8.0  # natural log units below the largest logit in which the kept tokens are looked for first


def stream_key(seed: int, sample_index: int, position: int) -> int:
    """The 64 bits that stand for everything in the noise but the token id."""
    key = _mix_int(seed + _GOLDEN)
    key = _mix_int(key ^ (sample_index + 2 * _GOLDEN))
    return _mix_int(key ^ (position + 3 * _GOLDEN))


def gumbel(key: int, token_id: int) -> float:
    """The noise of one token; what the kernels compute."""
    v = ((_MASK >> 11) - (_mix_int(key + (token_id + 1) * _GOLDEN) >> 11) + 0.5) * 2.0**-53
    return -math.log(-math.log1p(-v))


def _mix_int(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@precise_helper
def _word(key: Any, token_id: Any) -> Any:
    """53 hashed bits w; the uniform number is u = 1 - (w + 0.5) / 2**53, which is never 0 or 1."""
    z = key + np.uint64(token_id + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.uint64(0x1FFFFFFFFFFFFF) - (z >> np.uint64(11))


@precise_helper
def _noise(word: Any) -> Any:
    """Gumbel noise, -log(-log u)."""
    return -math.log(-math.log1p(-(float(word) + 0.5) * 2.0**-53))


@precise_helper
def _peak(row: Any) -> Any:
    """The token with the largest logit; _EMPTY when all are -inf, _BROKEN when one is NaN or +inf."""
    best = -np.inf
    at: Any = np.int64(_EMPTY)
    broken = np.int64(0)
    for token_id in range(row.shape[0]):
        value = row[token_id]
        broken += np.int64(not value < np.inf)
        if value > best:
            best = value
            at = token_id
    return np.int64(_BROKEN) if broken else at


@precise_helper
def _draw_all(row: Any, temperature: Any, key: Any, peak: Any) -> Any:
    """Over the whole row. A token's noise is computed only where it could win: -log(1-u) bounds it from above."""
    top = float(row[peak])
    best = _noise(_word(key, peak))
    at = peak
    for token_id in range(row.shape[0]):
        value = row[token_id]
        if value == -np.inf or token_id == peak:
            continue
        x = (float(value) - top) / temperature
        word = _word(key, token_id)
        bits = int(min((best - x) * _LOG2E_ROUNDED_DOWN, 60.0))
        # 1 - u >= 2**-bits gives noise <= best - x.
        if bits > 0 and (bits >= 54 or word >> np.uint64(max(53 - bits, 0)) != np.uint64(0)):
            continue
        score = x + _noise(word)
        if score > best or (score == best and token_id < at):
            best = score
            at = token_id
    return at


@precise_helper
def _above(row: Any, cut: Any) -> Any:
    """Token ids with logits of at least ``cut``, largest first."""
    count: Any = 0
    for token_id in range(row.shape[0]):
        count += np.int64(row[token_id] >= cut)
    ids: Any = np.empty(count, np.int64)
    negated = np.empty(count, np.float64)
    at = 0
    for token_id in range(row.shape[0]):
        if row[token_id] >= cut:
            ids[at] = token_id
            negated[at] = -float(row[token_id])
            at += 1
    return ids[np.argsort(negated, kind="mergesort")]  # stable: equal ones stay in order of their ids


@precise_helper
def _largest(row: Any, top: Any, k: Any) -> Any:
    """The k tokens with the largest logits (fewer where fewer are possible), largest first."""
    span = _FIRST_SPAN
    while True:
        cut = top - span if span < 1e4 else -1.7e308
        ids = _above(row, cut)
        if ids.shape[0] >= k or cut == -1.7e308:
            return ids[:k]
        span *= 4.0


@precise_helper
def _nucleus(row: Any, top: Any, temperature: Any, top_p: Any) -> Any:
    """The smallest set, of the whole row, whose probability reaches ``top_p``, largest first."""
    total = 0.0
    for token_id in range(row.shape[0]):
        total += math.exp((float(row[token_id]) - top) / temperature)
    span = _FIRST_SPAN
    while True:
        cut = top - span * temperature if span < 1e4 else -1.7e308
        ids = _above(row, cut)
        kept = _prefix(row, ids, top, temperature, top_p * total)
        if kept < ids.shape[0] or cut == -1.7e308:
            return ids[:kept]
        span *= 4.0


@precise_helper
def _prefix(row: Any, ids: Any, top: Any, temperature: Any, mass: Any) -> Any:
    """How many of the sorted tokens it takes to reach ``mass`` (not normalized); all when they do not."""
    reached = 0.0
    for i in range(ids.shape[0]):
        reached += math.exp((float(row[ids[i]]) - top) / temperature)
        if reached >= mass:
            return i + 1
    return ids.shape[0]


@precise_helper
def _kept(row: Any, top: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """What top-k and then top-p leave, largest first."""
    if top_k <= 0 or top_k >= row.shape[0]:
        return _nucleus(row, top, temperature, top_p)
    ids = _largest(row, top, top_k)
    if top_p >= 1.0:
        return ids
    total = 0.0
    for i in range(ids.shape[0]):
        total += math.exp((float(row[ids[i]]) - top) / temperature)
    return ids[: _prefix(row, ids, top, temperature, top_p * total)]


@precise_helper
def _draw_among(row: Any, ids: Any, top: Any, temperature: Any, min_p: Any, key: Any) -> Any:
    """Among sorted tokens, as far as they are at least ``min_p`` times as likely as the first."""
    best = -np.inf
    at = ids[0]
    floor = math.log(min_p) if min_p > 0.0 else -np.inf
    for i in range(ids.shape[0]):
        x = (float(row[ids[i]]) - top) / temperature
        if x < floor:
            break
        score = x + _noise(_word(key, ids[i]))
        if score > best or (score == best and ids[i] < at):
            best = score
            at = ids[i]
    return at


@precise_helper
def _draw_row(row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, key: Any) -> Any:
    peak = _peak(row)
    if peak < 0 or temperature <= 0.0 or top_k == 1:
        return peak
    top = float(row[peak])
    limited = 0 < top_k < row.shape[0] or top_p < 1.0
    if limited:
        return _draw_among(row, _kept(row, top, temperature, top_k, top_p), top, temperature, min_p, key)
    if min_p > 0.0:
        ids = _above(row, top + math.log(min_p) * temperature - 1e-6 * (1.0 + abs(top)))
        return _draw_among(row, ids, top, temperature, min_p, key)
    return _draw_all(row, temperature, key, peak)


@kernel
def draw_rows(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, keys: Any, tokens: Any) -> None:
    """tokens[i] = the draw of logits[i] ([S, V] fp32) by the i-th parameters; MASK_EMPTY or NOT_FINITE."""
    for i in numba.prange(logits.shape[0]):
        tokens[i] = _draw_row(logits[i], temperature[i], top_k[i], top_p[i], min_p[i], keys[i])
