"""The plan of a step: the one thing that the leader tells the ranks. Integers only; no torch, no phases.

Every row is a sequence that gets some of the token budget, so that what is computed catches up with what is known. A
decode is a row of one token, a prefill a row of many, a chunk a row of some: nothing downstream asks which.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from workers.request import PositionLogprobs, SamplingParams

Int32: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One row whose last token's logits are turned into a token."""

    row: int
    params: SamplingParams
    sample_index: int
    prompt_tokens: Int32  # for penalties; the same array in every step of a sequence
    output_tokens: Int32  # before this draw; the drawn token's position is len(prompt) + len(output)
    allow_stop: bool  # False while min_tokens forbids EOS and stop ids

    @property
    def position(self) -> int:
        """Where the drawn token will stand, from 0 at the prompt's first token."""
        return len(self.prompt_tokens) + len(self.output_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Prompt tokens of one row whose log-probabilities are asked for, given all that stands before each."""

    row: int
    first: int  # the row's token, counted from its first in this step, whose logits are about targets[0]
    targets: Int32  # the tokens that follow it and the next ones
    top: int  # most likely tokens to tell beside each

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """R rows with T tokens in all. CSR arrays need no padding, so no padding can be mistaken for a page.

    Row r feeds ``token_ids[row_starts[r]:row_starts[r+1]]`` at positions ``num_computed[r]``, +1, ...; its pages are
    ``blocks[block_starts[r]:block_starts[r+1]]``, and position p lies in slot ``p % block_tokens`` of page
    ``p // block_tokens`` of that list. The pages of all positions that the row feeds are in the list.
    """

    step: int
    token_ids: Int32  # [T]
    row_starts: Int32  # [R+1]
    num_computed: Int32  # [R] tokens whose KV is in pages before this step
    block_starts: Int32  # [R+1]
    blocks: Int32  # [sum of block table lengths]
    copies: Int32  # [C, 2] pages (from, to) copied before anything is written (copy on write)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.num_computed)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPlan(Rows):
    """A step as the scheduler makes it."""

    carried_from: Int32  # [R] row of step-1 whose drawn token is this row's last token_id; -1: token_ids holds it
    draws: tuple[Draw, ...]  # in order of row
    scores: tuple[Score, ...] = ()  # in order of row

    def for_ranks(self, token_ids: Int32) -> RankPlan:
        """What all ranks are told. ``token_ids``: ours, with what was carried over filled in."""
        spans = [(score.row, score.first, len(score)) for score in self.scores]
        shared = {field.name: getattr(self, field.name) for field in fields(Rows)}
        return RankPlan(
            **{**shared, "token_ids": token_ids},
            draw_rows=np.array([draw.row for draw in self.draws], np.int32),
            scored=np.array(spans, np.int32).reshape(-1, 3),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankPlan(Rows):
    """What every rank of a group must know of a step: all of it but what is done with the logits."""

    draw_rows: Int32  # [S] of each Draw
    scored: Int32  # [N, 3] row, first and number of tokens of each Score


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the ranks answer: for each Draw its token (or MASK_EMPTY, NOT_FINITE), and logprobs where asked for."""

    step: int
    tokens: tuple[int, ...]  # MASK_EMPTY where nothing could be drawn
    logprobs: tuple[PositionLogprobs | None, ...]
    forward_s: float  # the model's forward pass
    sample_s: float
    scores: tuple[tuple[PositionLogprobs, ...] | None, ...] = ()  # of each Score; None where logits were not finite
    linear_s: float = 0.0  # of forward_s, where the backend knows
    attention_s: float = 0.0


MASK_EMPTY = -1
"""In the place of a token: the masks left nothing that could be drawn."""

NOT_FINITE = -2
"""In the place of a token: the model's logits hold NaN or infinity, so there is no distribution."""
