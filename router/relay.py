"""One request on its way through the groups: chosen, submitted, and moved when its group dies.

What a client has received never changes: a moved request carries its output so far and the same seed, and the draw
depends on nothing but those, so it goes on at the next token, on a group of the same namespace.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from cluster import blocks
from cluster.blocks import BlockHash
from cluster.config import RouterConfig
from cluster.errors import Draining, GroupLost, NoGroup, Overloaded, QuireError
from cluster.pb import common_pb2, worker_pb2
from cluster.telemetry import get_logger
from router import policy
from router.admission import check_deadline
from router.groups import Groups
from router.links import Attempt, GroupLink
from router.policy import Choice, RequestFacts
from router.sessions import Affinity
from router.tenants import Tenants
from router.validation import ValidRequest

_log = get_logger("relay")

RECOVERY_MS = 5_000
"""When to come back after the last group was lost: a new one starts in some ten, and a call waits for it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What every relay of a router shares."""

    groups: Groups
    affinity: Affinity
    config: RouterConfig
    cluster_secret: bytes
    rng: random.Random
    tenants: Tenants


class Relay:
    """Of one request. ``interrupt`` ends its call from outside; ``deadline`` is the event loop's time, or None."""

    def __init__(
        self,
        request: ValidRequest,
        routing: Routing,
        interrupt: Callable[[QuireError], None],
        deadline: float | None,
    ) -> None:
        self.request = request
        self.attempts = 0
        self.link: GroupLink | None = None  # of the last attempt
        self.choice: Choice | None = None  # of the last attempt
        self.outputs: list[list[int]] = [[] for _ in range(request.sampling.n)]  # received so far, by sample
        self._routing = routing
        self._interrupt = interrupt
        self._deadline = deadline
        self._namespace: str | None = None  # pinned by the first delta
        self._refused_by: set[str] = set()
        self._overloaded = 0
        self._chains: dict[tuple[str, int], list[BlockHash]] = {}

    async def deltas(self) -> AsyncGenerator[worker_pb2.SequenceDelta, None]:
        """Of all attempts, as if there had been one. Ends when every sample has; close it when that is not awaited.

        Raises what the group answered; NoGroup, GroupLost where no group (any more) could take it; DeadlineExceeded.
        """
        while True:
            attempt = await self._submit()
            try:
                async for delta in attempt:
                    self._note(attempt, delta)
                    yield delta
                return
            except (GroupLost, Draining, Overloaded) as error:
                self._allow_move(attempt, error)
            finally:
                attempt.close()

    # -- choosing ----------------------------------------------------------------------------------------------------

    async def _submit(self) -> Attempt:
        while True:
            links = await self._candidates()
            link, cached = self._choose(links)
            self.attempts += 1
            self.link = link
            try:
                return link.submit(self._message(link), max(1, len(self.request.prompt) - cached), self._interrupt)
            except GroupLost:
                # Lost between choosing and sending: nothing was tried.
                self.attempts -= 1

    async def _candidates(self) -> list[GroupLink]:
        wait_s = self._routing.config.group_wait_s
        links = await self._routing.groups.wait_usable(self.request.model, self._fits, wait_s)
        if links:
            return links
        if self._namespace is not None:
            raise GroupLost(
                "the group that ran the request is gone, and there is no other of its kind", retry_after_ms=RECOVERY_MS
            )
        raise NoGroup(f"no group can take the request; waited {wait_s:g} s for one", retry_after_ms=RECOVERY_MS)

    def _fits(self, link: GroupLink) -> bool:
        hello = link.hello
        return (
            hello is not None
            and link.key not in self._refused_by
            and self._namespace in (None, hello.namespace)
            and self.request.total_tokens <= hello.max_context_tokens
        )

    def _choose(self, links: list[GroupLink]) -> tuple[GroupLink, int]:
        """The link, and how many prompt tokens it is believed to hold."""
        request, affinity = self.request, self._routing.affinity
        facts = RequestFacts(
            prompt_tokens=len(request.prompt),
            last_group=affinity.get(request.tenant, request.session_id),
        )
        by_key = {link.key: link for link in links}
        views = [link.view(self._cached_tokens(link)) for link in links]
        choice = policy.choose(facts, views, self._routing.rng)
        if choice is None:
            raise NoGroup("no group can take the request")
        if not self.attempts:
            check_deadline(self._remaining_ms(), choice.earliest_ttft_ms)
        self.choice = choice
        affinity.put(request.tenant, request.session_id, choice.key)
        return by_key[choice.key], choice.expected_cached_tokens

    def _cached_tokens(self, link: GroupLink) -> int:
        if link.hello is None or not len(link.index):
            return 0
        return link.index.overlap(self._chain(link.hello)) * link.hello.block_tokens

    def _chain(self, hello: worker_pb2.GroupHello) -> list[BlockHash]:
        key = (hello.namespace, hello.block_tokens)
        if key not in self._chains:
            self._chains[key] = blocks.chain(self._root(hello), self.request.prompt, hello.block_tokens)
        return self._chains[key]

    def _root(self, hello: worker_pb2.GroupHello) -> BlockHash:
        request = self.request
        domain = self._routing.tenants.cache_domain(request.tenant)
        return blocks.root(self._routing.cluster_secret, domain, hello.namespace, adapter="", salt=request.cache_salt)

    # -- sending and moving ------------------------------------------------------------------------------------------

    def _message(self, link: GroupLink) -> worker_pb2.Submit:
        request = self.request
        if link.hello is None:
            raise GroupLost("the group has not said hello")
        submit = worker_pb2.Submit(
            request_id=request.internal_id,
            attempt=self.attempts,
            model=request.model,
            prompt_token_ids=request.prompt,
            sampling=request.sampling,
            tenant=request.tenant,
            priority=request.priority,
            root=self._root(link.hello),
        )
        if any(self.outputs):
            submit.output_token_ids.extend(common_pb2.TokenSequence(token_ids=output) for output in self.outputs)
            submit.sampling.ClearField("prompt_logprobs")  # told with the first output
        remaining_ms = self._remaining_ms()
        if remaining_ms is not None:
            submit.remaining_ms = max(0, int(remaining_ms))
        return submit

    def _note(self, attempt: Attempt, delta: worker_pb2.SequenceDelta) -> None:
        if self._namespace is None and attempt.link.hello is not None:
            self._namespace = attempt.link.hello.namespace
        if delta.index < len(self.outputs):
            self.outputs[delta.index].extend(delta.token_ids)

    def _allow_move(self, attempt: Attempt, error: QuireError) -> None:
        """Return when the request may be tried elsewhere; else raise what the client gets."""
        if attempt.refused:
            self._refused_by.add(attempt.link.key)
        if isinstance(error, Overloaded):
            self._overloaded += 1
            elsewhere = any(self._fits(link) for link in self._routing.groups.usable(self.request.model))
            if self._overloaded > 1 or not elsewhere:
                raise error
        if self.attempts >= self._routing.config.max_attempts:
            raise GroupLost(
                f"the request was tried on {self.attempts} groups; the last one said: {error.message}",
                attempts=self.attempts,
            ) from error
        _log.info("request %s is moved: %s", self.request.request_id, error.message)

    def _remaining_ms(self) -> float | None:
        if self._deadline is None:
            return None
        return 1000 * (self._deadline - asyncio.get_running_loop().time())
