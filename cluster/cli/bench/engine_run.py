"""Requests through an engine in this process, and where the time and the pages go. No torch of its own."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.blocks import BlockHash
from cluster.cli.bench.workload import Item
from cluster.errors import QuireError

if TYPE_CHECKING:
    from workers.engine import Engine
    from workers.offline import ExecutedStep, Offline
    from workers.plan import StepPlan

OVERHEAD_ROWS = 32
SINGLE_PROMPT, SINGLE_OUTPUT = 64, 128
PREFILL_TOKENS = 2048  # of prompts, for the prompt rate: enough for full steps, and over soon

Progress = Callable[[int], None]
"""Told how many more output tokens there are."""


@dataclass(slots=True)
class StepTimes:
    """Seconds, summed over steps. ``forward_s`` is the runner's: spelling out the batch, and the model.

    ``linear_s`` and ``attention_s`` are parts of it, and zero where the backend does not know them.
    """

    steps: int = 0
    total_s: float = 0.0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    linear_s: float = 0.0
    attention_s: float = 0.0
    sample_s: float = 0.0
    other_s: float = 0.0

    def add(self, total_s: float, executed: ExecutedStep) -> None:
        """One step; ``total_s`` is of all of ``Engine.step``."""
        result = executed.result
        self.steps += 1
        self.total_s += total_s
        self.schedule_s += total_s - executed.execute_s
        self.forward_s += result.forward_s
        self.linear_s += result.linear_s
        self.attention_s += result.attention_s
        self.sample_s += result.sample_s
        self.other_s += executed.execute_s - result.forward_s - result.sample_s

    @property
    def overhead_share(self) -> float | None:
        """All but the forward pass, of the whole step."""
        return None if not self.total_s else 1 - self.forward_s / self.total_s


class PageFill:
    """How many slots of allocated pages hold no token, from the plans alone.

    Pages are written front to back by one sequence, so the last write to a page says how full it is. Allocated pages
    that a step does not name count as empty: with a token budget that starves a running sequence this overstates.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._filled: dict[int, int] = {}

    def holding(self, plan: StepPlan) -> int:
        """Slots that hold a token once this step has been computed, over the pages that it names."""
        size = self._block_tokens
        rows = zip(plan.num_computed.tolist(), plan.row_starts.tolist(), plan.row_starts.tolist()[1:], strict=False)
        for row, (computed, start, stop) in enumerate(rows):
            end = computed + stop - start
            table = plan.blocks[plan.block_starts[row] : plan.block_starts[row + 1]].tolist()
            for index in range(computed // size, -(-end // size)):
                self._filled[table[index]] = min(size, end - index * size)
        return sum(self._filled[page] for page in set(plan.blocks.tolist()))


@dataclass(slots=True, kw_only=True)
class Run:
    """What one pass over the requests gave."""

    wall_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    decode_times: StepTimes = field(default_factory=StepTimes)  # steps of OVERHEAD_ROWS decodes or more, nothing else
    waste: list[float] = field(default_factory=list)  # per step, a share
    most_running: int = 0

    @property
    def output_tok_s(self) -> float:
        """Output tokens by the clock on the wall."""
        return self.output_tokens / self.wall_s


def submit(engine: Engine, items: Sequence[Item]) -> None:
    """All of them, greedy, with their exact output lengths (EOS ignored). Raises QuireError for one that cannot fit."""
    from workers.request import Request, RequestKey, SamplingParams

    for index, item in enumerate(items):
        sampling = SamplingParams(max_tokens=item.max_tokens, seed=index, temperature=0.0, ignore_eos=True)
        key = RequestKey("bench", str(index), 1)
        engine.submit(Request(key=key, prompt=item.token_ids, sampling=sampling, root=BlockHash(bytes(32))))


def run(offline: Offline, items: Sequence[Item], progress: Progress = lambda tokens: None) -> Run:
    """One pass through a fresh engine. Raises QuireError when a request fails."""
    found = Run(prompt_tokens=sum(len(item.token_ids) for item in items))
    fill = PageFill(offline.config.block_tokens)
    seen: list[ExecutedStep] = []

    def observe(step: ExecutedStep) -> None:
        seen.append(step)
        slots = engine.load().used_blocks * offline.config.block_tokens
        found.waste.append(1 - fill.holding(step.plan) / slots)
        found.most_running = max(found.most_running, step.plan.num_rows)

    engine, group = offline.engine(observe)
    start = time.perf_counter()
    submit(engine, items)
    while engine.has_work:
        seen.clear()
        began, observed = time.perf_counter(), group.observed_s
        outputs = engine.step(began)
        total_s = time.perf_counter() - began - (group.observed_s - observed)
        for step in seen:
            found.times.add(total_s, step)
            if step.plan.num_rows == step.plan.num_tokens >= OVERHEAD_ROWS:
                found.decode_times.add(total_s, step)
        made = sum(len(output.token_ids) for output in outputs)
        found.output_tokens += made
        _raise_failures(outputs)
        progress(made)
    found.wall_s = time.perf_counter() - start - group.observed_s
    load = engine.load()
    found.cached_tokens, found.preemptions = load.cached_prompt_tokens, load.preemptions
    engine.check()
    return found


def _raise_failures(outputs: Sequence[Any]) -> None:
    from workers.request import Failed

    for output in outputs:
        if isinstance(output.end, Failed):
            error = output.end.error
            raise QuireError(f"request {output.key.request_id} failed: {error.message}") from error


def single(items: Sequence[Item], max_context_tokens: int) -> list[Item]:
    """One short request, to be alone."""
    prompt = items[0].token_ids[:SINGLE_PROMPT]
    return [Item(prompt=prompt, max_tokens=max(1, min(SINGLE_OUTPUT, max_context_tokens - len(prompt))))]


def prompts_only(items: Sequence[Item]) -> list[Item]:
    """The first prompts of all, up to some tokens, each with a single token of output."""
    chosen: list[Item] = []
    tokens = 0
    for item in items:
        if chosen and tokens + len(item.token_ids) > PREFILL_TOKENS:
            break
        chosen.append(Item(prompt=item.token_ids, max_tokens=1))
        tokens += len(item.token_ids)
    return chosen


def copy_speed(offline: Offline) -> float | None:
    """Bytes per second of a copy now; None where the weights are not in this host's memory."""
    return offline.copy_bytes_per_s() if offline.model.device.type == "cpu" else None


def report(
    runs: Sequence[Run], alone: Run, prefill: Run, offline: Offline, copies: Sequence[float | None]
) -> dict[str, Any]:
    """The figures; rates are medians over the repeats, whose range is told beside them.

    One request alone cannot be faster than the weights can be read: ``memory_limit_tok_s``, from ``copies`` around it.
    """
    peak = peak_rss_bytes()
    speeds = [speed for speed in copies if speed is not None]
    limit = statistics.fmean(speeds) / offline.model.weight_bytes if speeds else None
    middle = sorted(runs, key=lambda one: one.output_tok_s)[len(runs) // 2]
    rates = [one.output_tok_s for one in runs]
    waste = [share for one in runs for share in one.waste]
    decode = middle.decode_times
    return {
        "output_tok_s": statistics.median(rates),
        "output_tok_s_range": [min(rates), max(rates)],
        "prompt_tok_s": (prefill.prompt_tokens - prefill.cached_tokens) / prefill.wall_s,
        "single_tok_s": alone.output_tok_s,
        "memory_limit_tok_s": limit,
        "single_share_of_memory_limit": None if limit is None else alone.output_tok_s / limit,
        "repeats": len(runs),
        "prompt_tokens": middle.prompt_tokens,
        "cached_tokens": middle.cached_tokens,
        "output_tokens": middle.output_tokens,
        "preemptions": middle.preemptions,
        "wall_s": middle.wall_s,
        "step_ms": _mean_ms(middle.times),
        "step_ms_at_32": _mean_ms(decode) if decode.steps else None,
        "overhead_share": middle.times.overhead_share,
        "overhead_share_at_32": decode.overhead_share,
        "totals": asdict(middle.times),
        "kv_waste_percent": 100 * statistics.fmean(waste) if waste else 0.0,
        "most_running": middle.most_running,
        "peak_rss_bytes": peak,
        "threads": offline.threads,
        "num_blocks": offline.num_blocks,
        "device": str(offline.model.device),
        "dtype": str(offline.model.dtype).removeprefix("torch."),
    }


def _mean_ms(times: StepTimes) -> dict[str, float]:
    parts = {name: value for name, value in asdict(times).items() if name != "steps"}
    return {name.removesuffix("_s"): 1000 * value / max(1, times.steps) for name, value in parts.items()} | {
        "steps": times.steps
    }


def peak_rss_bytes() -> int:
    """High-water mark of this process's memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
