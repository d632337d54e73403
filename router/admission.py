"""How much one router takes on: bounded, per tenant too, and refused at once with a hint when to come again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import DeadlineExceeded, Overloaded

TENANT_SHARE = 0.75
"""Of the slots, what one tenant may hold where there are several: the others always find some free."""

MIN_RETRY_MS = 100
MAX_RETRY_MS = 5_000
_SMOOTHING = 0.2


class Admission:
    """Counts requests in flight. Lives on one event loop."""

    def __init__(
        self,
        max_active: int,
        *,
        shared: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shared``: whether there are several tenants now, so that none may take all slots."""
        self._max_active = max_active
        self._shared = shared
        self._active: Counter[str] = Counter()
        self._total = 0
        self._clock = clock
        self._last_end: float | None = None
        self._end_interval_s = MIN_RETRY_MS / 1000  # smoothed time between two ends while full

    @property
    def active(self) -> int:
        """Requests in flight."""
        return self._total

    @contextmanager
    def slot(self, tenant: str) -> Iterator[None]:
        """Hold a slot. Raises Overloaded at once when there is none: nobody queues here."""
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
        wait_ms = min(MAX_RETRY_MS, max(MIN_RETRY_MS, round(self._end_interval_s * 1000)))
        return Overloaded(f"{message}, its limit; try again later", retry_after_ms=wait_ms, limit=limit)


def check_deadline(remaining_ms: float | None, earliest_ms: float) -> None:
    """Raise DeadlineExceeded when even the lower bound of the prediction is too late."""
    if remaining_ms is not None and earliest_ms > remaining_ms:
        left_ms = max(0, round(remaining_ms))
        raise DeadlineExceeded(
            f"the first token cannot come in the {left_ms} ms that are left: it takes {earliest_ms:.0f} ms at least",
            value=left_ms,
            limit=round(earliest_ms),
        )
