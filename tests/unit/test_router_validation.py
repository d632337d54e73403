"""Every bad input gets the right class, and a message that names field, value and rule. Every good one gets through."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ContextExceeded, FieldNotSupported, InvalidRequest, PromptEmpty, QuireError
from cluster.pb import common_pb2, inference_pb2
from cluster.pb.common_pb2 import SamplingParams, TokenSequence
from cluster.pb.inference_pb2 import ChatMessage, ChatRequest, GenerateRequest, RequestOptions
from router.validation import (
    Conversation,
    Limits,
    ValidRequest,
    complete,
    parse_chat,
    parse_generate,
)

VOCAB = 1000
LIMITS = Limits(max_tokens=(100,))


def generate(options: RequestOptions | None = None, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": "hello", **fields}, options=options)


def valid(
    prompt: int | list[int] = 10, limits: Limits = LIMITS, options: RequestOptions | None = None, **sampling: Any
) -> ValidRequest:
    options = options or RequestOptions()
    options.sampling.MergeFrom(SamplingParams(**sampling))
    parsed = parse_generate(generate(options), "m", VOCAB)
    return complete(parsed, [7] * prompt if isinstance(prompt, int) else prompt, [], limits, "tenant")


BAD_SAMPLING: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", -1.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.nan),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -math.inf),
    ("n", 0),
    ("n", 65),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("allowed_token_ids", [VOCAB]),
    ("stop_token_ids", [1, 2**32 - 1]),
    ("logit_bias", {VOCAB: 1.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("allowed_token_ids", [1] * 65_537),
    ("stop_token_ids", [1] * 1025),
    ("bad_token_sequences", [TokenSequence(token_ids=[1])] * 4097),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=lambda v: str(v)[:24])
def test_a_bad_sampling_value_is_named(name: str, value: Any) -> None:
    vocab = 5000 if name == "logit_bias" and len(value) > 1 else VOCAB
    message = generate(RequestOptions(sampling=SamplingParams(**{name: value})))
    with pytest.raises(InvalidRequest) as caught:
        parse_generate(message, "m", vocab)
    assert caught.value.metadata["field"] == f"options.sampling.{name}"
    assert caught.value.code == "INVALID_ARGUMENT"
    assert "must" in caught.value.message
    assert caught.value.metadata["value"] in caught.value.message


@pytest.mark.parametrize("bias", [100.5, -101, math.nan, math.inf])
def test_a_bad_bias_names_its_token(bias: float) -> None:
    message = generate(RequestOptions(sampling=SamplingParams(logit_bias={5: bias})))
    with pytest.raises(InvalidRequest) as caught:
        parse_generate(message, "m", VOCAB)
    assert caught.value.metadata["field"] == "options.sampling.logit_bias[5]"


BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("stop", [""], "options.stop[0]"),
    ("stop", ["a"] * 17, "options.stop"),
    ("stop", ["ok", "é" * 513], "options.stop[1]"),
    ("bad_words", ["fine", ""], "options.bad_words[1]"),
    ("bad_words", ["a"] * 1025, "options.bad_words"),
    ("bad_words", ["x" * 1025], "options.bad_words[0]"),
    ("truncate_prompt_tokens", 0, "options.truncate_prompt_tokens"),
    ("stream_interval_tokens", 0, "options.stream_interval_tokens"),
    ("priority", 101, "options.priority"),
    ("priority", -101, "options.priority"),
    ("session_id", "é" * 129, "options.session_id"),
    ("cache_salt", "x" * 257, "options.cache_salt"),
    ("request_id", "x" * 129, "options.request_id"),
]


@pytest.mark.parametrize(("name", "value", "field"), BAD_OPTIONS, ids=lambda v: str(v)[:24])
def test_a_bad_option_is_named(name: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_generate(generate(RequestOptions(**{name: value})), "m", VOCAB)
    assert caught.value.metadata["field"] == field
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adapter", "lora"),
        ("constraint", common_pb2.Constraint(regex="a*")),
        ("constraint", common_pb2.Constraint()),
        ("draft", common_pb2.DraftSettings()),
        ("resume_token", "x"),
        ("output_token_ids", [1]),
    ],
)
def test_a_reserved_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FieldNotSupported) as caught:
        parse_generate(generate(RequestOptions(**{name: value})), "m", VOCAB)
    assert caught.value.metadata == {"field": f"options.{name}"}
    assert caught.value.code == "UNIMPLEMENTED"


def test_every_field_of_the_options_is_checked_or_known_to_need_no_check() -> None:
    """A field that is added to the protos has to be thought about here."""
    covered = {name for name, _, _ in BAD_OPTIONS} | {"sampling", "include_stop", "skip_special_tokens", "echo"}
    reserved = {"adapter", "constraint", "draft", "resume_token", "output_token_ids"}
    assert {field.name for field in RequestOptions.DESCRIPTOR.fields} == covered | reserved
    sampling = {name for name, _ in BAD_SAMPLING}
    rest = {"min_tokens", "top_k", "ignore_eos", "seed"}
    assert {field.name for field in SamplingParams.DESCRIPTOR.fields} == sampling | rest


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"text": ""}, PromptEmpty, "text"),
        ({"text": None}, PromptEmpty, "prompt"),
        ({"text": None, "token_ids": TokenSequence()}, PromptEmpty, "token_ids"),
        ({"text": None, "token_ids": TokenSequence(token_ids=[1, VOCAB])}, InvalidRequest, "token_ids"),
        ({"text": None, "token_ids": TokenSequence(token_ids=[2**32 - 1])}, InvalidRequest, "token_ids"),
    ],
)
def test_a_bad_prompt(fields: dict[str, Any], error: type[QuireError], field: str) -> None:
    with pytest.raises(error) as caught:
        parse_generate(generate(**fields), "m", VOCAB)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [ChatMessage(role="user"), ChatMessage(content="x")]}, "messages[1].role"),
        ({"messages": [ChatMessage(role="r" * 300)]}, "messages[0].role"),
        ({"template_variables_json": "{"}, "template_variables_json"),
        ({"template_variables_json": "[1]"}, "template_variables_json"),
        ({"template_variables_json": "[" * 100_000}, "template_variables_json"),
        ({"template_variables_json": '{"messages": []}'}, "template_variables_json"),
    ],
)
def test_a_bad_chat(fields: dict[str, Any], field: str) -> None:
    message = ChatRequest(**{"messages": [ChatMessage(role="user", content="hi")], **fields})
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(message, "m", VOCAB)
    assert caught.value.metadata["field"] == field


def test_a_good_chat() -> None:
    turns = [ChatMessage(role="system", content="be"), ChatMessage(role="user", content="", name="al")]
    parsed = parse_chat(ChatRequest(messages=turns, template_variables_json='{"date": "x"}'), "m", VOCAB)
    assert isinstance(parsed.prompt, Conversation)
    assert parsed.prompt.messages == (
        {"role": "system", "content": "be"},
        {"role": "user", "content": "", "name": "al"},
    )
    assert parsed.prompt.variables == {"date": "x"}


def test_defaults_are_filled_in() -> None:
    request = valid()
    sampling = request.sampling
    assert sampling.max_tokens == 90
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.n) == (1, 1, 1, 1)
    assert sampling.HasField("seed")
    assert not sampling.HasField("logprobs")
    assert request.skip_special_tokens
    assert request.stream_interval_tokens == 1
    assert len({valid().sampling.seed for _ in range(20)}) == 20


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_given_seed_is_kept_zero_too(seed: int) -> None:
    assert valid(seed=seed).sampling.seed == seed


def test_greedy_and_other_zeros_are_not_mistaken_for_unset() -> None:
    sampling = valid(temperature=0.0, top_k=0, min_tokens=0, logprobs=0).sampling
    assert sampling.temperature == 0
    assert sampling.HasField("logprobs")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [
        (99, 1, True),
        (99, None, True),
        (100, None, False),
        (100, 1, False),
        (101, None, False),
        (98, 2, True),
        (98, 3, False),
        (1, 99, True),
    ],
)
def test_exactly_the_context_fits(prompt: int, max_tokens: int | None, fits: bool) -> None:
    """Limits: a prompt exactly as long as the context, one less, one more. Filled, it has no room to draw."""
    given_tokens = {} if max_tokens is None else {"max_tokens": max_tokens}
    if fits:
        assert valid(prompt, **given_tokens).total_tokens == 100
        return
    with pytest.raises(ContextExceeded) as caught:
        valid(prompt, **given_tokens)
    assert caught.value.metadata["limit"] == "100"
    assert caught.value.metadata["prompt_tokens"] == str(prompt)
    assert caught.value.metadata["value"] == str(prompt + (max_tokens or 1))


def test_the_largest_number_on_the_wire_is_an_error_and_no_overflow() -> None:
    with pytest.raises(ContextExceeded):
        valid(1, max_tokens=2**32 - 1)
    with pytest.raises(InvalidRequest):
        valid(1, min_tokens=2**32 - 1)


def test_an_unset_max_tokens_is_what_is_left_or_the_default() -> None:
    assert valid(10, Limits(max_tokens=(100,), default_max_tokens=20)).sampling.max_tokens == 20
    assert valid(90, Limits(max_tokens=(100,), default_max_tokens=20)).sampling.max_tokens == 10
    # Unequal groups: any of them should be able to take it, where the prompt lets it.
    assert valid(10, Limits(max_tokens=(100, 60))).sampling.max_tokens == 50
    assert valid(60, Limits(max_tokens=(100, 60))).sampling.max_tokens == 40
    assert valid(10, Limits(max_tokens=(100, 60)), max_tokens=90).sampling.max_tokens == 90


def test_min_tokens_is_held_against_the_resolved_max_tokens() -> None:
    assert valid(10, min_tokens=90).sampling.min_tokens == 90
    with pytest.raises(InvalidRequest) as caught:
        valid(10, min_tokens=91)
    assert caught.value.metadata["field"] == "options.sampling.min_tokens"
    with pytest.raises(InvalidRequest):
        valid(10, min_tokens=3, max_tokens=2)


def test_truncation_keeps_the_last_tokens_and_comes_before_the_limit() -> None:
    request = valid(list(range(500)), options=RequestOptions(truncate_prompt_tokens=3), max_tokens=97)
    assert request.prompt == (497, 498, 499)
    assert valid([1, 2], options=RequestOptions(truncate_prompt_tokens=2**32 - 1)).prompt == (1, 2)


def test_a_prompt_without_tokens_is_empty() -> None:
    with pytest.raises(PromptEmpty):
        valid(0)


def test_bad_words_join_bad_sequences() -> None:
    options = RequestOptions(sampling=SamplingParams(bad_token_sequences=[TokenSequence(token_ids=[9])]))
    parsed = parse_generate(generate(options), "m", VOCAB)
    request = complete(parsed, [1], [[4, 5], [6]], LIMITS, "t")
    assert [list(bad.token_ids) for bad in request.sampling.bad_token_sequences] == [[9], [4, 5], [6]]
    assert len(options.sampling.bad_token_sequences) == 1


def test_an_empty_bad_sequence_is_named() -> None:
    options = RequestOptions(sampling=SamplingParams(bad_token_sequences=[TokenSequence()]))
    with pytest.raises(InvalidRequest) as caught:
        parse_generate(generate(options), "m", VOCAB)
    assert caught.value.metadata["field"] == "options.sampling.bad_token_sequences[0]"


def test_a_bad_sequence_that_is_too_long_is_named() -> None:
    options = RequestOptions(sampling=SamplingParams(bad_token_sequences=[TokenSequence(token_ids=[1] * 65)]))
    with pytest.raises(InvalidRequest) as caught:
        parse_generate(generate(options), "m", VOCAB)
    assert caught.value.metadata == {"field": "options.sampling.bad_token_sequences[0]", "value": "65", "limit": "64"}


def test_spellings_of_bad_words_count_as_bad_sequences() -> None:
    parsed = parse_generate(generate(), "m", VOCAB)
    with pytest.raises(InvalidRequest, match="bad_token_sequences"):
        complete(parsed, [1], [[1]] * 4097, LIMITS, "t")


def test_prompt_logprobs_are_bounded_over_the_prompt() -> None:
    limits = Limits(max_tokens=(100_000,))
    assert valid(5000, limits, max_tokens=1, prompt_logprobs=19).sampling.prompt_logprobs == 19
    with pytest.raises(InvalidRequest) as caught:
        valid(5001, limits, max_tokens=1, prompt_logprobs=19)
    assert caught.value.metadata["field"] == "options.sampling.prompt_logprobs"


def test_more_messages_than_a_conversation_has_are_refused() -> None:
    message = ChatRequest(messages=[ChatMessage(role="user")] * 4097)
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(message, "m", VOCAB)
    assert caught.value.metadata == {"field": "messages", "value": "4097", "limit": "4096"}


def test_equal_request_ids_of_clients_are_two_requests() -> None:
    one, two = (valid(options=RequestOptions(request_id="mine")) for _ in range(2))
    assert one.request_id == two.request_id == "mine"
    assert one.internal_id != two.internal_id
    assert valid().request_id != valid().request_id


def test_what_the_group_may_not_serve_yet_passes() -> None:
    sampling = valid(n=64, prompt_logprobs=20, logprobs=20).sampling
    assert (sampling.n, sampling.prompt_logprobs, sampling.logprobs) == (64, 20, 20)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 120))
def test_no_bytes_on_the_wire_do_anything_but_pass_or_raise_ours(data: bytes, prompt_tokens: int) -> None:
    try:
        message = inference_pb2.GenerateRequest.FromString(data)
    except Exception:
        return  # gRPC refuses it before us
    try:
        complete(parse_generate(message, "m", VOCAB), [3] * prompt_tokens, [], LIMITS, "t")
    except QuireError as error:
        raised: QuireError | None = error
    else:
        raised = None
    assert raised is None or raised.code in ("INVALID_ARGUMENT", "UNIMPLEMENTED")


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(width=32),
        top_p=st.floats(width=32),
        min_p=st.floats(width=32),
        repetition_penalty=st.floats(width=32),
        presence_penalty=st.floats(width=32),
        max_tokens=st.integers(0, 200),
        min_tokens=st.integers(0, 200),
        n=st.integers(0, 100),
        logit_bias=st.dictionaries(st.integers(0, 1100), st.floats(width=32), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 1100), max_size=3),
    )
)
def test_what_passes_is_within_every_rule(sampling: SamplingParams) -> None:
    try:
        passed = complete(
            parse_generate(generate(RequestOptions(sampling=sampling)), "m", VOCAB), [1], [], LIMITS, "t"
        ).sampling
    except InvalidRequest:
        return
    floats = [passed.temperature, passed.top_p, passed.min_p, passed.repetition_penalty, passed.presence_penalty]
    assert all(map(math.isfinite, [*floats, *passed.logit_bias.values()]))
    assert passed.temperature >= 0
    assert 0 < passed.top_p <= 1
    assert 1 <= passed.max_tokens <= 99
    assert passed.min_tokens <= passed.max_tokens
    assert 1 <= passed.n <= 64
    assert all(token_id < VOCAB for token_id in [*passed.stop_token_ids, *passed.logit_bias])
