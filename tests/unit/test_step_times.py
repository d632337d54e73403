"""Steps in which sequences decode are kept near their target by smaller chunks of prompts."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paged_group import PagedGroup, expected_tokens, make_request, make_settings, tokens_of
from workers.engine import Engine
from workers.plan import StepPlan, StepResult
from workers.request import Output
from workers.step_times import StepTimes

FIXED, EACH = 0.02, 0.001


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.integers(0, 2**20))
def test_the_law_of_steps_is_learned_from_steps_of_different_sizes(fixed: float, each: float, seed: int) -> None:
    times, rng = StepTimes(), random.Random(seed)
    for _ in range(100):
        tokens = rng.choice([8, 40, 200, 512])
        times.record(tokens, (fixed + each * tokens) * rng.uniform(0.99, 1.01))
    wanted = fixed + each * 300
    found = times.tokens_within(wanted)
    assert found is not None
    assert fixed + each * found == pytest.approx(wanted, rel=0.05, abs=each)


def test_a_long_time_of_decodes_forgets_nothing() -> None:
    times = StepTimes()
    assert times.tokens_within(1.0) is None
    for tokens in [10, 200, 400, 30] * 10:
        times.record(tokens, FIXED + EACH * tokens)
    for _ in range(5000):
        times.record(16, FIXED + EACH * 16)
    assert times.tokens_within(FIXED + EACH * 100) == pytest.approx(100, abs=5)


def test_equal_steps_alone_give_a_guess_that_is_too_low_and_never_negative() -> None:
    times = StepTimes()
    for _ in range(10):
        times.record(16, FIXED + EACH * 16)
    guess = times.tokens_within(FIXED + EACH * 100)
    assert guess is not None
    assert 16 <= guess <= 100
    assert times.tokens_within(0.0) == 0


class TimedGroup(PagedGroup):
    """Takes, as it says, a fixed time and as much again for each token."""

    def execute(self, plan: StepPlan) -> StepResult:
        return dataclasses.replace(super().execute(plan), forward_s=FIXED + EACH * plan.num_tokens, sample_s=0.0)


def run(engine: Engine, steps: int) -> list[Output]:
    return [output for step in range(steps) for output in engine.step(float(step))]


@pytest.mark.parametrize("target", [0.05, 0.1, 0.2])
def test_long_prompts_beside_decodes_come_in_chunks_that_take_the_target(target: float) -> None:
    group = TimedGroup(4000, 4)
    limits = {"max_batch_tokens": 512, "max_running": 12, "max_context_tokens": 4000, "step_target_s": target}
    engine = Engine(group, make_settings(**limits))
    alone = make_request("alone", [1] * 1000, 1)
    engine.submit(alone)
    outputs = run(engine, 20)
    assert max(plan.num_tokens for plan in group.plans) == 512, "nobody decodes: nobody waits"
    decoding = [make_request(f"d{i}", [i + 1] * 5, 400) for i in range(3)]
    for request in decoding:
        engine.submit(request)
    outputs += run(engine, 5)
    group.plans.clear()
    prompts = [make_request(f"p{i}", [i + 7] * 900, 3) for i in range(4)]
    for request in prompts:
        engine.submit(request)
    outputs += run(engine, 500)
    for request in [alone, *decoding, *prompts]:
        assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)
    chunks = [plan for plan in group.plans if plan.num_tokens > len(plan.draws) + 4]
    assert sum(plan.num_tokens for plan in chunks) >= 3600, "the prompts came in chunks"
    took = [FIXED + EACH * plan.num_tokens for plan in chunks]
    assert max(took) <= 1.15 * target
    assert sum(seconds > 0.8 * target for seconds in took) > len(took) // 2, "and in no smaller ones than need be"


def test_a_target_that_cannot_be_met_starves_nobody() -> None:
    """Less than a decode takes by itself: prompts still get a page in each step."""
    group = TimedGroup(1000, 4)
    engine = Engine(group, make_settings(max_batch_tokens=64, step_target_s=1e-6))
    requests = [make_request("decode", [1], 200), make_request("prompt", [2] * 100, 5)]
    for request in requests:
        engine.submit(request)
    outputs = run(engine, 400)
    for request in requests:
        assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)
    progress = [int(plan.num_tokens) for plan in group.plans if len(plan.row_starts) > 2]
    assert all(tokens >= 2 for tokens in progress)
    assert all(later.step == earlier.step + 1 for earlier, later in pairwise(group.plans))
