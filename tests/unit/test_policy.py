"""The choice of a group: monotone, finite, spread, sticky only where that costs nothing."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import Choice, GroupView, RequestFacts, choose, cost_ms, earliest_ms, ttft_ms, with_peers_rates

RATES = st.one_of(st.just(0.0), st.floats(0.001, 1e7), st.just(math.inf), st.just(math.nan))
COUNTS = st.integers(0, 10_000)

views = st.builds(
    GroupView,
    key=st.text("abc", min_size=1, max_size=3),
    cached_tokens=COUNTS,
    waiting_sequences=COUNTS,
    waiting_prefill_tokens=st.integers(0, 10**7),
    running_sequences=st.integers(0, 300),
    max_running=st.integers(1, 300),
    usable_blocks=COUNTS,
    used_blocks=COUNTS,
    block_tokens=st.sampled_from([8, 16, 128]),
    prefill_tokens_per_s=RATES,
    decode_tokens_per_s=RATES,
    step_ms=RATES,
    mean_output_tokens=RATES,
    sent_requests=COUNTS,
    sent_prefill_tokens=COUNTS,
    idle_s=st.floats(0, 1e6),
)
facts = st.builds(RequestFacts, prompt_tokens=st.integers(1, 10_000))


def view(key: str, cached_tokens: int = 0, **counts: Any) -> GroupView:
    return GroupView(key=key, cached_tokens=cached_tokens, **{"max_running": 32, "usable_blocks": 10_000, **counts})


def chosen(groups: list[GroupView], seed: int = 0, **given_facts: Any) -> Choice:
    choice = choose(RequestFacts(**{"prompt_tokens": 400, **given_facts}), groups, random.Random(seed))
    assert choice is not None
    return choice


@settings(max_examples=300, deadline=None)
@given(facts, views)
def test_a_cost_is_finite_and_above_its_lower_bound(request: RequestFacts, group: GroupView) -> None:
    assert math.isfinite(cost_ms(request, group))
    assert 0 <= earliest_ms(request, group) <= ttft_ms(request, group) <= cost_ms(request, group)


@settings(max_examples=300, deadline=None)
@given(facts, views, COUNTS)
def test_more_overlap_never_costs_more(request: RequestFacts, group: GroupView, more: int) -> None:
    better = replace(group, cached_tokens=group.cached_tokens + more)
    assert cost_ms(request, better) <= cost_ms(request, group)


@settings(max_examples=300, deadline=None)
@given(facts, views, COUNTS, st.sampled_from(["waiting_prefill_tokens", "sent_prefill_tokens", "waiting_sequences"]))
def test_more_work_ahead_never_costs_less(request: RequestFacts, group: GroupView, more: int, field: str) -> None:
    worse = replace(group, **{field: getattr(group, field) + more})
    assert cost_ms(request, worse) >= cost_ms(request, group)


@settings(max_examples=200, deadline=None)
@given(facts, st.lists(views, min_size=1, max_size=6, unique_by=lambda view: view.key), st.integers())
def test_the_choice_is_one_of_the_groups_and_near_the_best(
    request: RequestFacts, groups: list[GroupView], seed: int
) -> None:
    choice = choose(request, groups, random.Random(seed))
    assert choice is not None
    by_key = {group.key: group for group in with_peers_rates(groups)}
    best = min(cost_ms(request, group) for group in by_key.values())
    assert cost_ms(request, by_key[choice.key]) <= best + max(5.0, 0.05 * best)
    assert choice.candidates == len(groups)
    assert choice.expected_cached_tokens <= request.prompt_tokens


def test_an_untried_group_does_not_look_faster_than_the_one_that_holds_the_prompt() -> None:
    slow_first_step = view("known", cached_tokens=32, prefill_tokens_per_s=150.0, step_ms=60.0)
    assert chosen([slow_first_step, view("untried")], prompt_tokens=61).key == "known"


def test_without_groups_there_is_no_choice() -> None:
    assert choose(RequestFacts(prompt_tokens=1), [], random.Random(0)) is None


def test_two_equal_idle_groups_share_the_load_at_random() -> None:
    counts = Counter(chosen([view("a"), view("b")], seed).key for seed in range(400))
    assert min(counts.values()) > 120
    assert chosen([view("a"), view("b")]).decision == "tie_random"


def test_many_routers_do_not_all_send_to_the_group_that_is_idle_by_a_hair() -> None:
    """Each router decides alone, on the same news; a cost that is 2 ms lower must not draw all of them."""
    groups = [view("a", waiting_prefill_tokens=2), view("b")]
    assert {chosen(groups, seed).key for seed in range(50)} == {"a", "b"}


def test_what_this_router_sent_counts_before_the_group_has_said_so() -> None:
    groups = [view("a", sent_requests=4, sent_prefill_tokens=1600), view("b")]
    assert {chosen(groups, seed).key for seed in range(50)} == {"b"}


def test_a_burst_from_one_router_spreads_by_its_own_credit() -> None:
    sent: Counter[str] = Counter()
    for seed in range(40):
        groups = [view(key, sent_requests=sent[key], sent_prefill_tokens=400 * sent[key]) for key in "abcd"]
        sent[chosen(groups, seed).key] += 1
    assert max(sent.values()) - min(sent.values()) <= 1


@pytest.mark.parametrize(
    ("groups", "last", "key", "decision"),
    [
        ([view("a")], None, "a", "only_group"),
        ([view("a", cached_tokens=384), view("b")], None, "a", "lowest_cost"),
        ([view("a"), view("b")], "b", "b", "session"),
        ([view("a"), view("b")], "a", "a", "session"),
        # Where the session's group is clearly slower, its pages do not matter.
        ([view("a", cached_tokens=384, waiting_prefill_tokens=50_000), view("b")], "a", "b", "lowest_cost"),
        # Full: a slot is free elsewhere.
        ([view("a", running_sequences=32), view("b", running_sequences=3)], None, "b", "lowest_cost"),
        # No pages: they are free elsewhere.
        ([view("a", usable_blocks=1), view("b")], None, "b", "lowest_cost"),
        ([view("a", prefill_tokens_per_s=300), view("b", prefill_tokens_per_s=5000)], None, "b", "lowest_cost"),
        # Running neighbours would be delayed by the prefill.
        ([view("a", running_sequences=30), view("b")], None, "b", "lowest_cost"),
    ],
)
def test_decisions(groups: list[GroupView], last: str | None, key: str, decision: str) -> None:
    choice = chosen(groups, last_group=last)
    assert (choice.key, choice.decision) == (key, decision)


def test_a_lower_bound_needs_a_measured_rate_and_counts_only_own_work() -> None:
    request = RequestFacts(prompt_tokens=4000)
    assert earliest_ms(request, view("a", waiting_prefill_tokens=10**6)) == 0
    assert earliest_ms(request, view("a", prefill_tokens_per_s=1000, waiting_prefill_tokens=10**6)) == 1000
    assert earliest_ms(request, view("a", cached_tokens=4000, prefill_tokens_per_s=1000)) < 1


def test_a_borrowed_rate_refuses_nobody() -> None:
    assert chosen([view("a", prefill_tokens_per_s=1.0), view("untried")]).earliest_ttft_ms == 0
    assert chosen([view("a", prefill_tokens_per_s=1.0)]).earliest_ttft_ms > 0


def test_a_group_that_was_slow_once_is_tried_again() -> None:
    """Else it could never be seen to have recovered."""
    fast = view("fast", prefill_tokens_per_s=1000.0, step_ms=10.0, running_sequences=6)
    slow = view("slow", prefill_tokens_per_s=50.0, step_ms=40.0)
    assert {chosen([fast, slow], seed).key for seed in range(20)} == {"fast"}
    assert "slow" in {chosen([fast, replace(slow, idle_s=120.0)], seed).key for seed in range(20)}


def test_stale_rates_stay_between_what_was_measured() -> None:
    for idle_s in (0.0, 10.0, 1e9):
        group = replace(view("a", prefill_tokens_per_s=100.0), idle_s=idle_s)
        rates = [one.prefill_tokens_per_s for one in with_peers_rates([group, view("b", prefill_tokens_per_s=900.0)])]
        assert 100.0 <= rates[0] <= 900.0
        assert rates[1] == 900.0
