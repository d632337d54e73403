"""How fast the engine is: exponential averages over steps, from the times that the ranks report."""

from __future__ import annotations

from workers.plan import StepPlan, StepResult
from workers.step_times import StepTimes

_WEIGHT = 0.1
"""Of the newest step: the average follows a change within some twenty steps."""

REPRESENTATIVE_TOKENS = 64
"""A prefill of fewer tokens takes as long as any step: it says nothing about the rate."""

_RETRY_MS = (50, 60_000)
_RETRY_UNMEASURED_MS = 1000


class Meter:
    """Averages of recent steps; 0 until measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_tokens_per_s = 0.0
        self.step_ms = 0.0
        self.steps = 0
        self.step_times = StepTimes()
        self._request_s = 0.0  # busy time between two ends of requests
        self._since_end_s = 0.0
        self._finished = 0

    def record(self, plan: StepPlan, result: StepResult, requests_finished: int) -> None:
        """Take in one step; ``requests_finished`` since the engine began."""
        seconds = max(result.forward_s + result.sample_s, 1e-9)
        self.steps += 1
        self.step_ms = _average(self.step_ms, 1e3 * seconds)
        self.step_times.record(plan.num_tokens, seconds)
        draws, tokens = len(plan.draws), plan.num_tokens
        # A mixed step's time cannot be divided fairly: it counts for what most of its tokens were.
        if tokens >= max(2 * draws, REPRESENTATIVE_TOKENS):
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, tokens / seconds)
        elif tokens < 2 * draws:
            self.decode_tokens_per_s = _average(self.decode_tokens_per_s, draws / seconds)
        self._record_ends(seconds, requests_finished)

    def retry_after_ms(self, waiting: int) -> int:
        """In how long about a tenth of those that wait should have found a place."""
        if not self._request_s:
            return _RETRY_UNMEASURED_MS
        low, high = _RETRY_MS
        return round(min(max(1e3 * self._request_s * max(1, waiting // 10), low), high))

    def _record_ends(self, seconds: float, requests_finished: int) -> None:
        self._since_end_s += seconds
        ended = requests_finished - self._finished
        if ended > 0:
            self._request_s = _average(self._request_s, self._since_end_s / ended)
            self._since_end_s, self._finished = 0.0, requests_finished


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
