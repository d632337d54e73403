"""The engine: requests in, a step at a time, outputs out. Single-threaded, and without a clock: time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cluster.blocks import BlockHash
from cluster.errors import InvalidRequest, Overloaded
from workers.admission import EngineSettings, check_request
from workers.block_pool import CacheEvents, InvariantViolation
from workers.group import Group
from workers.meter import REPRESENTATIVE_TOKENS, Meter
from workers.plan import StepPlan, StepResult
from workers.prefetch import PrefetchTotals
from workers.request import Output, Request, RequestKey
from workers.scheduler import Scheduler
from workers.tier import Tier, TierLoad

__all__ = ["CacheEvents", "Engine", "EngineSettings", "InvariantViolation", "Load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine is doing; fields and units as in proto GroupLoad."""

    waiting_requests: int
    waiting_prefill_tokens: int
    running_requests: int
    waiting_sequences: int
    running_sequences: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    in_transfer_blocks: int
    total_blocks: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_ms: float
    steps: int
    pool_consistent: bool
    requests_finished: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    tier_prompt_tokens: int
    output_tokens: int
    tier: TierLoad | None
    prefetches: PrefetchTotals


class Engine:
    """Continuous batching over one group. Every accepted request ends in one Finished per sample, in one Failed, or
    by ``cancel``; its pages are free from then on."""

    def __init__(self, group: Group, settings: EngineSettings, tier: Tier | None = None) -> None:
        """``tier``: behind the group's pages; it is the caller's to close."""
        self.max_request_tokens = min(settings.max_context_tokens, group.num_blocks * settings.block_tokens)
        self._group = group
        self._settings = settings
        self._scheduler = Scheduler(group.num_blocks, settings, tier if settings.prefix_cache else None)
        self._tier = tier
        self._meter = Meter()
        self._last_submit: dict[str, int] = {}
        self._consistent = True
        self._idle = True

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Accept a request, or say at once why not.

        Raises PromptEmpty, InvalidRequest, ContextExceeded, MaskEmpty, DeadlineExceeded, FieldNotSupported (all name
        field, value and limit), or Overloaded with a retry hint.
        """
        owner = request.key.owner
        # A refused one is taken in too: the router must stop counting it as under way.
        self._last_submit[owner] = max(self._last_submit.get(owner, 0), request.submit_sequence)
        if request.key in self._scheduler:
            raise InvalidRequest.of("request_id", request.key.request_id, "is already running in this attempt")
        check_request(request, self._settings, self._scheduler.pool.num_blocks * self._settings.block_tokens)
        if not any(request.outputs):  # one that has begun elsewhere goes on: its client has half an answer
            self._refuse_if_full()
        self._scheduler.add(request)

    def cancel(self, key: RequestKey) -> None:
        """Forget a request: no output follows, its pages are free unless a step is writing them (then after it).

        Idempotent; an unknown key, one that has not run yet, and one that has ended are all fine.
        """
        self._scheduler.cancel(key)

    def cancel_owner(self, owner: str) -> None:
        """Cancel everything that came over one router's stream, and forget the stream."""
        for key in self._scheduler.keys_of(owner):
            self._scheduler.cancel(key)
        self._last_submit.pop(owner, None)

    def step(self, now: float) -> list[Output]:
        """Compute one step and return what it did; [] when nothing can run. ``now``: seconds, monotonic.

        What the group raises comes through; the step then counts as not computed. (EngineThread takes any exception
        for the end: what a group that failed has in its pages nobody knows.)
        """
        self._scheduler.expire(now)
        plan = self._scheduler.plan(now, self._tokens_beside_decodes())
        if plan is not None:
            try:
                result = self._group.execute(plan)
            except BaseException:
                self._scheduler.abandon(plan)
                raise
            self._scheduler.commit(plan, result)
            self._meter.record(plan, result, self._scheduler.totals.requests_finished)
            self._observe_prefill(plan, result)
        self._idle = plan is None
        return self._scheduler.take_outputs()

    def _tokens_beside_decodes(self) -> int | None:
        target = self._settings.step_target_s
        return None if target is None else self._meter.step_times.tokens_within(target)

    def _observe_prefill(self, plan: StepPlan, result: StepResult) -> None:
        if self._tier is None or plan.num_tokens < max(4 * len(plan.draws), REPRESENTATIVE_TOKENS):
            return
        lengths = np.diff(plan.row_starts)
        depth = int(np.average(plan.num_computed + lengths / 2, weights=lengths))
        self._tier.observe_prefill(plan.num_tokens, depth, result.forward_s)

    @property
    def waits_for_tier(self) -> bool:
        """Whether the last step found nothing to compute, and the tier has still something to say."""
        prefetcher = self._scheduler.prefetcher
        return self._idle and prefetcher is not None and prefetcher.is_waiting

    def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when it is worth to step again."""
        if self._tier is not None:
            self._tier.listen(wake)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has, or may come to have, something to do."""
        return self._scheduler.has_work

    def _refuse_if_full(self) -> None:
        waiting = self._scheduler.num_waiting_requests
        limit = self._settings.max_waiting
        if waiting >= limit:
            hint = self._meter.retry_after_ms(waiting)
            message = f"{waiting} requests wait here already; try again in {hint} ms"
            raise Overloaded(message, retry_after_ms=hint, field="max_waiting", value=waiting, limit=limit)

    def tier_load(self) -> TierLoad | None:
        """Of the tier, which goes on while the engine rests; from any thread."""
        return self._tier.load() if self._tier is not None else None

    def failure(self) -> str | None:
        """Why the group can compute no more, where it knows before a step does; from any thread."""
        return self._group.failure()

    def progress(self) -> int:
        """A number that grows while a step gets on; from any thread."""
        return self._group.progress()

    # -- looking in --------------------------------------------------------------------------------------------------

    def last_submit_sequence(self, owner: str) -> int:
        """The highest ``submit_sequence`` seen from a router's stream, refused ones too; 0 before the first."""
        return self._last_submit.get(owner, 0)

    def take_cache_events(self) -> CacheEvents:
        """Blocks that became shareable, and that no longer are, since the last call."""
        return self._scheduler.pool.take_events()

    def cached_hashes(self) -> list[BlockHash]:
        """Every block that a request could share now."""
        return self._scheduler.pool.hashes()

    def load(self) -> Load:
        """A snapshot; O(live requests)."""
        scheduler, pool, totals, meter = self._scheduler, self._scheduler.pool, self._scheduler.totals, self._meter
        return Load(
            waiting_requests=scheduler.num_waiting_requests,
            waiting_prefill_tokens=scheduler.num_missing_tokens,
            running_requests=scheduler.num_running_requests,
            waiting_sequences=scheduler.num_waiting_sequences,
            running_sequences=scheduler.num_running_sequences,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            used_blocks=pool.used,
            in_transfer_blocks=pool.in_transfer,
            total_blocks=pool.num_blocks,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_tokens_per_s=meter.decode_tokens_per_s,
            step_ms=meter.step_ms,
            steps=meter.steps,
            pool_consistent=self._consistent,
            requests_finished=totals.requests_finished,
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            cached_prompt_tokens=totals.cached_prompt_tokens,
            tier_prompt_tokens=totals.tier_prompt_tokens,
            output_tokens=totals.output_tokens,
            tier=self.tier_load(),
            prefetches=replace(scheduler.prefetcher.totals) if scheduler.prefetcher is not None else PrefetchTotals(),
        )

    def check(self) -> None:
        """Prove the invariants of pages, tables and queues; O(pages). Raises InvariantViolation, and Load says so."""
        self._consistent = False
        self._scheduler.check()
        self._consistent = True
