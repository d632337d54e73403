"""An engine in the caller's process, without a cluster: for measuring, and for whoever wants tokens and no server."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from pydantic import SecretStr

from cluster.config import ClusterConfig, EngineConfig
from workers import assembly
from workers.engine import Engine
from workers.group import Group, LocalGroup
from workers.plan import StepPlan, StepResult
from workers.rank import spawned
from workers.rank_group import RankListener
from workers.rank_start import Started, lead

if TYPE_CHECKING:
    from cluster.models import ModelFiles
    from workers.model.llama import Model

DEFAULT_WAITING = 100_000


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A step as the group saw it. Seconds."""

    plan: StepPlan
    result: StepResult
    execute_s: float


class ObservedGroup:
    """Tells each step to ``observe``, while the step is still in flight; what that takes is added to ``observed_s``."""

    def __init__(self, group: Group, observe: Callable[[ExecutedStep], None]) -> None:
        self.num_blocks = group.num_blocks
        self.observed_s = 0.0
        self._group = group
        self._observe = observe

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and tell about it."""
        start = time.perf_counter()
        result = self._group.execute(plan)
        executed = time.perf_counter()
        self._observe(ExecutedStep(plan, result, executed - start))
        self.observed_s += time.perf_counter() - executed
        return result

    def failure(self) -> str | None:
        """Of the group."""
        return self._group.failure()

    def progress(self) -> int:
        """Of the group."""
        return self._group.progress()

    def close(self) -> None:
        """The group stays: other engines come after this one."""


class Offline:
    """A loaded model with its KV pages; makes fresh engines over them, one at a time."""

    def __init__(
        self, model: Model, config: EngineConfig, threads: int, num_blocks: int, group: Group | None = None
    ) -> None:
        """``group``: of several ranks, whose leader holds ``model``; ``num_blocks`` is theirs then."""
        self.model = model
        self.config = config
        self.threads = threads
        self.group = group or LocalGroup(assembly.make_runner(model, config, num_blocks))
        self.num_blocks = num_blocks

    def copy_bytes_per_s(self) -> float:
        """What a copy of 256 MiB moves, reads and writes together; the median of some.

        No cache holds it, as none holds the weights; and on a machine that others use too the best one of a few copies
        is a burst that no longer work gets.
        """
        import torch

        source = torch.ones(64 << 20)
        target = torch.zeros_like(source)  # written once, so that no copy has to ask the system for its pages
        times = []
        for _ in range(7):
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
        return 2 * source.nbytes / median(times)

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus output of a request, as the model and the pages allow."""
        context = assembly.choose_context(self.config, self.model.config.max_context)
        return min(context, self.num_blocks * self.config.block_tokens)

    def engine(self, observe: Callable[[ExecutedStep], None] = lambda step: None) -> tuple[Engine, ObservedGroup]:
        """An empty engine; nothing of an earlier one is cached in it."""
        group = ObservedGroup(self.group, observe)
        settings = assembly.make_settings(ClusterConfig(engine=self.config), self.model.config)
        settings = replace(settings, max_waiting=max(settings.max_waiting, DEFAULT_WAITING))
        return Engine(group, settings), group


def load_offline(files: ModelFiles, config: EngineConfig, *, default_kv_tokens: int = 32 * 1024) -> Offline:
    """Load a model for this process alone. ``default_kv_tokens``: size of the pool where kv_memory_bytes is unset.

    Raises ModelLoadError, ConfigError, OutOfMemory.
    """
    started = _started(files, config, 1, None, default_kv_tokens)
    return Offline(started.model, config, _all_threads(started), started.group.num_blocks, started.group)


@contextlib.contextmanager
def offline_ranks(
    files: ModelFiles, config: EngineConfig, ranks: int, *, default_kv_tokens: int = 32 * 1024
) -> Iterator[Offline]:
    """As ``load_offline``, with ``ranks`` - 1 more processes on this host for the time of the block."""
    settings = ClusterConfig(
        model=str(files.path), tp=ranks, engine=config, worker_token=SecretStr(secrets.token_urlsafe(16))
    )
    assert settings.worker_token is not None
    listener = RankListener("127.0.0.1", settings.worker_token.get_secret_value())
    with spawned(settings, listener.address):
        started = _started(files, config, ranks, listener, default_kv_tokens, settings.worker_token)
        try:
            yield Offline(started.model, config, started.threads, started.group.num_blocks, started.group)
        finally:
            started.group.close()


def _started(
    files: ModelFiles,
    config: EngineConfig,
    ranks: int,
    listener: RankListener | None,
    default_kv_tokens: int,
    token: SecretStr | None = None,
) -> Started:
    settings = ClusterConfig(model=str(files.path), tp=ranks, engine=config, worker_token=token)
    return lead(settings, listener, default_blocks=-(-default_kv_tokens // config.block_tokens))


def _all_threads(started: Started) -> int:
    import torch

    return min(started.threads, torch.get_num_threads())
