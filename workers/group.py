"""What executes a plan: k ranks that hold one copy of the model, seen as one thing."""

from __future__ import annotations

from typing import Protocol

from workers.plan import StepPlan, StepResult


class Group(Protocol):
    """The ranks together."""

    @property
    def num_blocks(self) -> int:
        """Pages that every rank has (the minimum over the ranks)."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step on every rank and return what was drawn. Blocks until it is done; errors of ranks propagate."""
        ...

    def failure(self) -> str | None:
        """Why nothing can be computed any more, where that is known before a step finds out; from any thread."""
        ...

    def progress(self) -> int:
        """A number that grows while a step gets on; from any thread."""
        ...

    def close(self) -> None:
        """Give back pages and processes. Idempotent; nothing is executed afterwards."""
        ...


class StepRunner(Protocol):
    """What a LocalGroup needs of workers/runner.py, which is not imported here: the engine's core knows no torch."""

    @property
    def num_blocks(self) -> int:
        """Pages of the runner's pool."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        ...

    def progress(self) -> int:
        """A number that grows while a step gets on."""
        ...


class LocalGroup:
    """A group of one rank, in this process."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner: StepRunner | None = runner
        self._num_blocks = runner.num_blocks

    @property
    def num_blocks(self) -> int:
        """Pages of the runner's pool."""
        return self._num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step in the calling thread. Raises RuntimeError after ``close``."""
        if self._runner is None:
            raise RuntimeError("the group is closed")
        return self._runner.execute(plan)

    def failure(self) -> str | None:
        """Nothing fails outside a step."""
        return None

    def progress(self) -> int:
        """As the runner says."""
        return self._runner.progress() if self._runner is not None else 0

    def close(self) -> None:
        """Drop the runner, and with it the memory of weights and pages."""
        self._runner = None
