"""From the times of single requests to the figures of a run. Pure; seconds, or milliseconds where a name says so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cluster.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(slots=True)
class Record:
    """One request. Times are seconds on one clock; ``due`` is when it should have been sent, which counts as its
    start: a load generator that falls behind must not hide what its requests waited."""

    due: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when a delta came, and its tokens
    finished: float | None = None
    error: str = ""  # reason; "" while none

    @property
    def completed(self) -> bool:
        """Whether it came to a good end."""
        return self.finished is not None and not self.error

    @property
    def output_tokens(self) -> int:
        """Received so far."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        later = self.output_tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between deltas: what a reader sees stand still."""
        times = [time for time, _ in self.arrivals]
        return [later - before for before, later in pairwise(times)]

    @property
    def e2e_s(self) -> float | None:
        """From due to the last event."""
        return None if self.finished is None else self.finished - self.due


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between closest ranks, as numpy does. Raises ValueError for no value."""
    if not values:
        raise ValueError("no value has no percentile")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None without a value."""
    if not seconds:
        return None
    found = {"mean": sum(seconds) / len(seconds)} | {f"p{p}": percentile(seconds, p) for p in PERCENTILES}
    return {name: 1000 * value for name, value in found.items()}


def parse_slo(text: str) -> dict[str, float]:
    """Limits in milliseconds of "ttft_ms=500,tpot_ms=50". Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name.strip() not in SLO_NAMES or not 0 < limit < math.inf:
            raise ConfigError(
                f"--slo: must be name=milliseconds with names of {', '.join(SLO_NAMES)}; got {part!r}", field="slo"
            )
        limits[name.strip()] = limit
    return limits


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a completed request kept every limit; one token has no time per token to break."""
    took = {"ttft_ms": record.ttft_s, "tpot_ms": record.tpot_s, "e2e_ms": record.e2e_s}
    return record.completed and all((took[name] or 0.0) * 1000 <= limit for name, limit in slo.items())


def summarize(records: Sequence[Record], duration_s: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run that took ``duration_s``. Latencies are of completed requests only; failures are counted by
    reason, and those without an end as "UNFINISHED"."""
    done = [record for record in records if record.completed]
    reasons = Counter(r.error or "UNFINISHED" for r in records if not r.completed)
    prompt_tokens = sum(r.prompt_tokens for r in done)
    good = sum(meets(r, slo) for r in done)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "duration_s": duration_s,
        "requests": len(records),
        "completed": len(done),
        "errors": dict(sorted(reasons.items())),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(r.output_tokens for r in done),
        "cached_tokens_share": sum(r.cached_tokens for r in done) / prompt_tokens if prompt_tokens else 0.0,
        "request_s": len(done) * per_second,
        "output_tok_s": sum(r.output_tokens for r in done) * per_second,
        "total_tok_s": (prompt_tokens + sum(r.output_tokens for r in done)) * per_second,
        "ttft_ms": distribution([r.ttft_s for r in done if r.ttft_s is not None]),
        "tpot_ms": distribution([r.tpot_s for r in done if r.tpot_s is not None]),
        "itl_ms": distribution([gap for r in done for gap in r.itl_s]),
        "e2e_ms": distribution([r.e2e_s for r in done if r.e2e_s is not None]),
        "slo": dict(slo) or None,
        "goodput_request_s": good * per_second if slo else None,
        "goodput_share": good / len(records) if slo and records else None,
    }
