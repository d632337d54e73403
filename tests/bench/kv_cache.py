"""KV cache on and off over length: without it, every token costs a pass over everything before it.

Off is honest: our own engine, asked for one token after a prompt of that length, with nothing kept in between.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from tests.bench.common import Result, again, drain, submit, tokens, workload
from workers.offline import Offline


def run(base: Offline) -> Result:
    """Seconds per token at each length."""
    settings = workload("kv_cache")
    offline = again(base, max_batch_tokens=2048, prefix_cache=False)
    generator = random.Random(settings["seed"])
    prompts = [tokens(generator, length) for length in settings["lengths"]]
    for prompt in prompts:
        _without(offline, prompt)
    measured = [_both(offline, prompt, settings) for prompt in prompts]
    ratios = [off / on for off, on in measured]
    rows = [
        (str(length), f"{1000 * off:.0f}", f"{1000 * on:.0f}", f"{ratio:.1f}")
        for length, (off, on), ratio in zip(settings["lengths"], measured, ratios, strict=True)
    ]

    def plot(axes: Any) -> None:
        axes.plot(settings["lengths"], ratios, marker="o")
        axes.set_xlabel("tokens before this one")
        axes.set_ylabel("speed-up of a token")

    return Result(
        title="KV cache on and off",
        heading=("tokens before", "off, ms/token", "on, ms/token", "speed-up"),
        rows=rows,
        figures={"lengths": settings["lengths"], "speed_up": ratios},
        note="Off recomputes the whole sequence for each token; the speed-up grows with the length.",
        plot=plot,
        settings=settings,
    )


def _both(offline: Offline, prompt: tuple[int, ...], settings: dict[str, Any]) -> tuple[float, float]:
    off = statistics.median(_without(offline, prompt) for _ in range(settings["repeats"]))
    on = statistics.median(_with(offline, prompt, settings["tokens_with_cache"]) for _ in range(settings["repeats"]))
    return off, on


def _without(offline: Offline, prompt: tuple[int, ...]) -> float:
    engine, _ = offline.engine()
    submit(engine, "off", prompt, 1)
    start = time.perf_counter()
    drain(engine)
    return time.perf_counter() - start


def _with(offline: Offline, prompt: tuple[int, ...], count: int) -> float:
    """Of ``count`` tokens after the first, whose prefill is not counted."""
    engine, _ = offline.engine()
    submit(engine, "on", prompt, count + 1)
    engine.step(time.perf_counter())
    start = time.perf_counter()
    made = drain(engine)
    return (time.perf_counter() - start) / made
