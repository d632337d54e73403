"""A group that keeps pages as a real one does, with token ids in place of KV: the oracle of the engine's bookkeeping.

What a row draws is a hash of everything that is read back through its block table. A wrong page, a page that somebody
else overwrote, a position off by one, a block that was shared before it was computed: each gives other tokens than
``expected_tokens``, which knows no pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from cluster.blocks import BlockHash, root
from workers.block_pool import CacheEvents
from workers.engine import Engine, EngineSettings
from workers.plan import MASK_EMPTY, Score, StepPlan, StepResult
from workers.request import Failed, Logprob, Output, PositionLogprobs, Request, RequestKey, SamplingParams

VOCAB = 50
EOS = 0
ROOT = root(b"secret", "anonymous", "namespace")


class GroupBroke(RuntimeError):
    """What a PagedGroup raises when told to."""


class PagedGroup:
    """Pages of [num_blocks, block_tokens] (token, position). ``mask_empty``: seeds that can draw nothing."""

    def __init__(self, num_blocks: int, block_tokens: int, mask_empty: frozenset[int] = frozenset()) -> None:
        self.num_blocks = num_blocks
        self.pages = np.full((num_blocks, block_tokens, 2), -7, dtype=np.int64)
        self.plans: list[StepPlan] = []
        self.broken = False
        self._mask_empty = mask_empty

    def execute(self, plan: StepPlan) -> StepResult:
        """Write every row's tokens, then read every drawing row back."""
        self.plans.append(plan)
        self._copy(plan)
        written = {slot for row in range(plan.num_rows) for slot in self._write(plan, row)}
        assert len(written) == plan.num_tokens, "two rows wrote into one slot"
        if self.broken:
            raise GroupBroke
        tokens = tuple(self._draw(plan, index) for index in range(len(plan.draws)))
        scores = tuple(self._score(plan, score) for score in plan.scores)
        return StepResult(plan.step, tokens, (None,) * len(tokens), forward_s=0.01, sample_s=0.001, scores=scores)

    def failure(self) -> str | None:
        """Never outside a step."""
        return None

    def progress(self) -> int:
        """Of whole steps."""
        return len(self.plans)

    def close(self) -> None:
        """Nothing to give back."""

    def _copy(self, plan: StepPlan) -> None:
        """Only what the step's tables own alone is copied to: a page that somebody shares must never change."""
        tables = [page for row in range(plan.num_rows) for page in self._table(plan, row)]
        before = self.pages.copy()  # all are read before any is written
        for source, target in plan.copies.tolist():
            assert tables.count(target) == 1
            if not self.broken:
                self.pages[target] = before[source]

    def _table(self, plan: StepPlan, row: int) -> list[int]:
        table: list[int] = plan.blocks[plan.block_starts[row] : plan.block_starts[row + 1]].tolist()
        assert len(set(table)) == len(table)
        return table

    def _write(self, plan: StepPlan, row: int) -> list[tuple[int, int]]:
        table, size = self._table(plan, row), self.pages.shape[1]
        start = int(plan.num_computed[row])
        fed = plan.token_ids[plan.row_starts[row] : plan.row_starts[row + 1]]
        slots = [(table[position // size], position % size) for position in range(start, start + len(fed))]
        for offset, (slot, token) in enumerate(zip(slots, fed, strict=True)):
            self.pages[slot] = token, start + offset
        return slots

    def _score(self, plan: StepPlan, score: Score) -> tuple[PositionLogprobs, ...]:
        seen = self.pages[self._table(plan, score.row)].reshape(-1, 2)
        start, stop = (int(plan.row_starts[score.row + i]) for i in (0, 1))
        assert score.first + len(score) <= stop - start, "logits are asked for that the step does not compute"
        first = int(plan.num_computed[score.row]) + score.first
        assert seen[: first + len(score), 1].tolist() == list(range(first + len(score)))
        return tuple(scored(seen[: first + i + 1, 0].tolist(), int(t)) for i, t in enumerate(score.targets))

    def _draw(self, plan: StepPlan, index: int) -> int:
        draw = plan.draws[index]
        table = self._table(plan, draw.row)
        seen = self.pages[table].reshape(-1, 2)[: draw.position]
        known = np.concatenate((draw.prompt_tokens, draw.output_tokens))
        assert seen[:, 0].tolist() == known.tolist(), "the pages hold other tokens than the sequence"
        assert seen[:, 1].tolist() == list(range(draw.position)), "the pages hold other positions"
        if draw.params.seed in self._mask_empty:
            return MASK_EMPTY
        return drawn_token(seen[:, 0].tolist(), draw.params.seed, draw.sample_index, draw.allow_stop)


def drawn_token(known: Sequence[int], seed: int, sample: int, allow_stop: bool) -> int:
    """The token after ``known``, as the model of these tests has it."""
    digest = hashlib.blake2b(repr((list(known), seed, sample)).encode(), digest_size=4).digest()
    token = int.from_bytes(digest) % VOCAB
    return token if allow_stop or token != EOS else 1


def scored(before: Sequence[int], token: int) -> PositionLogprobs:
    """The logprob of ``token`` behind ``before``, as the model of these tests has it."""
    digest = hashlib.blake2b(repr((list(before), token)).encode(), digest_size=4).digest()
    return PositionLogprobs(Logprob(token, -float(int.from_bytes(digest)), 1), ())


def expected_scores(prompt: Sequence[int]) -> list[PositionLogprobs]:
    """Of every prompt token but the first."""
    return [scored(prompt[:i], prompt[i]) for i in range(1, len(prompt))]


def expected_tokens(request: Request, sample: int = 0) -> list[int]:
    """All output tokens of a sample, computed without pages, batches or steps."""
    sampling = request.sampling
    known, out = list(request.prompt), list(request.outputs[sample]) if request.outputs else []
    while len(out) < sampling.max_tokens:
        out.append(drawn_token(known + out, sampling.seed, sample, len(out) >= sampling.min_tokens))
        stops = out[-1] in sampling.stop_token_ids or (out[-1] == EOS and not sampling.ignore_eos)
        if stops and len(out) > sampling.min_tokens:
            break
    return out


def make_settings(**changes: object) -> EngineSettings:
    """Small: blocks of 4, 16 tokens a step, 4 sequences at once."""
    values: dict[str, object] = {
        "block_tokens": 4,
        "max_batch_tokens": 16,
        "max_running": 4,
        "max_waiting": 64,
        "max_context_tokens": 1000,
        "prefix_cache": True,
        "eos_token_ids": frozenset({EOS}),
        "vocab_size": VOCAB,
    }
    return EngineSettings(**{**values, **changes})  # type: ignore[arg-type]


def make_engine(
    num_blocks: int = 64, *, mask_empty: frozenset[int] = frozenset(), **changes: object
) -> tuple[Engine, PagedGroup]:
    """An engine over a PagedGroup."""
    settings = make_settings(**changes)
    group = PagedGroup(num_blocks, settings.block_tokens, mask_empty)
    return Engine(group, settings), group


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    outputs: tuple[tuple[int, ...], ...] = (),
    owner: str = "router",
    tenant: str = "anonymous",
    priority: int = 0,
    arrival: float = 0.0,
    deadline: float | None = None,
    chain_root: BlockHash = ROOT,
    **sampling: object,
) -> Request:
    """A request whose EOS is ignored unless ``ignore_eos=False``."""
    values: dict[str, object] = {"max_tokens": max_tokens, "seed": 1, "ignore_eos": True, **sampling}
    return Request(
        key=RequestKey(owner, name, 1),
        prompt=tuple(prompt),
        outputs=outputs,
        sampling=SamplingParams(**values),  # type: ignore[arg-type]
        root=chain_root,
        tenant=tenant,
        priority=priority,
        arrival=arrival,
        deadline=deadline,
    )


def run_to_end(engine: Engine, limit: int = 5000) -> list[Output]:
    """Step until nothing is left, checking after each step; fails when that takes more than ``limit`` steps."""
    outputs: list[Output] = []
    for step in range(limit):
        if not engine.has_work:
            return outputs
        outputs += engine.step(float(step))
        engine.check()
    raise AssertionError(f"work is left after {limit} steps: {engine.load()}")


def tokens_of(outputs: Sequence[Output], name: str, sample: int = 0) -> list[int]:
    """What a sample put out, in order."""
    mine = [output for output in outputs if output.key.request_id == name and output.index == sample]
    return [token for output in mine for token in output.token_ids]


def ends_of(outputs: Sequence[Output], name: str) -> list[object]:
    """Every terminal of a request."""
    return [output.end for output in outputs if output.key.request_id == name and output.end is not None]


def failure_of(outputs: Sequence[Output], name: str) -> type[Exception] | None:
    """The class of error that a request failed with."""
    failed = [end for end in ends_of(outputs, name) if isinstance(end, Failed)]
    return type(failed[0].error) if failed else None


class CacheReplica:
    """What a router knows of a group's pages from its events alone."""

    def __init__(self) -> None:
        self.known: set[BlockHash] = set()

    def apply(self, events: CacheEvents) -> None:
        """Dropped first, then stored; each drop must be of something known."""
        assert self.known.issuperset(events.dropped)
        self.known -= set(events.dropped)
        self.known |= set(events.stored)
