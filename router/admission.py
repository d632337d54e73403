"""How much one router takes on: bounded, per tenant too, and refused at once with a hint when to come again.

Quotas are counted by each router for itself: a tenant that uses two has twice as much.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import DeadlineExceeded, Overloaded, QuotaExceeded
from router.tenants import Tenants

TENANT_SHARE = 0.75
"""Of the slots, what one tenant may hold where there are several: the others always find some free."""

MIN_RETRY_MS = 100
MAX_RETRY_MS = 5_000
_SMOOTHING = 0.2
MAX_BUCKETS = 10_000
"""Tenants whose use of tokens is remembered; the one that was quiet for longest is forgotten, with a full bucket."""


class TokenBucket:
    """Tokens flow in at ``per_minute``, up to a minute's worth; taking may overdraw it, letting in needs a token in it.

    What a request will take is not known when it is let in, so it is charged when it is: over time no more comes out
    than flows in, however large the last request was.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_s = per_minute / 60
        self._most = float(per_minute)
        self._left = self._most
        self._at = now

    def left(self, now: float) -> float:
        """Below 0 when overdrawn. ``now`` in seconds, never less than before."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        return self._left

    def take(self, tokens: int, now: float) -> None:
        """Charge tokens; a negative number gives some back."""
        self._left = min(self._most, self.left(now) - tokens)

    def wait_s(self, now: float) -> float:
        """Until there is a token in it; 0 when there is."""
        return max(0.0, (1 - self.left(now)) / self._per_s)


class Admission:
    """Counts requests in flight. Lives on one event loop."""

    def __init__(
        self,
        max_active: int,
        *,
        shared: Callable[[], bool] = lambda: False,
        tenants: Tenants | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shared``: whether there are several tenants now, so that none may take all slots."""
        self._max_active = max_active
        self._shared = shared
        self._tenants = tenants or Tenants()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._active: Counter[str] = Counter()
        self._total = 0
        self._clock = clock
        self._last_end: float | None = None
        self._end_interval_s = MIN_RETRY_MS / 1000  # smoothed time between two ends while full

    @property
    def active(self) -> int:
        """Requests in flight."""
        return self._total

    def active_of(self, tenant: str) -> int:
        """The tenant's requests in flight."""
        return self._active[tenant]

    @contextmanager
    def slot(self, tenant: str) -> Iterator[None]:
        """Hold a slot. Raises Overloaded, QuotaExceeded at once when there is none: nobody queues here."""
        quota = self._tenants[tenant].max_active_requests
        if quota is not None and self._active[tenant] >= quota:
            message = f"the tenant has {quota} requests in flight here, its quota max_active_requests; try again later"
            raise QuotaExceeded(message, retry_after_ms=self._wait_ms(), quota="max_active_requests", limit=quota)
        if self._total >= self._max_active:
            raise self._refusal(f"this router has {self._max_active} requests in flight", self._max_active)
        share = max(1, int(self._max_active * TENANT_SHARE)) if self._shared() else self._max_active
        if self._active[tenant] >= share:
            raise self._refusal(f"the tenant has {share} requests in flight here", share)
        self._active[tenant] += 1
        self._total += 1
        try:
            yield
        finally:
            self._release(tenant)

    def _release(self, tenant: str) -> None:
        self._total -= 1
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]  # tenants come and go; the counter must not grow with them
        now = self._clock()
        if self._last_end is not None:
            self._end_interval_s += _SMOOTHING * (now - self._last_end - self._end_interval_s)
        self._last_end = now

    def _refusal(self, message: str, limit: int) -> Overloaded:
        return Overloaded(f"{message}, its limit; try again later", retry_after_ms=self._wait_ms(), limit=limit)

    def _wait_ms(self) -> int:
        return min(MAX_RETRY_MS, max(MIN_RETRY_MS, round(self._end_interval_s * 1000)))

    # -- tokens ------------------------------------------------------------------------------------------------------

    def check_tokens(self, tenant: str) -> None:
        """Raise QuotaExceeded when the tenant has used up its tokens for now."""
        bucket = self._bucket(tenant)
        if bucket is None or not (wait_s := bucket.wait_s(self._clock())):
            return
        quota = self._tenants[tenant].tokens_per_minute
        raise QuotaExceeded(
            f"the tenant has used up its quota of {quota} tokens per minute here; there are some in {wait_s:.1f} s",
            retry_after_ms=max(1, math.ceil(1000 * wait_s)),
            quota="tokens_per_minute",
            limit=quota,
        )

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens against the tenant's quota; a negative number gives some back."""
        bucket = self._bucket(tenant)
        if bucket is not None:
            bucket.take(tokens, self._clock())

    def tokens_left(self, tenant: str) -> int | None:
        """Below 0 when overdrawn; None without a quota."""
        bucket = self._bucket(tenant)
        return None if bucket is None else math.floor(bucket.left(self._clock()))

    def _bucket(self, tenant: str) -> TokenBucket | None:
        per_minute = self._tenants[tenant].tokens_per_minute
        if per_minute is None:
            return None
        if tenant not in self._buckets:
            self._buckets[tenant] = TokenBucket(per_minute, self._clock())
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(tenant)
        return self._buckets[tenant]


def check_deadline(remaining_ms: float | None, earliest_ms: float) -> None:
    """Raise DeadlineExceeded when even the lower bound of the prediction is too late."""
    if remaining_ms is not None and earliest_ms > remaining_ms:
        left_ms = max(0, round(remaining_ms))
        raise DeadlineExceeded(
            f"the first token cannot come in the {left_ms} ms that are left: it takes {earliest_ms:.0f} ms at least",
            value=left_ms,
            limit=round(earliest_ms),
        )
