"""What the benches share: workloads from files, engines, and results.

Ratios of two runs in one sitting are what counts; absolute figures move by a fifth and more on a shared machine.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.blocks import BlockHash
from cluster.cli.bench.workload import FIRST_TOKEN, VOCAB
from cluster.config import EngineConfig
from cluster.models import resolve
from workers.engine import Engine
from workers.offline import Offline, load_offline
from workers.plan import StepPlan, StepResult
from workers.request import Failed, Output, Request, RequestKey, SamplingParams

WORKLOADS = Path(__file__).parent / "workloads"
MODEL = "smollm2-135m"

Plot = Callable[[Any], None]
"""Draws on one matplotlib axes."""


@dataclass
class Result:
    """One bench: rows for the table of the report, figures for JSON, and a plot."""

    title: str
    heading: tuple[str, ...]
    rows: list[tuple[str, ...]]
    figures: dict[str, Any]
    note: str
    plot: Plot
    settings: dict[str, Any] = field(default_factory=dict)


class NoModel:
    """Answers every draw with the same token."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """In no time."""
        count = len(plan.draws)
        return StepResult(plan.step, (11,) * count, (None,) * count, forward_s=0.0, sample_s=0.0)

    def progress(self) -> int:
        """Nothing takes time."""
        return 0


def workload(name: str) -> dict[str, Any]:
    """The settings of one bench, fixed in a file."""
    found: dict[str, Any] = json.loads((WORKLOADS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def engine_on(model: str = MODEL, *, pool_tokens: int = 16_384, **settings: Any) -> Offline:
    """A loaded model; ``settings`` are fields of EngineConfig."""
    return load_offline(resolve(model), EngineConfig(**settings), default_kv_tokens=pool_tokens)


def again(offline: Offline, *, pool_tokens: int = 16_384, **settings: Any) -> Offline:
    """Another engine over the same weights. Its steps depend on no clock unless asked to: two runs must be alike."""
    config = EngineConfig(**{"step_target_ms": None, **settings})
    return Offline(offline.model, config, offline.threads, -(-pool_tokens // config.block_tokens))


def tokens(generator: random.Random, count: int) -> tuple[int, ...]:
    """Random token ids, none of them special."""
    return tuple(generator.randrange(FIRST_TOKEN, VOCAB) for _ in range(count))


def submit(engine: Engine, name: str, prompt: tuple[int, ...], output: int) -> None:
    """Greedy, and as long as asked."""
    sampling = SamplingParams(max_tokens=output, seed=0, temperature=0.0, ignore_eos=True)
    engine.submit(Request(key=RequestKey("b", name, 1), prompt=prompt, sampling=sampling, root=BlockHash(bytes(32))))


def step(engine: Engine) -> list[Output]:
    """One step; a failed request ends the bench."""
    outputs = engine.step(time.perf_counter())
    for output in outputs:
        if isinstance(output.end, Failed):
            raise output.end.error
    return outputs


def drain(engine: Engine) -> int:
    """Run to the end; returns the tokens made."""
    made = 0
    while engine.has_work:
        made += sum(len(output.token_ids) for output in step(engine))
    engine.check()
    return made
