"""Chunked prefill on and off: how long running answers stand still when long prompts arrive.

Off is the same engine with a token budget that holds a whole prompt; on bounds a step in tokens, or in time as the
engine does by itself. Arrivals are at fixed steps.
"""

from __future__ import annotations

import random
import time
from typing import Any

from cluster.cli.bench.stats import percentile
from tests.bench.common import Result, again, step, submit, tokens, workload
from workers.offline import Offline


def run(base: Offline) -> Result:
    """Gaps between tokens of the running answers."""
    settings = workload("chunked_prefill")
    whole = settings["long_prompt_tokens"] + settings["decodes"]
    kinds = {
        "off": {"max_batch_tokens": whole, "step_target_ms": None},
        f"{settings['chunk_tokens']} tokens": {"max_batch_tokens": settings["chunk_tokens"], "step_target_ms": None},
        f"{settings['step_target_ms']} ms": {"max_batch_tokens": whole, "step_target_ms": settings["step_target_ms"]},
    }
    _gaps(base, settings, kinds["off"])  # memory is touched, kernels know their shapes
    gaps = {name: _gaps(base, settings, limits) for name, limits in kinds.items()}
    p99 = {name: percentile(found[0], 99) for name, found in gaps.items()}
    rows = [
        (
            name,
            f"{1000 * percentile(found[0], 50):.0f}",
            f"{1000 * p99[name]:.0f}",
            f"{1000 * max(found[0]):.0f}",
            f"{found[1]:.1f}",
            f"{p99['off'] / p99[name]:.2f}",
        )
        for name, found in gaps.items()
    ]

    def plot(axes: Any) -> None:
        for name, (found, _) in gaps.items():
            ordered = sorted(1000 * gap for gap in found)
            axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=f"chunks of {name}")
        axes.set_xlabel("gap between tokens, ms")
        axes.set_ylabel("share of gaps")
        axes.set_xscale("log")
        axes.legend()

    return Result(
        title="Chunked prefill on and off",
        heading=("chunks of", "ITL p50, ms", "ITL p99, ms", "longest, ms", "all done, s", "p99, off / this"),
        rows=rows,
        figures={
            "itl_p99_ms": {n: 1000 * v for n, v in p99.items()},
            "itl_p99_ratio": {n: p99["off"] / v for n, v in p99.items()},
        },
        note=f"{settings['decodes']} answers run while {settings['long_prompts']} prompts of "
        f"{settings['long_prompt_tokens']} tokens arrive; a step is bounded not at all, in tokens, or in time.",
        plot=plot,
        settings=settings,
    )


def _gaps(base: Offline, settings: dict[str, Any], limits: dict[str, Any]) -> tuple[list[float], float]:
    """Seconds between tokens of the running answers, and of the whole."""
    offline = again(base, prefix_cache=False, **limits)
    generator = random.Random(settings["seed"])
    engine, _ = offline.engine()
    for index in range(settings["decodes"]):
        submit(engine, f"run-{index}", tokens(generator, settings["prompt_tokens"]), settings["output_tokens"])
    arrivals = {settings["every_steps"] * (index + 1): index for index in range(settings["long_prompts"])}
    last: dict[str, float] = {}
    gaps: list[float] = []
    steps, start = 0, time.perf_counter()
    while engine.has_work:
        steps += 1
        if steps in arrivals:
            submit(engine, f"long-{arrivals[steps]}", tokens(generator, settings["long_prompt_tokens"]), 1)
        outputs, now = step(engine), time.perf_counter()
        for output in outputs:
            name = output.key.request_id
            if output.token_ids and name.startswith("run-"):
                if name in last:
                    gaps.append(now - last[name])
                last[name] = now
    return gaps, time.perf_counter() - start
