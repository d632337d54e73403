"""Plans without an engine: sequences with pages of their own, stepped by hand, so that a test chooses every row."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from workers.plan import Draw, StepPlan, StepResult
from workers.request import PositionLogprobs, SamplingParams
from workers.runner import Runner

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class GreedySampler:
    """Takes the largest logit, and keeps the logits of the last step."""

    def __init__(self) -> None:
        self.logits = torch.empty(0)

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        self.logits = logits.clone()
        return tuple(logits.argmax(-1).tolist()), (None,) * len(draws)


@dataclass
class Row:
    """A sequence: what is known of it, how much of that is computed, and its pages."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Stepper:
    """Drives a runner. Pages are handed out in a random order, so that no test passes because they lie in a row."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        self.step_number = 0
        self._free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free)

    def plan(self, work: Iterable[tuple[Row, int]], carried: Sequence[int] = ()) -> StepPlan:
        """Each row gets so many of its tokens; one that has caught up draws. Marks them as computed."""
        rows = list(work)
        for row, count in rows:
            needed = -(-(row.computed + count) // self.runner.pages.block_tokens)
            while len(row.blocks) < needed:
                row.blocks.append(self._free.pop())
        token_ids = [t for row, n in rows for t in row.tokens[row.computed : row.computed + n]]
        plan = StepPlan(
            step=self.step_number,
            token_ids=_int32(token_ids),
            row_starts=_int32(accumulate((n for _, n in rows), initial=0)),
            num_computed=_int32(row.computed for row, _ in rows),
            carried_from=_int32(carried or [-1] * len(rows)),
            block_starts=_int32(accumulate((len(row.blocks) for row, _ in rows), initial=0)),
            blocks=_int32(block for row, _ in rows for block in row.blocks),
            draws=tuple(
                Draw(i, GREEDY, 0, _int32(row.tokens), _int32([]), True)
                for i, (row, n) in enumerate(rows)
                if row.computed + n == len(row.tokens)
            ),
            copies=np.zeros((0, 2), np.int32),
        )
        self.step_number += 1
        for row, n in rows:
            row.computed += n
        return plan

    def step(self, work: Iterable[tuple[Row, int]]) -> StepResult:
        """Plan and execute."""
        return self.runner.execute(self.plan(work))

    def free(self, row: Row) -> None:
        """Give a row's pages back."""
        self._free.extend(row.blocks)
        row.blocks.clear()
        row.computed = 0


def _int32(values: Iterable[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(list(values), np.int32)
