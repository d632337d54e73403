"""Slots: bounded, shared between tenants, given back however a request ends."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cluster.errors import DeadlineExceeded, Overloaded
from router.admission import MAX_RETRY_MS, MIN_RETRY_MS, Admission, check_deadline


def test_it_is_full_at_its_limit_and_says_when_to_come_again() -> None:
    admission = Admission(2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(admission.slot("t"))
        assert admission.active == 2
        with pytest.raises(Overloaded) as caught, admission.slot("t"):
            pytest.fail("a third got in")
        assert MIN_RETRY_MS <= caught.value.retry_after_ms <= MAX_RETRY_MS
        assert caught.value.metadata["limit"] == "2"
    assert admission.active == 0
    with admission.slot("t"):
        assert admission.active == 1


def test_a_request_that_fails_gives_its_slot_back() -> None:
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(KeyError), admission.slot("t"):
            raise KeyError
    assert admission.active == 0


def test_one_of_several_tenants_cannot_take_everything() -> None:
    admission = Admission(8, shared=lambda: True)
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(admission.slot("greedy"))
        with pytest.raises(Overloaded), admission.slot("greedy"):
            pytest.fail("a seventh got in")
        with admission.slot("modest"):
            assert admission.active == 7


def test_the_only_tenant_can_take_everything() -> None:
    admission = Admission(4, shared=lambda: False)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admission.slot("t"))
        assert admission.active == 4


def test_the_hint_follows_the_pace_of_ends() -> None:
    now = 0.0
    admission = Admission(1, clock=lambda: now)
    for _ in range(30):
        with admission.slot("t"):
            now += 2.0
    with admission.slot("t"), pytest.raises(Overloaded) as caught, admission.slot("t"):
        pytest.fail("a second got in")
    assert 1500 < caught.value.retry_after_ms <= 2000


def test_a_deadline_that_surely_cannot_be_met_is_refused() -> None:
    check_deadline(None, 1e9)
    check_deadline(100.0, 100.0)
    with pytest.raises(DeadlineExceeded) as caught:
        check_deadline(100.0, 101.0)
    assert caught.value.metadata == {"value": "100", "limit": "101"}
