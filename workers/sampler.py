"""From logits to tokens: masks and penalties here, the draw in workers/draw.py, logprobs in workers/logprobs.py.

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
from workers.logprobs import position_logprobs
from workers.plan import Draw
from workers.request import PositionLogprobs, SamplingParams

Rows: TypeAlias = npt.NDArray[np.float32]
Row: TypeAlias = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)


class Sampler:
    """Of one model; keeps nothing between steps."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = np.array(list(eos_token_ids), np.int64)

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        """One token for each draw, whose row of ``logits`` ([S, vocab_size], fp32, overwritten) stands at its place.

        Returns tokens (MASK_EMPTY where the masks left nothing, NOT_FINITE where the model gave NaN or infinity) and
        the logprobs that were asked for.
        """
        # Drawn on the CPU for every device: the rows are few, and the noise must be the same to the last bit.
        values = logits[:, : self._vocab_size].cpu().numpy()
        asked = [i for i, draw in enumerate(draws) if draw.params.logprobs is not None]
        raw = values[asked]  # a copy, before anything is overwritten
        for row, draw in zip(values, draws, strict=True):
            if _is_edited(draw):
                self._edit(row, draw)
        tokens = tuple(_draw(values, draws).tolist())
        return tokens, _told(raw, asked, tokens, draws)

    def _edit(self, row: Row, draw: Draw) -> None:
        """All that comes before the temperature, in place."""
        if not row.max() < np.inf:
            return  # no mask may hide what is not finite from the draw
        params, masks = draw.params, draw.params.masks
        row[masks.biased] += masks.bias
        if len(masks.allowed):
            _keep_only(row, masks.allowed)
        row[masks.banned] = -np.inf
        row[masks.banned_behind(draw.output_tokens)] = -np.inf
        _penalize(row, draw)
        if not draw.allow_stop:
            row[masks.stops] = -np.inf
            if not params.ignore_eos:
                row[self._eos] = -np.inf


def _is_edited(draw: Draw) -> bool:
    params = draw.params
    return bool(
        not draw.allow_stop
        or not params.masks.is_empty
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _keep_only(row: Row, ids: npt.NDArray[np.int64]) -> None:
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _penalize(row: Row, draw: Draw) -> None:
    """Repetition over prompt and output (Keskar et al., "CTRL", 2019, section 4.1); presence and frequency over output.

    The prompt is the whole one, also what came from the cache.
    """
    params: SamplingParams = draw.params
    if params.repetition_penalty != 1.0:
        present = np.zeros(len(row), np.bool_)  # marks, since sorting a long prompt would cost more than the draw
        present[draw.prompt_tokens] = True
        present[draw.output_tokens] = True
        seen = np.flatnonzero(present & (row > -np.inf))
        values = row[seen].astype(np.float64)
        values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[seen] = values.clip(-_LARGEST, _LARGEST)  # an extreme penalty neither masks nor breaks the row
    if (params.presence_penalty or params.frequency_penalty) and len(draw.output_tokens):
        ids, counts = np.unique(draw.output_tokens, return_counts=True)
        row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def _draw(values: Rows, draws: Sequence[Draw]) -> npt.NDArray[np.int64]:
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


def _told(
    raw: Rows, asked: Sequence[int], tokens: Sequence[int], draws: Sequence[Draw]
) -> tuple[PositionLogprobs | None, ...]:
    """The logprobs of each draw, None where none were asked for or nothing was drawn; raw[j] is of draw asked[j]."""
    told: list[PositionLogprobs | None] = [None] * len(draws)
    drawn = [j for j, i in enumerate(asked) if tokens[i] >= 0]
    rows = [asked[j] for j in drawn]
    found = position_logprobs(raw[drawn], [tokens[i] for i in rows], [draws[i].params.logprobs or 0 for i in rows])
    for i, position in zip(rows, found, strict=True):
        told[i] = position
    return tuple(told)
