"""An engine without a model, for tests of what is around it: each step gives each open request its next token.

Tokens count up from the request's seed, so that a stream's content is known. ``gate`` holds steps back, ``breakage`` is
raised by the next one, ``wide`` makes outputs of many tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.blocks import BlockHash
from cluster.errors import DeadlineExceeded, InvalidRequest
from workers.request import Admitted, Failed, Finished, FinishReason, Output, Request, RequestKey, Usage


@dataclass(frozen=True)
class ScriptedLoad:
    waiting_requests: int = 0
    waiting_prefill_tokens: int = 0
    running_requests: int = 0
    waiting_sequences: int = 0
    running_sequences: int = 0
    free_blocks: int = 100
    cached_blocks: int = 0
    used_blocks: int = 0
    in_transfer_blocks: int = 0
    total_blocks: int = 100
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    steps: int = 0
    requests_finished: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    tier_prompt_tokens: int = 0
    output_tokens: int = 0
    tier: None = None


@dataclass
class ScriptedEvents:
    stored: list[BlockHash] = field(default_factory=list)
    dropped: list[BlockHash] = field(default_factory=list)


class ScriptedEngine:
    """Stands in for workers.engine.Engine. Every request takes one page for each token it has put out."""

    max_request_tokens = 1 << 20

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.breakage: Exception | None = None
        self.lost: str | None = None
        self.layers = 0
        self.wide = 1
        self.cached: set[BlockHash] = set()
        self.checks = 0
        self.inconsistent = False
        self.requests: dict[RequestKey, Request] = {}
        self.done: dict[RequestKey, int] = {}
        self.steps = 0
        self.stepping = threading.Event()
        self._events = ScriptedEvents()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Request) -> None:
        if request.sampling.top_k == 666:
            raise RuntimeError("a fault of the engine's own")
        if len(request.prompt) > 4_000_000:
            raise InvalidRequest.of("prompt_token_ids", len(request.prompt), "too long")
        self.requests[request.key] = request
        self.done[request.key] = 0

    def cancel(self, key: RequestKey) -> None:
        self.requests.pop(key, None)

    def cancel_owner(self, owner: str) -> None:
        for key in [key for key in self.requests if key.owner == owner]:
            self.cancel(key)

    def step(self, now: float) -> list[Output]:
        self.stepping.set()
        self.gate.wait(30)
        time.sleep(0.001)
        self.steps += 1
        if self.breakage is not None:
            raise self.breakage
        return [output for request in list(self.requests.values()) for output in self._advance(request, now)]

    def _advance(self, request: Request, now: float) -> list[Output]:
        key, done = request.key, self.done[request.key]
        if request.deadline is not None and now >= request.deadline:
            self.cancel(key)
            return [Output(key, end=Failed(DeadlineExceeded("the deadline has passed")))]
        self.done[key] = done + 1
        last = done + 1 >= request.sampling.max_tokens
        usage = Usage(len(request.prompt), done + 1, 0, 0)
        if last:
            self.cancel(key)
        return [
            Output(
                key,
                index=index,
                token_ids=(request.sampling.seed + done,) * self.wide,
                admitted=Admitted(0, 0.0) if done == 0 and index == 0 else None,
                end=Finished(FinishReason.LENGTH, None, usage) if last else None,
            )
            for index in range(request.sampling.n)
        ]

    def store(self, hashes: Sequence[BlockHash], dropped: Sequence[BlockHash] = ()) -> None:
        """Between steps only."""
        self.cached |= set(hashes)
        self.cached -= set(dropped)
        self._events.stored += hashes
        self._events.dropped += dropped

    def take_cache_events(self) -> ScriptedEvents:
        taken, self._events = self._events, ScriptedEvents()
        return taken

    def cached_hashes(self) -> list[BlockHash]:
        return list(self.cached)

    def load(self) -> ScriptedLoad:
        return ScriptedLoad(
            running_requests=len(self.requests),
            running_sequences=len(self.requests),
            used_blocks=sum(map(self.done.__getitem__, self.requests)),
            steps=self.steps,
        )

    waits_for_tier = False

    def listen(self, wake: Callable[[], None]) -> None:
        """It has no tier."""

    def tier_load(self) -> None:
        return None

    def failure(self) -> str | None:
        return self.lost

    def progress(self) -> int:
        return self.layers

    def check(self) -> None:
        self.checks += 1
        if self.inconsistent:
            raise RuntimeError("pages are lost")
