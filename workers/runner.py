"""Runs plans: the model over its pages, then the draw. One runner per rank; it owns the memory of the pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from cluster.config import AttentionName
from cluster.errors import ProtocolError
from workers.attention.interface import Batch, KVPages, spell_out
from workers.logprobs import position_logprobs
from workers.model import backend
from workers.model.config import ModelConfig
from workers.model.llama import Model
from workers.plan import Draw, Int32, RankPlan, Score, StepPlan, StepResult
from workers.request import PositionLogprobs, SamplingParams

log = logging.getLogger(__name__)

NOT_CARRIED = -1

SCORED_AT_ONCE = 64
"""Rows of logits that are made at once for prompt logprobs."""


class TokenSampler(Protocol):
    """Turns logits into tokens; workers.sampler.Sampler is the one that is used."""

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs | None, ...]]:
        """``logits``: [S, vocab_size] in fp32, which may be overwritten. A token or a mark of workers.plan for each."""
        ...


class Runner:
    """A model, its KV pages, and the tokens that the last step drew."""

    def __init__(
        self,
        model: Model,
        *,
        block_tokens: int,
        num_blocks: int,
        attention: AttentionName = "auto",
        sampler: TokenSampler,
    ) -> None:
        """Allocates the pages and prepares the kernels, together with the group's other ranks.

        Raises OutOfMemory, ConfigError, RanksParted.
        """
        config = model.config
        self.model = model
        self.pages = KVPages(
            config.layers, (num_blocks, config.kv_heads, block_tokens, config.head_dim), model.dtype, model.device
        )
        self._backend = backend.choose(attention, model, self.pages)
        self._sampler = sampler
        self._drawn: dict[int, int] = {}  # row of the last step → its token
        self._last_step = -1
        self._logits_made = 0
        self._warm_up()

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self.pages.num_blocks

    def progress(self) -> int:
        """A number that grows while a step gets on; from any thread."""
        return self._backend.progress() + self._logits_made

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step of a group of one. Raises ProtocolError if the plan contradicts itself or the one before it."""
        return self.lead(plan, self.resolve(plan))

    def resolve(self, plan: StepPlan) -> RankPlan:
        """What all ranks are told of a plan. Raises ProtocolError, as ``execute``; no rank has begun then."""
        told = plan.for_ranks(self._resolved(plan))
        self._check(told)
        return told

    def lead(self, plan: StepPlan, told: RankPlan) -> StepResult:
        """Rank 0's part of a step, while the other ranks ``follow``."""
        start = time.perf_counter()
        batch = self._begin(told)
        begun = time.perf_counter()
        hidden = self._backend.forward(batch)
        computed = time.perf_counter()
        logits = self._logits(hidden[batch.last_tokens]) if plan.draws else hidden[:0]
        head_s = time.perf_counter() - computed
        spans = zip(batch.hidden_of_scores(), plan.scores, strict=True)
        scores = tuple(self._score(hidden[span], score) for span, score in spans)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        forwarded = time.perf_counter()
        tokens, logprobs = self._sampler.sample(logits, plan.draws) if plan.draws else ((), ())
        self._drawn = {draw.row: token for draw, token in zip(plan.draws, tokens, strict=True)}
        self._last_step = plan.step
        linear, attention = self._backend.shares()
        return StepResult(
            step=plan.step,
            tokens=tokens,
            logprobs=logprobs,
            forward_s=forwarded - start,
            sample_s=time.perf_counter() - forwarded,
            scores=scores,
            linear_s=linear * (computed - begun) + (head_s if linear else 0.0),
            attention_s=attention * (computed - begun),
        )

    def follow(self, told: RankPlan) -> None:
        """Another rank's part: all that rank 0 does but the draw, in the same order, since both meet in it."""
        self._check(told)
        batch = self._begin(told)
        hidden = self._backend.forward(batch)
        if len(told.draw_rows):
            self._backend.logits(hidden[batch.last_tokens])
        for span in batch.hidden_of_scores():
            scored = hidden[span]
            for done in range(0, len(scored), SCORED_AT_ONCE):
                self._backend.logits(scored[done : done + SCORED_AT_ONCE])
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _begin(self, told: RankPlan) -> Batch:
        self.pages.copy(told.copies)
        return spell_out(told, self.pages.block_tokens, self.model.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._backend.logits(hidden)
        self._logits_made += 1
        if found is None:
            raise RuntimeError("only rank 0 leads: logits are gathered there")
        return found

    def _score(self, hidden: torch.Tensor, score: Score) -> tuple[PositionLogprobs, ...] | None:
        """Prompt logprobs, a slab of rows at a time: all logits of a chunk would be 100 MB and more."""
        found: list[PositionLogprobs] = []
        for done in range(0, len(score), SCORED_AT_ONCE):
            targets = score.targets[done : done + SCORED_AT_ONCE].tolist()
            logits = self._logits(hidden[done : done + len(targets)])[:, : self.model.config.vocab_size].cpu()
            if not bool(torch.isfinite(logits).all()):
                return None
            found += position_logprobs(logits.numpy(), targets, [score.top] * len(targets))
        return tuple(found)

    def _warm_up(self) -> None:
        """Compile and load every kernel now, so that no request waits for it, and a failure is one of the start."""
        start = time.perf_counter()
        log.info("kernels: loading (the first start on a machine compiles them, which takes some seconds)")
        plan = StepPlan(
            step=-1,
            token_ids=np.zeros(3, np.int32),
            row_starts=np.array([0, 1, 3], np.int32),  # a decode and a chunk, in one page that nobody reads
            num_computed=np.zeros(2, np.int32),
            carried_from=np.full(2, NOT_CARRIED, np.int32),
            block_starts=np.arange(3, dtype=np.int32),
            blocks=np.zeros(2, np.int32),
            draws=tuple(_any_draw(row, temperature) for row, temperature in enumerate((0.0, 1.0))),
            copies=np.zeros((0, 2), np.int32),
        )
        told = self.resolve(plan)
        if self.model.ranks.rank == 0:
            self.lead(plan, told)
        else:
            self.follow(told)
        self._drawn, self._last_step = {}, -1
        for pages in (*self.pages.keys, *self.pages.values):
            pages[0].zero_()
        log.info("kernels: ready after %.1f s", time.perf_counter() - start)

    def _check(self, told: RankPlan) -> None:
        """Kernels look at nothing again: what would lead them out of the pages or the vocabulary is refused here."""
        vocab_size = self.model.config.vocab_size
        for name, numbers, end in (("page", told.blocks, self.num_blocks), ("token", told.token_ids, vocab_size)):
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < end:
                raise ProtocolError(f"plan of step {told.step}: a {name} outside 0 to {end - 1}")

    def _resolved(self, plan: StepPlan) -> Int32:
        """The plan's token ids, with those that the last step drew in their places."""
        token_ids = plan.token_ids.copy()
        carried = np.flatnonzero(plan.carried_from != NOT_CARRIED)
        for row in carried:
            source = int(plan.carried_from[row])
            if plan.step != self._last_step + 1 or source not in self._drawn:
                raise ProtocolError(
                    f"plan of step {plan.step}: row {row} carries a token of row {source} that step "
                    f"{plan.step - 1} did not draw",
                    row=row,
                )
            token = self._drawn[source]
            # A row that drew nothing ends one step late: what it computes meanwhile is thrown away.
            token_ids[plan.row_starts[row + 1] - 1] = max(token, 0)
        return token_ids


def _any_draw(row: int, temperature: float) -> Draw:
    none = np.zeros(0, np.int32)
    params = SamplingParams(max_tokens=1, seed=0, temperature=temperature, logprobs=1)
    return Draw(row, params, sample_index=0, prompt_tokens=none, output_tokens=none, allow_stop=True)


def bytes_per_block(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers: keys and values."""
    return 2 * config.layers * config.kv_heads * block_tokens * config.head_dim * dtype.itemsize
