"""Prefix cache on and off, with no reuse and with much: CPU time per 1,000 tokens, in interleaved pairs.

CPU time of one thread: spinning threads of a pool would count as work. Which of a pair goes first alternates.

Whole runs on a shared machine differ by more than the few per cent that hashing could cost. So the same pairs also run
without a model, where nothing but scheduler and pool is left: what the cache adds there, over the CPU time of a whole
run, is its cost as far as the engine's own work goes. It leaves out what other page numbers do to the CPU's caches.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from cluster.cli.bench.workload import VOCAB
from tests.bench.common import NoModel, Result, again, drain, submit, tokens, workload
from workers.engine import Engine, EngineSettings
from workers.group import LocalGroup
from workers.offline import Offline


def run(base: Offline) -> Result:
    """The ratio on/off for each share of reuse."""
    from workers.threads import set_threads  # loads torch, which the list of benches needs not

    settings = workload("prefix_cache")
    set_threads(1)
    try:
        found = {reuse: _pairs(base, settings, reuse) for reuse in settings["reuse"]}
    finally:
        set_threads(base.threads)
    figures: dict[str, Any] = {
        f"cpu_ratio_at_{reuse:.0%}": statistics.median(on / off for on, off in pairs) for reuse, pairs in found.items()
    }
    figures |= {f"cpu_ratios_at_{reuse:.0%}": [on / off for on, off in pairs] for reuse, pairs in found.items()}
    whole = statistics.median(off for _, off in found[min(found)])
    figures["scheduler_cost_share"] = scheduler_cost(settings) / whole
    rows = []
    for reuse, pairs in found.items():
        ratios = [on / off for on, off in pairs]
        on, off = (statistics.median(side) for side in zip(*pairs, strict=True))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append((f"{reuse:.0%}", f"{off:.2f}", f"{on:.2f}", f"{statistics.median(ratios):.3f}", spread))

    def plot(axes: Any) -> None:
        axes.boxplot([[on / off for on, off in pairs] for pairs in found.values()])
        axes.set_xticks(range(1, len(found) + 1), [f"{reuse:.0%} reuse" for reuse in found])
        axes.set_ylabel("CPU time, on / off")
        axes.axhline(1.0, linewidth=0.8, color="gray")

    return Result(
        title="Prefix cache on and off",
        heading=("reuse", "off, CPU s/1,000 tokens", "on", "on / off (median)", "pairs"),
        rows=rows,
        figures=figures,
        note=f"{settings['pairs']} interleaved pairs on one thread; tokens are those of prompts and outputs. "
        "Whole runs scatter as the last column says. Without a model, at no reuse, the cache adds "
        f"{figures['scheduler_cost_share']:.2%} of a whole run's CPU time.",
        plot=plot,
        settings=settings,
    )


def scheduler_cost(settings: dict[str, Any]) -> float:
    """CPU seconds per 1,000 tokens that the cache adds to scheduler and pool with nothing reused; median of pairs."""
    generator = random.Random(settings["seed"])
    added = []
    for index in range(2 * settings["pairs"]):
        prompts = [tokens(generator, settings["prompt_tokens"]) for _ in range(20 * settings["requests"])]
        order = (True, False) if index % 2 else (False, True)
        took = {on: _cpu_seconds(_without_model(on), prompts, settings["output_tokens"]) for on in order}
        added.append(took[True] - took[False])
    return statistics.median(added)


def _without_model(prefix_cache: bool) -> Engine:
    settings = EngineSettings(
        block_tokens=16,
        max_batch_tokens=512,
        max_running=32,
        max_waiting=10_000,
        max_context_tokens=8192,
        prefix_cache=prefix_cache,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB,
    )
    return Engine(LocalGroup(NoModel(1024)), settings)


def _pairs(base: Offline, settings: dict[str, Any], reuse: float) -> list[tuple[float, float]]:
    """CPU seconds per 1,000 tokens, (on, off), of each pair."""
    sides = {on: again(base, prefix_cache=on) for on in (True, False)}
    generator = random.Random(settings["seed"])
    pairs = []
    for index in range(settings["pairs"] + 1):
        shared = tokens(generator, round(settings["prompt_tokens"] * reuse))
        own = settings["prompt_tokens"] - len(shared)
        prompts = [shared + tokens(generator, own) for _ in range(settings["requests"])]
        order = (True, False) if index % 2 else (False, True)
        took = {on: _cpu_seconds(sides[on].engine()[0], prompts, settings["output_tokens"]) for on in order}
        pairs.append((took[True], took[False]))
    return pairs[1:]  # the first touched memory and code


def _cpu_seconds(engine: Engine, prompts: list[tuple[int, ...]], output: int) -> float:
    """Per 1,000 tokens. The first request runs before the others: it is the one whose prefix they find."""
    start = time.process_time()
    for index, prompt in enumerate(prompts):
        submit(engine, str(index), prompt, output)
        if index == 0:
            drain(engine)
    drain(engine)
    used = time.process_time() - start
    return used / sum(len(prompt) + output for prompt in prompts) * 1000
