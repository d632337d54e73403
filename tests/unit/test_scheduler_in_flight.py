"""What comes, is cancelled, or runs out of time while a step is in flight: its pages stay until the step has landed."""

from __future__ import annotations

import dataclasses
import gc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cluster.errors import DeadlineExceeded
from tests.support.machines import WatchedMachine, run_until_seen
from tests.support.paged_group import (
    PagedGroup,
    ends_of,
    expected_tokens,
    failure_of,
    make_request,
    make_settings,
    tokens_of,
)
from workers.plan import NOT_FINITE, StepPlan, StepResult
from workers.request import Failed, Finished, Logprob, Output, PositionLogprobs, Request, RequestKey
from workers.scheduler import Scheduler
from workers.sequence import RequestState, Sequence


def flying(num_blocks: int = 16, **changes: object) -> tuple[Scheduler, PagedGroup]:
    return Scheduler(num_blocks, make_settings(**changes)), PagedGroup(num_blocks, 4)


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


@pytest.mark.parametrize("landing", ["committed", "abandoned"])
@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_pages_of_what_ends_in_flight_are_free_once_the_step_has_landed(end: str, landing: str) -> None:
    scheduler, group = flying()
    request = make_request("a", range(1, 10), n=3, deadline=5.0)
    scheduler.add(request)
    for _ in range(2):
        plan = plan_of(scheduler)
        scheduler.commit(plan, group.execute(plan))
    scheduler.take_outputs()
    plan = plan_of(scheduler)
    assert plan.num_rows == 3
    if end == "cancelled":
        scheduler.cancel(request.key)
    else:
        scheduler.expire(5.0)
    scheduler.check()
    assert scheduler.pool.used == len(set(plan.blocks.tolist()))
    if landing == "committed":
        scheduler.commit(plan, group.execute(plan))
    else:
        scheduler.abandon(plan)
    scheduler.check()
    assert scheduler.pool.used == 0
    outputs = scheduler.take_outputs()
    assert failure_of(outputs, "a") is (DeadlineExceeded if end == "expired" else None)
    assert len(outputs) == (1 if end == "expired" else 0)
    assert not scheduler.has_work


@pytest.mark.parametrize("end", ["its own", "cancelled", "cancelled in flight", "expired", "moved"])
def test_what_has_ended_is_freed_at_once(end: str) -> None:
    """Not when Python next looks for cycles: it counts objects, and one that has ended may hold a long prompt."""
    scheduler, group = flying(64)
    outputs = ((1, 2), (3, 4)) if end == "moved" else ()
    request = make_request("a", range(1, 20), 2, n=2, outputs=outputs, deadline=5.0 if end == "expired" else None)
    gc.disable()
    try:
        scheduler.add(request)
        while scheduler.has_work and end != "moved":
            plan = plan_of(scheduler)
            if end == "cancelled in flight":
                scheduler.cancel(request.key)
            scheduler.commit(plan, group.execute(plan))
            if end == "cancelled":
                scheduler.cancel(request.key)
            if end == "expired":
                scheduler.expire(6.0)
            scheduler.take_outputs()
        scheduler.take_outputs()
        assert not scheduler.has_work
        assert not _kept_of(request)
    finally:
        gc.enable()


def _kept_of(request: Request) -> list[object]:
    """What is still in memory of it. By type(), since asking others' objects for their class may run code of theirs."""
    found = gc.get_objects()
    states = [one for one in found if type(one) is RequestState and one.request is request]
    return [*states, *(one for one in found if type(one) is Sequence and one.state.request is request)]


def test_what_is_cancelled_before_its_outputs_were_taken_says_nothing() -> None:
    scheduler, _ = flying()
    kept = make_request("kept", [1, 2], 2, outputs=((4, 5),))
    for request in (make_request("moved", [1, 2], 2, outputs=((4, 5),)), kept):
        scheduler.add(request)  # both have ended already
    scheduler.cancel(RequestKey("router", "moved", 1))
    assert [output.key for output in scheduler.take_outputs()] == [kept.key]


def test_the_same_key_may_come_again_while_the_cancelled_one_is_in_flight() -> None:
    scheduler, group = flying()
    first, second = make_request("a", [1, 2, 3, 4, 5], 3), make_request("a", [6, 7], 3)
    scheduler.add(first)
    plan = plan_of(scheduler)
    scheduler.cancel(first.key)
    scheduler.add(second)
    scheduler.check()
    scheduler.commit(plan, group.execute(plan))
    while (following := scheduler.plan(0.0)) is not None:
        scheduler.commit(following, group.execute(following))
    outputs = scheduler.take_outputs()
    assert tokens_of(outputs, "a") == expected_tokens(second)
    assert len(ends_of(outputs, "a")) == 1


def test_what_a_model_made_nan_of_is_told_and_is_found_by_nobody() -> None:
    scheduler, _ = flying()
    scheduler.add(make_request("a", range(1, 10), 5, n=2))
    plan = plan_of(scheduler)
    scheduler.commit(plan, StepResult(plan.step, (NOT_FINITE,), (None,), 0.1, 0.1))
    outputs = scheduler.take_outputs()
    assert len(outputs) == 1
    assert isinstance(outputs[0].end, Failed)
    assert "NaN" in outputs[0].end.error.message
    assert scheduler.pool.hashes() == []
    scheduler.check()
    assert (scheduler.pool.used, scheduler.has_work) == (0, False)


def test_two_that_fork_in_one_step_copy_the_same_page() -> None:
    """The second must not copy the first's, which is itself a copy that the step has yet to make."""
    scheduler, group = flying(num_blocks=30, max_batch_tokens=32, max_running=6)

    def fly() -> StepPlan:
        plan = plan_of(scheduler)
        scheduler.commit(plan, group.execute(plan))
        return plan

    prompt = [1, 2, 3, 4, 5, 6]
    scheduler.add(make_request("warm", prompt[:5], 1))  # the first block is there
    fly()
    request = make_request("a", prompt, 10, n=3)
    known = (tuple(expected_tokens(request)[:8]), tuple(expected_tokens(request, 1)[:8]), ())
    computing = [make_request(f"b{i}", [*prompt, *known[i]], 1, priority=-1) for i in range(2)]
    for one in computing:  # what the first two samples go on with is promised by others
        scheduler.add(one)
    scheduler.add(dataclasses.replace(request, outputs=known))
    plan = plan_of(scheduler)
    result = group.execute(plan)
    for one in computing:
        scheduler.cancel(one.key)
    scheduler.commit(plan, result)
    sources: set[int] = set()
    outputs = scheduler.take_outputs()
    while scheduler.has_work:
        plan = fly()
        assert not set(plan.copies[:, 0].tolist()) & set(plan.copies[:, 1].tolist())
        if len(plan.copies) == 2:
            sources = set(plan.copies[:, 0].tolist())
        outputs += scheduler.take_outputs()
        scheduler.check()
    assert len(sources) == 1, "both forked in one step"
    for index in range(3):
        assert [*known[index], *tokens_of(outputs, "a", index)] == expected_tokens(request, index)


@pytest.mark.parametrize("scored", [False, True])
def test_nan_at_the_end_of_a_prompt_takes_back_what_was_published_before_it(scored: bool) -> None:
    """What made NaN may have been in any of the pages; what others use too stays, and ends with them."""
    scheduler, _ = flying(max_batch_tokens=4)
    scheduler.add(make_request("a", range(1, 13), 5, prompt_logprobs=0 if scored else None))
    for chunk in range(3):
        plan = plan_of(scheduler)
        last = chunk == 2
        found = None if last else tuple(scored_of(plan))
        tokens = (NOT_FINITE,) * len(plan.draws)
        result = StepResult(plan.step, tokens, (None,) * len(tokens), 0.1, 0.1, (found,) if plan.scores else ())
        scheduler.commit(plan, result)
        assert bool(scheduler.pool.hashes()) == (not last)
    (output,) = scheduler.take_outputs()
    assert isinstance(output.end, Failed)
    assert (scheduler.pool.cached, scheduler.pool.used) == (0, 0)
    scheduler.check()


def scored_of(plan: StepPlan) -> list[PositionLogprobs]:
    return [PositionLogprobs(Logprob(int(t), 0.0, 1), ()) for score in plan.scores for t in score.targets]


class FlightMachine(WatchedMachine):
    """Taking off and landing are two rules, with everything else between them."""

    @initialize(
        num_blocks=st.integers(7, 12),
        budget=st.sampled_from([20, 1, 4, 9]),
        prefix_cache=st.sampled_from([True, False]),
    )
    def start(self, num_blocks: int, budget: int, prefix_cache: bool) -> None:
        self.scheduler, self.group = flying(num_blocks, max_batch_tokens=budget, prefix_cache=prefix_cache)
        self.in_flight: StepPlan | None = None
        self.requests: dict[RequestKey, Request] = {}
        self.cancelled: set[RequestKey] = set()
        self.outputs: list[Output] = []
        self.now = 0.0

    @rule(
        count=st.integers(1, 3),
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        max_tokens=st.sampled_from([14, 1, 3, 8]),
        n=st.sampled_from([1, 3]),
        priority=st.sampled_from([0, 0, -1]),
        patience=st.sampled_from([None, 4.0]),
    )
    def add(
        self, count: int, prompt: list[int], max_tokens: int, n: int, priority: int, patience: float | None
    ) -> None:
        deadline = None if patience is None else self.now + patience
        for seed in range(count):
            name = f"r{len(self.requests)}"
            request = make_request(
                name, prompt, max_tokens, n=n, priority=priority, arrival=self.now, deadline=deadline, seed=seed
            )
            self.requests[request.key] = request
            self.scheduler.add(request)

    @rule(landings=st.sampled_from([1, 5, 15]))
    def fly(self, landings: int) -> None:
        """Land and take off again, some times; the last step stays in the air."""
        for _ in range(landings):
            self.land()
            self.in_flight = self.scheduler.plan(self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kind=st.sampled_from(["cancel", "expire", "abandon"]))
    def interrupt(self, data: st.DataObject, kind: str) -> None:
        """While a step is in the air, if anything can run."""
        if self.in_flight is None:
            self.in_flight = self.scheduler.plan(self.now)
        flies = self.in_flight is not None
        if kind == "cancel":
            alive = sorted(key for key in self.requests if key in self.scheduler)
            key = data.draw(st.sampled_from(alive or sorted(self.requests)))
            self.seen["cancelled in flight"] += flies and bool(alive)
            self.scheduler.cancel(key)
            self.cancelled.add(key)
        elif kind == "expire":
            running = self.scheduler.num_running_requests
            deadlines = [self.requests[key].deadline for key in self.requests if key in self.scheduler]
            self.now = min((deadline for deadline in deadlines if deadline is not None), default=self.now + 1.0)
            self.scheduler.expire(self.now)
            self.seen["expired in flight"] += flies and self.scheduler.num_running_requests < running
        elif self.in_flight is not None:
            self.scheduler.abandon(self.in_flight)
            self.in_flight = None
            self.seen["abandoned"] += 1

    @rule()
    def take(self) -> None:
        outputs = self.scheduler.take_outputs()
        assert all(output.key not in self.cancelled for output in outputs)
        self.outputs += outputs

    @invariant()
    def pages_in_flight_are_nobodys_to_take(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        if self.in_flight is not None:
            pool = self.scheduler.pool
            assert not {*pool._free, *pool._cached}.intersection(self.in_flight.blocks.tolist())

    def land(self) -> None:
        plan, self.in_flight = self.in_flight, None
        if plan is not None:
            self.scheduler.commit(plan, self.group.execute(plan))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            self.land()
            self.in_flight = self.scheduler.plan(self.now)
            if self.in_flight is None:
                break
        self.take()
        assert not self.scheduler.has_work
        assert self.scheduler.pool.used == 0
        self.seen["preempted"] += self.scheduler.totals.preemptions
        for key, request in self.requests.items():
            self.check_outcome(key, request)

    def check_outcome(self, key: RequestKey, request: Request) -> None:
        mine = [output for output in self.outputs if output.key == key]
        ends = [output.end for output in mine if output.end is not None]
        failed = [end for end in ends if isinstance(end, Failed)]
        if key not in self.cancelled:
            assert len(failed) == 1 if failed else len(ends) == request.sampling.n
        for sample in range(request.sampling.n):
            came = tokens_of(mine, key.request_id, sample)
            should = expected_tokens(request, sample)
            complete = any(output.index == sample and isinstance(output.end, Finished) for output in mine)
            assert came == (should if complete else should[: len(came)])


def test_everything_in_flight() -> None:
    run_until_seen(FlightMachine, ["preempted", "abandoned", "cancelled in flight", "expired in flight"])
