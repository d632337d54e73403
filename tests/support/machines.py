"""State machines that must meet with every kind of trouble: an invariant of one that never preempts says little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MAX_ROUNDS = 20


class WatchedMachine(RuleBasedStateMachine):
    """Counts in ``seen`` what came up."""

    seen: ClassVar[Counter[str]]

    def __init_subclass__(cls) -> None:
        cls.seen = Counter()


def run_until_seen(machine: type[WatchedMachine], kinds: Sequence[str], examples: int = 80) -> None:
    """Run a machine, as a rule once; again only while one of ``kinds`` has not come up, which is a matter of chance."""
    machine.seen.clear()
    # Not derandomized, whatever the profile: then another round would be the same.
    chosen = settings(max_examples=examples, stateful_step_count=30, deadline=None, derandomize=False)
    for _ in range(MAX_ROUNDS):
        run_state_machine_as_test(machine, settings=chosen)
        if all(machine.seen[kind] for kind in kinds):
            return
    raise AssertionError(f"never came up: {[kind for kind in kinds if not machine.seen[kind]]}")
