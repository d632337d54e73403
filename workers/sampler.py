"""From logits to tokens: masks, penalties and logprobs here, the draw in workers/draw.py.

The order is that of proto/common.proto: raw logits (logprobs are of these) → logit_bias → allowed / bad token masks →
repetition, presence, frequency penalties → min_tokens mask → temperature → top_k → top_p → min_p → draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from workers.draw import draw_rows, stream_key
from workers.plan import Draw, Int32
from workers.request import Logprob, PositionLogprobs, SamplingParams

Row: TypeAlias = npt.NDArray[np.float32]

_LEAST_LOGPROB = float(np.finfo(np.float32).min)
"""A probability of 0, for wires that know no infinity."""


class Sampler:
    """Of one model; keeps nothing between steps."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        """One token for each draw, whose row of ``logits`` ([S, vocab_size], fp32, overwritten) stands at its place.

        Returns tokens (MASK_EMPTY where the masks left nothing, NOT_FINITE where the model gave NaN or infinity) and
        the logprobs that were asked for.
        """
        # Drawn on the CPU for every device: the rows are few, and the noise must be the same to the last bit.
        values = logits[:, : self._vocab_size].cpu().numpy()
        raw = {i: values[i].copy() for i, draw in enumerate(draws) if draw.params.logprobs is not None}
        for row, draw in zip(values, draws, strict=True):
            self._edit(row, draw)
        tokens = tuple(_draw(values, draws).tolist())
        told = tuple(
            _logprobs(raw[i], token, draw.params.logprobs or 0) if i in raw and token >= 0 else None
            for i, (token, draw) in enumerate(zip(tokens, draws, strict=True))
        )
        return tokens, told

    def _edit(self, row: Row, draw: Draw) -> None:
        """All that comes before the temperature, in place."""
        params = draw.params
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
            row[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        if params.allowed_token_ids:
            _keep_only(row, np.array(params.allowed_token_ids))
        for sequence in params.bad_token_sequences:
            if _ends_with(draw.output_tokens, sequence[:-1]):
                row[sequence[-1]] = -np.inf
        _penalize(row, draw)
        if not draw.allow_stop:
            row[[*params.stop_token_ids, *(() if params.ignore_eos else self._eos)]] = -np.inf


def _keep_only(row: Row, ids: npt.NDArray[np.int64]) -> None:
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _ends_with(tokens: Int32, ending: Sequence[int]) -> bool:
    """Whether the output ends so; an empty ending always does."""
    return not ending or (len(tokens) >= len(ending) and tokens[-len(ending) :].tolist() == list(ending))


def _penalize(row: Row, draw: Draw) -> None:
    """Repetition over prompt and output (Keskar et al., "CTRL", 2019, section 4.1); presence and frequency over output.

    The prompt is the whole one, also what came from the cache.
    """
    params: SamplingParams = draw.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((draw.prompt_tokens, draw.output_tokens)))
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(draw.output_tokens):
        ids, counts = np.unique(draw.output_tokens, return_counts=True)
        row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def _draw(values: npt.NDArray[np.float32], draws: Sequence[Draw]) -> npt.NDArray[np.int64]:
    params = [draw.params for draw in draws]
    keys = [stream_key(draw.params.seed, draw.sample_index, draw.position) for draw in draws]
    tokens = np.empty(len(draws), np.int64)
    draw_rows(
        np.ascontiguousarray(values),
        np.array([one.temperature for one in params], np.float64),
        np.array([one.top_k for one in params], np.int64),
        np.array([one.top_p for one in params], np.float64),
        np.array([one.min_p for one in params], np.float64),
        np.array(keys, np.uint64),
        tokens,
    )
    return tokens


def _logprobs(raw: Row, token: int, top: int) -> PositionLogprobs:
    """Of the raw distribution, by log-softmax in float64; equal logits rank by the lower id."""
    logits = raw.astype(np.float64)
    peak = logits.max()
    normalizer = peak + np.log(np.exp(logits - peak).sum())
    best = _largest(logits, top)

    def entry(token_id: int) -> Logprob:
        value = logits[token_id]
        rank = 1 + int((logits > value).sum()) + int((logits[:token_id] == value).sum())
        return Logprob(token_id, max(float(value - normalizer), _LEAST_LOGPROB), rank)

    return PositionLogprobs(entry(token), tuple(map(entry, best)))


def _largest(logits: npt.NDArray[np.float64], count: int) -> list[int]:
    """Ids of the ``count`` largest, largest first."""
    if count < 1:
        return []
    # What is picked among those that tie at the border is arbitrary: take all of them, sort, and keep the first.
    border = np.partition(logits, -count)[-count] if count < len(logits) else -np.inf
    ids = np.flatnonzero(logits >= border)
    found: list[int] = ids[np.argsort(-logits[ids], kind="stable")][:count].tolist()
    return found
