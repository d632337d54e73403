"""What enters and leaves an engine. Behind this module no request is invalid; no torch, no network, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from cluster.blocks import BlockHash
from cluster.errors import QuireError
from workers.masks import Masks


class RequestKey(NamedTuple):
    """Names one try of a request. Nothing of another attempt, or of another router, answers to it."""

    owner: str  # the router stream that it came over
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; meaning, units and order are those of proto/common.proto. Every default is filled in."""

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    masks: Masks = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        masks = Masks(self.logit_bias, self.allowed_token_ids, self.bad_token_sequences, self.stop_token_ids)
        object.__setattr__(self, "masks", masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One try of one request. Times are seconds of the engine's monotonic clock."""

    key: RequestKey
    prompt: Sequence[int]
    outputs: tuple[tuple[int, ...], ...] = ()  # what each sample has already put out (a moved request)
    sampling: SamplingParams
    root: BlockHash
    tenant: str = "anonymous"
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    submit_sequence: int = 0


class FinishReason(Enum):
    """Why a sample ended well."""

    STOP = "stop"
    LENGTH = "length"


class Logprob(NamedTuple):
    """Of the raw distribution; rank 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(NamedTuple):
    """The token at a position, and the most likely ones there."""

    token: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """What became of a request's look into the tier behind the pages."""

    decision: str  # as in proto PrefixUse
    stored_tokens: int = 0
    fetched_tokens: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """Told once per request, with its first output. cached + computed == prompt tokens."""

    cached_tokens: int
    queue_s: float
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    tier_tokens: int = 0  # of the cached ones, fetched for this request
    prefix_use: PrefixUse | None = None  # None: the tier was not asked


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the whole request, over all its samples so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int
    tier_tokens: int = 0  # of the cached ones


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample's good end."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request's bad end, also when some of its samples had ended well. Its output's index says nothing."""

    error: QuireError


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one sample. Every request's outputs end in one Finished per sample, or in one Failed."""

    key: RequestKey
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    admitted: Admitted | None = None
    end: Finished | Failed | None = None
