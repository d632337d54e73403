"""From a message to a ``ValidRequest``. Nothing behind this module meets an invalid one.

Two steps, since some rules need the prompt's tokens: ``parse_generate``/``parse_chat`` look at the message alone,
``complete`` at the message and its tokens together. Each rule is written in the protos; each error names the field by
its path in the message, its value and the rule.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cluster.errors import ContextExceeded, FieldNotSupported, InvalidRequest, PromptEmpty
from cluster.limits import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    MAX_REQUEST_ID_BYTES,
    MAX_SAMPLES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    check_bad_sequence,
    check_token_lists,
)
from cluster.pb import common_pb2, inference_pb2

SAMPLING = "options.sampling"
_RESERVED = ("adapter", "constraint", "draft", "resume_token", "output_token_ids")
_TEMPLATE_OWN = {"messages", "add_generation_prompt", "tokenize", "tools", "documents"}

Message: TypeAlias = dict[str, str]
"""One turn of a conversation: role, content, and name where one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What goes through the chat template."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRef:
    """Which stored session a Chat goes on with, and the version that it must be at (None: any, or none yet)."""

    session_id: str
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A message whose every field is right by itself."""

    model: str
    prompt: str | tuple[int, ...] | Conversation
    options: inference_pb2.RequestOptions
    session: SessionRef | None = None  # with it, the prompt is only what is new


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a prompt is held against. ``max_tokens``: of each group that serves the model, prompt and output."""

    max_tokens: tuple[int, ...]
    default_max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request with every default filled in, the seed too."""

    request_id: str  # what the client calls it
    internal_id: str  # unique in the cluster, whatever clients call theirs
    model: str
    prompt: tuple[int, ...]
    sampling: common_pb2.SamplingParams  # complete; not to be changed
    tenant: str
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    stream_interval_tokens: int
    priority: int
    session_id: str
    cache_salt: str

    @property
    def total_tokens(self) -> int:
        """Prompt plus the longest possible output of a sample."""
        return len(self.prompt) + self.sampling.max_tokens


# -- the message alone -----------------------------------------------------------------------------------------------


def parse_generate(message: inference_pb2.GenerateRequest, model: str, vocab_size: int) -> Parsed:
    """Check a GenerateRequest for ``model``. Raises InvalidRequest, PromptEmpty, FieldNotSupported."""
    prompt: str | tuple[int, ...]
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise PromptEmpty("prompt: text or token_ids must be set", field="prompt")
    if kind == "text":
        prompt = message.text
    else:
        prompt = tuple(message.token_ids.token_ids)
        check_ids("token_ids", prompt, vocab_size)
    if not prompt:
        raise PromptEmpty(f"{kind}: must not be empty", field=kind)
    _check_options(message.options, vocab_size)
    return Parsed(model=model, prompt=prompt, options=message.options)


def parse_chat(message: inference_pb2.ChatRequest, model: str, vocab_size: int) -> Parsed:
    """Check a ChatRequest for ``model``. Raises InvalidRequest, PromptEmpty, FieldNotSupported."""
    conversation = Conversation(
        messages=parse_messages(message.messages, "messages"),
        variables=_template_variables(message.template_variables_json),
    )
    _check_options(message.options, vocab_size)
    session = _session(message) if message.HasField("session") else None
    return Parsed(model=model, prompt=conversation, options=message.options, session=session)


def _session(message: inference_pb2.ChatRequest) -> SessionRef:
    sampling = message.options.sampling
    if sampling.HasField("n") and sampling.n != 1:
        raise InvalidRequest.of(
            f"{SAMPLING}.n", sampling.n, "must be 1 in a session: only one answer goes on", limit="1"
        )
    return SessionRef(
        session_id=session_name("session.session_id", message.session.session_id),
        version=message.session.version if message.session.HasField("version") else None,
    )


def session_name(field: str, name: str) -> str:
    """The name of a stored session. Raises InvalidRequest."""
    if not name:
        raise InvalidRequest.of(field, name, "must be set")
    _check_bytes(field, name, MAX_NAME_BYTES)
    return name


def with_history(parsed: Parsed, messages: tuple[Message, ...]) -> Parsed:
    """The same request for a whole conversation. Raises InvalidRequest when that is too long."""
    _check_count("messages", len(messages))
    assert isinstance(parsed.prompt, Conversation)
    return replace(parsed, prompt=replace(parsed.prompt, messages=messages))


def parse_messages(messages: Sequence[inference_pb2.ChatMessage], field: str) -> tuple[Message, ...]:
    """The turns of a conversation. Raises PromptEmpty, InvalidRequest."""
    if not messages:
        raise PromptEmpty(f"{field}: must hold at least one message", field=field)
    _check_count(field, len(messages))
    parsed: list[Message] = []
    for number, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest.of(f"{field}[{number}].role", message.role, "must be set")
        _check_bytes(f"{field}[{number}].role", message.role, MAX_NAME_BYTES)
        named = {"name": message.name} if message.name else {}
        parsed.append({"role": message.role, "content": message.content, **named})
    return tuple(parsed)


def _check_count(field: str, messages: int) -> None:
    if messages > MAX_MESSAGES:
        rule = f"must hold at most {MAX_MESSAGES}, stored ones included"
        raise InvalidRequest.of(field, messages, rule, limit=str(MAX_MESSAGES))


def check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequest for an id outside the vocabulary. (They are unsigned on the wire.)"""
    if ids and (largest := max(ids)) >= vocab_size:
        raise InvalidRequest.of(field, largest, f"must be token ids below {vocab_size}", limit=str(vocab_size))


def _template_variables(text: str) -> Mapping[str, Any]:
    field = "template_variables_json"
    if not text:
        return {}
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(field, text, "must be a JSON object") from error
    if not isinstance(variables, dict):
        raise InvalidRequest.of(field, text, "must be a JSON object")
    if taken := _TEMPLATE_OWN & set(variables):
        raise InvalidRequest.of(field, text, f"must not set {', '.join(sorted(taken))}")
    return variables


def _check_options(options: inference_pb2.RequestOptions, vocab_size: int) -> None:
    for name in _RESERVED:
        if options.HasField(name) if name in ("constraint", "draft") else getattr(options, name):
            raise FieldNotSupported(f"options.{name}: this version does not serve it", field=f"options.{name}")
    _check_texts("options.stop", options.stop, MAX_STOPS)
    _check_texts("options.bad_words", options.bad_words, MAX_BAD_WORDS)
    _check_bytes("options.session_id", options.session_id, MAX_NAME_BYTES)
    _check_bytes("options.cache_salt", options.cache_salt, MAX_NAME_BYTES)
    _check_bytes("options.request_id", options.request_id, MAX_REQUEST_ID_BYTES)
    for name in ("truncate_prompt_tokens", "stream_interval_tokens"):
        if options.HasField(name):
            _check_range(f"options.{name}", getattr(options, name), 1, math.inf)
    _check_range("options.priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_sampling(options.sampling, vocab_size)


def _check_sampling(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    for name, low, high, is_open in _RANGES:
        if sampling.HasField(name):
            _check_range(f"{SAMPLING}.{name}", getattr(sampling, name), low, high, open_below=is_open)
    check_token_lists(
        SAMPLING, sampling.logit_bias, sampling.allowed_token_ids, sampling.stop_token_ids, sampling.bad_token_sequences
    )
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"{SAMPLING}.logit_bias[{token_id}]", bias, -100, 100)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        check_ids(f"{SAMPLING}.{name}", getattr(sampling, name), vocab_size)
    for number, sequence in enumerate(sampling.bad_token_sequences):
        field = f"{SAMPLING}.bad_token_sequences[{number}]"
        check_bad_sequence(field, sequence.token_ids)
        check_ids(field, sequence.token_ids, vocab_size)


_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("max_tokens", 1, math.inf, False),
    ("temperature", 0, math.inf, False),
    ("top_p", 0, 1, True),
    ("min_p", 0, 1, False),
    ("repetition_penalty", 0, math.inf, True),
    ("presence_penalty", -2, 2, False),
    ("frequency_penalty", -2, 2, False),
    ("n", 1, MAX_SAMPLES, False),
    ("logprobs", 0, MAX_LOGPROBS, False),
    ("prompt_logprobs", 0, MAX_LOGPROBS, False),
)
"""Field, lowest, highest, whether the lowest itself is refused. min_tokens is held against max_tokens later."""


def _check_range(field: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    # NaN compares as False, so it is outside of every range; infinity is refused by name.
    inside = (low < value if open_below else low <= value) and value <= high and not math.isinf(value)
    if not inside:
        below = f"above {low}" if open_below else f"at least {low}"
        above = "finite" if math.isinf(high) else f"at most {high}"
        raise InvalidRequest.of(field, value, f"must be {below} and {above}", limit=f"{low}..{high}")


def _check_texts(field: str, texts: Sequence[str], most: int) -> None:
    if len(texts) > most:
        raise InvalidRequest.of(field, len(texts), f"must have at most {most} entries", limit=str(most))
    for number, text in enumerate(texts):
        if not text:
            raise InvalidRequest.of(f"{field}[{number}]", text, "must not be empty")
        _check_bytes(f"{field}[{number}]", text, MAX_STOP_BYTES)


def _check_bytes(field: str, text: str, most: int) -> None:
    if len(text.encode()) > most:
        raise InvalidRequest.of(field, text, f"must have at most {most} bytes", limit=str(most))


# -- the message and its tokens --------------------------------------------------------------------------------------


def complete(
    parsed: Parsed,
    prompt: Sequence[int],
    bad_sequences: Collection[Sequence[int]],
    limits: Limits,
    tenant: str,
) -> ValidRequest:
    """Fill in what depends on the prompt's tokens. Raises PromptEmpty, ContextExceeded, InvalidRequest.

    ``bad_sequences`` are the tokenizations of ``bad_words``; they join the sequences that the message has itself.
    """
    options = parsed.options
    if options.HasField("truncate_prompt_tokens"):
        prompt = prompt[-options.truncate_prompt_tokens :]
    if not prompt:
        raise PromptEmpty("prompt: it has no token", field="prompt")
    request_id = options.request_id or secrets.token_hex(16)
    return ValidRequest(
        request_id=request_id,
        # Two clients may choose one id, and a client may use one twice at a time.
        internal_id=f"{request_id}.{secrets.token_hex(8)}",
        model=parsed.model,
        prompt=tuple(prompt),
        sampling=_complete_sampling(options.sampling, len(prompt), bad_sequences, limits),
        tenant=tenant,
        stop=tuple(options.stop),
        include_stop=options.include_stop,
        skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        echo=options.echo,
        stream_interval_tokens=options.stream_interval_tokens if options.HasField("stream_interval_tokens") else 1,
        priority=options.priority,
        session_id=options.session_id or (parsed.session.session_id if parsed.session is not None else ""),
        cache_salt=options.cache_salt,
    )


def _complete_sampling(
    given: common_pb2.SamplingParams,
    prompt_tokens: int,
    bad_sequences: Collection[Sequence[int]],
    limits: Limits,
) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0, n=1)
    sampling.MergeFrom(given)
    sampling.max_tokens = _max_tokens(given, prompt_tokens, limits)
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest.of(
            f"{SAMPLING}.min_tokens",
            sampling.min_tokens,
            f"must be at most max_tokens, {sampling.max_tokens}",
            limit=str(sampling.max_tokens),
        )
    if not given.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    sampling.bad_token_sequences.extend(common_pb2.TokenSequence(token_ids=ids) for ids in bad_sequences)
    check_token_lists(SAMPLING, (), (), (), sampling.bad_token_sequences)
    _check_prompt_logprobs(sampling, prompt_tokens)
    return sampling


def _check_prompt_logprobs(sampling: common_pb2.SamplingParams, prompt_tokens: int) -> None:
    if sampling.HasField("prompt_logprobs") and (sampling.prompt_logprobs + 1) * prompt_tokens > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest.of(
            f"{SAMPLING}.prompt_logprobs",
            sampling.prompt_logprobs,
            f"must be at most {MAX_PROMPT_LOGPROBS:,} over the {prompt_tokens} prompt tokens, with their own",
            limit=str(MAX_PROMPT_LOGPROBS),
        )


def _max_tokens(given: common_pb2.SamplingParams, prompt_tokens: int, limits: Limits) -> int:
    """What was asked for, when it fits a group; else what is left: in the smallest group that can hold the prompt."""
    most = max(limits.max_tokens)
    wanted = given.max_tokens if given.HasField("max_tokens") else 1
    if prompt_tokens + wanted > most:
        field = f"{SAMPLING}.max_tokens" if prompt_tokens < most else "prompt"
        raise ContextExceeded(
            f"{field}: {prompt_tokens} prompt tokens and {wanted} output tokens are {prompt_tokens + wanted}, "
            f"more than the {most} that fit",
            field=field,
            value=prompt_tokens + wanted,
            limit=most,
            prompt_tokens=prompt_tokens,
        )
    if given.HasField("max_tokens"):
        return wanted
    left = min(limit for limit in limits.max_tokens if limit > prompt_tokens) - prompt_tokens
    return left if limits.default_max_tokens is None else min(left, limits.default_max_tokens)
