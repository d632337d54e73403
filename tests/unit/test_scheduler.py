"""What the scheduler decides: order, budget, preemption, waiting for another's blocks, who is refused."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.blocks import root
from cluster.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptEmpty,
)
from tests.support.paged_group import (
    VOCAB,
    GroupBroke,
    PagedGroup,
    ends_of,
    expected_tokens,
    failure_of,
    make_engine,
    make_request,
    make_settings,
    run_to_end,
    tokens_of,
)
from workers.engine import Engine
from workers.request import Finished, FinishReason
from workers.scheduler import Scheduler


def row_lengths(group: PagedGroup, step: int = -1) -> list[int]:
    starts = group.plans[step].row_starts.tolist()
    return [stop - start for start, stop in pairwise(starts)]


def first_draws(group: PagedGroup) -> list[int]:
    """Seeds in the order in which requests got their first token."""
    seeds = [draw.params.seed for plan in group.plans for draw in plan.draws if not len(draw.output_tokens)]
    return list(dict.fromkeys(seeds))


# -- budget and order ------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_to_the_token_budget() -> None:
    engine, group = make_engine(max_batch_tokens=16)
    engine.submit(make_request("a", range(1, 41), 2))
    run_to_end(engine)
    assert [plan.num_tokens for plan in group.plans] == [16, 16, 8, 1]
    assert [len(plan.draws) for plan in group.plans] == [0, 0, 1, 1]


def test_decodes_are_never_starved_by_a_long_prompt() -> None:
    engine, group = make_engine(max_batch_tokens=8)
    engine.submit(make_request("decoding", [1, 2, 3], 20))
    engine.step(0.0)
    engine.submit(make_request("long", range(1, 49), 1))
    for _ in range(6):
        engine.step(0.0)
        assert row_lengths(group) == [1, 7]


def test_a_prompt_progresses_among_as_many_decodes_as_the_budget_has_tokens() -> None:
    engine, _ = make_engine(max_batch_tokens=3, max_running=50)
    for index in range(6):
        engine.submit(make_request(f"r{index}", [index + 1, 2, 3, 4, 5], 30, seed=index))
    outputs = run_to_end(engine)
    assert all(len(tokens_of(outputs, f"r{index}")) == 30 for index in range(6))


def test_no_more_sequences_run_than_the_settings_allow() -> None:
    engine, group = make_engine(max_running=2)
    for index in range(5):
        engine.submit(make_request(f"r{index}", [index + 1, 2], 4))
    run_to_end(engine)
    assert max(plan.num_rows for plan in group.plans) == 2


def test_smaller_priority_runs_first_then_arrival() -> None:
    engine, group = make_engine(max_running=1)
    for seed, (priority, arrival) in enumerate([(1, 0.0), (0, 2.0), (0, 1.0), (-5, 3.0)]):
        engine.submit(make_request(f"r{seed}", [seed + 1], 1, priority=priority, arrival=arrival, seed=seed))
    run_to_end(engine)
    assert first_draws(group) == [3, 2, 1, 0]


# -- fairness --------------------------------------------------------------------------------------------------------


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few() -> None:
    engine, group = make_engine(max_running=1)
    for seed in range(10):
        engine.submit(make_request(f"many{seed}", [seed + 1, 7, 8], 2, tenant="many", seed=seed))
    engine.submit(make_request("few", [9, 9, 9], 2, tenant="few", seed=99, arrival=1.0))
    run_to_end(engine)
    assert first_draws(group).index(99) <= 1


def test_an_idle_tenant_earns_no_credit() -> None:
    engine, group = make_engine(max_running=1)
    for seed in range(20):
        engine.submit(make_request(f"busy{seed}", [seed + 1, 7, 8], 2, tenant="busy", seed=seed))
    for _ in range(20):
        engine.step(0.0)
    served = len(first_draws(group))
    for seed in range(100, 110):
        engine.submit(make_request(f"late{seed}", [seed - 90, 5, 5], 2, tenant="late", seed=seed, arrival=1.0))
    run_to_end(engine)
    next_eight = first_draws(group)[served : served + 8]
    assert 3 <= sum(seed < 100 for seed in next_eight) <= 5  # they take turns, however long one was idle


def test_cached_tokens_cost_a_tenant_less() -> None:
    engine, group = make_engine(max_running=1, num_blocks=200)
    shared = range(1, 41)
    engine.submit(make_request("warm", shared, 1, tenant="cached", seed=50))
    engine.step(0.0)
    engine.submit(make_request("hold", [1], 30, tenant="other", seed=51))  # keeps the one slot while others queue
    for seed in range(6):
        engine.submit(make_request(f"c{seed}", [*shared, seed + 1], 1, tenant="cached", seed=seed, arrival=1.0))
        engine.submit(make_request(f"n{seed}", [seed + 1] * 41, 1, tenant="fresh", seed=100 + seed, arrival=1.0))
    run_to_end(engine)
    first_six = [seed for seed in first_draws(group) if seed not in (50, 51)][:6]
    assert sum(seed < 100 for seed in first_six) >= 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 6)), min_size=2, max_size=14))
def test_everybody_of_one_priority_is_served(loads: list[tuple[int, int, int]]) -> None:
    engine, _ = make_engine(num_blocks=12, max_batch_tokens=8, max_running=3)
    for index, (tenant, length, output) in enumerate(loads):
        engine.submit(make_request(f"r{index}", [index + 1] * length, output, tenant=str(tenant), arrival=index))
    outputs = run_to_end(engine)
    assert [len(tokens_of(outputs, f"r{i}")) for i in range(len(loads))] == [output for _, _, output in loads]


# -- pages: preemption -----------------------------------------------------------------------------------------------


def test_the_last_arrived_of_the_lowest_priority_is_preempted_and_comes_back_first() -> None:
    engine, _ = make_engine(num_blocks=8, max_batch_tokens=32)
    engine.submit(make_request("old", [1, 2, 3], 20, arrival=0.0))
    engine.submit(make_request("urgent", [4, 5, 6], 12, arrival=2.0, priority=-1))
    engine.submit(make_request("young", [7, 8, 9], 12, arrival=1.0))
    outputs = run_to_end(engine)
    finished = {o.key.request_id: o.end for o in outputs if isinstance(o.end, Finished)}
    preempted = {name: end.usage.preemptions for name, end in finished.items()}
    assert preempted["urgent"] == preempted["old"] == 0
    assert preempted["young"] > 0
    assert engine.load().preemptions == preempted["young"]


def test_a_preempted_request_comes_back_before_those_that_never_ran() -> None:
    """Even where its tenant has been served most: it has been paid for."""
    engine, group = make_engine(num_blocks=8, max_batch_tokens=64, prefix_cache=False)
    engine.submit(make_request("old", range(1, 14), 10, tenant="served", seed=0))
    engine.submit(make_request("young", range(20, 31), 12, tenant="served", seed=1, arrival=1.0))
    while not engine.load().preemptions:
        engine.step(2.0)
    engine.submit(make_request("fresh", [9] * 11, 1, tenant="idle", seed=2, arrival=2.0))
    before = len(group.plans)
    run_to_end(engine)
    later = [draw.params.seed for plan in group.plans[before:] for draw in plan.draws if draw.params.seed]
    assert later.index(1) < later.index(2)


def test_what_is_let_in_leaves_a_page_to_each_that_runs() -> None:
    engine, group = make_engine(num_blocks=9, max_batch_tokens=64, prefix_cache=False)
    for seed in range(2):
        engine.submit(make_request(f"r{seed}", [seed + 1] * 8, 8, seed=seed))
    engine.step(0.0)
    engine.submit(make_request("third", [5] * 10, 2, seed=2, arrival=1.0))  # 3 pages, and as many are left
    outputs = run_to_end(engine)
    assert len(tokens_of(outputs, "third")) == 2
    assert engine.load().preemptions == 0
    assert first_draws(group) == [0, 1, 2]
    assert max(plan.num_rows for plan in group.plans) == 2


def test_preempted_pages_stay_cached_and_are_found_again() -> None:
    engine, group = make_engine(num_blocks=9, max_batch_tokens=64)
    engine.submit(make_request("old", range(1, 14), 10, arrival=0.0))
    engine.submit(make_request("young", range(20, 33), 10, arrival=1.0))
    run_to_end(engine)
    assert engine.load().preemptions > 0
    # What came back did not begin at 0 again.
    assert any(
        plan.num_computed[draw.row] >= 4 and row_lengths(group, index)[draw.row] > 1
        for index, plan in enumerate(group.plans)
        for draw in plan.draws
    )


def test_a_preempted_request_comes_back_with_its_first_hit_count() -> None:
    """Pages: a preempted request comes back with a stale hit count."""
    engine, _ = make_engine(num_blocks=9, max_batch_tokens=64)
    old, young = make_request("old", range(1, 14), 12), make_request("young", range(20, 33), 12, arrival=1.0)
    engine.submit(old)
    engine.submit(young)
    outputs = run_to_end(engine)
    ends = ends_of(outputs, "young")
    assert isinstance(ends[0], Finished)
    assert ends[0].usage.preemptions > 0
    assert ends[0].usage.cached_tokens == 0  # not what its own pages gave it when it came back
    admitted = [o.admitted for o in outputs if o.key.request_id == "young" and o.admitted]
    assert [a.cached_tokens for a in admitted] == [0]
    assert tokens_of(outputs, "young") == expected_tokens(young)


def test_a_request_that_lacks_pages_is_not_overtaken_by_smaller_ones() -> None:
    engine, group = make_engine(num_blocks=12, max_batch_tokens=64, max_running=8)
    engine.submit(make_request("running", [1] * 20, 8, seed=0))
    engine.step(0.0)
    engine.submit(make_request("large", [2] * 36, 4, seed=1, arrival=1.0))
    engine.submit(make_request("small", [3], 4, seed=2, arrival=2.0))
    run_to_end(engine)
    assert first_draws(group) == [0, 1, 2]


def test_nothing_is_planned_while_a_step_is_in_flight() -> None:
    scheduler = Scheduler(16, make_settings())
    scheduler.add(make_request("a", [1, 2, 3]))
    assert scheduler.plan(0.0) is not None
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.plan(0.0)


def test_pages_are_not_freed_while_a_step_still_writes_them() -> None:
    """Pages: freed while a step still writes them."""
    scheduler = Scheduler(16, make_settings())
    group = PagedGroup(16, 4)
    first, second = make_request("a", [1, 2, 3, 4, 5]), make_request("b", [6, 7, 8])
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.cancel(first.key)
    scheduler.check()
    assert scheduler.pool.used == 3
    scheduler.commit(plan, group.execute(plan))
    scheduler.check()
    assert scheduler.pool.used == 1
    assert [output.key for output in scheduler.take_outputs()] == [second.key]


def test_a_failed_step_leaves_the_pages_consistent_and_can_be_repeated() -> None:
    engine, group = make_engine()
    request = make_request("a", range(1, 30), 5)
    engine.submit(request)
    engine.step(0.0)
    group.broken = True
    with pytest.raises(GroupBroke):
        engine.step(1.0)
    engine.check()
    group.broken = False
    assert tokens_of(run_to_end(engine), "a") == expected_tokens(request)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancel_before_the_first_step_while_computing_and_twice(steps: int) -> None:
    """Pages: abort before the first step, abort while loading, abort twice."""
    engine, _ = make_engine(max_batch_tokens=8)
    request = make_request("a", range(1, 20), 5)
    engine.submit(request)
    for _ in range(steps):
        engine.step(0.0)
    for _ in range(2):
        engine.cancel(request.key)
        engine.check()
        assert engine.load().used_blocks == 0
    assert not engine.has_work
    assert engine.step(1.0) == []


# -- pages: sharing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_a_full_prefix_hit_still_computes_one_token(length: int) -> None:
    """Pages: a full prefix hit leaves zero tokens to run."""
    engine, group = make_engine()
    request = make_request("a", range(1, length + 1), 3)
    engine.submit(request)
    run_to_end(engine)
    again = make_request("b", range(1, length + 1), 3)
    engine.submit(again)
    before = len(group.plans)
    outputs = run_to_end(engine)
    cached = (length - 1) // 4 * 4
    assert outputs[0].admitted is not None
    assert outputs[0].admitted.cached_tokens == cached
    assert group.plans[before].num_tokens == length - cached
    assert tokens_of(outputs, "b") == expected_tokens(again)


def test_a_block_is_published_only_when_full_and_computed() -> None:
    """Pages: a block published before it is complete poisons a prefix."""
    engine, _ = make_engine(max_batch_tokens=6)
    engine.submit(make_request("a", range(1, 12), 3))
    published = []
    while engine.has_work:
        published.append(len(engine.cached_hashes()))
        engine.step(0.0)
    assert published == [0, 1, 2, 3]  # at 0, 6, 11 and 12 computed tokens, not at 11 known ones


def test_a_cancelled_prompt_leaves_no_block_that_was_not_computed() -> None:
    engine, _ = make_engine(max_batch_tokens=8)
    request = make_request("a", range(1, 30), 3)
    engine.submit(request)
    engine.step(0.0)
    engine.cancel(request.key)
    assert len(engine.cached_hashes()) == 2
    again = make_request("b", range(1, 30), 3)
    engine.submit(again)
    assert tokens_of(run_to_end(engine), "b") == expected_tokens(again)


def test_outputs_are_shared_as_a_later_prompt() -> None:
    engine, _ = make_engine()
    first = make_request("a", range(1, 8), 10)
    engine.submit(first)
    outputs = run_to_end(engine)
    turn = make_request("b", [*range(1, 8), *tokens_of(outputs, "a"), 5], 4)
    engine.submit(turn)
    outputs = run_to_end(engine)
    assert outputs[0].admitted is not None
    assert outputs[0].admitted.cached_tokens == 16
    assert tokens_of(outputs, "b") == expected_tokens(turn)


def test_requests_of_different_roots_share_nothing() -> None:
    engine, _ = make_engine()
    engine.submit(make_request("a", range(1, 20), 2))
    run_to_end(engine)
    engine.submit(make_request("b", range(1, 20), 2, chain_root=root(b"secret", "other", "namespace")))
    outputs = run_to_end(engine)
    assert outputs[0].admitted is not None
    assert outputs[0].admitted.cached_tokens == 0


def test_without_a_prefix_cache_nothing_is_hashed_or_found() -> None:
    engine, _ = make_engine(prefix_cache=False)
    for name in ("a", "b"):
        request = make_request(name, range(1, 20), 2)
        engine.submit(request)
        outputs = run_to_end(engine)
        assert tokens_of(outputs, name) == expected_tokens(request)
        assert outputs[0].admitted is not None
        assert outputs[0].admitted.cached_tokens == 0
    assert engine.cached_hashes() == []
    assert engine.load().cached_blocks == 0


# -- identical prompts in flight -------------------------------------------------------------------------------------


def test_the_second_of_two_equal_prompts_waits_for_the_firsts_blocks() -> None:
    engine, group = make_engine(max_batch_tokens=8)
    for name in ("a", "b"):
        engine.submit(make_request(name, range(1, 34), 2))
    outputs = run_to_end(engine)
    assert sum(plan.num_tokens for plan in group.plans) == 33 + 1 + 1 + 1
    assert tokens_of(outputs, "a") == tokens_of(outputs, "b")
    assert [o.admitted.cached_tokens for o in outputs if o.admitted] == [0, 32]


def test_what_waits_for_blocks_holds_up_nobody_behind_it() -> None:
    engine, group = make_engine(max_batch_tokens=12)
    engine.submit(make_request("a", range(1, 22), 2, seed=0))
    engine.submit(make_request("b", range(1, 22), 2, seed=1, arrival=1.0))
    engine.step(0.0)
    engine.submit(make_request("c", [40], 1, seed=2, arrival=2.0))
    run_to_end(engine)
    assert first_draws(group) == [0, 2, 1]


def test_only_the_shared_part_is_waited_for() -> None:
    engine, group = make_engine(max_batch_tokens=8)
    engine.submit(make_request("a", range(1, 42), 1, seed=0))
    engine.submit(make_request("b", [*range(1, 9), 9, 9, 9], 1, seed=1, arrival=1.0))
    engine.step(0.0)
    # All that the two share is there: b no longer waits, though a still computes.
    assert engine.load().running_requests == 1
    run_to_end(engine)
    assert group.plans[1].num_rows == 1  # a's chunk had the whole budget
    assert sum(plan.num_tokens for plan in group.plans) == 41 + 3


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_when_the_first_of_two_equal_prompts_goes_the_second_goes_on(leave: str) -> None:
    engine, _ = make_engine(max_batch_tokens=8)
    first = make_request("a", range(1, 34), 2, deadline=5.0 if leave == "deadline" else None)
    second = make_request("b", range(1, 34), 2, arrival=1.0)
    engine.submit(first)
    engine.submit(second)
    engine.step(1.0)
    if leave == "cancel":
        engine.cancel(first.key)
    else:
        assert failure_of(engine.step(6.0), "a") is DeadlineExceeded
    assert tokens_of(run_to_end(engine), "b") == expected_tokens(second)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 30), st.integers(9, 14), st.integers(1, 20))
def test_equal_prompts_never_wait_for_each_other_for_ever(
    copies: int, length: int, num_blocks: int, budget: int
) -> None:
    engine, _ = make_engine(num_blocks=num_blocks, max_batch_tokens=budget)
    requests = [make_request(f"r{i}", range(1, length + 1), 6, seed=i, arrival=i) for i in range(copies)]
    for request in requests:
        engine.submit(request)
    outputs = run_to_end(engine)
    for request in requests:
        assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)


# -- limits ----------------------------------------------------------------------------------------------------------


def refusal(engine: Engine, **changes: object) -> Exception:
    request = dataclasses.replace(make_request("a", [1, 2, 3], 4), **changes)  # type: ignore[arg-type]
    with pytest.raises(Exception) as caught:
        engine.submit(request)
    assert not engine.has_work
    return caught.value


def test_an_empty_prompt_is_refused_and_the_engine_lives() -> None:
    """Limits: an empty prompt kills the server."""
    engine, _ = make_engine()
    assert isinstance(refusal(engine, prompt=()), PromptEmpty)
    engine.submit(make_request("b", [1], 1))
    assert len(tokens_of(run_to_end(engine), "b")) == 1


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**32 - 1])
@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("prompt_token_ids", None),
        ("output_token_ids", None),
        ("logit_bias", "mapping"),
        ("allowed_token_ids", "tuple"),
        ("bad_token_sequences", "nested"),
        ("stop_token_ids", "set"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(field: str, sampling: str | None, bad: int) -> None:
    """Sampling: a token id outside the vocabulary."""
    engine, _ = make_engine()
    if field == "prompt_token_ids":
        error = refusal(engine, prompt=(1, bad))
    elif field == "output_token_ids":
        error = refusal(engine, outputs=((2, bad),))
    else:
        value = {"mapping": {bad: 1.0}, "tuple": (1, bad), "nested": ((1,), (2, bad)), "set": frozenset({1, bad})}
        params = make_request("a", [1], 4, **{field: value[str(sampling)]}).sampling
        error = refusal(engine, sampling=params)
    assert isinstance(error, InvalidRequest)
    assert error.metadata == {"field": field, "value": str(bad), "limit": str(VOCAB)}


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
@pytest.mark.parametrize("limit", ["context", "pool"])
def test_prompt_as_long_as_the_limit_one_less_and_one_more(limit: str, over: int, fits: bool) -> None:
    """Limits: a prompt exactly as long as the context, one less, one more."""
    engine, _ = (
        make_engine(num_blocks=8, max_context_tokens=1000)
        if limit == "pool"
        else make_engine(num_blocks=100, max_context_tokens=32)
    )
    assert engine.max_request_tokens == 32
    request = make_request("a", [1 + i % 40 for i in range(28 + over)], 4)
    if fits:
        engine.submit(request)
        assert tokens_of(run_to_end(engine), "a") == expected_tokens(request)
        return
    with pytest.raises(ContextExceeded) as caught:
        engine.submit(request)
    assert caught.value.metadata == {"field": "max_tokens", "value": "33", "limit": "32", "prompt_tokens": "29"}


def test_a_request_that_fits_the_context_but_not_the_pool_blocks_nobody() -> None:
    """Limits: a request that fits the context but not the page pool blocks the queue."""
    engine, _ = make_engine(num_blocks=4, max_context_tokens=1000)
    with pytest.raises(ContextExceeded, match="page pool"):
        engine.submit(make_request("large", range(1, 20), 10))
    engine.submit(make_request("small", [1], 2))
    assert len(tokens_of(run_to_end(engine), "small")) == 2


def test_a_full_queue_refuses_with_a_hint() -> None:
    engine, _ = make_engine(max_waiting=2, max_running=1)
    engine.submit(make_request("running", [1], 50))
    engine.step(0.0)
    for name in ("w1", "w2"):
        engine.submit(make_request(name, [2], 1))
    with pytest.raises(Overloaded) as caught:
        engine.submit(make_request("w3", [2], 1))
    assert caught.value.retry_after_ms > 0
    assert caught.value.metadata == {"field": "max_waiting", "value": "2", "limit": "2"}


def test_a_deadline_that_has_passed_is_refused() -> None:
    engine, _ = make_engine()
    assert isinstance(refusal(engine, arrival=5.0, deadline=5.0), DeadlineExceeded)


def test_a_key_that_is_alive_is_refused_and_free_again_afterwards() -> None:
    engine, _ = make_engine()
    engine.submit(make_request("a", [1], 2))
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.submit(make_request("a", [1], 2))
    assert len(ends_of(run_to_end(engine), "a")) == 1
    engine.submit(make_request("a", [1], 2))
    assert len(ends_of(run_to_end(engine), "a")) == 1


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("n", {"n": 0}),
        ("bad_token_sequences", {"bad_token_sequences": ((),)}),
    ],
)
def test_what_the_engine_could_not_run_is_refused(field: str, changes: dict[str, object]) -> None:
    engine, _ = make_engine()
    error = refusal(engine, sampling=make_request("a", [1], **{"max_tokens": 4, **changes}).sampling)  # type: ignore[arg-type]
    assert isinstance(error, InvalidRequest)
    assert error.metadata["field"] == field


@pytest.mark.parametrize("outputs", [((1,), (2,)), ((1, 2, 3, 4, 5),)])
def test_outputs_that_contradict_the_request_are_refused(outputs: tuple[tuple[int, ...], ...]) -> None:
    engine, _ = make_engine()
    error = refusal(engine, outputs=outputs)
    assert isinstance(error, InvalidRequest)
    assert error.metadata["field"] == "output_token_ids"


def test_more_prompt_logprobs_than_one_message_holds_are_refused() -> None:
    engine, _ = make_engine(num_blocks=20_000, max_context_tokens=80_000)
    error = refusal(engine, prompt=[1] * 20_000, sampling=make_request("a", [1], 4, prompt_logprobs=5).sampling)
    assert isinstance(error, InvalidRequest)
    assert error.metadata == {"field": "prompt_logprobs", "value": "5", "limit": "100000"}
    engine.submit(make_request("b", [1] * 20_000, 4, prompt_logprobs=4))


# -- stops -----------------------------------------------------------------------------------------------------------


def test_eos_ends_unless_ignored_and_stop_ids_always_do() -> None:
    prompt, free = [1, 2, 3], make_request("free", [1, 2, 3], 400)
    engine, _ = make_engine(num_blocks=200)
    tokens = expected_tokens(free)
    assert 0 in tokens
    eos_at = tokens.index(0)
    engine.submit(make_request("eos", prompt, 400, ignore_eos=False))
    engine.submit(make_request("stop", prompt, 400, stop_token_ids=frozenset({tokens[5]})))
    outputs = run_to_end(engine)
    assert tokens_of(outputs, "eos") == tokens[: eos_at + 1]
    assert tokens_of(outputs, "stop") == tokens[: tokens.index(tokens[5]) + 1]
    for name, token in (("eos", 0), ("stop", tokens[5])):
        end = ends_of(outputs, name)[0]
        assert isinstance(end, Finished)
        assert (end.reason, end.stop_token_id) == (FinishReason.STOP, token)


def test_min_tokens_forbids_stops_until_it_is_reached() -> None:
    engine, group = make_engine()
    engine.submit(make_request("a", [1, 2, 3], 6, min_tokens=4, ignore_eos=False))
    run_to_end(engine)
    allowed = [draw.allow_stop for plan in group.plans for draw in plan.draws]
    assert allowed[:4] == [False] * 4
    assert all(allowed[4:])


def test_the_last_token_ends_with_length() -> None:
    engine, _ = make_engine()
    engine.submit(make_request("a", [1], 3))
    end = ends_of(run_to_end(engine), "a")[0]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_token_id) == (FinishReason.LENGTH, None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (1, 3)
