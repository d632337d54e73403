"""Which tokens the next step computes, for whom, and what the answer means. No torch, no clock, no I/O.

``plan`` gives running sequences their share of the token budget first, then lets waiting ones in. ``commit`` takes the
step's answer. Between the two the step is *in flight*: its sequences' pages are being written, so whatever ends then
gives its pages back in ``commit``, not before.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from cluster.errors import DeadlineExceeded, MaskEmpty, QuireError
from workers.admission import EngineSettings
from workers.block_pool import BlockPool, InvariantViolation
from workers.fair_queue import Fairness, FairQueue
from workers.plan import MASK_EMPTY, NOT_FINITE, Int32, StepPlan, StepResult
from workers.prefetch import Go, Prefetcher
from workers.prefix_cache import Prefix, PrefixCache, fork
from workers.request import Failed, Output, PositionLogprobs, Request, RequestKey
from workers.sequence import RequestState, Sequence
from workers.tier import Tier


class Row(NamedTuple):
    """Tokens of a sequence that are computed in one step."""

    sequence: Sequence
    num_tokens: int


class PageCopy(NamedTuple):
    """A page that a sequence copies in a step, since it goes on where another's tokens differ from its own."""

    sequence: Sequence
    source: int
    target: int


@dataclass(slots=True)
class Totals:
    """Sums since the scheduler began."""

    requests_finished: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    tier_prompt_tokens: int = 0  # of those, from the tier behind the pages
    output_tokens: int = 0


@dataclass(slots=True)
class _Budget:
    """What is left of a step while it is planned, and what has been given."""

    tokens: int
    rows: list[Row] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    def give(self, sequence: Sequence) -> None:
        count = min(sequence.num_missing, self.tokens)
        if count:
            self.tokens -= count
            self.rows.append(Row(sequence, count))

    def copy(self, sequence: Sequence, source: int, target: int) -> None:
        # All copies are read before any is written: of a page that is itself a copy in this step, the original counts.
        source = next((copy.source for copy in self.copies if copy.target == source), source)
        self.copies.append(PageCopy(sequence, source, target))


class Scheduler:
    """Owner of the pages, of the running and of the waiting sequences."""

    def __init__(self, num_blocks: int, settings: EngineSettings, tier: Tier | None = None) -> None:
        """``tier``: where prefixes may be that are in no page here."""
        self.pool = BlockPool(num_blocks)
        self.totals = Totals()
        self._settings = settings
        # More rows than tokens could not all progress in a step.
        self._max_running = min(settings.max_running, settings.max_batch_tokens)
        self._cache = PrefixCache(self.pool, settings.block_tokens, enabled=settings.prefix_cache)
        self.prefetcher = (
            Prefetcher(
                tier,
                self.pool,
                self._cache,
                block_tokens=settings.block_tokens,
                deadline_s=settings.tier_deadline_s,
                claim_wait_s=settings.claim_wait_s,
            )
            if tier is not None
            else None
        )
        self._fairness = Fairness()
        self._waiting = FairQueue(self._fairness)
        self._running: list[Sequence] = []  # by rank: the first is served first and preempted last
        self._live: dict[RequestKey, RequestState] = {}
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._in_flight: tuple[int, _Budget] | None = None
        self._outputs: list[Output] = []
        self._serial = 0
        self._step = 0

    # -- coming and going ------------------------------------------------------------------------------------------

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._live

    def add(self, request: Request) -> None:
        """Take in a valid request whose key is new."""
        self._serial += 1
        state = RequestState(request, self._serial)
        self._live[request.key] = state
        self._fairness.join(request.tenant)
        self._watch_deadline(state)
        self.totals.prompt_tokens += len(state.prompt)
        # One that has begun elsewhere is like one that was preempted.
        push = self._waiting.push_preempted if any(request.outputs) else self._waiting.push
        for sequence in state.samples:
            push(sequence)
        for sequence in state.samples:
            self._end_if_due(sequence, (), ())  # a moved sample may have come to its end already
        if self.prefetcher is not None and not state.ended:
            self.prefetcher.begin(state)

    def cancel(self, key: RequestKey) -> None:
        """Forget a request: no output of it is taken any more. Unknown keys are ignored."""
        self._outputs = [output for output in self._outputs if output.key != key]
        state = self._live.get(key)
        if state is not None:
            self._close(state)

    def expire(self, now: float) -> None:
        """Fail every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, state = heapq.heappop(self._deadlines)
            waited = now - state.request.arrival
            self._fail(state, DeadlineExceeded(f"the deadline passed after {waited:.3f} s in the group"))

    def _watch_deadline(self, state: RequestState) -> None:
        if state.request.deadline is None:
            return
        if len(self._deadlines) > 2 * len(self._live) + 64:  # far deadlines must not keep ended requests in memory
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (state.request.deadline, self._serial, state))

    def take_outputs(self) -> list[Output]:
        """What there is to tell since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self, now: float, tokens_beside_decodes: int | None = None) -> StepPlan | None:
        """The next step, or None when nothing can run. Raises RuntimeError while a step is in flight.

        ``tokens_beside_decodes``: the budget of a step in which sequences decode, so that they need not wait for long
        chunks; it is raised to what lets every decode and one page of a prompt progress. None: the usual budget.
        """
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight; commit or abandon it first")
        if self.prefetcher is not None:
            self.prefetcher.advance(now)
        pages_lacked = self._make_room()
        budget = _Budget(self._tokens_of_step(tokens_beside_decodes))
        self._share(budget)
        if not pages_lacked:
            self._admit(budget, now)
        if not budget.rows:
            return None
        self._step += 1
        self._in_flight = (self._step, budget)
        return _build(self._step, budget, self._settings.block_tokens)

    def _tokens_of_step(self, beside_decodes: int | None) -> int:
        decodes = sum(sequence.num_missing == 1 for sequence in self._running)
        if beside_decodes is None or not decodes:
            return self._settings.max_batch_tokens
        return min(self._settings.max_batch_tokens, max(beside_decodes, decodes + self._settings.block_tokens))

    def _share(self, budget: _Budget) -> None:
        """Running sequences: those that miss one token before those that miss many, so that no long prompt starves
        a decode; in each, the oldest first."""
        ready = [sequence for sequence in self._running if self._lacks(sequence) <= 0]
        for sequence in ready:
            if sequence.num_missing == 1:
                budget.give(sequence)
        for sequence in ready:
            if sequence.num_missing > 1:
                budget.give(sequence)

    def _make_room(self) -> bool:
        """Give every running sequence pages for all that it knows, oldest first; True when that preempted somebody.

        Pages come from the youngest. The oldest can take them from all others, and admission proved that it fits
        alone: it always progresses, so preemption cannot go round in circles. It waits for pages in transfer only, and
        these have a deadline.
        """
        before = self.totals.preemptions
        for sequence in list(self._running):
            while sequence in self._running and self._lacks(sequence) > self.pool.available:
                if not self._take_room():
                    return True
            if sequence in self._running:
                sequence.table.extend(self.pool.allocate(self._lacks(sequence)))
        return self.totals.preemptions > before

    def _take_room(self) -> bool:
        """Free some pages; False where the last one that runs can only wait."""
        if self.prefetcher is not None and self.prefetcher.drop_holds():
            return True
        if len(self._running) == 1 and self.pool.in_transfer:
            return False
        self._preempt(self._running[-1])
        return True

    def _lacks(self, sequence: Sequence) -> int:
        return -(-sequence.num_known // self._settings.block_tokens) - len(sequence.table)

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self._give_back_pages(sequence)
        self._waiting.push_preempted(sequence)
        self.totals.preemptions += 1
        sequence.state.preemptions += 1

    def _admit(self, budget: _Budget, now: float) -> None:
        """Let waiting sequences in while tokens, slots and pages last.

        One that awaits another's blocks is passed by; one that lacks pages holds up those behind it, or small
        requests would starve it.
        """
        if not len(self._waiting):
            return
        for sequence in self._waiting:
            if not budget.tokens or len(self._running) >= self._max_running:
                return
            if sequence.awaits_sample or self._cache.is_promised(sequence.held_on):
                continue
            if self.prefetcher is not None:
                go = self.prefetcher.go(sequence, now, spare=len(self._running))
                if go == Go.NO_ROOM:
                    self._let_go_of_holds()
                    return
                if go == Go.WAIT:
                    continue
            prefix = self._cache.match(sequence)
            forked = fork(sequence, self._settings.block_tokens)
            if forked is not None and forked.num_tokens > prefix.num_tokens:
                prefix = forked
            else:
                sequence.held_on = self._cache.awaited(sequence, len(prefix.pages))
                if sequence.held_on is not None:
                    continue
            if not self._start(sequence, prefix, now):
                self._let_go_of_holds()
                return
            if prefix.partial is not None:
                budget.copy(sequence, prefix.partial, int(sequence.table.view()[len(prefix.pages)]))
            budget.give(sequence)

    def _let_go_of_holds(self) -> None:
        """Where nobody runs, nobody will give pages back: those that wait must not keep them from each other."""
        if self.prefetcher is not None and not self._running:
            self.prefetcher.drop_holds()

    def _start(self, sequence: Sequence, prefix: Prefix, now: float) -> bool:
        """Give a waiting sequence its pages; False when they lack now."""
        needed = -(-sequence.num_known // self._settings.block_tokens) - len(prefix.pages)
        self.pool.acquire(prefix.pages)
        # One page to spare for each that runs: what is let in should not be preempted in the very next steps.
        if needed + len(self._running) > self.pool.available:
            self.pool.release(prefix.pages)
            return False
        self._waiting.remove(sequence)
        sequence.table.extend([*prefix.pages, *self.pool.allocate(needed)])
        sequence.num_published = self._cache.count_published(sequence, len(prefix.pages))
        sequence.num_computed = prefix.num_tokens
        self._cache.promise(sequence)
        if self.prefetcher is not None:
            self.prefetcher.started(sequence)
        insort(self._running, sequence, key=_by_rank)
        self._account(sequence, now)
        return True

    def _account(self, sequence: Sequence, now: float) -> None:
        """Charge the tenant, once per request, and count cached tokens."""
        state = sequence.state
        if not state.admit(sequence.num_computed, now):
            return
        self.totals.cached_prompt_tokens += state.cached_tokens
        self.totals.tier_prompt_tokens += state.tier_tokens
        self._fairness.charge(state.request.tenant, len(state.prompt) - state.cached_tokens, state.cached_tokens)

    # -- taking the answer -------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """The step is done: publish what is full, append what was drawn, end what has ended."""
        rows = self._land(plan.step).rows
        if result.step != plan.step or len(result.tokens) != len(plan.draws):
            raise InvariantViolation(f"step {plan.step} with {len(plan.draws)} draws was answered by {result}")
        broken = {draw.row for draw, token in zip(plan.draws, result.tokens, strict=True) if token == NOT_FINITE}
        broken |= {score.row for score, found in zip(plan.scores, result.scores, strict=True) if found is None}
        for index, (sequence, count) in enumerate(rows):
            if not sequence.finished:
                sequence.num_computed += count
                if index in broken:  # whatever made NaN, in this step or one before, must not be found by others
                    self._cache.retract(sequence)
                else:
                    self._publish(sequence)
        for score, found in zip(plan.scores, result.scores, strict=True):
            self._take_scores(rows[score.row].sequence, found)
        for draw, token, logprobs in zip(plan.draws, result.tokens, result.logprobs, strict=True):
            self._append(rows[draw.row].sequence, token, logprobs)

    def _publish(self, sequence: Sequence) -> None:
        self._cache.publish(sequence)
        if self.prefetcher is not None:
            self.prefetcher.offer(sequence)

    def abandon(self, plan: StepPlan) -> None:
        """The step failed: nothing of it counts as computed, so it can be planned again."""
        for sequence, _, target in self._land(plan.step).copies:
            if not sequence.finished:  # what should have been copied is computed instead
                sequence.num_computed = sequence.table.view().tolist().index(target) * self._settings.block_tokens

    def _land(self, step: int) -> _Budget:
        """End the flight of a step; returns what it gave. Pages of what ended meanwhile become free now."""
        if self._in_flight is None or self._in_flight[0] != step:
            raise InvariantViolation(f"step {step} is not in flight")
        given = self._in_flight[1]
        self._in_flight = None
        for sequence, _ in given.rows:
            if sequence.finished:
                self._give_back_pages(sequence)
        return given

    def _take_scores(self, sequence: Sequence, found: tuple[PositionLogprobs, ...] | None) -> None:
        if sequence.finished:
            return
        if found is None:
            self._fail(sequence.state, QuireError("the model gave NaN or infinity within the prompt"))
        else:
            sequence.state.take_scores(found)

    def _append(self, sequence: Sequence, token: int, logprobs: PositionLogprobs | None) -> None:
        if sequence.finished:
            return
        if token == MASK_EMPTY:
            message = f"sample {sequence.index}: no token is left to draw at output {len(sequence.outputs)}"
            self._fail(sequence.state, MaskEmpty(message, field="sampling", sample=sequence.index))
            return
        if token == NOT_FINITE:
            message = f"sample {sequence.index}: the model gave NaN or infinity at output {len(sequence.outputs)}"
            self._fail(sequence.state, QuireError(message))
            return
        sequence.outputs.extend((token,))
        self.totals.output_tokens += 1
        self._fairness.charge(sequence.state.request.tenant, 1)
        told = () if logprobs is None else (logprobs,)
        if not self._end_if_due(sequence, (token,), told):
            state = sequence.state
            self._outputs.append(Output(state.request.key, sequence.index, (token,), told, state.announce()))

    def _end_if_due(self, sequence: Sequence, tokens: tuple[int, ...], told: tuple[PositionLogprobs, ...]) -> bool:
        end = sequence.end(self._settings.eos_token_ids)
        if end is None:
            return False
        state = sequence.state
        self._outputs.append(Output(state.request.key, sequence.index, tokens, told, state.announce(), end))
        self._finish(sequence)
        state.unfinished -= 1
        if not state.unfinished:
            self._close(state)
        return True

    # -- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, state: RequestState, error: QuireError) -> None:
        if not state.ended:
            self._outputs.append(Output(state.request.key, end=Failed(error)))
            self._close(state)

    def _close(self, state: RequestState) -> None:
        """The one exit of a request: nothing of it waits, runs, or keeps a page that no step is writing."""
        state.ended = True
        del self._live[state.request.key]
        self._fairness.leave(state.request.tenant)
        self.totals.requests_finished += 1
        if self.prefetcher is not None:
            self.prefetcher.forget(state)
        for sequence in state.samples:
            self._finish(sequence)
        # They name it, as it does them: else prompts stay in memory until Python next looks for cycles.
        state.samples = []

    def _finish(self, sequence: Sequence) -> None:
        if sequence.finished:
            return
        sequence.finished = True
        if sequence not in self._running:
            self._waiting.remove(sequence)
            return
        self._stop_running(sequence)
        if not self._is_in_flight(sequence):
            self._give_back_pages(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._cache.withdraw(sequence)

    def _give_back_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.forget_pages())

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return self._in_flight is not None and any(row.sequence is sequence for row in self._in_flight[1].rows)

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request lives, an output waits to be taken, or pages are in transfer."""
        return bool(self._live or self._outputs or self.pool.in_transfer)

    def keys_of(self, owner: str) -> list[RequestKey]:
        """Live requests that came over one router's stream."""
        return [key for key in self._live if key.owner == owner]

    @property
    def num_waiting_requests(self) -> int:
        """Requests accepted of which no sample has run yet."""
        return sum(state.admitted_at is None for state in self._live.values())

    @property
    def num_running_requests(self) -> int:
        """Requests that hold pages now."""
        return len({sequence.state.request.key for sequence in self._running})

    @property
    def num_running_sequences(self) -> int:
        """Samples that hold pages now."""
        return len(self._running)

    @property
    def num_waiting_sequences(self) -> int:
        """Samples that wait for pages and a slot, preempted ones too."""
        return len(self._waiting)

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens not yet computed, of all that lives; a prompt counts once for all samples that wait for it.

        What only waits for its next decode is not counted. O(requests, and samples of those that have begun).
        """
        begun = [state for state in self._live.values() if state.admitted_at is not None]
        first = sum(state.samples[0].num_missing for state in self._live.values() if state.admitted_at is None)
        return first + sum(map(_missing_of_begun, begun))

    def check(self) -> None:
        """Prove what must hold between steps. Raises InvariantViolation."""
        in_flight = [row.sequence for row in self._in_flight[1].rows] if self._in_flight else []
        ending = [sequence for sequence in in_flight if sequence.finished]
        held = self.prefetcher.tables() if self.prefetcher is not None else []
        fetching = self.prefetcher.fetching() if self.prefetcher is not None else []
        self.pool.check([*(sequence.table.view().tolist() for sequence in [*self._running, *ending]), *held])
        self._cache.check(self._running, fetching)
        alive = [s for state in self._live.values() for s in state.samples if not s.finished]
        placed = [*self._running, *self._waiting]
        if sorted(map(_by_rank, alive)) != sorted(map(_by_rank, placed)):
            raise InvariantViolation(f"{len(alive)} sequences live, {len(placed)} run or wait")
        if any(len(s.table) or s.num_computed for s in self._waiting):
            raise InvariantViolation("a waiting sequence holds pages")


_by_rank = attrgetter("rank")


def _missing_of_begun(state: RequestState) -> int:
    alive = [sample for sample in state.samples if not sample.finished]
    running = [sample for sample in alive if len(sample.table)]
    waiting = [sample for sample in alive if not len(sample.table)]
    shared = 0 if running else min(1, sum(not len(sample.outputs) for sample in waiting))
    own = sum(sample.num_known for sample in waiting if len(sample.outputs))
    return own + shared * len(state.prompt) + sum(max(0, sample.num_missing - 1) for sample in running)


def _build(step: int, given: _Budget, block_tokens: int) -> StepPlan:
    """Arrays of a step; O(rows) Python, the tokens and pages are copied by numpy."""
    rows = given.rows
    stops = [sequence.num_computed + count for sequence, count in rows]
    tokens = [row.sequence.tokens(row.sequence.num_computed, stop) for row, stop in zip(rows, stops, strict=True)]
    tables = [row.sequence.table.view(0, -(-stop // block_tokens)) for row, stop in zip(rows, stops, strict=True)]
    scores = [row.sequence.score(index, row.num_tokens) for index, row in enumerate(rows)]
    draws = [row.sequence.draw(index) for index, row in enumerate(rows) if row.num_tokens == row.sequence.num_missing]
    return StepPlan(
        step=step,
        token_ids=np.concatenate(tokens),
        row_starts=_starts(tokens),
        num_computed=np.array([row.sequence.num_computed for row in rows], dtype=np.int32),
        carried_from=np.full(len(rows), -1, dtype=np.int32),
        block_starts=_starts(tables),
        blocks=np.concatenate(tables),
        draws=tuple(draws),
        copies=np.array([copy[1:] for copy in given.copies], dtype=np.int32).reshape(-1, 2),
        scores=tuple(score for score in scores if score is not None),
    )


def _starts(parts: list[Int32]) -> Int32:
    return np.array([0, *accumulate(map(len, parts))], dtype=np.int32)
