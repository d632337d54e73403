"""Paged KV against reservation: sequences that run at once in the same memory, and slots that hold nothing.

Reservation is the same engine with pages as long as the reservation: a sequence takes one, whatever it needs. It is
measured twice, with the full context, and with the longest request of the workload, which no server knows beforehand.
Counts depend on lengths alone: scheduler and pool are the engine's, and where the model would be nothing is computed.
"""

from __future__ import annotations

import statistics
from typing import Any

from cluster.cli.bench import engine_run
from cluster.cli.bench.workload import VOCAB, Item, built_in
from tests.bench.common import NoModel, Result, workload
from workers.engine import Engine, EngineSettings
from workers.group import LocalGroup
from workers.offline import ExecutedStep, ObservedGroup, Offline

PAGE_TOKENS = 16


def run(_: Offline) -> Result:
    """As the other benches are called; no model is needed."""
    return measure()


def measure() -> Result:
    """Sequences at once, and waste, with pages of 16 and with reservations."""
    settings = workload("paging")
    pool = settings["pool_tokens"]
    items = built_in(
        settings["requests"], settings["seed"], prompt=tuple(settings["prompt"]), output=tuple(settings["output"])
    )
    pages = {
        "reserve the full context": settings["full_context"],
        "reserve the longest request": settings["longest_request"],
        "paged": PAGE_TOKENS,
    }
    found = {name: _measure(items, size, pool, settings["full_context"]) for name, size in pages.items()}
    full, longest, paged = found.values()
    figures = {
        "sequences": {name: one[0] for name, one in found.items()},
        "waste_percent": {name: 100 * one[1] for name, one in found.items()},
        "ratio_to_full_context": paged[0] / full[0],
        "ratio_to_longest_request": paged[0] / longest[0],
    }

    def plot(axes: Any) -> None:
        axes.bar(["full context", "longest request", "paged"], [one[0] for one in found.values()])
        axes.set_ylabel("sequences at once, mean")

    return Result(
        title="Paged KV against reservation",
        heading=("KV memory", "sequences at once", "empty slots", "ratio"),
        rows=[(name, f"{one[0]:.1f}", f"{one[1]:.1%}", f"{one[0] / full[0]:.2f}") for name, one in found.items()],
        figures=figures,
        note=f"A pool of {pool:,} tokens; means over the steps while requests wait. Empty slots: allocated to "
        "sequences and holding no token.",
        plot=plot,
        settings=settings,
    )


def _measure(items: list[Item], block_tokens: int, pool_tokens: int, context: int) -> tuple[float, float]:
    """Mean sequences at once and mean waste, while anything waits to run."""
    num_blocks, max_running = pool_tokens // block_tokens, len(items)
    if block_tokens > PAGE_TOKENS:
        # The scheduler keeps a page to spare for each sequence that runs, which would cost a reservation as much again:
        # the baseline gets those pages for nothing, and is held to what fits by the count of sequences.
        num_blocks, max_running = 2 * num_blocks, num_blocks
    settings = EngineSettings(
        block_tokens=block_tokens,
        max_batch_tokens=4096,
        max_running=max_running,
        max_waiting=len(items),
        max_context_tokens=context,
        prefix_cache=False,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB,
    )
    running: list[int] = []
    waste: list[float] = []
    fill = engine_run.PageFill(block_tokens)

    def observe(step: ExecutedStep) -> None:
        load, held = engine.load(), fill.holding(step.plan)
        if load.waiting_requests:
            running.append(step.plan.num_rows)
            waste.append(1 - held / (load.used_blocks * block_tokens))

    engine = Engine(ObservedGroup(LocalGroup(NoModel(num_blocks)), observe), settings)
    engine_run.submit(engine, items)
    while engine.has_work:
        engine.step(0.0)
    engine.check()
    return statistics.fmean(running), statistics.fmean(waste)
