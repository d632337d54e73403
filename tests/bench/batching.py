"""Continuous against static batching, with one long answer in eight.

Static is the same engine: the next batch is submitted when every request of the last has ended. It is a kind static
baseline, since a sequence that has ended costs it nothing, where real ones went on padding.
"""

from __future__ import annotations

import random
import time
from typing import Any

from tests.bench.common import Result, again, drain, submit, tokens, workload
from workers.offline import Offline

Requests = list[tuple[tuple[int, ...], int]]


def run(base: Offline) -> Result:
    """Output tokens per second of both."""
    settings = workload("batching")
    offline = again(base, max_running=settings["batch"], prefix_cache=False)
    generator = random.Random(settings["seed"])
    requests: Requests = [
        (
            tokens(generator, settings["prompt_tokens"]),
            settings["long_output"] if index % settings["long_every"] == 0 else settings["short_output"],
        )
        for index in range(settings["requests"])
    ]
    _measure(offline, requests[:8], settings["batch"])
    static = _measure(offline, requests, settings["batch"])
    continuous = _measure(offline, requests, len(requests))
    figures = {
        "static_tok_s": static[0],
        "continuous_tok_s": continuous[0],
        "ratio": continuous[0] / static[0],
        "steps_ratio": static[1] / continuous[1],
    }

    def plot(axes: Any) -> None:
        axes.bar(["static", "continuous"], [static[0], continuous[0]])
        axes.set_ylabel("output tok/s")

    return Result(
        title="Continuous against static batching",
        heading=("batching", "steps", "output tok/s", "ratio"),
        rows=[
            ("static", str(static[1]), f"{static[0]:.1f}", "1.0"),
            ("continuous", str(continuous[1]), f"{continuous[0]:.1f}", f"{figures['ratio']:.2f}"),
        ],
        figures=figures,
        note=f"At most {settings['batch']} sequences at once; one answer in {settings['long_every']} is "
        f"{settings['long_output']} tokens, the others {settings['short_output']}.",
        plot=plot,
        settings=settings,
    )


def _measure(offline: Offline, requests: Requests, at_once: int) -> tuple[float, int]:
    """Tokens per second, and steps, with ``at_once`` requests handed over together."""
    engine, _ = offline.engine()
    made, start = 0, time.perf_counter()
    for first in range(0, len(requests), at_once):
        for index, (prompt, output) in enumerate(requests[first : first + at_once], first):
            submit(engine, str(index), prompt, output)
        made += drain(engine)
    seconds = time.perf_counter() - start
    if made != sum(output for _, output in requests):
        raise RuntimeError(f"{made} tokens came out, not what was asked for")
    return made / seconds, engine.load().steps
