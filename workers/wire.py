"""Between the worker protocol's messages and the engine's values. Pure: what comes out of ``to_request`` is valid.

The router has validated for the client's sake. The group does it again for its own: whatever a faulty router sends must
end as one failed request, and never as a wrong page or a dead engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cluster.blocks import WIRE_HASH_BYTES, BlockHash
from cluster.errors import FieldNotSupported, InvalidRequest, ModelNotFound, PromptEmpty, QuireError
from cluster.limits import MAX_LOGPROBS, MAX_SAMPLES, check_bad_sequence, check_token_lists
from cluster.pb import common_pb2, worker_pb2
from workers.request import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    Output,
    PositionLogprobs,
    PrefixUse,
    Request,
    RequestKey,
    SamplingParams,
    Usage,
)

if TYPE_CHECKING:
    from workers.engine import Load
    from workers.rank_group import RankFacts

ROOT_BYTES = 32
MAX_ID_LENGTH = 256
LOWEST_FLOAT = -3.4028234e38
"""What a log-probability of minus infinity is sent as: JSON has no infinity."""

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is held against."""

    model: str
    vocab_size: int


# -- in --------------------------------------------------------------------------------------------------------------


def to_request(submit: worker_pb2.Submit, owner: str, limits: Limits, now: float) -> Request:
    """The request in a Submit that arrived at ``now`` (seconds of the engine's clock). Raises QuireError."""
    _check_identity(submit, limits)
    prompt = tuple(submit.prompt_token_ids)
    if not prompt:
        raise PromptEmpty("prompt_token_ids: must hold at least one token", field="prompt_token_ids")
    _check_ids("prompt_token_ids", prompt, limits.vocab_size)
    sampling = _to_sampling(submit.sampling, limits.vocab_size)
    outputs = tuple(tuple(sample.token_ids) for sample in submit.output_token_ids)
    if len(outputs) not in (0, sampling.n):
        raise InvalidRequest.of(
            "output_token_ids", len(outputs), f"must be empty or one for each of {sampling.n} samples"
        )
    for output in outputs:
        _check_ids("output_token_ids", output, limits.vocab_size)
    return Request(
        key=RequestKey(owner, submit.request_id, submit.attempt),
        prompt=prompt,
        outputs=outputs,
        sampling=sampling,
        root=BlockHash(submit.root),
        tenant=submit.tenant or "anonymous",
        priority=submit.priority,
        arrival=now,
        deadline=now + submit.remaining_ms / 1000 if submit.HasField("remaining_ms") else None,
        submit_sequence=submit.sequence,
    )


def _check_identity(submit: worker_pb2.Submit, limits: Limits) -> None:
    if not 1 <= len(submit.request_id) <= MAX_ID_LENGTH:
        raise InvalidRequest.of("request_id", submit.request_id, f"must have 1 to {MAX_ID_LENGTH} characters")
    if submit.attempt < 1:
        raise InvalidRequest.of("attempt", submit.attempt, "must be at least 1")
    if submit.model != limits.model:
        raise ModelNotFound(f"model: this group serves {limits.model!r}, not {submit.model!r}", field="model")
    if len(submit.root) != ROOT_BYTES:
        raise InvalidRequest.of("root", submit.root, f"must have {ROOT_BYTES} bytes")
    for name in ("adapter", "constraint", "draft"):
        if submit.adapter if name == "adapter" else submit.HasField(name):
            raise FieldNotSupported(f"{name}: this version does not serve it", field=name)


def _to_sampling(raw: common_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    for name in ("max_tokens", "seed"):
        if not raw.HasField(name):
            raise InvalidRequest.of(f"sampling.{name}", None, "must be set by the router")
    check_token_lists("sampling", raw.logit_bias, raw.allowed_token_ids, raw.stop_token_ids, raw.bad_token_sequences)
    for bad in raw.bad_token_sequences:
        check_bad_sequence("sampling.bad_token_sequences", bad.token_ids)
    params = SamplingParams(
        max_tokens=raw.max_tokens,
        seed=raw.seed,
        min_tokens=raw.min_tokens,
        temperature=raw.temperature if raw.HasField("temperature") else 1.0,
        top_k=raw.top_k,
        top_p=raw.top_p if raw.HasField("top_p") else 1.0,
        min_p=raw.min_p,
        repetition_penalty=raw.repetition_penalty if raw.HasField("repetition_penalty") else 1.0,
        presence_penalty=raw.presence_penalty,
        frequency_penalty=raw.frequency_penalty,
        logit_bias=dict(raw.logit_bias),
        allowed_token_ids=tuple(raw.allowed_token_ids),
        bad_token_sequences=tuple(tuple(bad.token_ids) for bad in raw.bad_token_sequences),
        stop_token_ids=frozenset(raw.stop_token_ids),
        ignore_eos=raw.ignore_eos,
        n=raw.n if raw.HasField("n") else 1,
        logprobs=raw.logprobs if raw.HasField("logprobs") else None,
        prompt_logprobs=raw.prompt_logprobs if raw.HasField("prompt_logprobs") else None,
    )
    _check_sampling(params, vocab_size)
    return params


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    _check_range("max_tokens", params.max_tokens, 1, math.inf)
    _check_range("min_tokens", params.min_tokens, 0, params.max_tokens)
    _check_range("temperature", params.temperature, 0, math.inf)
    _check_range("top_p", params.top_p, 0, 1, open_below=True)
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("repetition_penalty", params.repetition_penalty, 0, math.inf, open_below=True)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_range("n", params.n, 1, MAX_SAMPLES)
    _check_range("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS)
    _check_range("prompt_logprobs", params.prompt_logprobs or 0, 0, MAX_LOGPROBS)
    for bias in params.logit_bias.values():
        _check_range("logit_bias", bias, -100, 100)
    _check_ids("sampling.logit_bias", params.logit_bias, vocab_size)
    _check_ids("sampling.allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("sampling.stop_token_ids", params.stop_token_ids, vocab_size)
    for sequence in params.bad_token_sequences:
        _check_ids("sampling.bad_token_sequences", sequence, vocab_size)


def _check_range(name: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    # Written so that NaN, which compares as False, is refused; infinity is refused by name.
    inside = (low < value if open_below else low <= value) and value <= high
    if not inside or math.isinf(value):
        raise InvalidRequest.of(f"sampling.{name}", value, f"must lie in {'(' if open_below else '['}{low}, {high}]")


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest.of(name, max(ids), f"must be below the vocabulary's size, {vocab_size}")


# -- out -------------------------------------------------------------------------------------------------------------


def to_delta(output: Output) -> worker_pb2.SequenceDelta:
    """One sample's share of a step."""
    delta = worker_pb2.SequenceDelta(
        request_id=output.key.request_id,
        attempt=output.key.attempt,
        index=output.index,
        token_ids=output.token_ids,
        logprobs=map(_to_position, output.logprobs),
    )
    if output.admitted is not None:
        delta.admitted.CopyFrom(_to_admitted(output.admitted))
    if isinstance(output.end, Finished):
        delta.finished.reason = _REASONS[output.end.reason]
        delta.finished.usage.CopyFrom(_to_usage(output.end.usage))
        if output.end.stop_token_id is not None:
            delta.finished.stop_token_id = output.end.stop_token_id
    elif isinstance(output.end, Failed):
        delta.failed.CopyFrom(to_failed(output.end.error))
    return delta


def failure(request_id: str, attempt: int, error: QuireError) -> worker_pb2.SequenceDelta:
    """The end of a request that the engine never saw."""
    return worker_pb2.SequenceDelta(request_id=request_id, attempt=attempt, failed=to_failed(error))


def to_failed(error: QuireError) -> worker_pb2.RequestFailed:
    """An error's parts; cluster.errors.from_reason puts them together again."""
    return worker_pb2.RequestFailed(
        reason=error.reason, message=error.message, metadata=error.metadata, retry_after_ms=error.retry_after_ms
    )


def to_load(
    load: Load,
    *,
    last_submit_sequence: int,
    draining: bool,
    pool_consistent: bool,
    ranks: Iterable[RankFacts],
) -> common_pb2.GroupLoad:
    """A load as one router should see it."""
    return common_pb2.GroupLoad(
        last_submit_sequence=last_submit_sequence,
        waiting_requests=load.waiting_requests,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        running_requests=load.running_requests,
        waiting_sequences=load.waiting_sequences,
        running_sequences=load.running_sequences,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        used_blocks=load.used_blocks,
        in_transfer_blocks=load.in_transfer_blocks,
        total_blocks=load.total_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_tokens_per_s=load.decode_tokens_per_s,
        step_ms=load.step_ms,
        steps=load.steps,
        draining=draining,
        pool_consistent=pool_consistent,
        requests_finished=load.requests_finished,
        preemptions=load.preemptions,
        prompt_tokens=load.prompt_tokens,
        cached_prompt_tokens=load.cached_prompt_tokens,
        output_tokens=load.output_tokens,
        ranks=[
            common_pb2.Rank(
                rank=one.rank,
                pid=one.pid,
                weight_bytes=one.weight_bytes,
                kv_bytes=one.kv_bytes,
                heartbeat_age_ms=1000 * one.heartbeat_age_s,
            )
            for one in ranks
        ],
        tier=_to_tier(load) if load.tier is not None else None,
        tier_prompt_tokens=load.tier_prompt_tokens,
    )


def _to_tier(load: Load) -> common_pb2.TierLoad:
    use = load.prefetches
    return common_pb2.TierLoad(
        **(asdict(load.tier) if load.tier is not None else {}),
        found_tokens=use.found_tokens,
        fetched_tokens=use.fetched_tokens,
        waited_ms=1000 * use.waited_s,
        longest_wait_ms=1000 * use.longest_wait_s,
    )


def to_wire_hashes(hashes: Iterable[BlockHash]) -> list[bytes]:
    """Cut to what cache events carry."""
    return [block_hash[:WIRE_HASH_BYTES] for block_hash in hashes]


def _to_admitted(admitted: Admitted) -> worker_pb2.Admitted:
    return worker_pb2.Admitted(
        cached_tokens=_to_cached(admitted.cached_tokens, admitted.tier_tokens),
        queue_ms=admitted.queue_s * 1000,
        prompt_logprobs=map(_to_position, admitted.prompt_logprobs),
        prefix=_to_prefix_use(admitted.prefix_use) if admitted.prefix_use is not None else None,
    )


def _to_cached(tokens: int, from_tier: int) -> common_pb2.CachedTokens:
    return common_pb2.CachedTokens(group=tokens - from_tier, redis=from_tier)


def _to_prefix_use(use: PrefixUse) -> common_pb2.PrefixUse:
    return common_pb2.PrefixUse(
        decision=use.decision,
        stored_tokens=use.stored_tokens,
        fetched_tokens=use.fetched_tokens,
        waited_ms=1000 * use.waited_s,
    )


def _to_usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=_to_cached(usage.cached_tokens, usage.tier_tokens),
        preemptions=usage.preemptions,
    )


def _to_position(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(token=_to_logprob(position.token), top=_all_logprobs(position.top))


def _all_logprobs(found: Sequence[Logprob]) -> list[common_pb2.TokenLogprob]:
    return [_to_logprob(item) for item in found]


def _to_logprob(item: Logprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=item.token_id, logprob=max(item.logprob, LOWEST_FLOAT), rank=item.rank)
