"""In which order those that wait are let in: priority, preempted ones, fairness between tenants, arrival.

Fairness counts virtual tokens per tenant, as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024,
the Virtual Token Counter): the tenant that was served least is next. A tenant that comes back from idling starts at
the least counter among the active ones, so idling earns no credit.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from operator import attrgetter

from workers.sequence import Sequence

CACHED_TOKEN_COST = 0.1
"""A prompt token from the cache costs a lookup, not a forward pass."""

_by_rank = attrgetter("rank")


class Fairness:
    """Virtual tokens served to each tenant."""

    def __init__(self) -> None:
        self._active: Counter[str] = Counter()
        self._served: dict[str, float] = {}

    def join(self, tenant: str) -> None:
        """One more request of this tenant is alive."""
        if not self._active[tenant]:
            floor = min((self._served[other] for other in self._active if other != tenant), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One request less. What idle tenants owe is forgotten once all are idle, or everybody else has caught up."""
        self._active[tenant] -= 1
        if self._active[tenant]:
            return
        del self._active[tenant]
        floor = min((self._served[other] for other in self._active), default=float("inf"))
        caught_up = [name for name, served in self._served.items() if name not in self._active and served <= floor]
        for name in caught_up:
            del self._served[name]

    def charge(self, tenant: str, computed: int, cached: int = 0) -> None:
        """Tokens that a live request of this tenant is given."""
        self._served[tenant] += computed + CACHED_TOKEN_COST * cached

    def served(self, tenant: str) -> float:
        """Virtual tokens so far; comparable between active tenants only."""
        return self._served[tenant]


class FairQueue:
    """The sequences that wait for pages and a slot."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._preempted: list[Sequence] = []
        self._lines: dict[tuple[int, str], list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._lines.values()))

    def push(self, sequence: Sequence) -> None:
        """Join the line of its priority and tenant."""
        insort(self._lines.setdefault(_line(sequence), []), sequence, key=_by_rank)

    def push_preempted(self, sequence: Sequence) -> None:
        """Come back to the front of its priority: it has been paid for."""
        insort(self._preempted, sequence, key=_by_rank)

    def remove(self, sequence: Sequence) -> None:
        """Leave, let in or ended. Raises KeyError when it does not wait."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return
        line = self._lines[_line(sequence)]
        line.remove(sequence)
        if not line:
            del self._lines[_line(sequence)]

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission; the caller may remove and charge what it was just given."""
        priorities = {priority for priority, _ in self._lines} | {s.rank[0] for s in self._preempted}
        for priority in sorted(priorities):
            yield from [sequence for sequence in self._preempted if sequence.rank[0] == priority]
            yield from self._fair(priority)

    def _fair(self, priority: int) -> Iterator[Sequence]:
        lines = {tenant: deque(line) for (level, tenant), line in self._lines.items() if level == priority}
        while lines:
            tenant = min(lines, key=lambda name: (self._fairness.served(name), lines[name][0].rank))
            yield lines[tenant].popleft()
            if not lines[tenant]:
                del lines[tenant]


def _line(sequence: Sequence) -> tuple[int, str]:
    return sequence.state.request.priority, sequence.state.request.tenant
