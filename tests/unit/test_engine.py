"""The engine over pages that are read back: the same tokens however it is run, one end per request, no page lost."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cluster.errors import ContextExceeded, DeadlineExceeded, InvalidRequest, MaskEmpty, Overloaded
from tests.support.machines import WatchedMachine, run_until_seen
from tests.support.paged_group import (
    CacheReplica,
    GroupBroke,
    ends_of,
    expected_scores,
    expected_tokens,
    failure_of,
    make_engine,
    make_request,
    run_to_end,
    tokens_of,
)
from workers.engine import Engine
from workers.group import LocalGroup
from workers.plan import StepPlan, StepResult
from workers.request import Failed, Finished, Output, Request, RequestKey

# Few different tokens and lengths around block borders, so that prefixes meet.
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=22)
MASKED_SEED = 77
STEM = [1, 2, 2, 1, 1, 1, 2, 1, 2, 2, 2, 1, 2]


def check_same_tokens(requests: list[Request], engine: Engine) -> list[Output]:
    for request in requests:
        engine.submit(request)
    outputs = run_to_end(engine)
    for request in requests:
        for sample in range(request.sampling.n):
            assert tokens_of(outputs, request.key.request_id, sample) == expected_tokens(request, sample)
        assert len(ends_of(outputs, request.key.request_id)) == request.sampling.n
    assert engine.load().used_blocks == 0
    return outputs


def make_requests(prompts: list[list[int]], **sampling: object) -> list[Request]:
    return [make_request(f"r{i}", prompt, 9, seed=i % 3, **sampling) for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]


# -- oracles (design section 9) --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=8), st.integers(1, 5))
def test_alone_or_batched_tokens_are_the_same(prompts: list[list[int]], max_running: int) -> None:
    check_same_tokens(make_requests(prompts), make_engine(max_running=max_running)[0])


@settings(max_examples=50, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=8))
def test_cold_or_warm_tokens_are_the_same(prompts: list[list[int]]) -> None:
    engine, _ = make_engine(num_blocks=40)
    check_same_tokens(make_requests(prompts), engine)
    check_same_tokens(make_requests(prompts), engine)


@settings(max_examples=80, deadline=None)
@given(st.lists(PROMPTS, min_size=2, max_size=8), st.integers(8, 14), st.booleans())
def test_in_a_big_or_a_tiny_pool_tokens_are_the_same(
    prompts: list[list[int]], num_blocks: int, prefix_cache: bool
) -> None:
    check_same_tokens(make_requests(prompts), make_engine(num_blocks=num_blocks, prefix_cache=prefix_cache)[0])


def test_a_tiny_pool_does_preempt() -> None:
    engine, _ = make_engine(num_blocks=8)
    check_same_tokens(make_requests([[1] * 12, [2] * 12, [1, 2] * 6, [2, 1] * 6]), engine)
    assert engine.load().preemptions > 0


@settings(max_examples=50, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=5), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]))
def test_whatever_the_chunk_and_block_size_tokens_are_the_same(
    prompts: list[list[int]], budget: int, block_tokens: int
) -> None:
    check_same_tokens(make_requests(prompts), make_engine(max_batch_tokens=budget, block_tokens=block_tokens)[0])


@settings(max_examples=50, deadline=None)
@given(PROMPTS, st.integers(0, 9), st.booleans())
def test_a_moved_request_goes_on_at_its_next_token(prompt: list[int], moved_after: int, warm: bool) -> None:
    whole = make_request("a", prompt, 9, seed=5)
    tokens = expected_tokens(whole)
    engine, _ = make_engine()
    if warm:
        check_same_tokens([whole], engine)
    moved = make_request("moved", prompt, 9, seed=5, outputs=(tuple(tokens[:moved_after]),))
    engine.submit(moved)
    outputs = run_to_end(engine)
    assert tokens_of(outputs, "moved") == tokens[moved_after:]
    admitted = next((output.admitted for output in outputs if output.admitted is not None), None)
    if moved_after < 9:
        assert admitted is not None
        cached = (len(prompt) + moved_after - 1) // 4 * 4 if warm else 0
        assert admitted.cached_tokens == min(cached, len(prompt)), "what was put out is no part of the prompt"
    end = ends_of(outputs, "moved")
    assert len(end) == 1
    assert isinstance(end[0], Finished)
    assert (end[0].usage.prompt_tokens, end[0].usage.completion_tokens) == (len(prompt), 9)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(2, 6), st.booleans(), st.integers(6, 30))
def test_samples_share_the_prompt_and_are_drawn_apart(prompt: list[int], n: int, cache: bool, budget: int) -> None:
    """With pages for all: the prompt is computed once, but for its last token, whose logits each sample needs."""
    engine, group = make_engine(max_batch_tokens=budget, max_running=8, prefix_cache=cache)
    outputs = check_same_tokens([make_request("a", prompt, 9, n=n)], engine)
    admitted = [output.admitted for output in outputs if output.admitted is not None]
    assert len(admitted) == 1
    assert sum(plan.num_tokens for plan in group.plans) == len(prompt) + n - 1 + n * 8
    copied = sum(len(plan.copies) for plan in group.plans)
    assert copied == (n - 1 if (len(prompt) - 1) % 4 else 0), "a page is copied where a sample writes into it"


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(2, 6), st.integers(8, 20), st.booleans(), st.sets(st.integers(0, 12), max_size=5))
def test_samples_that_are_preempted_or_whose_step_fails(
    prompt: list[int], n: int, num_blocks: int, cache: bool, failing: set[int]
) -> None:
    """A page that was to be copied in a step that failed was not: what is in it must be computed."""
    engine, group = make_engine(num_blocks=num_blocks, max_batch_tokens=16, max_running=8, prefix_cache=cache)
    request = make_request("a", prompt, 9, n=n)
    engine.submit(request)
    outputs = []
    for step in range(1000):
        group.broken = step in failing
        try:
            outputs += engine.step(float(step))
        except GroupBroke:
            engine.check()
        if not engine.has_work:
            break
    engine.check()
    for index in range(n):
        assert tokens_of(outputs, "a", index) == expected_tokens(request, index)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(PROMPTS, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 30), st.integers(8, 40), st.booleans()
)
def test_prompt_logprobs_are_the_same_cold_and_warm(
    prompts: list[list[int]], n: int, budget: int, num_blocks: int, cache: bool
) -> None:
    """In chunks, with samples, over preemption, beside requests that want none, and where the prompt is cached."""
    engine, _ = make_engine(num_blocks=num_blocks, max_batch_tokens=budget, max_running=6, prefix_cache=cache)
    for turn in range(2):
        plain = [make_request(f"plain{turn}{i}", prompt, 5) for i, prompt in enumerate(prompts)]
        asking = [make_request(f"{turn}{i}", prompt, 9, n=n, prompt_logprobs=0) for i, prompt in enumerate(prompts)]
        outputs = check_same_tokens([*plain, *asking], engine)
        for request in asking:
            mine = [output for output in outputs if output.key == request.key]
            told = [output.admitted.prompt_logprobs for output in mine if output.admitted is not None]
            assert [list(positions) for positions in told] == [expected_scores(request.prompt)]


@settings(max_examples=30, deadline=None)
@given(PROMPTS, st.integers(1, 12))
def test_cached_and_computed_tokens_make_the_prompt(prompt: list[int], budget: int) -> None:
    engine, group = make_engine(max_batch_tokens=budget)
    engine.submit(make_request("first", prompt[: len(prompt) // 2 + 1], 1))
    run_to_end(engine)
    before = sum(plan.num_tokens for plan in group.plans)
    engine.submit(make_request("second", prompt, 1))
    outputs = run_to_end(engine)
    assert outputs[0].admitted is not None
    computed = sum(plan.num_tokens for plan in group.plans) - before
    assert outputs[0].admitted.cached_tokens + computed == len(prompt)


def test_a_draw_knows_the_whole_prompt_however_much_of_it_was_cached() -> None:
    """Sampling: penalties that ignore the part of the prompt that came from the cache."""
    engine, group = make_engine(num_blocks=12)
    prompt = list(range(1, 24))
    for name, cached in (("cold", 0), ("warm", 20)):
        before = len(group.plans)
        engine.submit(make_request(name, prompt, 3))
        outputs = run_to_end(engine)
        assert outputs[0].admitted is not None
        assert outputs[0].admitted.cached_tokens == cached
        draws = [draw for plan in group.plans[before:] for draw in plan.draws]
        assert [draw.prompt_tokens.tolist() for draw in draws] == [prompt] * 3
        assert [len(draw.output_tokens) for draw in draws] == [0, 1, 2]


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_request_that_ended_before_it_was_moved_ends_at_once() -> None:
    engine, group = make_engine()
    engine.submit(make_request("a", [1, 2], 3, outputs=((4, 5, 6),)))
    engine.submit(make_request("b", [1, 2], 3, n=2, outputs=((4, 0), (7,)), ignore_eos=False, seed=3))
    outputs = run_to_end(engine)
    assert [output.token_ids for output in outputs if output.key.request_id == "a"] == [()]
    assert len(ends_of(outputs, "a")) == 1
    assert len(ends_of(outputs, "b")) == 2
    assert all(draw.sample_index == 1 for plan in group.plans for draw in plan.draws)


def test_an_empty_mask_fails_that_request_only() -> None:
    engine, _ = make_engine(mask_empty=frozenset({MASKED_SEED}))
    other = make_request("b", [1, 2, 3], 5)
    engine.submit(make_request("a", [1, 2, 3], 5, seed=MASKED_SEED, n=2))
    engine.submit(other)
    outputs = run_to_end(engine)
    assert failure_of(outputs, "a") is MaskEmpty
    assert len(ends_of(outputs, "a")) == 1
    assert tokens_of(outputs, "a") == []
    assert tokens_of(outputs, "b") == expected_tokens(other)


@pytest.mark.parametrize("state", ["waiting", "computing", "drawing"])
def test_a_deadline_ends_a_request_within_the_step_and_frees_its_pages(state: str) -> None:
    engine, _ = make_engine(max_running=1, max_batch_tokens=4)
    if state == "waiting":
        engine.submit(make_request("other", [3], 50))
    request = make_request("a", [1, 2, 3, 4, 5, 6], 50, deadline=10.0, arrival=1.0)
    engine.submit(request)
    for _ in range(1 if state == "computing" else 4):
        engine.step(2.0)
    assert failure_of(engine.step(9.999), "a") is None
    outputs = engine.step(10.0)
    assert failure_of(outputs, "a") is DeadlineExceeded
    engine.check()
    engine.cancel(RequestKey("router", "other", 1))
    assert engine.load().used_blocks == 0
    assert engine.step(11.0) == []


@pytest.mark.parametrize("gone", ["computes", "waits", "waits too"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_cancel_while_one_computes_the_blocks_that_others_wait_for(gone: str, steps: int) -> None:
    """Pages: abort before the first step, abort while loading, abort twice. Here: its blocks, computed by another."""
    engine, _ = make_engine(max_batch_tokens=8)
    names = ("computes", "waits", "waits too")
    requests = [make_request(name, range(1, 34), 3, seed=i, arrival=i) for i, name in enumerate(names)]
    for request in requests:
        engine.submit(request)
    outputs = [output for step in range(steps) for output in engine.step(float(step))]
    for _ in range(2):
        engine.cancel(next(request.key for request in requests if request.key.request_id == gone))
        engine.check()
    outputs += run_to_end(engine)
    assert not ends_of(outputs, gone)
    assert engine.load().used_blocks == 0
    for request in requests:
        if request.key.request_id != gone:
            assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)
            assert len(ends_of(outputs, request.key.request_id)) == 1


def test_many_far_deadlines_do_not_keep_ended_requests() -> None:
    engine, _ = make_engine()
    for index in range(300):
        engine.submit(make_request(f"r{index}", [1], 1, deadline=1e9))
        run_to_end(engine)
    assert len(engine._scheduler._deadlines) < 100


def test_losing_a_router_cancels_what_came_over_it_and_nothing_else() -> None:
    engine, _ = make_engine()
    kept = make_request("a", [1, 2], 6, owner="kept")
    engine.submit(kept)
    for index in range(3):
        engine.submit(make_request(f"r{index}", [3, index + 1], 6, owner="lost"))
    engine.step(0.0)
    engine.cancel_owner("lost")
    engine.check()
    outputs = run_to_end(engine)
    assert {output.key.owner for output in outputs} == {"kept"}
    assert tokens_of(outputs, "a") == expected_tokens(kept)[1:]


def test_what_was_to_be_told_survives_a_step_that_failed() -> None:
    engine, group = make_engine()
    engine.submit(make_request("late", [1, 2], 6, deadline=1.0))
    engine.submit(make_request("other", [1, 2], 2))
    group.broken = True
    with pytest.raises(GroupBroke):
        engine.step(2.0)
    group.broken = False
    assert failure_of(run_to_end(engine), "late") is DeadlineExceeded


# -- looking in ------------------------------------------------------------------------------------------------------


def test_a_refused_submit_counts_as_seen() -> None:
    engine, _ = make_engine()
    request = make_request("a", [1], 5000)
    object.__setattr__(request, "submit_sequence", 7)
    with pytest.raises(ContextExceeded):
        engine.submit(request)
    assert engine.last_submit_sequence("router") == 7
    assert engine.last_submit_sequence("unknown") == 0
    engine.cancel_owner("router")
    assert engine.last_submit_sequence("router") == 0


def test_a_moved_request_is_no_new_one_for_a_full_queue() -> None:
    """Its client has half an answer: it is let in, and before those that wait for their first token."""
    engine, _ = make_engine(max_running=1, max_waiting=2, num_blocks=40)
    requests = [make_request(name, [i + 1] * 5, 6) for i, name in enumerate("abc")]
    engine.submit(requests[0])
    outputs = engine.step(0.0)
    for request in requests[1:]:
        engine.submit(request)
    with pytest.raises(Overloaded):
        engine.submit(make_request("new", [9], 6))
    whole = expected_tokens(make_request("moved", [8] * 5, 6))
    engine.submit(make_request("moved", [8] * 5, 6, outputs=(tuple(whole[:2]),)))
    outputs += run_to_end(engine)
    assert tokens_of(outputs, "moved") == whole[2:]
    for request in requests:
        assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)
    order = list(dict.fromkeys(output.key.request_id for output in outputs))
    assert order == ["a", "moved", "b", "c"]


def test_a_prompt_counts_once_however_many_samples_wait_for_it() -> None:
    engine, _ = make_engine(max_running=4, max_batch_tokens=16, num_blocks=60)
    engine.submit(make_request("many", [1] * 40, 9, n=10))
    load = engine.load()
    assert (load.waiting_prefill_tokens, load.waiting_sequences, load.running_sequences) == (40, 10, 0)
    engine.step(0.0)
    assert engine.load().waiting_prefill_tokens == 40 - 16 - 1
    for _ in range(4):
        engine.step(0.0)
    load = engine.load()
    assert (load.running_sequences, load.waiting_sequences, load.running_requests) == (4, 6, 1)
    assert load.waiting_prefill_tokens == 0


def test_load_counts_what_is_there() -> None:
    engine, _ = make_engine(max_running=1, max_batch_tokens=8, num_blocks=20)
    assert (engine.load().step_ms, engine.load().prefill_tokens_per_s) == (0.0, 0.0)
    engine.submit(make_request("a", range(1, 13), 3))
    engine.submit(make_request("b", range(20, 30), 3))
    assert (engine.load().waiting_requests, engine.load().waiting_prefill_tokens) == (2, 22)
    engine.step(0.0)
    load = engine.load()
    assert (load.waiting_requests, load.running_requests, load.waiting_prefill_tokens) == (1, 1, 4 - 1 + 10)
    assert (load.used_blocks, load.free_blocks, load.total_blocks, load.steps) == (3, 17, 20, 1)
    assert load.prefill_tokens_per_s == 0.0, "eight tokens are too few to tell"
    run_to_end(engine)
    load = engine.load()
    assert (load.requests_finished, load.prompt_tokens, load.output_tokens) == (2, 22, 6)
    assert load.decode_tokens_per_s == pytest.approx(1 / 0.011)
    assert load.step_ms == pytest.approx(11.0)
    assert load.pool_consistent


def test_a_local_group_passes_plans_on_until_it_is_closed() -> None:
    _, runner = make_engine()
    group = LocalGroup(runner)
    assert group.num_blocks == 64
    engine = Engine(group, make_engine()[0]._settings)
    request = make_request("a", [1, 2, 3], 4)
    engine.submit(request)
    assert tokens_of(run_to_end(engine), "a") == expected_tokens(request)
    group.close()
    group.close()
    engine.submit(make_request("b", [1], 1))
    with pytest.raises(RuntimeError, match="closed"):
        engine.step(0.0)


def test_an_answer_to_another_step_is_a_defect_that_is_noticed() -> None:
    class Confused:
        num_blocks = 8

        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(plan.step + 1, (1,), (None,), 0.1, 0.1)

        def failure(self) -> str | None:
            return None

        def progress(self) -> int:
            return 0

        def close(self) -> None:
            pass

    engine = Engine(Confused(), make_engine()[0]._settings)
    engine.submit(make_request("a", [1], 1))
    with pytest.raises(RuntimeError, match="was answered by"):
        engine.step(0.0)


# -- everything at once ----------------------------------------------------------------------------------------------


class EngineMachine(WatchedMachine):
    """Submits, cancels, deadlines, lost routers, broken steps, in any order; pages are checked after each."""

    @initialize(
        num_blocks=st.integers(8, 14),
        budget=st.sampled_from([24, 1, 5, 9, 16]),
        max_running=st.sampled_from([5, 1, 2, 3]),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks: int, budget: int, max_running: int, prefix_cache: bool) -> None:
        self.engine, self.group = make_engine(
            num_blocks,
            mask_empty=frozenset({MASKED_SEED}),
            max_batch_tokens=budget,
            max_running=max_running,
            max_waiting=8,
            prefix_cache=prefix_cache,
        )
        self.now = 0.0
        self.serial = 0
        self.accepted: dict[RequestKey, Request] = {}
        self.cancelled: set[RequestKey] = set()
        self.outputs: list[Output] = []
        self.replica = CacheReplica()

    @rule(
        count=st.integers(1, 4),
        stem=st.sampled_from([9, 0, 4, 8, 13]),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=4),
        max_tokens=st.sampled_from([14, 1, 2, 6, 10]),
        n=st.sampled_from([1, 1, 3]),
        seed=st.sampled_from([0, 0, 0, 1, 2, MASKED_SEED]),
        tenant=st.sampled_from("xy"),
        priority=st.sampled_from([0, 0, 1]),
        patience=st.sampled_from([None, None, None, 6.0]),
        moved=st.sampled_from([0, 0, 1, 3]),
    )
    def submit(
        self,
        count: int,
        stem: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        seed: int,
        tenant: str,
        priority: int,
        patience: float | None,
        moved: int,
    ) -> None:
        """Some at once that begin alike."""
        for _ in range(count):
            self.serial += 1
            request = make_request(
                f"r{self.serial}",
                [*STEM[:stem], *tail],
                max_tokens,
                n=n,
                seed=seed,
                tenant=tenant,
                owner=tenant,
                priority=priority,
                arrival=self.now,
                deadline=None if patience is None else self.now + patience,
            )
            if 0 < moved < max_tokens:
                outputs = tuple(tuple(expected_tokens(request, sample)[:moved]) for sample in range(n))
                request = dataclasses.replace(request, outputs=outputs)
                self.seen["moved"] += 1
            try:
                self.engine.submit(request)
            except Overloaded:
                self.seen["overloaded"] += 1
            else:
                self.accepted[request.key] = request
            tail = [*tail[1:], 1 + self.serial % 2]

    @rule(times=st.sampled_from([3, 1, 8, 20]))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.now += 1.0
            self.take(self.engine.step(self.now))

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), kind=st.sampled_from(["cancel", "cancel", "lose_router", "submit_twice", "broken_step"]))
    def trouble(self, data: st.DataObject, kind: str) -> None:
        """One rule for all kinds, so that most of the time there is none."""
        key = data.draw(st.sampled_from(sorted(self.accepted)))
        if kind == "cancel":
            self.seen["cancelled alive"] += key in self.engine._scheduler
            self.engine.cancel(key)
            self.cancelled.add(key)
        elif kind == "lose_router":
            self.engine.cancel_owner(key.owner)
            self.cancelled |= {other for other in self.accepted if other.owner == key.owner}
        elif kind == "submit_twice" and key in self.engine._scheduler:
            with pytest.raises(InvalidRequest):
                self.engine.submit(self.accepted[key])
        elif kind == "broken_step":
            self.group.broken = True
            with contextlib.suppress(GroupBroke):
                self.take(self.engine.step(self.now))
            self.group.broken = False

    @rule()
    def follow_events(self) -> None:
        self.replica.apply(self.engine.take_cache_events())
        assert self.replica.known == set(self.engine.cached_hashes())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.key in self.accepted
            assert output.key not in self.cancelled
        self.outputs += outputs

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            load = self.engine.load()
            pages = load.free_blocks + load.cached_blocks + load.used_blocks + load.in_transfer_blocks
            assert pages == load.total_blocks

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.now += 0.01
            self.take(self.engine.step(self.now))
            self.engine.check()
        assert not self.engine.has_work
        load = self.engine.load()
        assert load.used_blocks == 0
        fairness = self.engine._scheduler._fairness
        assert not fairness._active
        assert not fairness._served
        self.seen["preempted"] += load.preemptions
        self.seen["cached"] += load.cached_prompt_tokens
        for key, request in self.accepted.items():
            self.check_outcome(key, request)

    def check_outcome(self, key: RequestKey, request: Request) -> None:
        """Exactly one terminal per sample, or one failure; what came is a prefix of what should come."""
        mine = [output for output in self.outputs if output.key == key]
        ends = [output.end for output in mine if output.end is not None]
        failed = [end for end in ends if isinstance(end, Failed)]
        if key not in self.cancelled:
            assert len(failed) == 1 if failed else len(ends) == request.sampling.n
        if failed:
            assert mine[-1].end is failed[0]
            self.seen[type(failed[0].error).__name__] += 1
        if ends and request.sampling.n > 1 and not failed:
            self.seen["samples"] += 1
        for sample in range(request.sampling.n):
            came = [token for output in mine if output.index == sample for token in output.token_ids]
            already = len(request.outputs[sample]) if request.outputs else 0
            should = expected_tokens(request, sample)[already:]
            complete = any(output.index == sample and isinstance(output.end, Finished) for output in mine)
            assert came == (should if complete else should[: len(came)])


def test_everything_at_once() -> None:
    kinds = [
        "preempted",
        "cached",
        "samples",
        "moved",
        "cancelled alive",
        "overloaded",
        "DeadlineExceeded",
        "MaskEmpty",
    ]
    run_until_seen(EngineMachine, kinds)
