"""The worker protocol's messages to and from the engine's values."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.blocks import WIRE_HASH_BYTES, BlockHash
from cluster.errors import ContextExceeded, InvalidRequest, Overloaded, QuireError, from_reason
from cluster.pb import common_pb2, worker_pb2
from workers.request import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    Output,
    PositionLogprobs,
    RequestKey,
    SamplingParams,
    Usage,
)
from workers.wire import LOWEST_FLOAT, Limits, failure, to_delta, to_request, to_wire_hashes

LIMITS = Limits("m", 1000)
ROOT = bytes(32)
KEY = RequestKey("r#1", "id", 3)


def submit(**fields: object) -> worker_pb2.Submit:
    sampling = common_pb2.SamplingParams(max_tokens=10, seed=2**64 - 1)
    base = {"request_id": "id", "attempt": 3, "model": "m", "prompt_token_ids": [1, 999], "root": ROOT}
    return worker_pb2.Submit(**{**base, "sampling": sampling, **fields})  # type: ignore[arg-type]


def test_a_submit_becomes_a_request_with_every_default_of_the_protocol() -> None:
    request = to_request(submit(sequence=9, priority=-2), "r#1", LIMITS, now=50.0)
    assert request.key == KEY
    assert request.prompt == (1, 999)
    assert request.outputs == ()
    assert request.sampling == SamplingParams(max_tokens=10, seed=2**64 - 1)
    assert (request.arrival, request.deadline) == (50.0, None)
    assert (request.tenant, request.priority, request.submit_sequence) == ("anonymous", -2, 9)
    assert request.root == ROOT


def test_every_sampling_field_arrives() -> None:
    sampling = common_pb2.SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_k=5000,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={3: -100.0, 999: 4.0},
        allowed_token_ids=[4, 5],
        bad_token_sequences=[common_pb2.TokenSequence(token_ids=[1, 2])],
        stop_token_ids=[8, 8],
        ignore_eos=True,
        seed=11,
        n=2,
        logprobs=0,
        prompt_logprobs=20,
    )
    fields = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert {field.name for field, _ in sampling.ListFields()} | {"logprobs"} == fields, (
        "a new field needs its line here"
    )
    request = to_request(submit(sampling=sampling, remaining_ms=1500), "r#1", LIMITS, now=1.0)
    assert request.deadline == 2.5
    assert request.sampling == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_k=5000,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={3: -100.0, 999: 4.0},
        allowed_token_ids=(4, 5),
        bad_token_sequences=((1, 2),),
        stop_token_ids=frozenset({8}),
        ignore_eos=True,
        seed=11,
        n=2,
        logprobs=0,
        prompt_logprobs=20,
    )


def test_a_moved_request_brings_its_outputs() -> None:
    sampling = common_pb2.SamplingParams(max_tokens=7, seed=0, n=2)
    outputs = [common_pb2.TokenSequence(token_ids=[5]), common_pb2.TokenSequence()]
    request = to_request(submit(sampling=sampling, output_token_ids=outputs), "r", LIMITS, 0.0)
    assert request.outputs == ((5,), ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("min_tokens", 11),
        ("n", 0),
        ("n", 65),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1000: 0.0}),
        ("allowed_token_ids", [1000]),
        ("stop_token_ids", [2**32 - 1]),
        ("bad_token_sequences", [common_pb2.TokenSequence(token_ids=[1000])]),
        ("bad_token_sequences", [common_pb2.TokenSequence()]),
        ("bad_token_sequences", [common_pb2.TokenSequence(token_ids=[1] * 65)]),
        ("bad_token_sequences", [common_pb2.TokenSequence(token_ids=[1])] * 4097),
        ("allowed_token_ids", [1] * 65_537),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    sampling = common_pb2.SamplingParams(**{"max_tokens": 10, "seed": 0, field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        to_request(submit(sampling=sampling), "r", LIMITS, 0.0)
    assert caught.value.metadata["field"] == f"sampling.{field}"


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 2.0])
IDS = st.lists(st.integers(0, 1100) | st.just(2**32 - 1), max_size=3)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(0, 20), "seed": st.integers(0, 2**64 - 1)},
    optional={
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), NUMBERS),
        "min_tokens": st.integers(0, 30),
        "n": st.integers(0, 70),
        "logprobs": st.integers(0, 30),
        "logit_bias": st.dictionaries(st.integers(0, 1100), NUMBERS, max_size=2),
        "allowed_token_ids": IDS,
        "stop_token_ids": IDS,
    },
)


@settings(deadline=None, max_examples=300)
@given(sampling=SAMPLING, prompt=IDS, outputs=st.lists(IDS, max_size=2), root=st.binary(min_size=31, max_size=32))
def test_what_passes_is_within_every_limit(
    sampling: dict[str, object], prompt: list[int], outputs: list[list[int]], root: bytes
) -> None:
    message = submit(
        sampling=common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        prompt_token_ids=prompt,
        output_token_ids=[common_pb2.TokenSequence(token_ids=ids) for ids in outputs],
        root=root,
    )
    with suppress(QuireError):  # and nothing else
        request = to_request(message, "r", LIMITS, 0.0)
        params = request.sampling
        ids = [*request.prompt, *params.logit_bias, *params.allowed_token_ids, *params.stop_token_ids]
        assert all(token < LIMITS.vocab_size for token in ids + [token for some in request.outputs for token in some])
        assert request.prompt
        assert 0 <= params.min_tokens <= params.max_tokens
        assert 0 <= params.temperature < math.inf
        assert 0 < params.top_p <= 1
        assert len(request.root) == 32
        assert len(request.outputs) in (0, params.n)


def test_an_output_becomes_a_delta() -> None:
    top = Logprob(5, -math.inf, 1)
    output = Output(
        KEY,
        index=1,
        token_ids=(5, 6),
        logprobs=(PositionLogprobs(top, (top,)),),
        admitted=Admitted(16, 0.25, (PositionLogprobs(top, ()),)),
        end=Finished(FinishReason.STOP, 2, Usage(20, 4, 16, 1)),
    )
    delta = to_delta(output)
    assert (delta.request_id, delta.attempt, delta.index, list(delta.token_ids)) == ("id", 3, 1, [5, 6])
    assert delta.logprobs[0].token.logprob == pytest.approx(LOWEST_FLOAT)
    assert math.isfinite(delta.logprobs[0].top[0].logprob), "minus infinity is not JSON"
    assert delta.admitted.cached_tokens.group == 16
    assert delta.admitted.queue_ms == 250
    assert len(delta.admitted.prompt_logprobs) == 1
    assert delta.finished.reason == common_pb2.FINISH_REASON_STOP
    assert delta.finished.stop_token_id == 2
    assert delta.finished.usage == common_pb2.Usage(
        prompt_tokens=20, completion_tokens=4, cached_tokens=common_pb2.CachedTokens(group=16), preemptions=1
    )
    at_length = to_delta(Output(KEY, end=Finished(FinishReason.LENGTH, None, Usage(1, 1, 0, 0))))
    assert at_length.finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert not at_length.finished.HasField("stop_token_id")
    assert not at_length.HasField("admitted")


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after_ms=250), ContextExceeded("too long", field="max_tokens", value=9, limit=8)]
)
def test_an_error_survives_the_wire(error: InvalidRequest) -> None:
    for delta in (to_delta(Output(KEY, end=Failed(error))), failure("id", 3, error)):
        failed = worker_pb2.SequenceDelta.FromString(delta.SerializeToString()).failed
        back = from_reason(failed.reason, failed.message, failed.metadata, failed.retry_after_ms)
        assert type(back) is type(error)
        assert (back.message, back.metadata, back.retry_after_ms) == (
            error.message,
            error.metadata,
            error.retry_after_ms,
        )


def test_hashes_are_cut_for_the_wire() -> None:
    assert to_wire_hashes([BlockHash(bytes(range(32)))]) == [bytes(range(WIRE_HASH_BYTES))]
