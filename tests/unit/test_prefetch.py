"""Prefixes from a tier: the right tokens whatever it does, pages that add up, and nobody who waits longer than told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from itertools import chain, repeat

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paged_group import (
    PagedGroup,
    ends_of,
    expected_tokens,
    make_request,
    make_settings,
    run_to_end,
    tokens_of,
)
from tests.support.scripted_tier import Manner, ScriptedTier, Store
from workers.engine import Engine
from workers.request import Admitted, Output, Request

BLOCK, CHUNK = 4, 8
LONG = [(7 * i * i + 3 * i) % 49 + 1 for i in range(64)]


def tiered(
    store: Store, manners: Iterator[Manner] | None = None, num_blocks: int = 64, **changes: object
) -> tuple[Engine, ScriptedTier]:
    group = PagedGroup(num_blocks, BLOCK)
    tier = ScriptedTier(group, store, CHUNK, manners)
    return Engine(group, make_settings(**{"tier_deadline_s": 100.0, **changes}), tier), tier  # a step takes a second


def warm(store: Store, prompt: list[int] = LONG) -> None:
    """Some other group has computed it."""
    engine, _ = tiered(store)
    engine.submit(make_request("first", prompt, 1))
    run_to_end(engine)


def admitted(outputs: list[Output], name: str) -> Admitted:
    (found,) = [o.admitted for o in outputs if o.key.request_id == name and o.admitted]
    return found


def test_what_one_group_computed_another_fetches() -> None:
    store = Store()
    warm(store)
    engine, tier = tiered(store)
    request = make_request("second", LONG)
    engine.submit(request)
    outputs = run_to_end(engine)
    assert tokens_of(outputs, "second") == expected_tokens(request)
    told = admitted(outputs, "second")
    assert told.cached_tokens == told.tier_tokens == 56, "the last token is computed for its logits, so its chunk is"
    assert told.prefix_use is not None
    assert told.prefix_use.decision == "fetch"
    assert [chunk.number for chunk in tier.fetched] == list(range(7))
    assert engine.load().tier_prompt_tokens == 56


def test_what_is_in_pages_here_is_not_fetched() -> None:
    store = Store()
    warm(store)
    engine, tier = tiered(store)
    engine.submit(make_request("half", LONG[:33], 1))
    run_to_end(engine)
    fetched = len(tier.fetched)
    engine.submit(make_request("whole", LONG, 1))
    outputs = run_to_end(engine)
    assert fetched == 4
    assert [chunk.number for chunk in tier.fetched[fetched:]] == [4, 5, 6]
    assert admitted(outputs, "whole").cached_tokens == 56
    assert admitted(outputs, "whole").tier_tokens == 24
    engine.submit(make_request("again", LONG, 1))
    lookups = tier.lookups
    run_to_end(engine)
    assert tier.lookups == lookups, "all of it was here"


def test_outputs_are_stored_too() -> None:
    store = Store()
    engine, _ = tiered(store)
    request = make_request("first", LONG[:6], 20)
    engine.submit(request)
    said = tokens_of(run_to_end(engine), "first")
    other, _ = tiered(store)
    other.submit(make_request("next turn", [*LONG[:6], *said, 5, 6, 7], 1))
    assert admitted(run_to_end(other), "next turn").tier_tokens == 24


def test_a_late_answer_is_not_waited_for_and_its_pages_come_back() -> None:
    store = Store()
    warm(store)
    slow = chain([Manner(), Manner(delay=30)], repeat(Manner()))
    engine, tier = tiered(store, slow, tier_deadline_s=5.0)
    request = make_request("second", LONG)
    engine.submit(request)
    outputs: list[Output] = []
    step = 0
    while not outputs:
        outputs += engine.step(float(step))
        engine.check()
        step += 1
    assert admitted(outputs, "second").prefix_use.decision == "deadline"  # type: ignore[union-attr]
    assert admitted(outputs, "second").prefix_use.waited_s <= 6.0  # type: ignore[union-attr]
    assert tier.under_way
    assert engine.load().in_transfer_blocks == 14, "somebody may still write them"
    outputs += run_to_end(engine)
    assert tokens_of(outputs, "second") == expected_tokens(request)
    assert engine.load().in_transfer_blocks == 0


def test_a_look_up_that_is_never_answered_holds_nobody_up() -> None:
    store = Store()
    warm(store)
    engine, _ = tiered(store, repeat(Manner(delay=10**6)), tier_deadline_s=3.0)
    request = make_request("second", LONG)
    engine.submit(request)
    assert tokens_of(run_to_end(engine), "second") == expected_tokens(request)


def test_a_request_that_is_cancelled_while_its_prefix_comes_leaves_the_pages_to_the_tier() -> None:
    store = Store()
    warm(store)
    engine, tier = tiered(store, chain([Manner(), Manner(delay=5)], repeat(Manner())))
    request = make_request("second", LONG)
    engine.submit(request)
    while not tier.under_way:
        engine.step(0.0)
    engine.cancel(request.key)
    engine.cancel(request.key)
    engine.check()
    assert engine.load().in_transfer_blocks == 14
    run_to_end(engine)
    load = engine.load()
    assert load.in_transfer_blocks == load.used_blocks == 0
    assert load.cached_blocks == 14, "what came is right, and somebody may want it"


def test_equal_prompts_that_come_together_are_fetched_once() -> None:
    store = Store()
    warm(store)
    engine, tier = tiered(store, chain(repeat(Manner(), 2), [Manner(delay=3)], repeat(Manner())))
    requests = [make_request(name, LONG) for name in ("a", "b")]
    for request in requests:
        engine.submit(request)
    outputs = run_to_end(engine)
    for request in requests:
        assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)
    assert len(tier.fetched) == 7
    assert [admitted(outputs, name).tier_tokens for name in "ab"] == [56, 0]
    assert admitted(outputs, "b").cached_tokens == 60, "the last block is the first one's, computed here"


def test_pages_that_a_fetch_continues_stay_and_nobody_who_waits_blocks_himself() -> None:
    """Half of a prompt is in pages, half is being fetched, and somebody else needs all the room there is."""
    store = Store()
    warm(store)
    engine, tier = tiered(store, num_blocks=20)
    engine.submit(make_request("half", LONG[:33], 1))
    run_to_end(engine)
    tier.fetch_delay = 4
    whole = make_request("whole", LONG, 8)
    other = make_request("other", [50 - token for token in LONG[:52]], 1)
    engine.submit(whole)
    engine.submit(other)
    outputs = run_to_end(engine, 300)
    for request in (whole, other):
        assert tokens_of(outputs, request.key.request_id) == expected_tokens(request)


def test_all_samples_of_a_request_wait_for_its_prefix() -> None:
    store = Store()
    warm(store)
    engine, tier = tiered(store, chain([Manner(delay=2)], repeat(Manner())))
    request = make_request("several", LONG, n=3)
    engine.submit(request)
    outputs = run_to_end(engine)
    assert len(tier.fetched) == 7
    for sample in range(3):
        assert tokens_of(outputs, "several", sample) == expected_tokens(request, sample)


def test_a_prefix_that_another_group_computes_is_waited_for_where_that_is_faster() -> None:
    store = Store()
    manner = Manner(claimed_s=0.01)
    computing, _ = tiered(store, repeat(manner))
    computing.submit(make_request("first", LONG, 1))
    outputs = []
    for step in range(3):
        outputs += computing.step(float(step))  # the look-up, and one chunk of the prompt
    assert store.claims
    waiting, tier = tiered(store, repeat(manner))
    request = make_request("second", LONG)
    waiting.submit(request)
    for step in range(3):
        assert not waiting.step(0.1 * step)
    assert waiting.load().steps == 0, "it computes nothing"
    run_to_end(computing)
    outputs = run_to_end(waiting)
    assert tokens_of(outputs, "second") == expected_tokens(request)
    assert admitted(outputs, "second").tier_tokens == 56
    assert tier.lookups > 1


def test_a_claim_that_comes_to_nothing_is_waited_for_no_longer_than_configured() -> None:
    store = Store()
    engine, tier = tiered(store, repeat(Manner(claimed_s=0.01)), claim_wait_s=2.0)
    store.claims = AllClaimed()
    request = make_request("second", LONG)
    engine.submit(request)
    outputs, step = [], 0
    while not outputs:
        outputs += engine.step(0.1 * step)
        step += 1
        assert step < 100
    assert 0.1 * step >= 2.0
    assert tier.lookups < 100
    assert tokens_of([*outputs, *run_to_end(engine)], "second") == expected_tokens(request)


class AllClaimed(set[bytes]):
    """Every chunk is being computed somewhere, for ever."""

    def __contains__(self, _: object) -> bool:
        return True


def a_manner(chance: random.Random) -> Manner:
    return Manner(
        delay=chance.choice([0, 0, 0, 1, 3, 20]),
        at_most=chance.choice([0, 1, 2, 1000, 1000, 1000]),
        refuses=chance.random() < 0.2,
        claimed_s=chance.choice([None, 0.5, 3.0]),
    )


def some_requests(chance: random.Random) -> list[Request]:
    made = []
    for number in range(chance.randint(1, 6)):
        prompt = LONG[: chance.choice([0, 5, 8, 16, 17, 40, 56])]
        prompt += [chance.randint(1, 49) for _ in range(chance.randint(1, 12))]
        made.append(make_request(f"r{number}", prompt, chance.randint(1, 10), n=chance.choice([1, 1, 1, 2])))
    return made


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_tier_does_tokens_are_right_and_pages_add_up(seed: int) -> None:
    """Two groups in turn, few pages, chunks that get lost, answers that come late, cancels in between."""
    chance = random.Random(seed)
    store = Store()
    for _ in range(2):
        manners = (a_manner(chance) for _ in itertools.count())
        blocks = chance.choice([20, 21, 26, 64])
        engine, _tier = tiered(store, manners, blocks, tier_deadline_s=4.0, claim_wait_s=6.0)
        requests = some_requests(chance)
        pending, cancelled, outputs = list(requests), set(), []
        for step in range(2000):
            if pending and chance.random() < 0.5:
                engine.submit(pending.pop(0))
            if step < 40 and chance.random() < 0.1:
                victim = chance.choice(requests)
                if victim not in pending:
                    engine.cancel(victim.key)
                    cancelled.add(victim.key)
            if not pending and not engine.has_work:
                break
            outputs += engine.step(float(step))
            engine.check()
            if store.chunks and chance.random() < 0.1:
                del store.chunks[chance.choice(list(store.chunks))]
        assert not engine.has_work, "work is left"
        load = engine.load()
        assert load.in_transfer_blocks == load.used_blocks == 0
        for request in requests:
            name = request.key.request_id
            if request.key not in cancelled:
                assert len(ends_of(outputs, name)) == request.sampling.n
                for sample in range(request.sampling.n):
                    assert tokens_of(outputs, name, sample) == expected_tokens(request, sample)
