"""Which group gets a request. Pure: no I/O, no clock; randomness comes in as an argument.

The cost of a group is the predicted time to the request's first token there, plus what the request will cost the others
there. Everything is in milliseconds, so that terms can be added. Where a group has measured nothing yet, what its peers
measured stands in, and where nobody has, defaults that are equal for all: a cold cluster is balanced by counts alone,
and no group looks faster than one that holds the prompt only because nobody has tried it yet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

COLD_PREFILL_TOKENS_PER_S = 1_000.0
COLD_DECODE_TOKENS_PER_S = 100.0
COLD_STEP_MS = 50.0
COLD_OUTPUT_TOKENS = 128.0
"""What stands in until a group has measured its own."""

TIE_RATIO = 0.05
TIE_MS = 5.0
"""Costs this close are equal: a prediction is not better than that, and choosing the same "best" group in every router
would send all of them to one group at once."""

PREFILL_WEIGHT = 0.1
DECODE_WEIGHT = 0.05
"""How much a neighbour's waiting counts against one's own: prefill delays each running sequence, and each further
sequence makes every step a little longer."""

STALE_S = 30.0
"""What a group measured before it idled for this long counts for a third, its peers' rates for the rest: a group that
was slow once would otherwise never be tried again, and so never be seen to have recovered."""

LOWER_BOUND_SPEEDUP = 4.0
"""No group prefills this many times faster than its own average: what even then comes too late is surely too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What the choice depends on."""

    prompt_tokens: int
    last_group: str | None = None  # the key of the group that served this session last


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group as this router knows it. Counts are of the last load frame; ``sent_*`` is what that does not show yet."""

    key: str
    cached_tokens: int  # of the request's prompt, believed to be in the group's pages
    waiting_sequences: int = 0
    waiting_prefill_tokens: int = 0
    running_sequences: int = 0
    max_running: int = 1
    usable_blocks: int = 0  # free or cached
    used_blocks: int = 0
    block_tokens: int = 16
    prefill_tokens_per_s: float = 0.0  # 0: not measured
    decode_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    mean_output_tokens: float = 0.0
    sent_requests: int = 0
    sent_prefill_tokens: int = 0
    idle_s: float = 0.0  # since its last step


@dataclass(frozen=True, slots=True)
class Choice:
    """``decision``: "only_group", "lowest_cost", "session" or "tie_random"."""

    key: str
    predicted_ttft_ms: float
    earliest_ttft_ms: float  # a lower bound, over all groups
    expected_cached_tokens: int
    candidates: int
    decision: str


def choose(facts: RequestFacts, groups: Sequence[GroupView], rng: random.Random) -> Choice | None:
    """The group with the lowest cost; near-ties go to the session's last group, then at random. None without groups."""
    if not groups:
        return None
    # Of what each group has measured itself: a peer's rate is a guess, and a guess refuses nobody.
    earliest_ttft_ms = min(earliest_ms(facts, group) for group in groups)
    groups = with_peers_rates(groups)
    costs = {group.key: cost_ms(facts, group) for group in groups}
    best = min(costs.values())
    near = [group for group in groups if costs[group.key] <= best + max(TIE_MS, TIE_RATIO * best)]
    remembered = [group for group in near if group.key == facts.last_group]
    if len(groups) == 1:
        chosen, decision = groups[0], "only_group"
    elif remembered:
        chosen, decision = remembered[0], "session"
    elif len(near) > 1:
        chosen, decision = rng.choice(near), "tie_random"
    else:
        chosen, decision = near[0], "lowest_cost"
    return Choice(
        key=chosen.key,
        predicted_ttft_ms=ttft_ms(facts, chosen),
        earliest_ttft_ms=earliest_ttft_ms,
        expected_cached_tokens=min(chosen.cached_tokens, facts.prompt_tokens),
        candidates=len(groups),
        decision=decision,
    )


def with_peers_rates(groups: Sequence[GroupView]) -> list[GroupView]:
    """Each rate that a group has not measured replaced by its peers' mean; a stale one moved towards that."""
    return [_with_rates_of(group, [other for other in groups if other is not group]) for group in groups]


def _with_rates_of(group: GroupView, peers: Sequence[GroupView]) -> GroupView:
    trust = math.exp(-max(0.0, group.idle_s) / STALE_S)

    def mixed(own: float, theirs: list[float]) -> float:
        known = [value for value in theirs if _measured(value)]
        if not known:
            return own
        mean = sum(known) / len(known)
        return trust * own + (1 - trust) * mean if _measured(own) else mean

    return replace(
        group,
        prefill_tokens_per_s=mixed(group.prefill_tokens_per_s, [peer.prefill_tokens_per_s for peer in peers]),
        decode_tokens_per_s=mixed(group.decode_tokens_per_s, [peer.decode_tokens_per_s for peer in peers]),
        step_ms=mixed(group.step_ms, [peer.step_ms for peer in peers]),
        mean_output_tokens=mixed(group.mean_output_tokens, [peer.mean_output_tokens for peer in peers]),
    )


def cost_ms(facts: RequestFacts, group: GroupView) -> float:
    """Predicted time to the first token, plus the cost to the others."""
    return ttft_ms(facts, group) + _others_ms(facts, group)


def ttft_ms(facts: RequestFacts, group: GroupView) -> float:
    """Work ahead, own work, the wait for a slot and for pages, and one step."""
    ahead = group.waiting_prefill_tokens + group.sent_prefill_tokens + uncached_tokens(facts, group)
    prefill_ms = 1000 * ahead / _rate(group.prefill_tokens_per_s, COLD_PREFILL_TOKENS_PER_S)
    wait_ms = max(_slot_wait_ms(group), _page_wait_ms(facts, group))
    return prefill_ms + wait_ms + _step_ms(group)


def earliest_ms(facts: RequestFacts, group: GroupView) -> float:
    """Below this the first token cannot come: only the request's own work counts; 0 where no rate is measured.

    Work ahead does not count: priorities and fairness may let a request pass it.
    """
    if not _measured(group.prefill_tokens_per_s):
        return 0.0
    return 1000 * uncached_tokens(facts, group) / (LOWER_BOUND_SPEEDUP * group.prefill_tokens_per_s)


def uncached_tokens(facts: RequestFacts, group: GroupView) -> int:
    """At least 1: a full hit still computes one token."""
    return max(1, facts.prompt_tokens - group.cached_tokens)


def _slot_wait_ms(group: GroupView) -> float:
    """Until a sequence slot is free: 0 while there is one."""
    excess = group.running_sequences + group.waiting_sequences + group.sent_requests + 1 - group.max_running
    return max(0, excess) * _ms_between_ends(group)


def _page_wait_ms(facts: RequestFacts, group: GroupView) -> float:
    """Until enough pages are free for the prompt: 0 while there are."""
    sent = group.sent_prefill_tokens // group.block_tokens
    lacking = math.ceil(uncached_tokens(facts, group) / group.block_tokens) + sent - group.usable_blocks
    if lacking <= 0:
        return 0.0
    blocks_per_end = max(1.0, group.used_blocks / max(1, group.running_sequences))
    return lacking / blocks_per_end * _ms_between_ends(group)


def _ms_between_ends(group: GroupView) -> float:
    """Mean time between two requests that finish there."""
    output_tokens = _rate(group.mean_output_tokens, COLD_OUTPUT_TOKENS)
    return 1000 * output_tokens / _rate(group.decode_tokens_per_s, COLD_DECODE_TOKENS_PER_S)


def _others_ms(facts: RequestFacts, group: GroupView) -> float:
    others = group.running_sequences + group.waiting_sequences + group.sent_requests
    prefill_ms = 1000 * uncached_tokens(facts, group) / _rate(group.prefill_tokens_per_s, COLD_PREFILL_TOKENS_PER_S)
    return others * (PREFILL_WEIGHT * prefill_ms + DECODE_WEIGHT * _step_ms(group))


def _step_ms(group: GroupView) -> float:
    return group.step_ms if _measured(group.step_ms) else COLD_STEP_MS


def _rate(measured: float, cold: float) -> float:
    return max(measured, 1e-3) if _measured(measured) else cold


def _measured(value: float) -> bool:
    # A group's word is not trusted blindly: NaN or infinity in one load frame must not decide where everything goes.
    return math.isfinite(value) and value > 0
