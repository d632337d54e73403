"""An engine in the caller's process, without a cluster: for measuring, and for whoever wants tokens and no server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.config import EngineConfig
from workers import assembly
from workers.engine import Engine
from workers.group import LocalGroup, StepRunner
from workers.plan import StepPlan, StepResult

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


class ObservedGroup(LocalGroup):
    """Tells each step to ``observe``, while the step is still in flight; what that takes is added to ``observed_s``."""

    def __init__(self, runner: StepRunner, observe: Callable[[ExecutedStep], None]) -> None:
        super().__init__(runner)
        self.observed_s = 0.0
        self._observe = observe

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and tell about it."""
        start = time.perf_counter()
        result = super().execute(plan)
        executed = time.perf_counter()
        self._observe(ExecutedStep(plan, result, executed - start))
        self.observed_s += time.perf_counter() - executed
        return result


class Offline:
    """A loaded model with its KV pages; makes fresh engines over them, one at a time."""

    def __init__(self, model: Model, config: EngineConfig, threads: int, num_blocks: int) -> None:
        self.model = model
        self.config = config
        self.threads = threads
        self.runner = assembly.make_runner(model, config, num_blocks)

    def copy_bytes_per_s(self) -> float:
        """What a copy of 64 MiB moves, reads and writes together; the best of a few."""
        import torch

        source = torch.ones(16 << 20)
        target = torch.empty_like(source)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - start)
        return 2 * source.nbytes / best

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus output of a request, as the model and the pages allow."""
        context = assembly.choose_context(self.config, self.model.config.max_context)
        return min(context, self.runner.num_blocks * self.config.block_tokens)

    def engine(self, observe: Callable[[ExecutedStep], None] = lambda step: None) -> tuple[Engine, ObservedGroup]:
        """An empty engine; nothing of an earlier one is cached in it."""
        group = ObservedGroup(self.runner, observe)
        settings = assembly.make_settings(self.config, self.model.config)
        settings = replace(settings, max_waiting=max(settings.max_waiting, DEFAULT_WAITING))
        return Engine(group, settings), group


def load_offline(files: ModelFiles, config: EngineConfig, *, default_kv_tokens: int = 32 * 1024) -> Offline:
    """Load a model for this process alone. ``default_kv_tokens``: size of the pool where kv_memory_bytes is unset.

    Raises ModelLoadError, ConfigError, OutOfMemory.
    """
    import torch

    from workers.model import load
    from workers.runner import bytes_per_block
    from workers.sizing import pool_blocks
    from workers.threads import set_threads

    threads = config.threads or len(os.sched_getaffinity(0))
    set_threads(threads)
    device = assembly.choose_device(config)
    model = load(files, assembly.choose_dtype(config, device), device, int8=config.weights == "int8")
    blocks = -(-default_kv_tokens // config.block_tokens)
    if config.kv_memory_bytes is not None:
        blocks = pool_blocks(
            bytes_per_block=bytes_per_block(model.config, config.block_tokens, model.dtype),
            block_tokens=config.block_tokens,
            max_context_tokens=model.config.max_context,
            max_running=config.max_running,
            free_bytes=assembly.free_bytes(device),
            wanted_bytes=config.kv_memory_bytes,
            groups_on_host=1,
        )
    return Offline(model, config, min(threads, torch.get_num_threads()), blocks)
