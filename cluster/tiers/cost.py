"""Fetch or compute? Measured, and decided for each request. Pure; times are seconds.

Fetching takes a round trip and bytes over a measured bandwidth. Computing takes longer the deeper a token stands, since
it attends to all before it: seconds per token = base + slope * depth, learned from the steps that were run.

One hiccup must not decide: of the link it is the median of the last measurements that counts, so that a link that has
changed is believed after three; and a step that took much longer than others is taken for twice as long.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

_LINK_MEASUREMENTS = 5
_PREFILL_WEIGHT = 0.1
_LONGEST_STEP = 2.0
"""Times the prediction: what took longer was held up by something else."""

_SPREAD = 128.0
"""Tokens of depth: of steps that differ by less than this hardly a slope is read, it would be noise."""


class Decision(NamedTuple):
    """``chunks`` are worth fetching, from the first on."""

    chunks: int
    fetch_s: float  # predicted, of these chunks
    compute_s: float  # predicted, of all tokens behind them
    reason: str  # "fetch", "nothing_stored", "compute_is_faster", "deadline"


class CostModel:
    """Not thread-safe. Unmeasured things are taken for good: the first try measures them."""

    def __init__(self) -> None:
        self.round_trip_s = 0.0
        self.fetch_bytes_per_s = 0.0
        self._round_trips: deque[float] = deque(maxlen=_LINK_MEASUREMENTS)
        self._byte_times: deque[float] = deque(maxlen=_LINK_MEASUREMENTS)
        self._depth = self._each = self._variance = self._covariance = 0.0
        self._slope = 0.0
        self._has_prefill = False

    def observe_fetch(self, size: int, seconds: float) -> None:
        """So many bytes came in so long, the round trip included."""
        if size <= 0:
            return
        net_s = max(seconds - self.round_trip_s, seconds / 10, 1e-9)
        self._byte_times.append(net_s / size)
        self.fetch_bytes_per_s = 1 / median(self._byte_times)

    def observe_round_trip(self, seconds: float) -> None:
        """Of a question of a few bytes."""
        self._round_trips.append(seconds)
        self.round_trip_s = median(self._round_trips)

    def observe_prefill(self, tokens: int, depth: int, seconds: float) -> None:
        """A step computed so many tokens of prompts, at this depth on average."""
        each = seconds / max(1, tokens)
        if not self._has_prefill:
            self._has_prefill, self._depth, self._each = True, float(depth), each
            return
        each = min(each, _LONGEST_STEP * max(self._each, self._each_at(depth))) if self._each else each
        deeper, longer = depth - self._depth, each - self._each
        self._depth += _PREFILL_WEIGHT * deeper
        self._each += _PREFILL_WEIGHT * longer
        self._variance = (1 - _PREFILL_WEIGHT) * (self._variance + _PREFILL_WEIGHT * deeper * deeper)
        self._covariance = (1 - _PREFILL_WEIGHT) * (self._covariance + _PREFILL_WEIGHT * deeper * longer)
        slope = max(0.0, self._covariance / (self._variance + _SPREAD**2))
        # One beyond this would make the first token of a prompt cost nothing.
        self._slope = min(slope, self._each / max(1.0, self._depth))

    def compute_s(self, first: int, end: int) -> float:
        """Of tokens [first, end) of a prompt; 0 before anything was measured."""
        if not self._has_prefill or end <= first:
            return 0.0
        middle = (first + end) / 2
        return (end - first) * self._each_at(middle)

    def fetch_s(self, size: int) -> float:
        """Of so many bytes."""
        if not size:
            return 0.0
        return self.round_trip_s + (size / self.fetch_bytes_per_s if self.fetch_bytes_per_s else 0.0)

    def decide(
        self,
        *,
        stored_chunks: int,
        first_token: int,
        prompt_tokens: int,
        chunk_tokens: int,
        bytes_per_chunk: int,
        budget_s: float,
    ) -> Decision:
        """How many chunks, of which the first begins at ``first_token``, make the whole prompt's time least, and come
        within ``budget_s``. At least one token is computed."""
        whole_s = self.compute_s(first_token, prompt_tokens)
        if stored_chunks <= 0:
            return Decision(0, 0.0, whole_s, "nothing_stored")
        usable = min(stored_chunks, (prompt_tokens - 1 - first_token) // chunk_tokens)
        affordable = self._affordable(max(0, usable), bytes_per_chunk, budget_s)
        if not affordable:
            return Decision(0, 0.0, whole_s, "deadline")
        # The time is concave in the number of chunks, since deeper ones save more: it is least at an end.
        fetch_s = self.fetch_s(affordable * bytes_per_chunk)
        rest_s = self.compute_s(first_token + affordable * chunk_tokens, prompt_tokens)
        if self._has_prefill and fetch_s + rest_s >= whole_s:
            return Decision(0, 0.0, whole_s, "compute_is_faster")
        return Decision(affordable, fetch_s, rest_s, "fetch")

    def _each_at(self, depth: float) -> float:
        return max(0.0, self._each + self._slope * (depth - self._depth))

    def _affordable(self, stored: int, bytes_per_chunk: int, budget_s: float) -> int:
        if budget_s <= self.round_trip_s:
            return 0
        if not self.fetch_bytes_per_s:
            return stored
        return min(stored, int((budget_s - self.round_trip_s) * self.fetch_bytes_per_s / bytes_per_chunk))
