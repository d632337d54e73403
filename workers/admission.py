"""What a group refuses at submit: whatever could not finish here, or would harm the kernel. Behind it all is valid."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from cluster.errors import ContextExceeded, DeadlineExceeded, InvalidRequest, PromptEmpty
from cluster.limits import MAX_PROMPT_LOGPROBS
from workers.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is told once. Tokens and counts."""

    block_tokens: int
    max_batch_tokens: int  # token budget of a step
    max_running: int  # sequences that run at once
    max_waiting: int  # requests that wait before the engine refuses
    max_context_tokens: int  # prompt plus output, as the model allows
    prefix_cache: bool
    eos_token_ids: frozenset[int]
    vocab_size: int
    step_target_s: float | None = None  # of a step in which sequences decode; None: max_batch_tokens alone bounds it
    tier_deadline_s: float = 0.5  # that a request waits for the tier behind the pages, all in all
    claim_wait_s: float = 10.0  # and for a prefix that another group is computing

    def __post_init__(self) -> None:
        for name in ("block_tokens", "max_batch_tokens", "max_running", "max_waiting", "max_context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1; got {getattr(self, name)}")


def check_request(request: Request, settings: EngineSettings, max_pool_tokens: int) -> None:
    """Raise the error that names field, value and limit; return when the request can finish in this group alone.

    Samples are preempted one by one, so a request fits as soon as its longest sample does.
    """
    sampling = request.sampling
    if len(request.prompt) == 0:
        raise PromptEmpty("prompt_token_ids: at least one token is needed; got none", field="prompt_token_ids")
    if request.deadline is not None and request.deadline <= request.arrival:
        raise DeadlineExceeded("the deadline had passed when the request arrived", field="remaining_ms", value=0)
    if sampling.max_tokens < 1:
        raise InvalidRequest.of("max_tokens", sampling.max_tokens, "must be at least 1", limit="1")
    if sampling.n < 1:
        raise InvalidRequest.of("n", sampling.n, "must be at least 1", limit="1")
    _check_outputs(request)
    for field, ids in _id_fields(request):
        _check_ids(field, ids, settings.vocab_size)
    _check_length(request, settings, max_pool_tokens)
    _check_scores(request)


def _check_outputs(request: Request) -> None:
    sampling = request.sampling
    if request.outputs and len(request.outputs) != sampling.n:
        rule = f"must be empty or one per sample, {sampling.n}"
        raise InvalidRequest.of("output_token_ids", len(request.outputs), rule, limit=str(sampling.n))
    longest = max(map(len, request.outputs), default=0)
    if longest > sampling.max_tokens:
        rule = f"must have at most max_tokens, {sampling.max_tokens}, tokens"
        raise InvalidRequest.of("output_token_ids", longest, rule, limit=str(sampling.max_tokens))
    if not all(sampling.bad_token_sequences):
        raise InvalidRequest.of("bad_token_sequences", (), "must have at least one token each")


def _id_fields(request: Request) -> Iterator[tuple[str, Collection[int]]]:
    sampling = request.sampling
    yield "prompt_token_ids", request.prompt
    for output in request.outputs:
        yield "output_token_ids", output
    yield "logit_bias", sampling.logit_bias.keys()
    yield "allowed_token_ids", sampling.allowed_token_ids
    for sequence in sampling.bad_token_sequences:
        yield "bad_token_sequences", sequence
    yield "stop_token_ids", sampling.stop_token_ids


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    array = np.fromiter(ids, dtype=np.int64, count=len(ids))
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise InvalidRequest.of(
            field, int(wrong[0]), f"must be at least 0 and below {vocab_size}", limit=str(vocab_size)
        )


def _check_length(request: Request, settings: EngineSettings, max_pool_tokens: int) -> None:
    prompt, output = len(request.prompt), request.sampling.max_tokens
    for limit, what in ((settings.max_context_tokens, "context"), (max_pool_tokens, "page pool")):
        if prompt + output > limit:
            raise ContextExceeded(
                f"max_tokens: {prompt} prompt tokens and {output} output tokens are {prompt + output}, "
                f"more than the {what}'s {limit}",
                field="max_tokens",
                value=prompt + output,
                limit=limit,
                prompt_tokens=prompt,
            )


def _check_scores(request: Request) -> None:
    asked = request.sampling.prompt_logprobs
    if asked is not None and (asked + 1) * len(request.prompt) > MAX_PROMPT_LOGPROBS:
        rule = f"must be at most {MAX_PROMPT_LOGPROBS:,} over the {len(request.prompt)} prompt tokens, with their own"
        raise InvalidRequest.of("prompt_logprobs", asked, rule, limit=str(MAX_PROMPT_LOGPROBS))
