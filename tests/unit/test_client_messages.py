"""What a Python call becomes as a message, and when a client tries again. No network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    GroupLost,
    InvalidRequest,
    NoGroup,
    Overloaded,
    QuireError,
    Unauthenticated,
)
from cluster.pb.common_pb2 import SamplingParams
from cluster.pb.inference_pb2 import RequestOptions
from router.client import RetryPolicy, chat_request, generate_request


def test_request_and_sampling_options_stand_side_by_side() -> None:
    request = generate_request("hi", "m", {"temperature": 0, "stop": ["x"], "session_id": "s", "logit_bias": {3: 1.0}})
    assert (request.model, request.text) == ("m", "hi")
    assert request.options.sampling.HasField("temperature")
    assert list(request.options.stop) == ["x"]
    assert request.options.session_id == "s"
    assert dict(request.options.sampling.logit_bias) == {3: 1.0}


def test_no_name_is_both_a_request_and_a_sampling_option() -> None:
    both = {field.name for field in SamplingParams.DESCRIPTOR.fields}
    assert both.isdisjoint({field.name for field in RequestOptions.DESCRIPTOR.fields} - {"sampling"})


def test_none_is_unset_and_zero_is_not() -> None:
    options = generate_request("hi", "", {"temperature": None, "seed": 0, "stop": None}).options
    assert not options.sampling.HasField("temperature")
    assert options.sampling.HasField("seed")
    assert not generate_request("hi", "", {}).options.HasField("sampling")


def test_one_stop_string_may_be_given_alone() -> None:
    assert list(generate_request("hi", "", {"stop": "END"}).options.stop) == ["END"]


@pytest.mark.parametrize(
    "messages",
    ["hi", [("user", "hi")], [{"role": "user", "content": "hi"}]],
)
def test_forms_of_a_conversation(messages: Any) -> None:
    [message] = chat_request(messages, "", "", {}).messages
    assert (message.role, message.content) == ("user", "hi")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"temprature": 1}, "temprature"), ({"temperature": "hot"}, "temperature"), ({"n": -1}, "sampling")],
)
def test_a_wrong_option_is_ours_to_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        generate_request("hi", "", options)


def test_ids_that_cannot_be_sent_are_named() -> None:
    for ids in ([-1], [2**32], ["x"]):
        with pytest.raises(InvalidRequest, match="prompt"):
            generate_request(ids, "", {})  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [NoGroup("x"), Draining("x"), Overloaded("x")])
def test_what_time_mends_is_tried_again_a_few_times(error: QuireError) -> None:
    policy = RetryPolicy(attempts=3, first_delay_s=0.2)
    delays = [policy.delay_s(error, attempt, None) for attempt in (1, 2, 3)]
    assert delays[0] is not None
    assert delays[1] is not None
    assert delays[2] is None


@pytest.mark.parametrize(
    "error", [InvalidRequest("x"), Unauthenticated("x"), DeadlineExceeded("x"), GroupLost("x"), QuireError("x")]
)
def test_nothing_else_is(error: QuireError) -> None:
    assert RetryPolicy().delay_s(error, 1, None) is None


def test_a_delay_beyond_the_deadline_is_not_waited() -> None:
    hinted = Overloaded("x", retry_after_ms=2000)
    assert RetryPolicy().delay_s(hinted, 1, left_s=1.0) is None
    assert RetryPolicy().delay_s(hinted, 1, left_s=60.0) is not None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60_000), st.integers(1, 30))
def test_the_servers_hint_is_a_floor_and_the_delay_is_bounded(hint_ms: int, attempt: int) -> None:
    policy = RetryPolicy(attempts=100)
    delay_s = policy.delay_s(Overloaded("x", retry_after_ms=hint_ms), attempt, None)
    assert delay_s is not None
    assert hint_ms / 1000 <= delay_s <= max(hint_ms / 1000, policy.max_delay_s) + policy.max_delay_s / 2
