"""A circuit breaker: what fails again and again is left alone, and tried again after a while, then less often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

LONGEST_S = 30.0
"""Between two tries."""

State = Literal["closed", "open", "half_open"]


class Breaker:
    """Closed: in use. Open: left alone. Half open: one try is under way. Any thread may call anything."""

    def __init__(self, failures_to_open: int, probe_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures_to_open = failures_to_open
        self._first_s = probe_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state: State = "closed"
        self._failures = 0
        self._wait_s = probe_s
        self._next_try = 0.0

    @property
    def state(self) -> State:
        """Now."""
        return self._state

    def allows(self) -> bool:
        """Whether to use it now. When open and it is time for a try, true once: the caller is the one who tries, and
        says how it went."""
        with self._lock:
            if self._state == "closed":
                return True
            if self._clock() < self._next_try:
                return False
            self._state = "half_open"
            self._next_try = self._clock() + self._wait_s  # if this one never tells, another may try
            return True

    def succeeded(self) -> None:
        """It works."""
        with self._lock:
            self._state, self._failures, self._wait_s = "closed", 0, self._first_s

    def failed(self) -> None:
        """It did not. Those that were under way when it opened change nothing."""
        with self._lock:
            self._failures += 1
            if self._state == "half_open":
                self._wait_s = min(2 * self._wait_s, LONGEST_S)
                self._open()
            elif self._state == "closed" and self._failures >= self._failures_to_open:
                self._open()

    def _open(self) -> None:
        self._state = "open"
        self._next_try = self._clock() + self._wait_s
