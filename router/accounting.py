"""What each tenant has used of this router: sums since it started, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.errors import DeadlineExceeded, Overloaded, QuireError, QuotaExceeded
from cluster.pb import common_pb2
from router.admission import Admission
from router.answer import Answer
from router.validation import ValidRequest

MAX_TENANTS = 10_000
"""The tenant that was quiet for longest is forgotten beyond this."""


@dataclass(slots=True)
class TenantTotals:
    """Of one tenant. ``prompt_tokens`` less the cached ones were computed."""

    requests: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    cached_group_tokens: int = 0
    cached_redis_tokens: int = 0
    output_tokens: int = 0


class Accounting:
    """The totals of all tenants. Lives on one event loop."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._totals: OrderedDict[str, TenantTotals] = OrderedDict()

    def __len__(self) -> int:
        return len(self._totals)

    def of(self, tenant: str) -> TenantTotals:
        """To be read, or counted up at once: it may be forgotten later."""
        if tenant not in self._totals:
            self._totals[tenant] = TenantTotals()
            if len(self._totals) > self._max_tenants:
                self._totals.popitem(last=False)
        self._totals.move_to_end(tenant)
        return self._totals[tenant]

    @contextmanager
    def refusals(self, tenant: str) -> Iterator[None]:
        """Count what the block refuses because of a quota or of overload."""
        try:
            yield
        except (Overloaded, QuotaExceeded):
            self.of(tenant).refusals += 1
            raise

    def prompt(self, tenant: str, tokens: int, cached: common_pb2.CachedTokens) -> None:
        """A request began to run."""
        totals = self.of(tenant)
        totals.prompt_tokens += tokens
        totals.cached_group_tokens += cached.group
        totals.cached_redis_tokens += cached.redis


class Meter:
    """Charges one request's tokens to its tenant's quota, and adds them to its totals, as they come."""

    def __init__(self, request: ValidRequest, answer: Answer, admission: Admission, accounting: Accounting) -> None:
        self._request = request
        self._answer = answer
        self._admission = admission
        self._accounting = accounting
        self._started = False
        self._output_tokens = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The whole prompt is charged at once, so that many requests at a time cannot slip through.

        What turns out to be cached is given back, and everything where no group took the request. A client that goes
        away before its first token gets nothing back: its prompt was, or is being, computed.
        """
        tenant, prompt_tokens = self._request.tenant, len(self._request.prompt)
        self._admission.charge(tenant, prompt_tokens)
        try:
            yield
        except QuireError as error:
            if not self._started and not isinstance(error, DeadlineExceeded):
                self._admission.charge(tenant, -prompt_tokens)
            raise

    def update(self) -> None:
        """Call after each delta."""
        tenant, answer = self._request.tenant, self._answer
        if answer.started and not self._started:
            self._started = True
            cached = answer.cached_tokens
            self._accounting.prompt(tenant, len(self._request.prompt), cached)
            self._admission.charge(tenant, -(cached.group + cached.redis))
        new = answer.completion_tokens - self._output_tokens
        self._output_tokens += new
        self._accounting.of(tenant).output_tokens += new
        self._admission.charge(tenant, new)
