"""Kernels round differently: two runs may part where two tokens are as good as equal, and nowhere else (design, 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.plans import GreedySampler, Row, Stepper
from workers.draw import gumbel, stream_key
from workers.model.llama import Model
from workers.plan import Draw
from workers.request import SamplingParams
from workers.runner import Runner
from workers.sampler import Sampler

TIE = 1e-4


class Ties:
    """Compares token lists of one model; counts the tokens and the ties it has seen."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.tokens = 0
        self.ties = 0

    def assert_same(
        self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], params: SamplingParams, index: int = 0
    ) -> None:
        """Equal to the end, or up to a tie."""
        self.tokens += len(one)
        parted = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if parted is None:
            assert len(one) == len(other)
            return
        gap = self._gap(prompt, one[:parted], one[parted], other[parted], params, index)
        assert gap < TIE, f"they part at output {parted}: {one[parted]} and {other[parted]}, {gap} apart"
        self.ties += 1

    def assert_rare(self) -> None:
        """At most one tie, or one in 10,000 tokens."""
        assert self.ties <= max(1, self.tokens // 10_000), f"{self.ties} ties in {self.tokens} tokens"

    def _gap(
        self, prompt: Sequence[int], output: Sequence[int], a: int, b: int, params: SamplingParams, index: int
    ) -> float:
        """Between the scores of two tokens, noise added, computed alone and at once."""
        known = [*prompt, *output]
        sampler = GreedySampler()
        runner = Runner(self._model, block_tokens=16, num_blocks=len(known) // 16 + 1, sampler=sampler)
        Stepper(runner).step([(Row(known), len(known))])
        row = sampler.logits[0].numpy()
        draw = Draw(0, params, index, np.array(prompt, np.int32), np.array(output, np.int32), len(output) > 0)
        Sampler(self._model.config.vocab_size, self._model.config.eos_token_ids)._edit(row, draw)
        if params.temperature == 0:
            return abs(float(row[a]) - float(row[b]))
        key = stream_key(params.seed, index, len(known))
        scores = [float(row[token]) / params.temperature + gumbel(key, token) for token in (a, b)]
        return abs(scores[0] - scores[1])
